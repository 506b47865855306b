"""`kvfold convert`: the options are the keywords of the functions, and what is said goes where it belongs."""

import inspect
import json

import pytest
from click.testing import CliRunner

from kvfold.cli.convert import gqa, mla, plain
from kvfold.convert.gqa import convert_gqa
from kvfold.convert.mla.convert import convert_mla
from kvfold.convert.plain import convert_plain
from kvfold.recipes.tiny import MODEL_DIR

from .test_cli import kvfold, one_line

SIZES = ["--kv-rank", "96", "--rope-dim", "32", "--rope-select", "high"]
QUICK = ["--calib-windows", "4", "--search-windows", "1"]


@pytest.mark.parametrize(
    ("command", "function"),
    [(gqa, convert_gqa), (mla, convert_mla), (plain, convert_plain)],
    ids=["gqa", "mla", "plain"],
)
def test_options_are_the_keywords_of_the_function(command, function):
    keywords = {name: given.default for name, given in inspect.signature(function).parameters.items()}
    del keywords["progress"]
    with command.make_context(
        command.name, ["src", "out", *(["--kv-heads", "1"] if command is gqa else [])]
    ) as context:
        options = dict(context.params)
    assert options.pop("as_json") is False
    assert options.keys() == keywords.keys()
    for name in keywords.keys() - {"src", "out", "kv_heads"}:
        assert options[name] == keywords[name], name


@pytest.mark.parametrize(("said", "readers"), [("vllm", ("vllm",)), ("vllm, sglang", ("vllm", "sglang"))])
def test_readers_are_named_with_commas(said, readers):
    with mla.make_context("mla", ["src", "out", "--for", said]) as context:
        assert context.params["readers"] == readers


@pytest.mark.parametrize(("flag", "value"), [([], None), (["--large-eps"], True), (["--small-eps"], False)])
def test_eps_is_left_to_the_readers_unless_said(flag, value):
    with mla.make_context("mla", ["src", "out", *flag]) as context:
        assert context.params["large_eps"] is value


def test_stock_form_and_back_with_json(tmp_path):
    stock, back = tmp_path / "stock", tmp_path / "back"
    made = kvfold("convert", "mla", MODEL_DIR, stock, *SIZES, "--calib", "none", "--json")
    reports = [
        made,
        kvfold("convert", "plain", stock, back, "--json"),
        kvfold("inspect", stock, "--json"),
        kvfold("eval", "cache", stock, "--context", 32, "--json"),
        kvfold("eval", "cache", back, "--context", 32, "--json"),
        kvfold("check", stock, "--engine", "transformers", "--json"),
    ]
    for result in reports:
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("\n") == 1
    assert made.stderr == (
        "kvfold: warning: factored by weights alone, which loses far more than need be; leave --calib none out\n"
    )
    mla_, plain_, looked, stock_cache, plain_cache, checked = (json.loads(result.stdout) for result in reports)
    assert (mla_["form"], mla_["kv_lora_rank"], mla_["qk_rope_head_dim"]) == ("deepseek_v3", 96, 32)
    assert plain_["family"] == "mla_llama"
    assert (looked["attention_kind"], looked["source_kv_elements_per_token_per_layer"]) == ("MLA", 512)
    assert checked["passed"]
    for cache in (stock_cache, plain_cache):
        assert cache["measured_kv_elements_per_token_per_layer"] == cache["kv_elements_per_token_per_layer"] == 128
    result = kvfold("check", stock, "--engine", "vllm")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "96 + 32 = 128" in result.stderr
    assert "in the plain form already" in one_line(kvfold("convert", "plain", back, tmp_path / "again"), 2)


def test_what_was_searched_and_refined_is_a_table(tmp_path):
    budget = ["--kv-elements", "128", "--rope-dim", "16"]
    out = tmp_path / "out"
    result = kvfold("convert", "mla", MODEL_DIR, out, *budget, *QUICK, "--refine", "1", "--refine-passes", "1")
    assert result.returncode == 0, result.stderr
    assert "warnings" not in result.stdout and "layer_errors" not in result.stdout
    lines = result.stdout.splitlines()
    for when in ("before", "after"):
        title = lines.index(f"relative error of each layer's state, {when} refinement")
        assert lines[title + 1].split() == ["layer", "+0", "+1", "+2", "+3"]
    title = lines.index("loss on 1 windows not calibrated on; the first is what was chosen")
    assert lines[title + 1].split() == ["rope_select", "rope_dim", "kv_rank", "loss"]
    first, second = (line.split() for line in lines[title + 2 :])
    assert {first[0], second[0]} == {"high", "fold"}
    assert first[1:3] == second[1:3] == ["16", "112"]
    assert float(first[3]) <= float(second[3])
    assert next(line.split() for line in lines if line.startswith("rope_select ")) == ["rope_select", first[0]]


def test_a_cache_that_grows_is_warned_of(tmp_path):
    out = tmp_path / "out"
    padded = [*SIZES, "--calib", "none", "--for", "vllm,transformers", "--pad-to-engine"]
    result = kvfold("convert", "mla", MODEL_DIR, out, *padded)
    assert result.returncode == 0, result.stderr
    assert "warning: padded to 576 cached numbers a token and layer, more than the source's 512" in result.stderr
    assert "readable_by" in result.stdout and "vllm" in result.stdout
    result = kvfold("inspect", out)
    assert result.stderr.startswith("kvfold: warning: it caches 576 elements a token and layer, more than the 512 of")
    assert "unpadded_kv_elements_per_token_per_layer  128" in result.stdout
    assert kvfold("check", out, "--engine", "vllm").returncode == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "say how large the cache may be"),
        (["--kv-elements", "128", "--kv-ratio", "0.25"], "give one of them"),
        (["--kv-ratio", "2"], "no smaller cache"),
        (["--kv-rank", "96", "--rope-dim", "33"], "give an even number"),
        (["--kv-elements", "128", "--rope-select", "hihg"], "did you mean high"),
        (["--kv-elements", "128", "--form", "deepseek"], "did you mean deepseek_v3"),
        (["--kv-elements", "128", "--for", "vlm"], "did you mean vllm"),
        (["--kv-elements", "128", "--for", "vllm,,sglang"], "leaves a name empty"),
        (["--kv-elements", "128", "--search-windows", "0"], "tell no choices apart"),
        ([*SIZES, "--for", "vllm"], "vllm would not read it right"),
        ([*SIZES, "--form", "plain", "--pad-to-engine"], "leave --for, --pad-to-engine and --q-rank out"),
        ([*SIZES, "--for", "transformers", "--large-eps"], "cannot read the large-eps form"),
        ([*SIZES, "--calib", "none", "--refine", "4"], "leaves --refine no text"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(mla, [str(MODEL_DIR), "out", *args])
    said = f"{result.output} {result.exception}"
    assert result.exit_code
    assert message in said
    assert not list(tmp_path.iterdir())


def test_no_export_is_no_source_of_plain(tmp_path):
    result = kvfold("convert", "plain", MODEL_DIR, tmp_path / "out")
    assert "is a llama model, not an export" in one_line(result, 2)
