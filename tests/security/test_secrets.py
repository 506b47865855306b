"""A token goes to the Hub, in a header, and nowhere else; and what is shown steers no terminal."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import click
import pytest

from kvfold.cli import kvfold
from kvfold.common.embedded import MODEL_DIR
from kvfold.common.errors import UserError
from kvfold.common.output import print_report, print_table, print_warnings
from kvfold.common.shown import shown, without_secrets
from kvfold.common.status import status_of
from kvfold.publish.contents import check_secrets
from kvfold.publish.licences import find_licence, read_head
from kvfold.publish.publish import publish

from ..hub import Fault, hub_server, use
from ..hub.store import Blob
from ..publish.test_card import MADE_BY, write_report

TOKEN = "hf_" + "Zq7" * 11 + "Z"  # 37 letters, as the Hub's are
PASSWORD = "p4ssw0rd-of-an-address"
STEERING = "\x1b[2J\x1b]0;title\x07\u202e\x9b31m"


@pytest.fixture
def source(tmp_path):
    folder = shutil.copytree(MODEL_DIR, tmp_path / "work/source")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with hub_server(token=TOKEN) as hub:
        use(hub, tmp_path / "home", monkeypatch)
        yield hub


def command(*words: object) -> int:
    """A command as `kvfold` runs it, with its status and what it says of a failure."""

    def run() -> int:
        try:
            with kvfold.make_context("kvfold", [str(word) for word in words]) as context:
                kvfold.invoke(context)
        except click.exceptions.Exit as done:
            return done.exit_code
        return 0

    return status_of(run)


def test_a_token_is_in_no_file_and_no_stream(hub, source, tmp_path, capfd, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    work, out = tmp_path / "work", tmp_path / "work/gqa"
    recipe = work / "recipe.yaml"
    recipe.write_text(f"source: {{model: {source}}}\nconvert: {{to: gqa, kv_heads: 2}}\n")
    assert command("convert", "gqa", source, out, "--kv-heads", 2, "--method", "mean") == 0
    write_report(work / "report", out, kv_elements_per_token_per_layer=128, made_by=MADE_BY)
    assert command("publish", out, "me/model", "--recipe", recipe, "--dry-run", "--folder", work / "folder") == 0
    assert command("publish", out, "me/model", "--report", work / "report", "--tag", "v1", "--json") == 0
    # What the Hub says back, and what the client says of an address, may hold it.
    echo = {"X-Error-Message": f"no {TOKEN}, Bearer {TOKEN}, see https://me:{PASSWORD}@hub/x?y"}
    for fault in (
        Fault("POST .*/commit/", status=403, headers=echo),
        Fault("GET /api/whoami", status=418, headers=echo),
    ):
        hub.faults[:] = [fault]
        assert command("publish", out, "me/other") == 2
    assert status_of(lambda: int(TOKEN)) == 70  # a fault of ours, with a traceback
    (out / "LICENSE").write_text(f"mine: {TOKEN}")
    assert command("publish", out, "me/other") == 2
    (out / "LICENSE").unlink()

    streams = capfd.readouterr()
    texts = {"stdout": streams.out.encode(), "stderr": streams.err.encode(), "log": caplog.text.encode()}
    texts |= {str(path): path.read_bytes() for path in work.rglob("*") if path.is_file()}
    texts |= {f"{name}/{path}": text for name, repo in hub.repos.items() for path, text in repo.files.items()}
    assert len(texts) > 30 and "me/model/kvfold.json" in texts
    for name, text in texts.items():
        assert TOKEN.encode() not in text and PASSWORD.encode() not in text, name
    sent = [request for request in hub.log if TOKEN in f"{request.path}{request.query}{request.body!r}"]
    assert not sent
    assert any(TOKEN in value for request in hub.log for value in request.headers.values())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"a {TOKEN}.", "a <token>."),
        ("https://me:secret@hub.org/a/b", "https://<token>@hub.org/a/b"),
        ("Bearer abc.def'", "Bearer <token>'"),
        ("my-own-token-1234", "<token>"),
        ("hf_models/llama and hf_transfer", "hf_models/llama and hf_transfer"),
        ("https://hub.org/a@b, me@hub.org", "https://hub.org/a@b, me@hub.org"),
    ],
)
def test_secrets_are_seen(text, said, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "my-own-token-1234")
    assert without_secrets(text) == said
    assert str(UserError(text)) == said


@pytest.mark.parametrize("name", ["NOTICE", "tokenizer.model", "vocab.csv", "no-suffix"])
@pytest.mark.parametrize("at", [0, (1 << 20) - 5, 3 << 20])
def test_a_token_is_found_in_every_file_but_weights(tmp_path, name, at):
    path = tmp_path / name
    for secrets in ([TOKEN], []):
        path.write_bytes(b"-" * at + TOKEN.encode() + b"-" * 9)
        with pytest.raises(UserError, match=f"{name} holds") as refused:
            check_secrets({name: path}, secrets)
        assert TOKEN not in str(refused.value)
    path.write_bytes(b"-" * at)
    check_secrets({name: path, "model.safetensors": path}, [TOKEN, "", "short"])


def test_nothing_that_is_shown_steers_a_terminal(capsys):
    report = {"model": STEERING, "warnings": [STEERING], "more": {STEERING: 1}}
    print_report(report, as_json=False)
    print_report(report, as_json=True)
    print_table([{"a": STEERING}], {STEERING: "a"}, title=STEERING)
    print_warnings([STEERING])
    assert status_of(lambda: int(STEERING)) == 70
    assert status_of(lambda: Path("/nowhere", STEERING).stat().st_size) == 3

    def wrong() -> int:
        raise UserError(STEERING)

    assert status_of(wrong) == 2
    said = "".join(capsys.readouterr())
    assert not set(said) & set("\x1b\x07\x9b\u202e")
    assert shown(STEERING).startswith(r"\x1b[2J") and shown(STEERING).isprintable()


# What is published of a folder, and what not.


@pytest.fixture
def gqa(source, tmp_path):
    assert command("convert", "gqa", source, tmp_path / "gqa", "--kv-heads", 2, "--method", "mean") == 0
    return tmp_path / "gqa"


def list_file(out: Path, name: str, **row: str) -> None:
    record = json.loads((out / "kvfold.json").read_text())
    record["files"][name] = row
    (out / "kvfold.json").write_text(json.dumps(record))


@pytest.mark.parametrize("name", ["vocab.txt", "LICENSE", "../secret", "/etc/hostname"])
def test_a_record_leads_to_nothing_outside(hub, gqa, tmp_path, name):
    """Whoever wrote kvfold.json chose the names in it."""
    (tmp_path / "secret").write_text("s3cret of the user")
    if "/" not in name:
        (gqa / name).symlink_to(tmp_path / "secret")
    list_file(gqa, name)
    with pytest.raises(UserError, match=r"outside the checkpoint|which its kvfold.json lists"):
        publish(gqa, "me/model")
    assert not hub.repos


def test_a_private_source_is_not_made_public(hub, gqa):
    hub.add("me/base", private=True).add("main", {"README.md": Blob(b"---\nlicense: mit\n---\n", large=False)}, "a")
    with pytest.raises(UserError, match=r"its source is gated or private: .*say --accept-license"):
        publish(gqa, "me/model", base_model="me/base")
    assert "me/model" not in hub.repos
    publish(gqa, "me/model", base_model="me/base", private=True)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("stage", ["comparing", "uploading"])
def test_what_is_changed_meanwhile_is_not_published(hub, gqa, name, stage):
    from contextlib import contextmanager

    @contextmanager
    def progress(label):
        if label == stage:
            content = bytearray((gqa / name).read_bytes())
            content[-3] ^= 1
            (gqa / name).write_bytes(content)
        yield lambda done, total, note="": None

    with pytest.raises(UserError, match=f"{name} was changed while it was being published"):
        publish(gqa, "me/model", progress=progress)
    assert hub.repos["me/model"].history() == ["initial commit"]


@pytest.mark.parametrize("name", ["../main", "a b", "refs/pr/1", "x\ny", "main~1", "-x", "a..b", "x.lock", "x/", ""])
def test_names_of_branches_and_tags(gqa, name):
    for option in ({"revision": name}, {"tag": name}):
        with pytest.raises(UserError, match="is no name of a branch or a tag"):
            publish(gqa, "me/model", dry_run=True, **option)


@pytest.mark.parametrize(("given", "meant"), [("apache2", "apache-2.0"), ("lama3.1", "llama3.1"), ("my-own", "")])
def test_licences_that_are_spelt_otherwise(gqa, given, meant):
    with pytest.raises(UserError, match=r"say --accept-license" + (f"; did you mean {meant}" if meant else "$")):
        publish(gqa, "me/model", license=given, dry_run=True)


def test_the_head_of_a_card_is_one_table(gqa, tmp_path):
    """Whatever the head of the source's README says, that of the card holds our keys, and one value each."""
    from huggingface_hub import ModelCard

    odd = 'x"\n---\ntags: [evil]\n---\n<script>'
    head = {"license": "other", "license_name": odd, "license_link": f"https://x/{odd}", "language": ["en", odd]}
    head |= {"datasets": ["a/b", odd], "tags": ["evil"], "model-index": [1], "base_model": "evil/evil", odd: odd}
    (gqa / "README.md").write_text(f"---\n{json.dumps(head)}\n---\n")  # JSON is YAML
    assert find_licence(read_head((gqa / "README.md").read_bytes())).id == "other"
    list_file(gqa, "README.md")
    publish(gqa, "me/model", dry_run=True, folder=tmp_path / "folder", accept_license=True)
    found = ModelCard.load(tmp_path / "folder/README.md").data.to_dict()
    assert set(found) == {"license", "license_name", "library_name", "pipeline_tag", "tags", "language"}
    assert (found["tags"], found["language"]) == (["kvfold", "kv-cache", "gqa"], ["en"])
    assert found["license_name"].replace("-", "").isalnum()


def test_a_report_takes_no_longer_than_any(gqa, tmp_path):
    folder = write_report(tmp_path / "report", gqa)
    figures = json.loads((folder / "report.json").read_text())
    figures["results"] += figures["results"][1:] * 1500
    (folder / "report.json").write_text(json.dumps(figures))
    with pytest.raises(UserError, match="has 3003 results, more than a page can show"):
        publish(gqa, "me/model", report=folder, dry_run=True)
