"""The model card: figures, commands, engines and limits, whatever names and records hold."""

import inspect
import json
import re
import shlex
from dataclasses import replace

import pytest

from kvfold.convert.mla.convert import convert_mla
from kvfold.convert.request import asked_for
from kvfold.eval.report.record import to_json
from kvfold.eval.report.write import FIGURES
from kvfold.publish.card import card_text, dataset_of
from kvfold.publish.commands import TRAINED, Step, command_lines
from kvfold.publish.contents import publishable
from kvfold.publish.facts import gather
from kvfold.publish.licences import find_licence
from kvfold.publish.words import fenced, public_name, without_folders
from kvfold.uptrain import finish
from kvfold.uptrain.recipe import Recipe

from ..eval.report.made import make_report, make_result, make_source

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def step(recipe, asked=None, source="source", revision=None):
    return Step(recipe, asked, source, revision, "0.1.0")


def lines(*steps, name="out", base=None):
    return [line.text for line in command_lines(steps, name, base)]


def write_report(folder, out, **figures):
    """A report of two results, of which the second is the one at `out`."""
    rows = [make_result("other", "MQA", 2.0), make_result("this", "GQA", 1.08, model=str(out), **figures)]
    report = make_report(*rows, speed=False, healed=False, source=make_source(model="/home/somebody/source"))
    report = replace(report, protocol=replace(report.protocol, tokens_in_text=20_441))
    folder.mkdir(exist_ok=True)
    (folder / FIGURES).write_text(json.dumps(to_json(report)))
    return folder


MADE_BY = ["convert gqa: kv_heads 2, method mean, grouping contiguous"]


def card(facts, repo="me/tiny", **options):
    report = publishable(facts.report) if facts.report else None
    return card_text(facts, find_licence(facts.head), repo, report=report, recipe=False, **options)


def test_metadata_goes_there_and_back(results, tmp_path):
    from huggingface_hub import ModelCard

    report = write_report(tmp_path / "report", results / "gqa", kv_elements_per_token_per_layer=128, made_by=MADE_BY)
    text = card(gather(results / "gqa", base_model="some/base", report=report))
    data = ModelCard(text).data
    assert ModelCard(str(ModelCard(text))).data.to_dict() == data.to_dict()
    said = data.to_dict()
    assert said["base_model"] == "some/base" and said["base_model_relation"] == "finetune"
    assert (said["license"], said["library_name"], said["language"]) == ("apache-2.0", "transformers", ["en", "no"])
    assert said["tags"] == ["kvfold", "kv-cache", "gqa"]
    found = {one.metric_type: one.metric_value for one in data.eval_results}
    assert found == {"perplexity": 21.6, "kl": 0.0123456789, "top1_agreement": 0.9517}
    assert {one.dataset_name for one in data.eval_results} == {"builtin, my.txt"}
    assert "21.60, 1.080× the source's 20.00" in text
    assert "| **this model** | **GQA** | **128** | **2.00 KiB** | **21.60** | **1.080×** |" in text
    assert "| other | MQA |" in text
    assert "- a warning" in text


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["hub:a/b:c:test"], ("a/b", "a/b", "c", "test")),
        (["hub:a/b"], ("a/b", "a/b")),
        (["/home/me/my.txt"], ("text", "my.txt")),
        (["builtin", "hub:a/b"], ("text", "builtin, a/b")),
    ],
)
def test_what_it_was_measured_on(texts, said):
    assert tuple(dataset_of(texts).values()) == said


@pytest.mark.parametrize(
    ("name", "engines", "not_for"),
    [
        ("gqa", ["transformers", "vLLM", "SGLang", "llama.cpp"], ["backend"]),
        ("mla", ["transformers", "SGLang"], ["llama.cpp"]),
        ("plain", ["kvfold, for training"], ["transformers", "vLLM", "SGLang", "llama.cpp"]),
    ],
)
def test_engines_are_those_that_check_passes(results, name, engines, not_for):
    text = card(gather(results / name), revision="v'2")
    headings = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert [one for one in headings if one in engines] == engines
    assert not any(one in heading for heading in headings for one in not_for if one not in engines)
    assert ('revision="v\'2"' in text) and ("kvfold alone reads" in text) == (name == "plain")
    assert "was not measured" in text


def test_conversions_are_asked_for_again(results):
    (line,) = gather(results / "mla", base_model="some/base").commands
    words_of = shlex.split(line.text)
    assert words_of[:5] == ["kvfold", "convert", "mla", "some/base", "mla"]
    assert " ".join(words_of[5:]) == (
        "--kv-rank 40 --rope-dim 24 --rope-select high --for transformers,sglang --calib none"
    )
    assert line.exact


def test_options_are_recorded_without_folders():
    given = {"src": "/home/me/src", "kv_elements": 64, "calib": ("/home/me/a.txt", "hub:a/b", "builtin:code")}
    given |= {"stats": "/home/me/s.safetensors", "large_eps": False, "fisher": False, "device": "cuda:1"}
    usual = {name: one.default for name, one in inspect.signature(convert_mla).parameters.items()}
    asked = asked_for(convert_mla, usual | given)
    assert asked == {
        "kv_elements": 64, "large_eps": False, "calib": ["a.txt", "hub:a/b", "builtin:code"], "fisher": False,
        "stats": "s.safetensors",
    }  # fmt: skip
    assert lines(step({"command": "convert mla"}, asked)) == [
        "kvfold convert mla source out --kv-elements 64 --small-eps --calib a.txt --calib hub:a/b --calib builtin:code "
        "--no-fisher --stats s.safetensors"
    ]


def test_old_records_say_what_they_can():
    old = {"command": "convert gqa", "kv_heads": 2, "method": "svd", "seed": 0, "refine": {"windows": 8}, "dtype": None}
    (line,) = command_lines([step(old, None, "a/b", COMMIT)], "out", "a/b")
    assert line.text == f"kvfold convert gqa a/b out --kv-heads 2 --refine 8 --revision {COMMIT}"
    assert not line.exact


def test_training_of_an_export_is_one_command():
    recipe = Recipe(model="export", out="healed", teacher="a/b", data=("hub:c/d", "my, text.txt"), steps=8)
    healed = recipe.identity() | {"command": "uptrain", "held_out": {"builtin": 3.0}, "held_out_share": 0.05}
    chain = [
        step({"command": "convert mla"}, {"kv_elements": 64}, "a/b", COMMIT),
        step({"command": "convert plain"}, {}, "export"),
        step(healed, None, "plain-0123"),
        step({"command": "convert mla", "rope_select": "as it is"}, {"readers": ["sglang"]}, "trained"),
    ]
    first, second = lines(*chain, name="healed", base="a/b")
    assert first == f"kvfold convert mla a/b export --kv-elements 64 --revision {COMMIT}"
    assert shlex.split(second) == [
        "kvfold", "uptrain", "model=export", "out=healed", "data=[hub:c/d, 'my, text.txt']", "held_out=0.05",
        "teacher=a/b", "steps=8",
    ]  # fmt: skip
    assert TRAINED == finish._TRAINED
    assert len(lines(*chain[:2], replace(chain[2], recipe={**healed, "model": "mine"}), chain[3])) == 4


HOSTILE = "a|b`c\n# d <script>alert(1)</script> [x](http://y) \x1b[31m ![z](q) {{ 7*7 }} --- $$x$$ \u202e"


def test_no_name_leaves_its_place(results, tmp_path):
    from huggingface_hub import ModelCard
    from markdown_it import MarkdownIt

    report = write_report(tmp_path / "report", results / "gqa", kv_elements_per_token_per_layer=128, made_by=MADE_BY)
    data = json.loads((report / FIGURES).read_text())
    data["results"][1]["name"] = data["results"][1]["model"] = data["title"] = HOSTILE
    data["warnings"] = data["protocol"]["texts"] = [HOSTILE]
    data["results"][2]["reason"] = HOSTILE
    (report / FIGURES).write_text(json.dumps(data))
    facts = gather(results / "gqa", report=report)
    facts = replace(facts, source=HOSTILE)
    text = card(facts)
    assert len(ModelCard(text).data.eval_results) == 3
    body = ModelCard(text).text
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(body)
    html = [one.content.strip() for one in tokens if one.type == "html_block"]
    inline = [child for one in tokens if one.type == "inline" for child in one.children]
    assert all(one.startswith(("<!-- written by", "<details>", "</details>")) for one in html), html
    assert not [one for one in inline if one.type == "html_inline"]
    assert {one.attrs["src"] for one in inline if one.type == "image"} == {"kvfold-report/charts/trade-off.png"}
    assert not [one for one in inline if one.type == "link_open" and "//y" in one.attrs["href"]]
    rows = [one for one in body.splitlines() if one.startswith("|")]
    assert len(rows) == 5 and {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {7}
    assert "\x1b" not in text and "\u202e" not in text and "{{ 7*7 }}" in text


def test_fences_and_folders():
    assert fenced("a\n````\nb") == "`````\na\n````\nb\n`````"
    names = ["a/b/c.txt", "hub:a/b", "hub:/a/b", "builtin:code", "a/b", "/x/y/"]
    assert [public_name(name, {"a/b"}) for name in names] == ["c.txt", "hub:a/b", "b", "builtin:code", "a/b", "y"]
    told = "in /home/me/x.run, by https://a.b/c/d and '~/k/v' 1/2"
    assert without_folders(told) == "in x.run, by https://a.b/c/d and 'v' 1/2"


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ({"builtin:topics": 4, "builtin:code": 4}, ""),
        ({"builtin:topics": 4, "my.txt": 4}, " --calib my.txt"),
        ({"my.txt": 8}, " --calib my.txt --no-calib-builtin"),
    ],
)
def test_statistics_that_a_conversion_was_given_are_made_before_it(kinds, said):
    recipe = {"command": "convert gqa", "kv_heads": 2, "calibration": {"windows": 8, "kinds": kinds}}
    assert lines(step(recipe, {"kv_heads": 2, "stats": "s.safetensors"})) == [
        f"kvfold calibrate source -o s.safetensors --calib-windows 8{said}",
        "kvfold convert gqa source out --kv-heads 2 --stats s.safetensors",
    ]
