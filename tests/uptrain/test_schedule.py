"""How fast a run learns: every schedule rises, follows its curve and ends where it should; stages follow each other."""

import itertools

import pytest

from kvfold.common.errors import UserError
from kvfold.uptrain.schedule import SCHEDULES, Course, Schedule, Stage, course


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_rate_rises_to_its_peak_and_follows_the_decay(kind):
    schedule = Schedule(kind, warmup=10)
    factors = [schedule.factor(step, 110) for step in range(110)]
    assert factors[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert factors[10] == 1
    assert all(later <= sooner for sooner, later in itertools.pairwise(factors[10:]))
    assert factors[60] == pytest.approx({"constant": 1.0, "wsd": 1.0, "cosine": 0.5, "linear": 0.5}[kind])
    assert factors[-1] == pytest.approx(1.0 if kind == "constant" else 0.0, abs=0.06)


def test_wsd_decays_linearly_in_its_last_share():
    factors = [Schedule("wsd", warmup=0, decay_share=0.25).factor(step, 100) for step in range(100)]
    assert factors[:76] == [1.0] * 76
    assert factors[76:] == pytest.approx([n / 25 for n in range(24, 0, -1)])


@pytest.mark.parametrize("kind", sorted(SCHEDULES.keys() - {"constant"}))
def test_what_is_left_at_the_end(kind):
    schedule = Schedule(kind, warmup=0, final_share=0.3)
    assert schedule.factor(0, 1000) == 1
    assert schedule.factor(999, 1000) == pytest.approx(0.3, abs=0.005)


def test_a_run_may_be_all_warmup():
    assert [Schedule(warmup=5).factor(step, 5) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert Schedule(warmup=20).factor(4, 5) == 0.25


def test_each_stage_has_its_own_peak_warmup_and_decay():
    whole = course(10, Schedule("linear", warmup=2), learning_rate=1.0, layer_share=0.4, layer_learning_rate=10.0)
    assert whole.stages == (Stage("layers", 4, 10.0), Stage("loss", 6, 1.0))
    assert whole.steps == 10
    assert [whole.at(step) for step in range(10)] == [
        *(("layers", rate) for rate in (5.0, 10.0, 10.0, 5.0)),
        *(("loss", rate) for rate in (0.5, 1.0, 1.0, 0.75, 0.5, 0.25)),
    ]
    with pytest.raises(IndexError, match="the course has 10 steps"):
        whole.at(10)


@pytest.mark.parametrize(("share", "names"), [(0.0, ["loss"]), (0.01, ["loss"]), (1.0, ["layers"])])
def test_a_stage_without_steps_is_none(share, names):
    assert [stage.name for stage in course(10, Schedule(), learning_rate=1.0, layer_share=share).stages] == names


def test_a_course_without_stages_has_no_steps():
    assert Course((), Schedule()).steps == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "cosin"}, "unknown schedule 'cosin'.*did you mean cosine"),
        ({"warmup": -1}, "warmup_steps is -1"),
        ({"decay_share": 0.0}, r"decay_share is 0\.0"),
        ({"decay_share": 1.1}, r"decay_share is 1\.1"),
        ({"final_share": -0.1}, r"final_share is -0\.1"),
        ({"final_share": float("nan")}, "final_share is nan"),
    ],
)
def test_knobs_out_of_range_are_named(change, words):
    with pytest.raises(UserError, match=words):
        Schedule(**change)
