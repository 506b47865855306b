from __future__ import annotations

import pytest

from kvfold.eval.report.names import short_names
from kvfold.eval.report.verdict import judge, level_of

from .made import make_result, make_source


@pytest.mark.parametrize(
    ("ratio", "passed", "word"),
    [
        (0.97, True, "as good"),
        (1.02, True, "as good"),
        (1.021, True, "close"),
        (1.10, True, "close"),
        (1.5, True, "wants healing"),
        (1.51, True, "wants uptraining"),
        (1.0, False, "broken"),
        (None, False, "broken"),
        (None, True, "not judged"),
    ],
)
def test_a_result_gets_a_word(ratio, passed, word):
    assert level_of(ratio, passed).word == word


def verdict(*outs, max_ratio=1.1, source=None):
    return judge([source or make_source(), *outs], max_ratio)[1]


def test_the_smallest_cache_that_will_do_is_best():
    rows = [make_result("better", "GQA", 1.01), make_result("smaller", "MLA", 1.09), make_result("bad", "MQA", 1.11)]
    found = verdict(*rows)
    assert (found.best, found.within) == ("smaller", True)
    assert "25 % of the source's KV cache" in found.text and "1.090 times" in found.text
    assert verdict(*rows, max_ratio=1.2).best == "bad"
    assert verdict(*rows, max_ratio=1.05).best == "better"


def test_of_equal_caches_the_better_is_best():
    assert verdict(make_result("a", ratio=1.09), make_result("b", ratio=1.03)).best == "b"


def test_none_that_will_do_is_said_with_the_nearest_and_what_to_do():
    found = verdict(make_result("a", "MQA", 9.0), make_result("b", "MLA", 1.4))
    assert (found.best, found.within) == ("b", False)
    assert found.text.startswith("No result stays within 1.1 times")
    assert found.command.startswith("kvfold uptrain model=models/b")


def test_a_broken_result_is_never_best_and_never_in_front():
    rows, found = judge([make_source(), make_result("x", "MQA", 1.0, passed=False), make_result("y", "GQA", 3.0)], 1.1)
    assert found.best == "y"
    assert [row.verdict for row in rows] == ["source", "broken", "wants uptraining"]
    assert [row.pareto for row in rows] == [True, False, True]


def test_all_broken():
    found = verdict(make_result("x", passed=False, ratio=None), make_result("y", passed=False))
    assert (found.best, found.within) == (None, False)
    assert "All 2 results are broken" in found.text


def test_a_source_without_a_perplexity():
    found = verdict(make_result("x", ratio=None), source=make_source(perplexity=None, perplexity_ratio=None))
    assert found.best is None and "source itself" in found.text


def test_a_cache_that_grew_is_not_praised():
    assert "1.5 times the source's KV cache" in verdict(make_result("x", kv_ratio=1.5)).text


def test_the_front_is_what_no_other_beats_in_both():
    rows, _ = judge(
        [make_source(), make_result("a", "MLA", 1.2), make_result("b", "MLA", 1.3), make_result("c", "GQA", 1.25)], 1.1
    )
    assert [row.name for row in rows if row.pareto] == ["source", "a"]


@pytest.mark.parametrize(
    ("models", "names"),
    [
        (["a/m", "b/n"], ["m", "n"]),
        (["a/x/m", "b/x/m", "c"], ["a/x/m", "b/x/m", "c"]),
        (["org/Model-1", "m/kv4", "n/kv4"], ["Model-1", "m/kv4", "n/kv4"]),
        (["m", "a/m"], ["m", "a/m"]),
        (["/m", "m/"], ["/m", "m"]),
        (["a/m", "a/m-gqa", "b/m_mla"], ["m", "gqa", "mla"]),
        (["m", "m-gqa", "n"], ["m", "m-gqa", "n"]),
        (["m", "mgqa"], ["m", "mgqa"]),
        (["m", "m-m", "m-n"], ["m", "m-m", "m-n"]),
        (["m", "m-"], ["m", "m-"]),
    ],
)
def test_names_are_the_shortest_ends_that_differ(models, names):
    assert short_names(models) == names
    assert len(set(names)) == len(models)
