"""What is started for what is asked for, and that its end and its signals are handed through."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from kvfold.common.errors import UserError
from kvfold.uptrain import launch as module
from kvfold.uptrain.launch import CONFIGS, config_names, launch_command, read_settings

PAIRS = ["model=org/m", "out=o", "steps=10"]
RUN = ["kvfold.uptrain", *PAIRS]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("ACCELERATE_USE_CPU", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpus(monkeypatch):
    return lambda count: monkeypatch.setattr(module, "_count_gpus", lambda: count)


def argv(**asked):
    """What stands behind `python -m`, the path of an accelerate config cut to its name."""
    command = launch_command(None, PAIRS, **asked)
    assert command.argv[:2] == (sys.executable, "-m")
    return [word.removeprefix(f"{CONFIGS}/") for word in command.argv[2:]]


def accelerated(config, count):
    start = ["kvfold.uptrain.agent", "accelerate", "--config_file", config, "--num_processes", str(count), "-m"]
    return [*start, *RUN, f"processes={count}"]


def by_torchrun(count):
    start = ["kvfold.uptrain.agent", "torchrun", "--standalone", "--nproc_per_node", str(count), "-m"]
    return [*start, *RUN, f"processes={count}"]


@pytest.mark.parametrize(
    ("count", "asked", "expected"),
    [
        (0, {}, [*RUN, "processes=1"]),
        (0, {"num_processes": 2}, by_torchrun(2)),
        (0, {"accelerate": "cpu"}, accelerated("cpu.yaml", 1)),
        (0, {"accelerate": "cpu", "num_processes": 2}, by_torchrun(2)),
        (4, {"accelerate": "cpu", "num_processes": 2}, by_torchrun(2)),
        (0, {"accelerate": "ddp", "num_processes": 2}, accelerated("ddp.yaml", 2)),
        (0, {"accelerate": "fsdp2", "num_processes": 2}, accelerated("fsdp2.yaml", 2)),
        (1, {}, [*RUN, "processes=1"]),
        (4, {}, accelerated("ddp.yaml", 4)),
        (4, {"num_processes": 2}, accelerated("ddp.yaml", 2)),
        (8, {"accelerate": "fsdp2"}, accelerated("fsdp2.yaml", 8)),
        (8, {"accelerate": "multi_node"}, accelerated("multi_node.yaml", 16)),
        (4, {"accelerate": "single"}, accelerated("single.yaml", 1)),
    ],
)
def test_what_really_distributes(count, asked, expected, gpus):
    gpus(count)
    assert argv(**asked) == expected


@pytest.mark.parametrize(
    ("count", "pairs", "asked", "said"),
    [
        (0, [], {"accelerate": "fsdp3"}, "no accelerate config 'fsdp3'; did you mean fsdp2"),
        (0, [], {"accelerate": "fsdp2"}, "fsdp2.yaml is for GPUs and none is used; say --num-processes"),
        (4, [], {"accelerate": "ddp"}, "8 processes a machine and 4 GPUs; say --num-processes 4"),
        (4, [], {"accelerate": "single", "num_processes": 2}, "is for one process .* take --accelerate ddp"),
        (4, ["device=cuda:1"], {"num_processes": 2}, "device cuda:1 is one, and there are 2 processes"),
        (0, ["processes=4"], {"num_processes": 2}, "recipe asks for 4 processes and --num-processes for 2"),
        (0, [], {"num_processes": 3}, "batch_size 32 does not divide among 3 processes"),
        (0, [], {"num_processes": 0}, "--num-processes is 0"),
        (8, [], {"accelerate": "multi_node", "num_processes": 1}, "1 processes do not divide among 2 machines"),
        (0, ["model=no/such/thing"], {}, "no/such/thing does not exist"),
        (0, ["teacher="], {"accelerate": "setup.cfg"}, "no accelerate config"),
    ],
)
def test_what_cannot_be_started(count, pairs, asked, said, gpus):
    gpus(count)
    with pytest.raises(UserError, match=said):
        launch_command(None, [*PAIRS, *pairs], **asked)


def test_one_gpu_that_is_named_is_one_process(gpus):
    gpus(4)
    assert launch_command(None, [*PAIRS, "device=cuda:1"]).argv[-1] == "processes=1"


def test_the_recipes_own_number(tmp_path, gpus):
    gpus(0)
    (tmp_path / "r.yaml").write_text("model: org/m\nout: o\nsteps: 1\nprocesses: 2\n")
    command = launch_command(tmp_path / "r.yaml", ["seed=1"], dry_run=True, as_json=True)
    end = ["kvfold.uptrain", "--config", str(tmp_path / "r.yaml"), "seed=1", "processes=2", "--dry-run", "--json"]
    assert list(command.argv[-len(end) :]) == end
    assert "torchrun" in command.argv


def test_the_environment(gpus, monkeypatch):
    monkeypatch.setattr(module, "_cores", lambda: 8)
    gpus(0)
    env = launch_command(None, PAIRS, num_processes=2).env
    assert (env["ACCELERATE_USE_CPU"], env["OMP_NUM_THREADS"]) == ("true", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch_command(None, PAIRS, num_processes=2).env["OMP_NUM_THREADS"] == "3"
    gpus(2)
    assert "ACCELERATE_USE_CPU" not in launch_command(None, PAIRS).env


@pytest.mark.parametrize("name", config_names())
def test_accelerate_reads_every_config(name):
    """Its own parser refuses unknown keys, and its launcher takes what ours reads."""
    path = str(CONFIGS / f"{name}.yaml")
    config, settings = load_config_from_file(path), read_settings(name)
    assert config.distributed_type.value == settings.kind
    assert (config.num_processes, config.num_machines) == (settings.processes, settings.machines)
    assert config.use_cpu == settings.on_cpu
    options = launch_command_parser().parse_args(["--config_file", path, "-m", "kvfold.uptrain"])
    known = vars(options)
    for section in (config.fsdp_config, config.deepspeed_config):
        assert set(section or ()) <= set(known)
    args, *_ = _validate_launch_command(options)
    assert args.use_fsdp == (settings.kind == "FSDP")
    assert args.use_deepspeed == (settings.kind == "DEEPSPEED")
    assert args.mixed_precision == "no"  # the recipe's business
    if settings.kind == "FSDP":
        assert str(args.fsdp_version) == "2"


def test_the_configs_say_how_they_are_launched():
    assert config_names() == ["cpu", "ddp", "deepspeed_zero3", "fsdp2", "multi_node", "single"]
    for name in config_names():
        head = (CONFIGS / f"{name}.yaml").read_text().split("compute_environment")[0]
        assert f"--config_file recipes/accelerate/{name}.yaml" in head
        assert "To change" in head


RANKS = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
assert os.environ["WORLD_SIZE"] == "2"
{}
"""


@pytest.mark.parametrize(
    ("does", "status"),
    [
        ("pass", 0),
        ("sys.exit(2)", 2),
        ("sys.exit(3) if rank else time.sleep(60)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(60)", 137),
    ],
)
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_an_agent_ends_as_its_processes_do(tmp_path, launcher, does, status):
    (tmp_path / "ranks.py").write_text(RANKS.format(does))
    how = ["--standalone", "--nproc_per_node", "2"]
    if launcher == "accelerate":
        how = ["--config_file", CONFIGS / "ddp.yaml", "--num_processes", "2", "--main_process_port", "0"]
    command = [sys.executable, "-m", "kvfold.uptrain.agent", launcher, *how, tmp_path / "ranks.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert not re.search("FAILED", done.stderr)


def test_an_agent_lets_its_processes_save(tmp_path):
    does = (
        "def stop(number, frame): time.sleep(1); open(f'{sys.argv[1]}/{rank}', 'w').close(); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop); open(f'{sys.argv[1]}/up{rank}', 'w').close(); time.sleep(60)"
    )
    (tmp_path / "ranks.py").write_text(RANKS.format(does))
    how = ["torchrun", "--standalone", "--nproc_per_node", "2", tmp_path / "ranks.py", tmp_path]
    process = subprocess.Popen([sys.executable, "-m", "kvfold.uptrain.agent", *how], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"up{rank}").exists() for rank in (0, 1)) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert {"0", "1"} <= {path.name for path in tmp_path.iterdir()}
    assert "Traceback" not in process.stderr.read()
