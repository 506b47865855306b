"""`kvfold publish`: what it writes, what it sends, and what it refuses before anything is sent."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from kvfold.cli.publish import publish as command
from kvfold.common.errors import UserError
from kvfold.publish.publish import PublishReport, publish

from ..hub import hub_server, use
from ..hub.store import Blob
from .test_card import MADE_BY, write_report

REPO = "me/tiny-gqa"
TOKEN = "hf_" + "q" * 34


@pytest.fixture
def report(results, tmp_path):
    return write_report(tmp_path / "report", results / "gqa", kv_elements_per_token_per_layer=128, made_by=MADE_BY)


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with hub_server() as hub:
        use(hub, tmp_path / "hub-home", monkeypatch)
        yield hub


def texts_of(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.suffix != ".safetensors"}


def test_a_dry_run_writes_all_and_tells_nothing_of_this_machine(results, report, tmp_path, monkeypatch, no_network):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    recipe = tmp_path / "my.yaml"
    recipe.write_text(f"# {tmp_path}/x/y\nsource:\n  model: {results}/source\npublish: {{private: true}}\n")
    folder = tmp_path / "folder"
    options = {"report": report, "recipe": recipe, "folder": folder, "dry_run": True, "tag": "v1"}
    said = publish(results / "gqa", REPO, **options)
    charts = [f"kvfold-report/charts/{name}.png" for name in ("trade-off", "cache", "layers")]
    whole = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    source = {path.name for path in (results / "gqa").iterdir()}
    added = {"README.source.md", "recipe.yaml", "kvfold-report/index.html", "kvfold-report/report.json", *charts}
    assert whole == source | added
    assert (said.files, said.bytes) == (len(whole), sum((folder / name).stat().st_size for name in whole))
    assert (said.url, said.commit, said.tag, said.files_changed, said.folder) == ("", "", "v1", 0, str(folder))
    assert said.engines == ["transformers", "vllm", "vllm-transformers", "sglang", "llama.cpp"]
    places = [str(results), str(tmp_path), str(Path.home()), "/home/somebody", str(Path.cwd()), TOKEN]
    for name in whole:
        assert not [place for place in places if place.encode() in (folder / name).read_bytes()], name
    assert "kvfold run recipe.yaml" in (folder / "README.md").read_text()
    card = (folder / "README.md").read_text()
    linked = re.findall(r"\]\(((?!https?:)[^)]+)\)", card)
    assert linked and set(linked) <= whole
    weights = [path / "model.safetensors" for path in (folder, results / "gqa")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    with pytest.raises(UserError, match="or replace it with --overwrite"):
        publish(results / "gqa", REPO, **options)
    publish(results / "gqa", REPO, **options | {"report": None}, overwrite=True)
    assert not (folder / "kvfold-report").exists()
    with pytest.raises(UserError, match="is not the folder of an earlier kvfold publish --dry-run"):
        publish(results / "gqa", REPO, **options | {"folder": results / "mla"}, overwrite=True)
    with pytest.raises(UserError, match="lie inside one another"):
        publish(results / "gqa", REPO, dry_run=True, folder=results / "gqa" / "in")


def test_what_is_published_is_loaded_again(results, report, tmp_path, hub):
    import torch

    out = results / "mla"
    said = publish(out, "me/tiny-mla", base_model="some/base", private=True, tag="v1")
    assert (said.created, said.revision, said.tag, said.dry_run) == (True, "main", "v1", False)
    assert said.commit and said.commit in said.url and said.files_changed == said.files
    ids = torch.arange(40)[None]
    ours, theirs = (AutoModelForCausalLM.from_pretrained(name).eval()(ids).logits for name in (out, "me/tiny-mla"))
    torch.testing.assert_close(theirs, ours, rtol=0, atol=0)
    again = publish(out, "me/tiny-mla", base_model="some/base", private=True, tag="v1")
    assert (again.commit, again.files_changed, again.created) == (said.commit, 0, False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"report": "nothing"}, "holds no report.json"),
        ({"recipe": "nothing.yaml"}, "cannot read the recipe"),
        ({"base_model": "/home/me/model"}, "is no id of the Hub"),
        ({"folder": "somewhere"}, "add --dry-run"),
        ({"license": "gemma"}, r"Gemma Terms of Use \(gemma, says --license\).*say --accept-license"),
        ({"license": "llama3.1", "accept_license": True}, "names that begin with Llama"),
    ],
)
def test_nothing_is_sent_before_all_is_right(results, no_network, options, said):
    with pytest.raises(UserError, match=said):
        publish(results / "gqa", REPO, **options)


def test_the_report_must_be_about_the_result(results, report, tmp_path):
    def refused(said, **change):
        data = json.loads((report / "report.json").read_text())
        data["results"][2] |= change.pop("row", {})
        (tmp_path / "changed").mkdir(exist_ok=True)
        (tmp_path / "changed" / "report.json").write_text(json.dumps(data | change))
        with pytest.raises(UserError, match=said):
            publish(results / "gqa", REPO, report=tmp_path / "changed", dry_run=True, folder=tmp_path / "f")
        assert not (tmp_path / "f").exists()

    refused("about gqa not", row={"model": "/elsewhere/other"})
    refused("caches 256 elements a token and layer, and .* caches 128", row={"kv_elements_per_token_per_layer": 256})
    refused("was made in another way", row={"made_by": ["convert gqa: kv_heads 2, method svd"]})
    refused("is broken .report.results.2.perplexity is not float", row={"perplexity": "<b>"})
    refused("unknown key 'more'", row={"more": 1})
    refused("by another kvfold", format_version=99)
    refused("do not fit together", cache_growth={"contexts": [1], "results": []})
    moved = json.loads((report / "report.json").read_text())
    moved["results"][2]["model"] = "/elsewhere/gqa"
    (report / "report.json").write_text(json.dumps(moved))
    publish(results / "gqa", REPO, report=report, dry_run=True, folder=tmp_path / "f")


def test_the_card_of_the_base_model_says_the_licence(gqa, hub, tmp_path):
    """Where the source came without a README: from the Hub, but not in a dry run, which has the Hub's cache alone."""
    record = json.loads((gqa / "kvfold.json").read_text())
    del record["files"]["README.md"]
    record["source"] |= {"name": "some/base", "revision": None}
    (gqa / "kvfold.json").write_text(json.dumps(record))
    (gqa / "README.md").unlink()
    base = {"base_model": "some/base"}
    with pytest.raises(UserError, match="say it with --license ID"):
        publish(gqa, REPO, **base, dry_run=True)
    assert not hub.requests("GET ")
    with pytest.raises(UserError, match="say it with --license ID"):
        publish(gqa, REPO, **base)
    hub.add("some/base").add("main", {"README.md": Blob(b"---\nlicense: llama3.2\n---\n", large=False)}, "a card")
    with pytest.raises(UserError, match=r"says the card of some/base on the Hub"):
        publish(gqa, REPO, **base)
    said = publish(gqa, "me/Llama-tiny", **base, accept_license=True)
    assert said.license == "llama3.2"
    assert said.warnings == []
    (tmp_path / "f").mkdir()
    publish(gqa, "me/Llama-tiny", **base, accept_license=True, dry_run=True, folder=tmp_path / "f" / "f")
    assert (tmp_path / "f/f/NOTICE").read_text().startswith("Llama 3.2 is licensed")
    assert "\n**Built with Llama**\n" in (tmp_path / "f/f/README.md").read_text()


def test_the_command(results, tmp_path):
    arguments = [str(results / "gqa"), REPO, "--dry-run", "--folder", str(tmp_path / "f")]
    result = CliRunner().invoke(command, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert set(said) == set(PublishReport.__dataclass_fields__)
    assert "kvfold: warning: the base model is only known as source" in result.stderr
    result = CliRunner().invoke(command, [*arguments, "--overwrite"])
    assert re.search(r"^license +apache-2.0$", result.stdout, re.MULTILINE)
    assert re.search(r"^folder +", result.stdout, re.MULTILINE)


def test_the_modules_need_no_torch_to_say_help():
    code = "import sys, kvfold.cli.publish, kvfold.publish.licences; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
