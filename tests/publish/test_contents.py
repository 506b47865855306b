"""What goes into the repository and what stays here, file by file."""

import json
from dataclasses import replace

import pytest

from kvfold.common.errors import UserError
from kvfold.convert.gqa import convert_gqa
from kvfold.publish.contents import (
    check_secrets,
    contents,
    public_history,
    publishable,
    read_recipe_file,
    take_inventory,
)
from kvfold.publish.facts import gather, read_record
from kvfold.publish.licences import terms_of

from ..eval.report.made import make_report, make_result, make_source


def inventory_of(out):
    return take_inventory(out, read_record(out))


def contents_of(out, licence="mit", **options):
    facts = gather(out)
    inventory = take_inventory(out, facts.record)
    return contents(
        out, facts.record, inventory, card="the card", readme=facts.readme, terms=terms_of(licence), **options
    )


def test_all_that_kvfold_wrote_goes(results):
    found = contents_of(results / "gqa")
    written = {path.name for path in (results / "gqa").iterdir()}
    assert set(found) == written | {"README.source.md"}
    assert found["README.md"] == b"the card"
    assert found["README.source.md"] == results / "gqa" / "README.md"
    record = json.loads(found["kvfold.json"])
    assert set(record["files"]) == set(found) - {"README.md", "kvfold.json"}
    assert record["files"]["README.source.md"] == read_record(results / "gqa")["files"]["README.md"]


LEFT = {
    ".env": "looks like a credential",
    "prod.env": "looks like a credential",
    "server.key": "looks like a credential",
    "id_rsa": "looks like a credential",
    ".netrc": "looks like a credential",
    "hf_token": "looks like a credential",
    "token.txt": "looks like a credential",
    "credentials.json": "looks like a credential",
    ".gitattributes": "hidden",
    "notes.pkl": "may run code when it is loaded",
    "old.bin": "may run code when it is loaded",
    "my-notes.md": "kvfold did not write it",
    "recipe.yaml": "was published with the source",
}
FOLDERS = {".git": "hidden", "gqa.run": "the folder of a run", "kvfold-report": "was published with the source"}


@pytest.mark.parametrize("listed", [False, True])
def test_what_stays_is_named(gqa, listed):
    """Whether somebody put it there, or it came with the source and was copied and recorded."""
    record = read_record(gqa)
    for name in LEFT:
        (gqa / name).write_text("x")
        if listed:
            record["files"][name] = {"xxh3_128": "0"}
    for name in FOLDERS:
        (gqa / name).mkdir()
        (gqa / name / "config.json").write_text("x")
    (gqa / "NOTICE.txt").write_text("put beside it, as the licence asks")
    (gqa / "etc").symlink_to("/etc")
    (gqa / "COPYING").symlink_to("/etc/hostname")
    if listed:
        (gqa / "my-notes.md").unlink()
        del record["files"]["my-notes.md"]
    (gqa / "kvfold.json").write_text(json.dumps(record))
    found = inventory_of(gqa)
    expected = LEFT | {f"{name}/": reason for name, reason in FOLDERS.items()}
    expected |= {"etc/": "kvfold did not write it", "COPYING": "kvfold did not write it"}
    if listed:
        del expected["my-notes.md"]
    assert found.left_out == expected
    assert "NOTICE.txt" in found.files
    assert {"tokenizer.json", "tokenizer_config.json", "model.safetensors", "config.json"} <= found.files.keys()
    assert not set(found.files) & set(LEFT)
    assert not set(LEFT) & json.loads(contents_of(gqa)["kvfold.json"])["files"].keys()


def test_changed_and_missing_files_are_refused(gqa):
    (gqa / "config.json").write_text((gqa / "config.json").read_text() + " ")
    with pytest.raises(UserError, match=r"config.json is not as kvfold wrote it.*convert the source again"):
        inventory_of(gqa)
    (gqa / "LICENSE").unlink()
    with pytest.raises(UserError, match=r"lacks LICENSE, which its kvfold.json lists"):
        inventory_of(gqa)


def test_what_is_no_result_is_refused(results, gqa, tmp_path):
    with pytest.raises(UserError, match=r"has no kvfold.json.*only what kvfold wrote"):
        gather(results / "source")
    with pytest.raises(UserError, match="is no directory"):
        gather(tmp_path / "nothing")
    weights = gqa / "model.safetensors"
    weights.rename(gqa / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (gqa / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"1 of 2 shards missing: model-00002-of-00002.safetensors"):
        gather(gqa)
    weights.write_bytes((gqa / "model-00001-of-00002.safetensors").read_bytes())
    record = read_record(gqa)
    del record["files"]["model.safetensors"]
    (gqa / "kvfold.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"holds model.safetensors, of which its kvfold.json knows nothing"):
        inventory_of(gqa)
    (gqa / "kvfold.json").write_text(json.dumps({"files": {}, "recipe": {}}))
    with pytest.raises(UserError, match="does not say how the model was made"):
        gather(gqa)


def test_a_published_result_is_published_again_and_converted(gqa, results, tmp_path):
    """Its own card is written anew, and its source's README stays its source's; so with what is made of it."""
    again = tmp_path / "again"
    again.mkdir()
    for name, content in contents_of(gqa, recipe=b"a: b\n").items():
        (again / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    found = contents_of(again)
    assert found["README.source.md"].read_text().endswith("# The source\n")
    assert inventory_of(again).left_out == {"recipe.yaml": "was published with the source"}
    assert gather(again).head.license == "apache-2.0"
    convert_gqa(again, tmp_path / "mqa", kv_heads=1, method="mean")
    found = contents_of(tmp_path / "mqa")
    assert found["README.source.md"].read_bytes() == b"the card"
    assert inventory_of(tmp_path / "mqa").left_out["README.source.md"] == "was published with the source"
    assert [step.recipe["kv_heads"] for step in gather(tmp_path / "mqa").steps] == [2, 1]
    assert gather(tmp_path / "mqa").source_cache.kv_elements_per_token_per_layer == 512


def test_the_notice_that_a_licence_sets_goes_along(gqa):
    assert contents_of(gqa, "llama3.1")["NOTICE"] == f"{terms_of('llama3.1').notice}\n".encode()
    assert "NOTICE" not in contents_of(gqa, "apache-2.0")
    (gqa / "NOTICE.txt").write_text("theirs")
    assert "NOTICE" not in contents_of(gqa, "llama3.1")


def test_records_lose_folders_and_keep_ids():
    record = {
        "format_version": 1,
        "recipe": {
            "command": "uptrain", "data": ["hub:a/b:c", "/home/me/d.txt", "work/d/e.txt"], "teacher": "a/b",
            "held_out": {"/home/me/d.txt": 1.0, "builtin": 2.0}, "init_from": "runs/x/step-5", "model": "/home/me/m",
            "calibration": {"kinds": {"/home/me/k.txt": 3}},
        },
        "asked": {"stats": "/home/me/stats.safetensors", "kv_heads": 2},
        "source": {"name": "/home/me/src", "record": {"source": {"name": "a/b", "revision": "0" * 40}}},
        "left_out": [], "files": {},
    }  # fmt: skip
    found = public_history(record)
    assert "/home" not in json.dumps(found) and "work/" not in json.dumps(found) and "runs/" not in json.dumps(found)
    assert found["recipe"]["data"] == ["hub:a/b:c", "d.txt", "e.txt"]
    assert found["recipe"]["held_out"] == {"d.txt": 1.0, "builtin": 2.0}
    assert (found["recipe"]["teacher"], found["recipe"]["model"]) == ("a/b", "m")
    assert found["source"]["name"] == "src"
    assert found["source"]["record"]["source"]["name"] == "a/b"
    assert list(found) == list(record)


def test_reports_lose_folders(tmp_path):
    home = "/home/me/project"
    rows = [make_result("gqa", model=f"{home}/models/gqa", reason=f"see {home}/models/gqa"), make_result("b", "MLA")]
    report = make_report(*rows, speed=False, source=make_source(model=f"{home}/models/src"))
    report = replace(
        report,
        title=f"{home}/models/src",
        model=f"{home}/models/src",
        protocol=replace(report.protocol, texts=("builtin", f"{home}/my.txt", "hub:a/b")),
        commands=[f"kvfold report {home}/models/src models/b -o work/rep --text {home}/my.txt --text hub:a/b"],
        warnings=[f"no run in {home}/models/gqa.run ends as it did"],
    )
    found = publishable(report)
    assert found.commands == ["kvfold report src b -o rep --text my.txt --text hub:a/b"]
    assert (found.title, found.model, found.results[1].model) == ("src", "src", "gqa")
    assert found.results[1].reason == "see gqa"
    assert found.warnings == ["no run in gqa.run ends as it did"]
    assert found.protocol.texts == ("builtin", "my.txt", "hub:a/b")
    assert found.results[1].perplexity == report.results[1].perplexity
    assert publishable(replace(report, model="a/b"), {"a/b"}).model == "a/b"


def test_recipes_keep_their_comments(tmp_path):
    (tmp_path / "models").mkdir()
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"# kvfold run x source.model={tmp_path}/models/big\n"
        f"source:\n  model: {tmp_path}/models  # mine\n"
        f"uptrain: {{data: ['~/texts/my text.txt', hub:a/b], teacher: &t meta/llama, reference: *t}}\n"
    )
    text = read_recipe_file(path).decode()
    assert text == (
        "# kvfold run x source.model=big\n"
        'source:\n  model: "models"  # mine\n'
        'uptrain: {data: ["my text.txt", hub:a/b], teacher: &t meta/llama, reference: *t}\n'
    )
    for wrong, said in (("[a]", "not a table"), ("a: [", "is not YAML"), ("a: 1\na: 2", "twice")):
        path.write_text(wrong)
        with pytest.raises(UserError, match=said):
            read_recipe_file(path)


def test_a_token_goes_nowhere(gqa):
    token = "hf_" + "x" * 30
    check_secrets(contents_of(gqa), [token, ""])
    (gqa / "LICENSE").write_text(f"mine: {token}")
    record = read_record(gqa)
    del record["files"]["LICENSE"]
    (gqa / "kvfold.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"LICENSE holds your token") as refused:
        check_secrets(contents_of(gqa), [token])
    assert token not in str(refused.value)
