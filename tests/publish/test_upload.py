"""Uploads by the real client, to a Hub on this machine."""

import subprocess
import sys
import traceback
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvfold.common.errors import EnvironmentFailure, UserError
from kvfold.common.status import Stopped
from kvfold.publish import client
from kvfold.publish.upload import _ALONE, check_login, check_repo_id, upload

from ..common.tiny import make_model
from ..hub import Fault, Repo, environment, hub_server, use

REPO = "me/model"
CARD = b"---\nlicense: mit\n---\n# A model\n"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with hub_server(part_size=_ALONE) as hub:
        use(hub, tmp_path / "home", monkeypatch)
        yield hub


@pytest.fixture
def waits(monkeypatch):
    """Seconds that would have been waited, by the client or by us."""
    seen = []
    monkeypatch.setattr("time.sleep", seen.append)
    return seen


@pytest.fixture
def contents(tmp_path):
    """A card, two small files, one in a folder, and three large ones; the last comes in two parts."""
    files = {"README.md": CARD, "config.json": b"{}", "kvfold-report/index.html": b"<p>", "empty.txt": b""}
    for number, size in enumerate((1000, _ALONE, _ALONE + 1)):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(bytes([number]) * size)
        files[path.name] = path
    return files


def held(contents):
    return {path: item if isinstance(item, bytes) else item.read_bytes() for path, item in contents.items()}


def sent(hub):
    """Bytes of large files that arrived, or should have."""
    return sum(request.received for request in hub.requests("PUT "))


def put(contents, **options):
    return upload(contents, REPO, message="a model", **options)


def test_what_is_published_is_the_model(hub, tmp_path):
    model = make_model("llama").double()
    model.save_pretrained(tmp_path / "out")
    contents = {path.name: path for path in (tmp_path / "out").iterdir()} | {"README.md": CARD}
    seen = []

    @contextmanager
    def progress(label):
        yield lambda done, total: seen.append((label, done / total))

    done = put(contents, private=True, tag="v1", progress=progress)
    assert {label for label, _ in seen} == {"comparing", "uploading"} and seen == sorted(seen)
    assert all(0 <= share <= 1 for _, share in seen)
    repo = hub.repos[REPO]
    assert (repo.private, repo.files, repo.tags) == (True, held(contents), {"v1": done.commit})
    assert done.url == f"{hub.endpoint}/{REPO}/tree/{done.commit}"
    assert (done.created, done.files, done.files_changed, done.files_deleted) == (True, len(contents), len(contents), 0)
    assert done.bytes == done.bytes_changed == sum(map(len, repo.files.values()))
    ids = torch.arange(12)[None]
    for revision in ("v1", "main"):
        there = AutoModelForCausalLM.from_pretrained(REPO, revision=revision, dtype=torch.float64)
        torch.testing.assert_close(there(ids).logits, model(ids).logits, rtol=0, atol=0)
    # Storage is elsewhere, and no business of the token's.
    stored = hub.requests(".* /large/")
    assert {request.method for request in stored} == {"PUT", "GET"}
    assert not any("authorization" in request.headers for request in stored)


def test_the_same_again_makes_no_commit(hub, contents):
    first = put(contents)
    assert hub.repos[REPO].history() == ["a model", "initial commit"]
    assert hub.repos[REPO].files == held(contents)
    hub.log.clear()
    again = put(contents, tag="v1")
    assert (again.commit, again.files_changed, again.bytes_changed) == (first.commit, 0, 0)
    assert not hub.requests("PUT |.*(commit/|preupload|batch)")
    assert hub.repos[REPO].tags == {"v1": first.commit}
    put(contents, tag="v1")  # which is where it should be
    with pytest.raises(UserError, match=r"has the tag v1 elsewhere \(.{8}\)"):
        put(contents | {"config.json": b"{1}"}, tag="v1", overwrite=True)
    assert hub.repos[REPO].files == held(contents)


def test_other_files_are_replaced_only_when_asked(hub, contents):
    put(contents | {"model-00002-of-00002.safetensors": b"stale"})
    changed = contents | {"config.json": b"{ }"}
    with pytest.raises(UserError, match=r"me/model \(main\) holds other files, .*such as 0.safetensors; --overwrite"):
        put(changed)
    hub.log.clear()
    done = put(changed, overwrite=True)
    assert (done.files_changed, done.bytes_changed, done.files_deleted, done.created) == (1, 3, 1, False)
    assert hub.repos[REPO].files == held(changed)
    assert hub.repos[REPO].history() == ["a model", "a model", "initial commit"]
    assert not sent(hub)


def test_a_gitignore_of_the_repository_keeps_nothing_out(hub, contents, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/.gitignore").write_text("config.json 1.safetensors")
    hub.add(REPO).add_folder(tmp_path / "old")
    put(contents, overwrite=True)
    assert hub.repos[REPO].files == held(contents)


def test_a_branch_leaves_main_alone(hub, contents):
    put({"README.md": CARD, "old.bin": b"old"})
    hub.faults.append(Fault("POST .*/commit/", status=418))
    with pytest.raises(UserError):
        put(contents, revision="try/mla")  # the branch stands, as main does
    done = put(contents, revision="try/mla", tag="v2")
    repo = hub.repos[REPO]
    assert (done.revision, repo.branches["try/mla"], repo.tags["v2"]) == ("try/mla", done.commit, done.commit)
    assert repo.commits[done.commit].files.keys() - {".gitattributes"} == contents.keys()
    assert repo.files == {"README.md": CARD, "old.bin": b"old"}
    with pytest.raises(UserError, match="v2 is a tag or a commit of me/model"):
        put(contents, revision="v2")
    repo.branches["copy"] = repo.head.oid
    with pytest.raises(UserError, match=r"me/model \(main\) holds other files"):
        put(contents)


# Uploads three files one after another; the test ends it while the second is on its way.
CLIENT = """
import pathlib, sys
from kvfold.publish.upload import upload
files = {path.name: path for path in pathlib.Path(sys.argv[1]).glob("*.safetensors")}
upload(dict(sorted(files.items())) | {"README.md": b"a card"}, "me/model", message="a model")
"""


def test_killed_and_run_again(hub, tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.safetensors").write_bytes(bytes([number]) * _ALONE)
    hub.faults.append(fault := Fault("PUT ", skip=1, hang_after=_ALONE // 2))
    command, env = [sys.executable, "-c", CLIENT, str(tmp_path)], environment(hub, tmp_path / "home")
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE) as process:
        assert fault.struck.wait(60), process.communicate()
        process.kill()
    first, second = hub.requests("PUT ")
    assert (first.received, second.received) == (_ALONE, _ALONE // 2)
    assert hub.repos[REPO].history() == ["initial commit"]
    hub.log.clear()
    hub.faults.append(Fault("POST .*/batch", status=503))
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    # Neither bars nor what the client thinks of the 503, which would name addresses.
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert first.path not in {request.path for request in hub.requests("PUT ")}
    assert sent(hub) == 2 * _ALONE
    assert hub.repos[REPO].history() == ["a model", "initial commit"]
    assert len(hub.repos[REPO].files) == 4


@pytest.mark.parametrize(
    "fault",
    [
        Fault("PUT ", skip=1, times=2, drop_after=_ALONE // 2),
        Fault("PUT ", times=2, status=503),
        Fault("POST .*/batch", times=2, status=429, headers={"Retry-After": "7"}),
        Fault("POST /api/repos/create", times=2, status=429, headers={"Retry-After": "7"}),
        Fault("GET .*/refs", times=2, status=502),
        Fault("POST .*/commit/", times=2, status=503),
        Fault("POST .*/commit/", times=2, drop_after=10),
        Fault("POST .*/commit/", lose_answer=True),
        Fault("POST /api/repos/create", lose_answer=True),
        Fault("POST .*/tag/", lose_answer=True),
    ],
    ids=lambda fault: f"{fault.where} {fault.status or ('lost' if fault.lose_answer else 'dropped')}",
)
def test_what_passes_is_waited_for(hub, contents, waits, fault):
    hub.faults.append(fault := replace(fault))
    done = put(contents, tag="v1")
    assert not fault.times
    assert all(wait >= 7 for wait in waits) or fault.status != 429
    repo = hub.repos[REPO]
    assert (repo.files, repo.history()) == (held(contents), ["a model", "initial commit"])
    assert repo.tags == {"v1": done.commit}


@pytest.mark.parametrize(
    "fault", [Fault("PUT ", status=503, times=99), Fault("POST .*/commit/", drop_after=1, times=99)]
)
def test_what_does_not_pass_is_told(hub, contents, waits, fault):
    hub.faults.append(fault := replace(fault))
    with pytest.raises(EnvironmentFailure, match=r"the same command goes on") as caught:
        put(contents)
    assert_clean(hub, caught)
    assert hub.repos[REPO].history() == ["initial commit"]
    hub.faults.clear()
    hub.log.clear()
    put(contents)
    assert hub.repos[REPO].files == held(contents)
    assert sent(hub) == (2 * _ALONE + 1001 if fault.status else 0)


REFUSED = {
    "a wrong token": ("hf_Wrong0123456789", "does not take the token for me/model; run hf auth login"),
    "no token": ("", "there is no token for the Hub; run hf auth login"),
    "no token at all": ("hf_a\x7fä", "has characters that no token has"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tokens_that_will_not_do(hub, contents, monkeypatch, case):
    token, said = REFUSED[case]
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=said) as caught:
        put(contents)
    assert_clean(hub, caught, token)
    with pytest.raises(UserError, match=said.replace("me/model", "this account")) as caught:
        check_login()
    assert_clean(hub, caught, token)


def test_login_says_who(hub):
    assert check_login() == "me"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            Fault("POST .*/commit/", status=403, headers={"X-Error-Message": "no hf_0123456789 today"}),
            "no <token> today",
        ),
        (Fault("POST .*/commit/", status=409), "me/model is in the way of what was asked for"),
        (Fault("POST .*/commit/", status=418), r"refuses \(HTTP 418\)"),
        (Fault("POST .*/batch", status=413), "takes nothing of this size"),
    ],
)
def test_what_the_hub_refuses(hub, contents, fault, said):
    hub.faults.append(fault := replace(fault))
    with pytest.raises(UserError, match=said) as caught:
        put(contents)
    assert_clean(hub, caught)


def test_repositories_of_others(hub, contents):
    hub.repos["other/model"] = Repo("other/model")
    with pytest.raises(UserError, match="the token may not write to other/model"):
        upload({"a": b"a"}, "other/model", message="mine")
    with pytest.raises(UserError, match=r"the token may not write to other/new .*rights to create a model"):
        upload({"a": b"a"}, "other/new", message="mine")
    hub.add(REPO)
    with pytest.raises(UserError, match="me/model is there, and public"):
        put(contents, private=True)


def test_somebody_else_is_faster(hub, contents, waits):
    hub.add(REPO)

    @contextmanager
    def meanwhile(label):
        yield lambda done, total: None
        if label == "uploading":
            hub.repos[REPO].add("main", {}, "theirs")

    with pytest.raises(UserError, match="changed by somebody meanwhile"):
        put(contents, progress=meanwhile)
    assert hub.repos[REPO].history() == ["theirs", "initial commit"]


def test_cards_are_looked_at_first(hub, contents):
    with pytest.raises(UserError, match=r"does not take the head of README.md: "):
        put(contents | {"README.md": b"---\na: [\n---\n"})
    assert not hub.requests("PUT ")
    done = put(contents | {"README.md": b"no head"})
    assert done.warnings == ("empty or missing yaml metadata in repo card",)


def test_stopped(hub, contents, monkeypatch):
    def stop(*args, **options):
        raise Stopped(15)

    monkeypatch.setattr("huggingface_hub.HfApi.preupload_lfs_files", stop)
    with pytest.raises(Stopped) as caught:
        put(contents)
    assert caught.value.left == "what was sent is on the Hub, and the same command goes on"


@pytest.mark.parametrize("name", ["model", "me/", "a/b/c", "me/mo del", "me/.x", "me/a--b", "me/" + "x" * 100, ""])
def test_malformed_names(name):
    with pytest.raises(UserError, match="is not the id of a repository"):
        check_repo_id(name)


def assert_clean(hub, caught, token=""):
    """An error is one line, and shows no token, nor the signature of an address, even as a traceback."""
    assert "\n" not in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value))
    for secret in (hub.token, "s3cret", *([token] if token else [])):
        assert secret not in shown


def test_no_token_is_left_in_a_text(hub):
    said = client.redacted(f"Illegal header b'Bearer abc def', {hub.token}, hf_0123456789abc")
    assert said == "Illegal header b'Bearer <token> def', <token>, <token>"
