"""lm-evaluation-harness behind kvfold: its own figures, offline, from one process or two."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

import lm_eval.evaluator
import lm_eval.tasks
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from kvfold.attention.absorb import _layers as latent_layers
from kvfold.cli.eval.tasks import tasks as command
from kvfold.common.errors import CheckFailed, EnvironmentFailure, UserError
from kvfold.common.output import to_dict
from kvfold.common.parallel import Workers
from kvfold.eval.harness import Harness
from kvfold.eval.ppl import perplexity
from kvfold.eval.tasks import tasks

from .conftest import CONTEXT, make_model, make_tokenizer

COLOURS = ["red", "green", "blue", "cyan", "pink", "grey"]
PAGES = [" ".join(COLOURS[n * k % 6] for k in range(3 + 9 * n)) for n in range(5)]  # from 11 to some 190 tokens
QUESTIONS = [
    {"question": f"Colour {n * 7 % 5}?", "choices": [COLOURS[(n + k) % 6] for k in range(3)], "answer": n % 3}
    for n in range(9)
]
CHOICE = {
    "output_type": "multiple_choice",
    "training_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        {"metric": "brier_score"},  # of which every likelihood is a part
    ],
    "metadata": {"version": 2},
}
ROLLING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{page}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
}
GENERATE = {
    "output_type": "generate_until",
    "training_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["z"], "max_gen_toks": 8, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}, {"metric": "bleu"}],
}


@pytest.fixture
def write(tmp_path):
    """Write a task file, and its documents beside it."""

    def task(name: str, body: dict, rows: list[dict], **settings) -> str:
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        local = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")},
            "test_split": "test",
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps({**local, **body, **settings}))  # JSON is YAML
        return str(path)

    return task


@pytest.fixture
def choice(write):
    return write("choice", CHOICE, QUESTIONS)


@pytest.fixture
def three(write, choice):
    pages = [{"page": page} for page in PAGES]
    return [choice, write("rolling", ROLLING, pages), write("generate", GENERATE, QUESTIONS)]


@pytest.fixture
def path(llama, save):
    return save(llama)


@pytest.fixture
def few(monkeypatch):
    """lm-eval's index of a few of its own tasks, as that of all takes five seconds."""
    root = Path(lm_eval.tasks.__file__).parent
    index = lm_eval.tasks.TaskManager
    own = [root / name for name in ("hellaswag", "humaneval")]
    few = lambda include_path, include_defaults: index(include_path=[*own, *include_path], include_defaults=False)  # noqa: E731
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", few)


def test_equals_lm_eval_itself(path, three, monkeypatch, capfd):
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)  # asks pip
    theirs = HFLM(pretrained=path, device="cpu", dtype="float32")
    none = lm_eval.tasks.TaskManager(include_defaults=False)
    expected = lm_eval.simple_evaluate(theirs, tasks=three, num_fewshot=2, limit=7, task_manager=none)
    capfd.readouterr()
    report = tasks(path, task=three, num_fewshot=2, limit=7)
    said = capfd.readouterr()
    assert said.out == "" and "%|" not in said.err
    assert [(row.task, row.metric) for row in report.results] == [
        *(("choice", "acc"), ("choice", "brier_score"), ("generate", "bleu"), ("generate", "exact_match")),
        *(("rolling", "bits_per_byte"), ("rolling", "byte_perplexity"), ("rolling", "word_perplexity")),
    ]
    for row in report.results:
        said = expected["results"][row.task]
        assert row.value == pytest.approx(said[f"{row.metric},{row.filter}"], rel=1e-6)
        stderr = said[f"{row.metric}_stderr,{row.filter}"]
        assert row.stderr == (None if stderr == "N/A" else pytest.approx(stderr))
    first = report.results[0]
    assert (first.higher_is_better, first.samples, first.num_fewshot, first.version) == (True, 7, 2, "2")
    assert 0 < first.value < 1
    assert (report.model, report.dtype, report.device, report.limit) == (path, "float32", "cpu", 7)
    assert json.loads(json.dumps(asdict(report), allow_nan=False))["results"][0]["metric"] == "acc"


# As a launcher does, but that both processes import once.
TWO = """
import os, lm_eval.evaluator, kvfold.eval.harness
from kvfold.cli import main
os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(int(os.fork() == 0))
main()
"""


def test_two_processes_find_what_one_finds(path, three, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    knobs = [path, *(part for task in three for part in ("--task", task)), "--num-fewshot", "2", "--limit", "5"]
    line = [sys.executable, "-c", TWO, "eval", "tasks", *knobs, "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)  # until both have closed their output
    assert done.returncode == 0, done.stderr
    monkeypatch.delenv("WORLD_SIZE")
    alone = tasks(path, task=three, num_fewshot=2, limit=5)
    assert json.loads(done.stdout) == json.loads(json.dumps(to_dict(alone)))  # one object, and nothing else


def test_people_read_a_table(path, choice, capsys):
    command.main([path, "--task", choice, "--limit", "3"], standalone_mode=False)
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["limit", "3"] in said and ["results"] not in [line[:1] for line in said]
    assert said[-3][:6] == ["task", "metric", "filter", "value", "stderr", "samples"]  # an error beside its samples
    assert [line[5] for line in said[-2:]] == ["3", "3"]
    assert [line[:3] for line in said[-2:]] == [["choice", "acc", "none"], ["choice", "brier_score", "none"]]


def test_batch_size_changes_nothing(path, three):
    reports = [tasks(path, task=three[:2], batch_size=size, dtype="float64") for size in (1, 4)]
    for one, four in zip(reports[0].results, reports[1].results, strict=True):
        assert four.value == pytest.approx(one.value, rel=1e-6)


def test_progress_ends_at_the_total(path, three):
    seen = []
    tasks(path, task=three[:2], limit=5, progress=lambda *at: seen.append(at))
    assert seen == [(n + 1, 15) for n in range(15)] + [(n + 1, 5) for n in range(5)]


def test_a_group_brings_its_tasks_and_the_code_beside_them(few, path, write, tmp_path):
    (tmp_path / "own.py").write_text("def prompt(doc):\n    return doc['question'].upper()\n")
    for name in ("one", "two"):
        file = Path(write(name, CHOICE, QUESTIONS))
        file.write_text(file.read_text().replace('"{{question}}"', "!function own.prompt"))
    mean = "\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    (tmp_path / "both.yaml").write_text(f"group: both\ntask: [one, two]{mean}")
    report = tasks(path, task=[str(tmp_path / "both.yaml")], limit=6)
    acc = {row.task: row for row in report.results if row.metric == "acc"}
    assert list(acc) == ["both", "one", "two"]
    assert (acc["both"].samples, acc["both"].value) == (12, acc["one"].value)


def test_tasks_of_an_included_folder_have_names(few, path, choice):
    report = tasks(path, task=["choice"], include_path=[Path(choice).parent], limit=2)
    assert {row.task for row in report.results} == {"choice"}


REFUSED = {
    "near": ("helaswag", UserError, "'helaswag' is neither a task of lm-eval nor a YAML file here; did you mean hella"),
    "far": ("xyzzyxyzzy", UserError, "lm-eval ls tasks lists what it has"),
    "file": ("none.yaml", UserError, "there is no task file none.yaml"),
    "offline": ("hellaswag", EnvironmentFailure, "data of task hellaswag cannot be downloaded .* local data"),
    "code": ("humaneval", UserError, "task humaneval runs the code that a model writes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_task_that_cannot_be_had(case, few, path):
    name, error, message = REFUSED[case]
    with pytest.raises(error, match=message) as refused:
        tasks(path, task=[name])
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


MEAN = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
BROKEN = {
    "no task": ({"task": ""}, QUESTIONS, r"bad.yaml names no task"),
    "unsafe": ({"unsafe_code": True}, QUESTIONS, "task bad runs the code that a model writes"),
    "field": ({"doc_to_text": "{{ nope.nope }}"}, QUESTIONS, "task .*bad.* cannot be run .*nope"),
    "data": ({"dataset_kwargs": {"data_files": {"test": "none.jsonl"}}}, QUESTIONS, "cannot be run .*none.jsonl"),
    "empty": ({}, [], r"bad.yaml cannot be run: its data holds no document; fill it, or name another split"),
    "split": ({"test_split": "nope"}, QUESTIONS, r"bad.yaml cannot be run \(KeyError in test_docs\): 'nope'"),
    "filter": ({"filter_list": [{"name": "x", "filter": [{"function": "nope"}]}]}, QUESTIONS, "Unknown filter 'nope'"),
    "metric": ({"metric_list": [{"metric": "nope"}]}, QUESTIONS, r"the metric 'nope' .* task .*bad.yaml is unknown"),
    "left out": (
        {"metric_list": [MEAN | {"metric": "nope"}]},
        QUESTIONS,
        r"the metric 'nope' .*\(.*bad.yaml\) is unkn",
    ),
    "aggregation": ({"metric_list": [MEAN | {"aggregation": "nope"}]}, QUESTIONS, "aggregation of 'acc' .* is unknown"),
    "no data": ({"dataset_path": None}, QUESTIONS, "bad.yaml has no data; give it a dataset_path"),
    "number": ({"task": 5}, QUESTIONS, "bad.yaml says task: 5, which is not a name; write one, in quotes"),
    "examples": ({"num_fewshot": 20}, QUESTIONS, "task bad .*cannot be run .*[Ss]ample larger"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_task_file_that_is_broken(case, path, write):
    settings, rows, message = BROKEN[case]
    with pytest.raises(UserError, match=message):
        tasks(path, task=[write("bad", CHOICE, rows, **settings)])


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"limit": 0}, "limit 0 is not possible; give 1"),
        ({"num_fewshot": -1}, "num fewshot -1 is not possible; give 0"),
        ({"batch_size": 0}, "batch size 0"),
        ({"include_path": ["nowhere"]}, "no folder nowhere"),
        ({"apply_chat_template": True}, "has no chat template"),
        ({"task": []}, "no task given"),
    ],
)
def test_a_knob_that_cannot_be(knobs, message, path, choice):
    with pytest.raises(UserError, match=message):
        tasks(path, **{"task": [choice], **knobs})


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("task: [", r"bad.yaml is not YAML \(line 1, column 8: .*flow"),
        ("a: 1\ntask: 2020-13-45", r"bad.yaml is not YAML \(line 2, column 7: month must be in 1..12; quote it"),
        ("task: !!int abc", r"bad.yaml is not YAML \(line 1, column 7: invalid literal .*'abc'"),
        ("task: !!float abc", r"bad.yaml is not YAML \(line 1, column 7: could not convert .*'abc'"),
        ("task: " + 3000 * "[", r"bad.yaml is nested too deeply"),
        ("task: 2020-12-12", r"bad.yaml says task: 2020-12-12, which is not a name"),
        ("group: [a]\ntask: [b]", r"bad.yaml says group: \['a'\], which is not a name"),
        ("group: g\ntask: [nope]", r"bad.yaml names the task 'nope', which is not there; put its file beside"),
        ("group: g", r"bad.yaml brings no task; a group lists"),
        ("include: none.yaml", r"task .*bad.yaml cannot be run .*none.yaml"),
    ],
)
def test_a_task_file_that_cannot_be_read(said, message, few, path, tmp_path):
    (tmp_path / "bad.yaml").write_text(said)
    with pytest.raises(UserError, match=message) as refused:
        tasks(path, task=tmp_path / "bad.yaml")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_a_task_that_contains_itself(path, choice):
    text = Path(choice).read_text().replace('{"version": 2}', "&m {version: *m}")
    Path(choice).write_text(text)
    with pytest.raises(UserError, match=r"task choice \(.*choice.yaml\) cannot be run: it contains itself"):
        tasks(path, task=choice)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("task: 5", "num.yaml says task: 5, which is not a name"),
        ("group: 5\ntask: [choice]", "num.yaml says group: 5, which is not a name"),
        ("task: t\ntag: [5]", "num.yaml says tag: 5, which is not a name"),
        ("group: a\ntask: [b]\n---", None),  # which lm-eval does not read either
    ],
)
def test_a_strangers_file_beside_a_task(said, message, few, path, choice, tmp_path):
    (tmp_path / "num.yaml").write_text(said)
    (tmp_path / "both.yaml").write_text("group: both\ntask: [choice]\n")
    asked = [{"task": str(tmp_path / "both.yaml")}, {"task": "choice", "include_path": str(tmp_path)}]
    for knobs in asked:
        if message is None:
            assert tasks(path, **knobs, limit=1).results
            continue
        with pytest.raises(UserError, match=message):
            tasks(path, **knobs)


@pytest.mark.parametrize("members", ["5", "[5]", "[b]", "[{group: b}]"])
def test_a_group_that_names_no_tasks(members, few, path, tmp_path):
    (tmp_path / "a.yaml").write_text(f"group: a\ntask: {members}\n")
    (tmp_path / "b.yaml").write_text("group: b\ntask: [a]\n")
    with pytest.raises(UserError, match=r"task a \(.*a.yaml\) cannot be run|a brings no task"):
        tasks(path, task="a", include_path=tmp_path)


def test_one_name_for_one_task(path, choice, write, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(Path(choice).read_text())
    with pytest.raises(UserError, match=r"other.yaml brings choice, which was there before"):
        tasks(path, task=[choice, str(other)])


def test_without_lm_eval(path, choice, monkeypatch):
    monkeypatch.setattr("kvfold.eval.tasks.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'kvfold\[tasks\]'"):
        tasks(path, task=[choice])


def test_a_likelihood_that_is_not_a_number(llama, save, choice):
    with torch.no_grad():
        llama.lm_head.weight[7, 3] = math.nan
    with pytest.raises(CheckFailed, match="document 0 of task choice is not a number"):
        tasks(save(llama), task=[choice])


def test_a_foreign_tokenizer(save, choice):
    small = make_model("llama", vocab_size=30, bos_token_id=1, eos_token_id=2)
    with pytest.raises(UserError, match="beyond the model's 30 embeddings"):
        tasks(save(small), task=[choice])


def test_the_chat_template_is_what_the_model_reads(llama, save, choice, monkeypatch):
    folder = save(llama)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    tokenizer.save_pretrained(folder)
    read = []
    ask = Harness.loglikelihood
    monkeypatch.setattr(
        Harness, "loglikelihood", lambda self, requests: read.extend(r.args for r in requests) or ask(self, requests)
    )
    report = tasks(folder, task=[choice], num_fewshot=1, limit=1, apply_chat_template=True)
    assert report.chat_template
    prompt, continuation = read[0]
    assert prompt.startswith("[user]Colour") and "[assistant]" in prompt  # an example is a turn of its own
    assert prompt.endswith("[user]Colour 0?[assistant]")
    assert continuation == "red"


MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
}


def test_stock_mla_writes_in_latent_space(save):
    model = make_model("deepseek_v3", **MLA)
    expanded = []
    for layer in latent_layers(model).values():
        layer.kv_b_proj.register_forward_hook(lambda *call: expanded.append(call[1][0].shape[-2]))
    questions = [row["question"] * (1 + n) for n, row in enumerate(QUESTIONS[:3])]
    knobs = {"until": ["\0"], "max_gen_toks": 8, "do_sample": False}
    requests = [Instance("generate_until", {}, (text, knobs), 0, ("t", n, 1)) for n, text in enumerate(questions)]

    def by(kind, **options):
        expanded.clear()
        return kind(model, tokenizer=make_tokenizer(), batch_size=2, **options).generate_until(requests), len(expanded)

    stock, every_step = by(partial(HFLM, backend="causal"))
    latent, prompts = by(Harness, workers=Workers("cpu"))
    assert latent == stock and len(set(stock)) == 3
    assert prompts < every_step / 4
    assert model.config._attn_implementation == "sdpa"


LENGTHS = (CONTEXT - 10, CONTEXT, CONTEXT + 1, 2 * CONTEXT, 5 * CONTEXT + 7)


@pytest.mark.parametrize("prefix", ["bos", "added bos", "eos"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_the_protocol_lm_eval_is_its_rolling_likelihood(model_type, prefix, tmp_path):
    model = make_model(model_type).double()
    tokenizer = make_tokenizer()
    if prefix != "added bos":
        tokenizer.backend_tokenizer.post_processor = None
    if prefix == "eos":
        tokenizer.bos_token = None
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    letters = "".join(COLOURS) * 20
    for length in LENGTHS:
        (tmp_path / "text.txt").write_text(text := letters[: length - (prefix == "added bos")])
        harness = HFLM(pretrained=model, backend="causal", tokenizer=tokenizer)
        request = Instance("loglikelihood_rolling", {}, (text,), 0)
        expected = -harness.loglikelihood_rolling([request], disable_tqdm=True)[0]
        report = perplexity(
            tmp_path / "model", text=[str(tmp_path / "text.txt")], protocol="lm-eval", dtype="float64", batch_size=2
        )
        assert report.tokens == length
        assert report.loss * report.tokens == pytest.approx(expected, rel=1e-6)


def test_importing_needs_neither_torch_nor_lm_eval():
    code = "import sys, kvfold.eval.tasks\nprint({'torch', 'transformers', 'lm_eval'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
