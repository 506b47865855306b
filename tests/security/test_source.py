"""What the source may not say anywhere: each rule is a promise of SECURITY.md that no reader of a diff has to keep."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvfold

ROOT = Path(kvfold.__file__).parent
NEVER_CALLED = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
}
NEVER_CALLED |= {"yaml.full_load", "yaml.unsafe_load", "yaml.load_all", "yaml.full_load_all", "yaml.unsafe_load_all"}
UNPICKLERS = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle", "code", "runpy", "imp"}
# Who may all the same, and why.
MAY_IMPORT = {
    ("common/sources.py", "pickle"),  # the name of an error
    ("uptrain/tables.py", "pickle"),  # makes what is on its list, and nothing else
    ("recipes/engines/run_to_gguf.py", "runpy"),  # runs llama.cpp's own converter
}
LOADERS = {("common/typed.py", "Loader"): "yaml.BaseLoader", ("eval/tasks.py", "_Reader"): "yaml.SafeLoader"}
Rule = Callable[[str, ast.Call], object]


def trees() -> dict[str, ast.Module]:
    paths = [
        path for path in ROOT.rglob("*.py") if not path.relative_to(ROOT).parts[0].startswith((".", "tests", "build"))
    ]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_bytes()) for path in paths}


TREES = trees()


def name_of(node: ast.AST) -> str:
    """A dotted name; of anything else, nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return ""


def calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def keyword(call: ast.Call, name: str) -> object:
    """A keyword's value, if it is a constant; the node if not; None without."""
    value = next((each.value for each in call.keywords if each.arg == name), None)
    return value.value if isinstance(value, ast.Constant) else value


def broken(rule: Rule, found: dict[str, ast.Module] = TREES) -> list[str]:
    """The calls that a rule says something against."""
    return [f"{path}:{call.lineno}" for path, tree in found.items() for call in calls(tree) if rule(path, call)]


def runs_text(path: str, call: ast.Call) -> bool:
    return name_of(call.func) in NEVER_CALLED or bool(keyword(call, "shell"))


def starts_a_line(path: str, call: ast.Call) -> bool:
    """A program with its arguments in one text, which somebody takes apart."""
    first = call.args[0] if call.args else None
    starts = name_of(call.func) in {
        f"subprocess.{name}" for name in ("run", "Popen", "call", "check_call", "check_output")
    }
    return starts and (first is None or isinstance(first, ast.JoinedStr | ast.Constant | ast.BinOp))


def unpickles(path: str, call: ast.Call) -> bool:
    loads = "torch.load" in {name_of(call.func), *map(name_of, call.args)}  # also by `partial`
    return (loads and keyword(call, "weights_only") is not True) or keyword(call, "allow_pickle") not in (None, False)


def trusts(path: str, call: ast.Call) -> bool:
    said = keyword(call, "trust_remote_code")
    loads = name_of(call.func).endswith(".from_pretrained") or name_of(call.func) == "load_dataset"
    return said not in (None, False) or (loads and "Auto" in name_of(call.func) and said is not False)


def reads_yaml(path: str, call: ast.Call) -> bool:
    """By a loader that makes more than text, numbers, lists and tables."""
    if name_of(call.func) not in ("yaml.load", "yaml.compose"):
        return False
    given = [name_of(value) for value in (*call.args[1:], *(each.value for each in call.keywords))]
    return not any((path, name) in LOADERS or name in ("yaml.BaseLoader", "yaml.SafeLoader") for name in given)


def unpacks(path: str, call: ast.Call) -> bool:
    return name_of(call.func).endswith("extractall") and keyword(call, "filter") != "data"


RULES = [runs_text, starts_a_line, unpickles, trusts, reads_yaml, unpacks]
WRONG = {
    runs_text: ["eval(x)", "os.system(x)", "run(x, shell=True)", "run(x, shell=y)"],
    starts_a_line: ["subprocess.run(f'{x} -v')", "subprocess.Popen('ls')", "subprocess.run('a ' + x)"],
    unpickles: [
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "partial(torch.load, x)",
        "f(x, allow_pickle=True)",
    ],
    trusts: ["AutoConfig.from_pretrained(x)", "A.from_pretrained(x, trust_remote_code=y)", "f(trust_remote_code=True)"],
    reads_yaml: ["yaml.load(x)", "yaml.load(x, Loader=yaml.FullLoader)", "yaml.load(x, yaml.UnsafeLoader)"],
    unpacks: ["tar.extractall(x)", "tar.extractall(x, filter='tar')"],
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_call_breaks_a_rule(rule):
    assert len(TREES) > 150
    assert broken(rule) == []
    for text in WRONG[rule]:
        assert broken(rule, {"x.py": ast.parse(text)}) == ["x.py:1"], text


def test_nobody_imports_what_unpickles_or_runs():
    found = set()
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            found |= {(path, name.partition(".")[0]) for name in names} & {(path, name) for name in UNPICKLERS}
    assert found == MAY_IMPORT


def test_yaml_is_read_by_loaders_that_make_nothing_else():
    for (path, name), base in LOADERS.items():
        (found,) = (node for node in ast.walk(TREES[path]) if isinstance(node, ast.ClassDef) and node.name == name)
        assert [name_of(each) for each in found.bases] == [base]
