"""The contract of the command line: what goes where, and which status it ends with."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from kvfold.recipes.tiny import MODEL_DIR

SUBCOMMANDS = [[], ["inspect"], ["convert"], ["convert", "gqa"], ["eval"], ["eval", "ppl"], ["eval", "cache"], ["demo"]]
SUBCOMMANDS += [["calibrate"], ["verify"], ["check"], ["convert", "mla"], ["convert", "plain"], ["report"]]
SUBCOMMANDS += [["plan"], ["uptrain"], ["run"], ["publish"], ["recipes", "ls"], ["recipes", "validate"]]
SUBCOMMANDS += [["eval", each] for each in ("compare", "long", "speed", "flops", "memory", "tasks")]


def kvfold(*args, **options):
    """Run the console script as a user would, with pipes for its output."""
    return subprocess.run(
        [sys.executable, "-m", "kvfold.cli", *map(str, args)], capture_output=True, text=True, timeout=120, **options
    )


def one_line(result, status):
    assert result.returncode == status, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("kvfold: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


@pytest.mark.parametrize("command", SUBCOMMANDS, ids=" ".join)
def test_help_needs_no_torch(command):
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; from kvfold.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code, *command, "--help"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Usage:" in result.stdout


def test_help_is_instant():
    times = []
    for _ in range(3):
        start = time.monotonic()
        kvfold("--help")
        times.append(time.monotonic() - start)
    assert min(times) < 0.5


def test_version():
    from kvfold import __version__

    assert __version__ in kvfold("--version").stdout


def test_inspect_convert_and_eval_with_json(tmp_path):
    """Every reporting command prints exactly one JSON object, and only that, on standard output."""
    out = tmp_path / "gqa"
    text = tmp_path / "text.txt"
    text.write_text("The key value cache holds what attention remembers. " * 40)
    reports = [
        kvfold("inspect", MODEL_DIR, "--context", 100, "--json"),
        kvfold("convert", "gqa", MODEL_DIR, out, "--kv-heads", 4, "--json"),
        kvfold("convert", "gqa", MODEL_DIR, out, "--kv-heads", 2, "--json", "--overwrite", "--max-shard-size", "1MB"),
        kvfold("eval", "ppl", out, "--text", text, "--text", text, "--window", 64, "--json"),
        kvfold("eval", "cache", out, "--context", 32, "--json"),
    ]
    for result in reports:
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("\n") == 1
    inspected, four, two, ppl, cache = (json.loads(result.stdout) for result in reports)
    assert inspected["attention_kind"] == "MHA"
    assert (four["num_key_value_heads"], two["num_key_value_heads"]) == (4, 2)
    assert two["shards"] > four["shards"]
    assert ppl["protocol"]["window"] == 64
    assert ppl["tokens"] > 0
    assert cache["measured_kv_bytes"] == cache["kv_bytes"] == 32 * cache["kv_bytes_per_token"]
    assert all(report["model"] for report in (inspected, four, two, ppl, cache))


def test_tables_for_people(tmp_path):
    result = kvfold("inspect", MODEL_DIR)
    assert "attention_kind" in result.stdout
    assert "convert to gqa: --kv-heads 2 or 4" in result.stdout
    result = kvfold("convert", "gqa", MODEL_DIR, tmp_path / "out", "--kv-heads", 1, "--dry-run")
    assert result.returncode == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["inspect"],
        ["inspect", "a/b/c"],
        ["inspect", MODEL_DIR, "--context", "many"],
        ["inspect", MODEL_DIR, "--context", "0"],
        ["convert", "gqa", MODEL_DIR, "out", "--kv-heads", "3"],
        ["convert", "gqa", MODEL_DIR, "out"],
        ["convert", "gqa", MODEL_DIR, "out", "--kv-heads", "2", "--metod", "mean"],
        ["convert", "gqa", MODEL_DIR, "out", "--kv-heads", "2", "--method", "maen"],
        ["convert", "gqa", MODEL_DIR, "out", "--kv-heads", "2", "--max-shard-size", "big"],
        ["convert", "gqa", MODEL_DIR, "out", "--kv-heads", "2", "--dtype", "int4"],
        ["eval", "ppl", MODEL_DIR],
        ["eval", "ppl", MODEL_DIR, "--text", "no-such-file"],
        ["eval", "ppl", MODEL_DIR, "--text", "builtin", "--window", "100000"],
        ["eval", "ppl", MODEL_DIR, "--text", "builtin", "--batch-size", "0"],
        ["eval", "cache", MODEL_DIR, "--context", "-1"],
        ["eval", "cache", "nowhere/at/all"],
        ["eval", "cache", MODEL_DIR, "--device", "meta"],
        ["eval", "cache", MODEL_DIR, "--device", "hpu"],
        ["eval", "ppl", MODEL_DIR, "--text", "builtin", "--max-windows", "1" + "0" * 20],
        ["eval", "ppl", MODEL_DIR, "--text", ""],
        ["convert", "gqa", MODEL_DIR, "out", "--kv-heads", "2", "--max-shard-size", "9" * 400],
        ["convert", "gqa", MODEL_DIR, "", "--kv-heads", "2", "--overwrite"],
        ["convert", "gqa", MODEL_DIR, "x" * 300, "--kv-heads", "2"],
        ["convert", "gqa", "y" * 300, "out", "--kv-heads", "2"],
        ["convert", "gqa", MODEL_DIR, "out", "--kv-heads", "2", "--grouping", "same"],
        ["convert", "gqa", MODEL_DIR, "out", "--kv-heads", "2", "--calib", "none", "--refine", "4"],
        ["convert", "gqa", MODEL_DIR, "out", "--kv-heads", "8", "--refine", "4"],
        ["convert", "gqa", MODEL_DIR, "out", "--kv-heads", "2", "--refine", "-4"],
        ["convert", "gqa", MODEL_DIR, "out", "--kv-heads", "2", "--refine", "4", "--refine-passes", "0"],
        ["convert", "gqa", MODEL_DIR, "out", "--kv-heads", "2", "--stats", "no-such-file"],
        ["convert", "gqa", MODEL_DIR, "out", "--kv-heads", "2", "--stats", "no-such-file", "--dry-run"],
        ["convert", "gqa", MODEL_DIR, "out", "--kv-heads", "2", "--stats", "s", "--method", "mean"],
        ["convert", "gqa", MODEL_DIR, "out", "--kv-heads", "2", "--stats", "s", "--calib", "none"],
        ["convert", "gqa", MODEL_DIR, "out", "--kv-heads", "2", "--calib", "no-such-file"],
        ["convert", "gqa", MODEL_DIR, "out", "--kv-heads", "2", "--calib-window", "100000"],
        ["convert", "gqa", MODEL_DIR, "out", "--kv-heads", "2", "--no-calib-builtin"],
        ["convert", "gqa", MODEL_DIR, "out", "--kv-heads", "2", "--chat"],
        ["convert", "mla", MODEL_DIR, "out"],
        ["convert", "mla", MODEL_DIR, "out", "--kv-elements", "many"],
        ["convert", "mla", MODEL_DIR, "out", "--kv-elements", "128", "--for", "vllm,"],
        ["convert", "mla", MODEL_DIR, "out", "--kv-ratio", "0"],
        ["convert", "mla", MODEL_DIR, "out", "--kv-elements", "1000000"],
        ["convert", "plain", MODEL_DIR, "out"],
        ["check", MODEL_DIR],
        ["check", MODEL_DIR, "--engine", "nobody"],
        ["calibrate", MODEL_DIR],
        ["calibrate", MODEL_DIR, "-o", "stats", "--calib", "none"],
        ["calibrate", MODEL_DIR, "-o", "stats", "--calib-windows", "0"],
        ["calibrate", MODEL_DIR, "-o", "stats", "--batch-size", "0"],
        ["calibrate", MODEL_DIR, "-o", "."],
        ["verify", MODEL_DIR, MODEL_DIR],
        ["verify", MODEL_DIR, "nowhere/at/all", "--text", "builtin"],
        ["inspect", MODEL_DIR, "--context", "1" + "0" * 320],
        ["inspect", ""],
        ["demo", "--out", "."],
    ],
    ids=lambda args: " ".join(str(a) for a in args if a != MODEL_DIR),
)
def test_user_errors_are_one_line_and_status_2(args, tmp_path):
    one_line(kvfold(*args, cwd=tmp_path), 2)
    assert not list(tmp_path.iterdir())


def test_unreachable_hub_is_status_3(tmp_path):
    assert "Hub cannot be reached" in one_line(kvfold("inspect", "some/repo", cwd=tmp_path), 3)
    assert "Hub cannot be reached" in one_line(kvfold("eval", "cache", "some/repo", cwd=tmp_path), 3)


def test_failing_disk_is_status_3(tmp_path):
    """A limit on the size of files stands for a full disk: the system's own error, in one line."""
    convert = f"{sys.executable} -m kvfold.cli convert gqa {MODEL_DIR} new/out --kv-heads 2 --method mean"
    script = f"ulimit -f 1000; exec {convert}"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert "File too large" in one_line(result, 3)
    assert not list(tmp_path.iterdir())


def test_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    result = kvfold("convert", "gqa", MODEL_DIR, tmp_path / "file/out", "--kv-heads", 2)
    assert "file is a file" in one_line(result, 2)


def test_our_own_fault_is_status_70_with_a_traceback():
    code = (
        "import kvfold.convert.inspect as i; i.inspect_model = lambda *a, **k: 1 / 0; "
        "import sys; sys.argv = ['kvfold', 'inspect', 'embedded']; from kvfold.cli import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 70
    assert "Traceback" in result.stderr
    assert "ZeroDivisionError" in result.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_conversion_leaves_nothing(tmp_path, number, status):
    code = (
        "import sys, time\n"
        "import kvfold.convert.directory as d\n"
        "d.write_weights = lambda folder, *a, **k: (print('writing', flush=True), time.sleep(60))\n"
        "from kvfold.cli import main\n"
        f"sys.argv = ['kvfold', 'convert', 'gqa', {str(MODEL_DIR)!r}, 'out', '--kv-heads', '2', '--method', 'mean']\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "writing\n"
    assert list(tmp_path.iterdir())
    process.send_signal(number)
    assert process.wait(timeout=30) == status
    assert "Traceback" not in process.stderr.read()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("plumbing", ["| true", "| head -1", ">&-", "2>&-", "<&-"])
@pytest.mark.parametrize("json_flag", ["", "--json"])
def test_closed_pipes_and_streams_are_no_error(plumbing, json_flag):
    script = f"{sys.executable} -m kvfold.cli inspect {MODEL_DIR} {json_flag} {plumbing}"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_names_and_streams_that_are_not_utf8(tmp_path):
    name = os.fsdecode(b"b\xff d")
    shutil.copytree(MODEL_DIR, tmp_path / name)
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    for args in (
        ["convert", "gqa", name, "out", "--kv-heads", "4", "--method", "mean", "--json"],
        ["inspect", name, "--json"],
    ):
        result = kvfold(*args, cwd=tmp_path, env=ascii_only)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)
    assert kvfold("inspect", name, cwd=tmp_path, env=ascii_only).returncode == 0


def test_too_little_memory_is_status_3(tmp_path):
    script = f"ulimit -v 700000; exec {sys.executable} -m kvfold.cli eval cache {MODEL_DIR}"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert result.returncode in (3, 70)  # 70 where a library turns it into an error of its own
    if result.returncode == 3:
        assert result.stderr.startswith("kvfold: ")


def test_no_decoder_is_status_2(tmp_path):
    from transformers import ViTConfig, ViTModel

    ViTModel(
        ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    ).save_pretrained(tmp_path)
    assert "not a decoder of text" in one_line(kvfold("inspect", tmp_path), 2)
    one_line(kvfold("convert", "gqa", tmp_path, tmp_path / "../out", "--kv-heads", 1), 2)
