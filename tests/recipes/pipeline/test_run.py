"""What a run does, what it leaves alone, and what it goes on with; its commands are stood in for."""

import json
import re
import shlex
import signal
from pathlib import Path

import pytest

from kvfold.common.errors import CheckFailed, EnvironmentFailure, KvfoldError, UserError
from kvfold.common.status import Stopped
from kvfold.convert.headers import pack_header
from kvfold.recipes.pipeline import run as module
from kvfold.recipes.pipeline.run import run_recipe
from kvfold.uptrain import launch

RECIPE = """# Title
source:
  model: {source}
convert:
  to: gqa
  kv_heads: 2
uptrain:
  teacher: source
  data: [{data}]
  steps: 8
eval:
  text: [builtin]
  window: 64
publish:
  license: mit
"""
ALL = ["convert", "uptrain", "verify", "report", "publish"]
REPO = "publish.repo_id=me/it"


class Kvfold:
    """Stands in for the commands: each makes what it is told to, out of what it is given."""

    def __init__(self):
        self.log, self.lines, self.rehearsed, self.ends = [], [], [], {}

    def __call__(self, command, *, stdout, short_of_memory, started=None):
        words = list(command.argv[3:])
        if "--dry-run" in words:
            self.rehearsed.append(words)
            return self.ends.pop("rehearsal", 0)
        self.log.append(words[0])
        self.lines.append(words)
        assert words[-1] == "--json"
        pairs = dict(word.split("=", 1) for word in words if re.match(r"[a-z_]+=", word))
        after = {flag: words[words.index(flag) + 1] for flag in ("-o", "--recipe") if flag in words}
        makes = {"convert": words[3], "uptrain": pairs.get("out"), "report": after.get("-o")}.get(words[0])
        end = self.ends.pop(words[0], 0)
        if words[0] == "uptrain":
            Path(pairs["run_dir"]).mkdir(exist_ok=True)
        if end == "killed after":  # the last thing that happened is that the result was there
            self.make(makes, words)
            raise KeyboardInterrupt
        if end:
            return end
        if makes:
            assert Path(makes).exists() == ("--overwrite" in words)
            self.make(makes, words)
        stdout.write(b"{}\n")
        return 0

    @staticmethod
    def make(folder, words):
        Path(folder).mkdir(exist_ok=True)
        settings = [word for word in words if word != "--overwrite"]
        recipe = next((Path(word).read_text() for word in words if word.endswith("recipe.yaml")), "")
        (Path(folder) / "it").write_text(shlex.join(settings) + recipe)


CONFIG = '{"model_type": "llama"}'


@pytest.fixture
def kvfold(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(CONFIG)
    (tmp_path / "model/model.safetensors").write_bytes(pack_header([], {}))
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "r.yaml").write_text(RECIPE.format(source="model", data="text.txt"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    stand_in = Kvfold()
    monkeypatch.setattr(module, "launch", stand_in)
    return stand_in


def states(report):
    return {step.step: step.state for step in report.results}


def test_everything_is_done_once(kvfold, tmp_path):
    report = run_recipe("r.yaml", [REPO])
    assert kvfold.log == ALL
    assert set(states(report).values()) == {"done"}
    assert states(run_recipe("r.yaml", [REPO])) == dict.fromkeys(states(report), "done before")
    assert kvfold.log == ALL
    said = json.loads((tmp_path / "r/run.json").read_text())
    assert [step["attempts"] for step in said["steps"].values()] == [1] * 5
    assert said["seconds"] == pytest.approx(sum(step["seconds"] for step in said["steps"].values()))


def test_the_commands(kvfold, tmp_path):
    pairs = [REPO, "convert.for=[]", "convert.to=mla", "convert.kv_elements=64", "convert.for=[vllm, sglang]"]
    pairs += ["convert.pad_to_engine=true", "publish.private=true", "publish.accept_license=false", "eval.max_ratio=2"]
    (tmp_path / "r.yaml").write_text((tmp_path / "r.yaml").read_text().replace("  kv_heads: 2\n", ""))
    run_recipe("r.yaml", pairs)
    at = tmp_path / "r"
    mla = f"convert mla model {at}/converted --for vllm,sglang --kv-elements 64 --pad-to-engine"
    assert [shlex.join(words[:-1]) for words in kvfold.lines] == [
        mla,
        f"uptrain {at}/recipe.yaml model={at}/converted out={at}/healed run_dir={at}/healed.run",
        f"verify model {at}/healed --text builtin --window 64 --max-ratio 2.0",
        f"report model {at}/converted {at}/healed -o {at}/report --title r --text builtin --window 64 --max-ratio 2.0",
        f"publish {at}/healed me/it --recipe {at}/recipe.yaml --report {at}/report --license mit --private",
    ]
    assert (at / "recipe.yaml").read_text().startswith("# Title\nsource:\n  model: model\n")


def test_statistics_are_made_once_and_used(kvfold, tmp_path):
    kvfold.make = lambda folder, words: None
    kvfold.ends = {"convert": 3}
    with pytest.raises(EnvironmentFailure):
        run_recipe("r.yaml", ["calibrate.calib_windows=8"])
    at = tmp_path / "r"
    assert kvfold.lines[0][:-1] == ["calibrate", "model", "-o", f"{at}/stats.safetensors", "--calib-windows", "8"]
    assert kvfold.lines[1][-3:-1] == ["--stats", f"{at}/stats.safetensors"]


def test_refinement_reads_the_text_of_the_calibration(kvfold):
    pairs = ["calibrate.calib_windows=8", "calibrate.calib=text.txt", "calibrate.chat=true"]
    run_recipe("r.yaml", pairs, until="convert", out="plain")
    run_recipe("r.yaml", [*pairs, "convert.refine=4"], until="convert", out="refined")
    plain, refined = kvfold.lines[1], kvfold.lines[3]
    assert "--calib" not in plain and "--chat" not in plain
    assert refined[refined.index("--calib") + 1] == "text.txt" and "--chat" in refined
    assert "--calib-windows" not in refined


@pytest.mark.parametrize(
    ("stopped", "end"),
    [
        *((stopped, end) for stopped in ALL for end in (128 + signal.SIGTERM, 3)),
        *((stopped, "killed after") for stopped in ("convert", "uptrain", "report")),  # the others make nothing
    ],
)
def test_it_goes_on_where_it_was_stopped(kvfold, stopped, end):
    """Without doing anything again that was done, and without telling a user of --overwrite."""
    kvfold.ends = {stopped: end}
    with pytest.raises((Stopped, EnvironmentFailure, KeyboardInterrupt)) as caught:
        run_recipe("r.yaml", [REPO])
    if end == 3:
        assert "the same command goes on" in str(caught.value)
    done = list(kvfold.log)
    assert done == ALL[: ALL.index(stopped) + 1]
    report = run_recipe("r.yaml", [REPO])
    again = [stopped] * (end != "killed after")
    assert kvfold.log[len(done) :] == again + ALL[ALL.index(stopped) + 1 :]
    assert len(report.results) == 5


@pytest.mark.parametrize(
    ("status", "kind"), [(1, CheckFailed), (2, UserError), (3, EnvironmentFailure), (70, KvfoldError)]
)
def test_statuses_are_handed_on(kvfold, status, kind):
    kvfold.ends = {"verify": status}
    with pytest.raises(kind, match=f"eval ended with status {status}") as caught:
        run_recipe("r.yaml", [REPO])
    assert caught.value.exit_status == status
    assert kvfold.log == ["convert", "uptrain", "verify"]  # nothing is published
    assert Path("r/steps/eval.json").exists() == (status == 1)  # with which figures come


def test_what_took_long_is_made_anew_only_if_asked_for(kvfold, tmp_path):
    run_recipe("r.yaml")
    for pairs, said in (
        (["uptrain.steps=9"], "uptrain was begun or done otherwise: steps was 8 and is 9; --overwrite"),
        (["convert.kv_heads=1"], "convert was begun or done otherwise: kv_heads was 2 and is 1"),
    ):
        before = (tmp_path / "r/recipe.yaml").read_text()
        with pytest.raises(UserError, match=said):
            run_recipe("r.yaml", pairs)
        assert (tmp_path / "r/recipe.yaml").read_text() == before
    assert kvfold.log == ["convert", "uptrain", "verify", "report"]
    (tmp_path / "r/healed.run/mine").write_text("of the first run")
    report = run_recipe("r.yaml", ["uptrain.steps=9"], overwrite=True)
    assert states(report) == {"convert": "done before", "uptrain": "done", "eval": "done", "report": "done"}
    assert not (tmp_path / "r/healed.run/mine").exists()


def test_a_training_that_was_begun_otherwise_is_not_thrown_away(kvfold):
    kvfold.ends = {"uptrain": 128 + signal.SIGTERM}
    with pytest.raises(Stopped):
        run_recipe("r.yaml")
    with pytest.raises(UserError, match="steps was 8 and is 9"):
        run_recipe("r.yaml", ["uptrain.steps=9"])


def test_judgements_are_made_anew_unasked(kvfold):
    run_recipe("r.yaml")
    report = run_recipe("r.yaml", ["eval.window=32"])
    assert states(report) == {"convert": "done before", "uptrain": "done before", "eval": "done", "report": "done"}


@pytest.mark.parametrize("pair", ["uptrain.micro_batch_size=2", "convert.device=cpu", "eval.batch_size=2"])
def test_what_changes_no_result_changes_nothing(kvfold, pair):
    run_recipe("r.yaml", ["uptrain.batch_size=4"])
    assert set(states(run_recipe("r.yaml", ["uptrain.batch_size=4", pair])).values()) == {"done before"}


def test_inputs_are_known_by_their_content(kvfold, tmp_path):
    run_recipe("r.yaml")
    (tmp_path / "model/config.json").write_text(CONFIG)  # the same again
    assert set(states(run_recipe("r.yaml")).values()) == {"done before"}
    (tmp_path / "text.txt").write_text("other")
    with pytest.raises(UserError, match=r"uptrain was .*its input text\.txt is another now"):
        run_recipe("r.yaml")
    (tmp_path / "model/config.json").write_text(f"{CONFIG} ")
    with pytest.raises(UserError, match=r"convert was .*its input source is another now"):
        run_recipe("r.yaml")


def test_what_was_changed_by_hand_stays(kvfold, tmp_path):
    run_recipe("r.yaml")
    (tmp_path / "r/report/it").write_text("notes of mine")
    with pytest.raises(UserError, match="report was changed after report had made it; --overwrite"):
        run_recipe("r.yaml")
    (tmp_path / "r/healed/it").unlink()
    (tmp_path / "r/healed").rmdir()  # whereas what is gone is made again
    report = run_recipe("r.yaml", overwrite=True)
    assert states(report) == {"convert": "done before", "uptrain": "done", "eval": "done before", "report": "done"}


def test_folders_of_others_are_left_alone(kvfold, tmp_path):
    (tmp_path / "r/healed").mkdir(parents=True)
    (tmp_path / "r/healed/it").write_text("mine")
    with pytest.raises(UserError, match="holds healed and no run; name another folder with -o"):
        run_recipe("r.yaml")
    with pytest.raises(UserError, match=r"the source .* lies in the folder of the run"):
        run_recipe("r.yaml", out=tmp_path)
    run_recipe("r.yaml", out=tmp_path / "other", until="convert")
    (tmp_path / "r/healed").rename(tmp_path / "other/healed")
    with pytest.raises(UserError, match="healed stands where uptrain writes, and is not of this run"):
        run_recipe("r.yaml", out=tmp_path / "other")
    assert (tmp_path / "other/healed/it").read_text() == "mine"


def test_parts_of_a_run(kvfold, tmp_path):
    with pytest.raises(UserError, match=r"--from eval takes what convert made, and there is no .*converted"):
        run_recipe("r.yaml", from_="eval")
    run_recipe("r.yaml", until="uptrain")
    assert kvfold.log == ["convert", "uptrain"]
    (tmp_path / "model/config.json").write_text(f"{CONFIG} ")  # which only those before would mind
    assert list(states(run_recipe("r.yaml", from_="report"))) == ["report"]
    with pytest.raises(UserError, match=r"--from report takes what uptrain made, .*otherwise: steps was 8 and is 9"):
        run_recipe("r.yaml", ["uptrain.steps=9"], from_="report")
    for words, said in (
        ({"until": "publish"}, "needs to know where to; say publish.repo_id"),
        ({"until": "evil"}, r"no stage 'evil'; did you mean eval\?"),
        ({"from_": "tasks"}, "no stage 'tasks'"),
        ({"from_": "report", "until": "convert"}, "turn them round"),
    ):
        with pytest.raises(UserError, match=said):
            run_recipe("r.yaml", **words)


def test_a_dry_run_does_nothing(kvfold, tmp_path):
    report = run_recipe("r.yaml", dry_run=True)
    assert set(states(report).values()) == {"to do"}
    assert report.notes == ["nothing is published; publish.repo_id=NAME/REPOSITORY does that"]
    assert not (tmp_path / "r").exists()
    run_recipe("r.yaml", until="convert")
    assert states(run_recipe("r.yaml", dry_run=True))["convert"] == "done before"
    assert kvfold.log == ["convert"]


@pytest.mark.parametrize(
    ("pairs", "readme", "said"),
    [
        (["publish.license=gemma"], "", "gemma.*say --accept-license"),
        ([], "---\nlicense: llama3.1\n---\n", "llama3.1.*say --accept-license"),
        (["publish.repo_id=me/it/too"], "", "me/it/too"),
    ],
)
def test_what_could_not_be_published_is_not_begun(kvfold, tmp_path, pairs, readme, said):
    (tmp_path / "model/README.md").write_text(readme)
    if readme:
        (tmp_path / "r.yaml").write_text((tmp_path / "r.yaml").read_text().replace("  license: mit\n", ""))
    with pytest.raises(UserError, match=said):
        run_recipe("r.yaml", [REPO, *pairs])
    assert kvfold.log == []
    run_recipe("r.yaml", [REPO, *pairs], until="report")


def test_a_conversion_that_cannot_be_is_not_calibrated_for(kvfold):
    kvfold.ends = {"rehearsal": 2}
    with pytest.raises(UserError, match="convert ended with status 2"):
        run_recipe("r.yaml", ["calibrate.calib_windows=8", "convert.refine=4"])
    (words,) = kvfold.rehearsed
    assert words[:3] == ["convert", "gqa", "model"] and "--refine" in words and "--stats" not in words
    assert kvfold.log == []


def test_what_cannot_be_trained_here_is_not_begun(kvfold, monkeypatch):
    monkeypatch.setattr(launch, "_count_gpus", lambda: 2)
    for pairs, said in (
        (
            ["uptrain.accelerate=fsdp2", "uptrain.processes=8", "uptrain.batch_size=8"],
            "8 processes a machine and 2 GPUs",
        ),
        (["uptrain.accelerate=fspd2"], r"no accelerate config 'fspd2'; did you mean fsdp2\?"),
    ):
        with pytest.raises(UserError, match=said):
            run_recipe("r.yaml", pairs)
    assert kvfold.log == []


def test_a_recipe_that_says_the_same_keeps_its_comments(kvfold, tmp_path):
    run_recipe("r.yaml", until="convert")
    recipe = tmp_path / "r/recipe.yaml"
    recipe.write_text(recipe.read_text() + "# a remark of mine\n")
    run_recipe("r.yaml", until="uptrain")
    assert recipe.read_text().endswith("# a remark of mine\n")
    run_recipe("r.yaml", ["eval.window=32"])
    assert "window: 32" in recipe.read_text()


def test_a_folder_that_no_step_made_is_not_removed(kvfold, tmp_path):
    run_recipe("r.yaml", until="convert")
    (tmp_path / "r/healed.run").mkdir()
    (tmp_path / "r/healed.run/mine").write_text("mine")
    run_recipe("r.yaml", overwrite=True)
    assert (tmp_path / "r/healed.run/mine").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"format_version": 2}', '{"format_version": 1, "steps": {"convert": 3}}'])
def test_a_broken_record(kvfold, tmp_path, text):
    run_recipe("r.yaml", until="convert")
    (tmp_path / "r/run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json"):
        run_recipe("r.yaml")
