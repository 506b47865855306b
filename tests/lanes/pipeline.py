"""The embedded recipe from conversion to the Hub: once in one go, and once killed again and again.

The Hub is one on this machine that the real client talks to. `make lanes` runs this; pytest finds it by its path only.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from kvfold.recipes.pipeline.stages import CONVERTED, HEALED

from ..hub import environment, hub_server

RECIPE = "embedded-gqa"
MOST_SECONDS = 300
SAME = """
import sys, torch
from transformers import AutoModelForCausalLM
local, there = (AutoModelForCausalLM.from_pretrained(name, dtype="float64") for name in sys.argv[1:])
tokens = torch.arange(3, 200)[None]
torch.testing.assert_close(there(tokens).logits, local(tokens).logits, rtol=0, atol=0)
print("equal")
"""


@pytest.fixture(scope="module")
def hub():
    with hub_server() as hub:
        yield hub


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


def command(folder, repo):
    pair = f"publish.repo_id=me/{repo}"
    return [sys.executable, "-m", "kvfold.cli", "run", RECIPE, pair, "-o", str(folder), "--json"]


def record(folder):
    path = folder / "run.json"
    return json.loads(path.read_text())["steps"] if path.exists() else {}


@pytest.fixture(scope="module")
def undisturbed(hub, home):
    folder = home / "undisturbed"
    began = time.monotonic()
    done = subprocess.run(command(folder, "whole"), env=environment(hub, home), stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - began
    assert done.returncode == 0
    return folder, seconds, json.loads(done.stdout)


def test_it_goes_from_the_source_to_the_hub(undisturbed, hub, home, capsys):
    folder, seconds, report = undisturbed
    with capsys.disabled():
        print(f"\n{RECIPE} in one go: {seconds:.0f} s, of which")
        for step in report["results"]:
            print(f"  {step['stage']:<10} {step['seconds']:6.1f} s  {step['state']}")
    assert seconds < MOST_SECONDS
    assert [step["stage"] for step in report["results"]][-3:] == ["eval", "report", "publish"]
    assert "README.md" in hub.repos["me/whole"].head.files
    again = subprocess.run(
        [sys.executable, "-c", SAME, str(folder / HEALED), "me/whole"],
        env=environment(hub, home),
        capture_output=True,
        text=True,
    )
    assert again.stdout == "equal\n", again.stderr


def test_once_more_does_nothing(undisturbed, hub, home):
    folder, _, _ = undisturbed
    asked = len(hub.log)
    before = record(folder)
    done = subprocess.run(command(folder, "whole"), env=environment(hub, home), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {step["state"] for step in json.loads(done.stdout)["results"]} == {"done before"}
    assert record(folder) == before
    assert len(hub.log) == asked


def test_killed_again_and_again_it_ends_the_same(undisturbed, hub, home, capsys):
    """At moments that a seed chooses, by signals in turn, each time after a little more than was done before."""
    whole, seconds, _ = undisturbed
    folder, draw, kills = home / "disturbed", random.Random(20261130), []
    stops = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
    for number in range(60):
        run = subprocess.Popen(
            command(folder, "disturbed"), env=environment(hub, home), stdout=subprocess.PIPE, start_new_session=True
        )
        before = {name: step["attempts"] for name, step in record(folder).items() if step["state"] == "done"}
        patience = draw.uniform(0.03, 0.25) * seconds
        try:
            assert run.wait(patience) == 0
            break
        except subprocess.TimeoutExpired:
            os.kill(run.pid, stops[number % len(stops)])
            status = run.wait()
            assert status in (-signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGINT)
            now = record(folder)
            kills.append(next((name for name, step in now.items() if step["state"] == "running"), "between"))
            assert all(now[name]["attempts"] == attempts for name, attempts in before.items())
    else:
        raise AssertionError(f"not done after {len(kills)} kills, in {kills}")
    with capsys.disabled():
        print(f"\n{RECIPE} killed {len(kills)} times, in {', '.join(kills)}")
    assert kills
    for part in (CONVERTED, HEALED):
        for path in (whole / part).glob("*.safetensors"):
            assert (folder / part / path.name).read_bytes() == path.read_bytes(), path
    one, other = (hub.repos[f"me/{name}"] for name in ("whole", "disturbed"))
    weights = [name for name in one.head.files if name.endswith(".safetensors")]
    assert weights
    for name in weights:
        assert one.head.files[name] == other.head.files[name]
    assert len(other.history()) == 2  # the Hub's first, and ours
