"""Every reader with a second's worth of hostile files, and with those that once broke one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from .broke import BROKE
from .limits import hold
from .targets import TARGETS, Target, read_in

Test = Callable[[bytes], None]
FEW, SLOW = 120, {"gguf-config", "inspect", "config"}


def hostile(target: Target) -> st.SearchStrategy[bytes]:
    """Good files with fields changed, once or again; and any bytes."""
    seeds = st.sampled_from(target.seeds())
    once = st.builds(target.mutate, seeds, st.randoms(use_true_random=False))
    twice = st.builds(target.mutate, once, st.randoms(use_true_random=False))
    return once | twice | st.binary(max_size=200)


def known(name: str) -> Callable[[Test], Test]:
    """Those that once broke it, before any others."""

    def add(test: Test) -> Test:
        for file in BROKE.get(name, ()):
            test = example(file)(test)
        return test

    return add


@pytest.mark.parametrize("name", TARGETS)
def test_takes_good_files(name, tmp_path):
    for file in TARGETS[name].seeds():
        assert hold(lambda file=file: read_in(TARGETS[name], file, tmp_path)) == ""


@pytest.mark.parametrize("name", TARGETS)
def test_any_file_is_read_or_refused_in_a_line(name, tmp_path):
    target = TARGETS[name]

    @known(name)
    @settings(
        max_examples=FEW // 4 if name in SLOW else FEW,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(hostile(target))
    def read(file: bytes) -> None:
        hold(lambda: read_in(target, file, tmp_path))

    read()
