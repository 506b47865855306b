"""A command in a process of its own: its status, its signals, and that neither outlives the other."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvfold.common.errors import EnvironmentFailure, UserError
from kvfold.common.launcher import Command, launch, wait_for_orphan


def script(text):
    return Command((sys.executable, "-c", text), dict(os.environ))


@pytest.mark.parametrize("status", [0, 2, 3, 70])
def test_the_status_is_the_childs(status):
    assert launch(script(f"import sys; sys.exit({status})"), short_of_memory="") == status


def test_a_child_that_the_system_kills():
    with pytest.raises(EnvironmentFailure, match=r"killed \(signal 9\).*; try less"):
        launch(script("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), short_of_memory="try less")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a process")
@pytest.mark.parametrize("kill_first", [False, True])
def test_a_run_ends_with_its_launcher(tmp_path, kill_first):
    """Even with one that is killed, and even if that happens before the run has begun."""
    work = tmp_path / "run.py"
    work.write_text(
        "import os, time\nfrom pathlib import Path\n"
        "from kvfold.common.status import Stopped, prepare_process\n"
        "from kvfold.common.launcher import end_with_launcher\n"
        f"here = Path({str(tmp_path)!r})\n"
        "prepare_process()\n"
        "try:\n"
        "    (here / 'begun').touch()\n"
        f"    while {kill_first} and not (here / 'killed').exists(): time.sleep(0.05)\n"
        "    end_with_launcher(); (here / 'up').touch(); time.sleep(60)\n"
        "except Stopped: (here / 'stopped').touch()\n"
    )
    text = (
        "import os, sys\nfrom kvfold.common.launcher import Command, launch\n"
        f"launch(Command((sys.executable, {str(work)!r}), dict(os.environ)), short_of_memory='')\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", text])
    wait_for(tmp_path / ("begun" if kill_first else "up"))
    launcher.kill()
    launcher.wait()
    (tmp_path / "killed").touch()
    wait_for(tmp_path / "stopped")
    assert kill_first != (tmp_path / "up").exists()


def wait_for(path):
    for _ in range(1200):
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} never came")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_handed_on_once_and_waited_for(tmp_path, number):
    text = (
        "import signal, sys, time\nfrom pathlib import Path\n"
        "def stop(number, frame):\n"
        f"    with open({str(tmp_path / 'got')!r}, 'a') as file: file.write(f'{{int(number)}} ')\n"
        "    time.sleep(0.5); sys.exit(128 + number)\n"
        "signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGINT, stop)\n"
        f"Path({str(tmp_path / 'up')!r}).touch(); time.sleep(60)"
    )

    def interrupt():
        while not (tmp_path / "up").exists():
            time.sleep(0.05)
        for _ in range(2):
            os.kill(os.getpid(), number)
            time.sleep(0.2)

    # A shell starts what is in the background with SIGINT ignored, which `launch` would respect.
    before = signal.signal(number, signal.default_int_handler)
    try:
        thread = threading.Thread(target=interrupt)
        thread.start()
        assert launch(script(text), short_of_memory="") == 128 + number
        thread.join()
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert (tmp_path / "got").read_text() == f"{int(number)} "


def test_what_it_prints_goes_where_it_is_told(tmp_path):
    with (tmp_path / "said").open("wb") as file:
        assert launch(script("print('so')"), stdout=file, short_of_memory="") == 0
    assert (tmp_path / "said").read_text() == "so\n"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="only Linux shows processes so")
def test_an_orphan_is_waited_for():
    work = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.6)  # the word"])
    while b"the word" not in Path(f"/proc/{work.pid}/cmdline").read_bytes():  # it begins as a copy of this process
        time.sleep(0.01)
    began = time.monotonic()
    wait_for_orphan(work.pid, "another word", 60)
    with pytest.raises(UserError, match=f"process {work.pid} of this run, which was killed, still works"):
        wait_for_orphan(work.pid, "the word", 0.1)
    assert time.monotonic() - began < 0.5
    wait_for_orphan(work.pid, "the word", 60)
    assert work.wait() == 0
    wait_for_orphan(0, "the word", 60)
