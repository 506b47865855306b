"""A run that was asked for N processes and finds another world does not train; one that finds it forms a group."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.common.errors import EnvironmentFailure, UserError
from kvfold.uptrain.launch import CONFIGS
from kvfold.uptrain.processes import check_fsdp, check_world, sharding

# Says what world it found, and what accelerate then makes of it.
SCRIPT = """
import json, os, sys
from pathlib import Path
from kvfold.common.errors import KvfoldError
from kvfold.uptrain.processes import check_world, join, sharding
try:
    size = check_world(json.loads(sys.argv[2]))
    join("auto")
except KvfoldError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_status)
from accelerate import Accelerator
accelerator = Accelerator()
said = [size, accelerator.num_processes, str(accelerator.distributed_type).split(".")[1], accelerator.device.type]
Path(sys.argv[1], str(accelerator.process_index)).write_text(json.dumps([*said, sharding()]))
"""
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = ["accelerate.commands.launch", "--num_processes", "2"]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "MASTER_")) or name.endswith(("RANK", "_SIZE", "LOCALRANKID")):
            monkeypatch.delenv(name)


def start(tmp_path, launcher, expected, **env):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", *launcher, tmp_path / "script.py", tmp_path, json.dumps(expected)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | env)


def test_alone():
    assert check_world(None) == check_world(1) == 1
    assert sharding() == "single"


@pytest.mark.parametrize(
    ("env", "expected", "error", "said"),
    [
        ({}, 2, UserError, "asks for 2 processes and there are 1; launch with torchrun --nproc_per_node 2 -m kvfold"),
        ({"WORLD_SIZE": "4", "RANK": "0"}, 2, UserError, "asks for 2 processes and there are 4"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, 1, UserError, "there are 2; start it without a launcher"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, 4, UserError, "there are 2"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, None, EnvironmentFailure, "would train alone"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, 2, EnvironmentFailure, "torchrun --nproc_per_node 2"),
        ({"WORLD_SIZE": "2"}, None, EnvironmentFailure, "WORLD_SIZE 2 and no RANK"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, 2, EnvironmentFailure, "WORLD_SIZE 2 and RANK 2"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, None, EnvironmentFailure, "WORLD_SIZE 0"),
        ({"WORLD_SIZE": "two"}, None, EnvironmentFailure, "WORLD_SIZE is 'two'"),
        ({"ACCELERATE_USE_FSDP": "true"}, None, UserError, "FSDP 1 is not supported"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, None, UserError, "Megatron-LM is not supported"),
    ],
)
def test_worlds_that_are_refused(env, expected, error, said, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=said) as caught:
        check_world(expected)
    assert "\n" not in str(caught.value)


def test_a_place_to_meet_is_no_matter_for_one_process(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert check_world(1) == 1


def test_what_an_mpi_says_is_said_in_torchs_names(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):  # so that monkeypatch takes them away again
        monkeypatch.setenv(name, "")
    for name, value in {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1"}.items():
        monkeypatch.setenv(name, value)
    assert check_world(4) == 4
    assert [os.environ[name] for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")] == ["4", "3", "1"]
    assert sharding() == "ddp"


@pytest.mark.parametrize("flags", [["--cpu"], []], ids=["cpu", "plain"])
@pytest.mark.parametrize("expected", [2, None])
def test_accelerates_strangers_on_a_cpu_do_not_train(tmp_path, flags, expected):
    if torch.cuda.is_available() and not flags:
        pytest.skip("with a GPU accelerate forms a group")
    done = start(tmp_path, [*ACCELERATE, *flags], expected)
    assert "each of its processes would train alone; launch with torchrun" in done.stderr
    assert done.returncode != 0
    assert {path.name for path in tmp_path.iterdir()} == {"script.py"}


@pytest.mark.parametrize(
    ("launcher", "env", "kind", "shared"),
    [
        (TORCHRUN, {}, "MULTI_CPU", "ddp"),
        (TORCHRUN, {"ACCELERATE_USE_CPU": "true"}, "MULTI_CPU", "ddp"),
        (TORCHRUN, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "FSDP", "fsdp2"),
        ([*ACCELERATE, "--config_file", str(CONFIGS / "ddp.yaml")], {}, "MULTI_CPU", "ddp"),
        ([*ACCELERATE, "--config_file", str(CONFIGS / "fsdp2.yaml")], {}, "FSDP", "fsdp2"),
    ],
    ids=["torchrun", "torchrun-cpu", "torchrun-fsdp2", "accelerate-ddp", "accelerate-fsdp2"],
)
def test_two_processes_form_a_group_on_a_cpu(tmp_path, launcher, env, kind, shared):
    """By itself accelerate 1.15 makes two strangers of most of these, and DDP of FSDP."""
    if torch.cuda.is_available():
        pytest.skip("on a CPU")
    done = start(tmp_path, launcher, 2, **env)
    assert done.returncode == 0, done.stderr
    for rank in ("0", "1"):
        assert json.loads((tmp_path / rank).read_text()) == [2, 2, kind, "cpu", shared]


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        return LlamaForCausalLM(
            LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
        )


def test_fsdp_is_told_the_layers_of_the_model(model, monkeypatch):
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    check_fsdp(model, "LlamaDecoderLayer")
    assert os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] == ""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    check_fsdp(model, "LlamaDecoderLayer")
    assert os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "LlamaDecoderLayer"
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "LlamaMLP, LlamaDecoderLayer")
    check_fsdp(model, "LlamaDecoderLayer")
    assert os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "LlamaMLP,LlamaDecoderLayer"
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "GPT2Block")
    with pytest.raises(UserError, match="wraps GPT2Block, and LlamaForCausalLM has none; its layers are LlamaDecoderL"):
        check_fsdp(model, "LlamaDecoderLayer")
