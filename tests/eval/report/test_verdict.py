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


def judged(*outs, max_ratio=1.1, source=None, tokens=20_000):
    scoring = ["--text", "my.txt", "--window", "64"]
    return judge([source or make_source(), *outs], max_ratio, tokens=tokens, scoring=scoring)


def verdict(*outs, max_ratio=1.1, source=None):
    return judged(*outs, max_ratio=max_ratio, source=source)[1]


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
    rows, found = judged(make_result("x", "MQA", 1.0, passed=False), make_result("y", "GQA", 3.0))
    assert found.best == "y"
    assert [row.verdict for row in rows] == ["source", "broken", "wants uptraining"]
    assert [row.pareto for row in rows] == [True, False, True]


def test_all_broken():
    found = verdict(make_result("x", passed=False, ratio=None), make_result("y", passed=False))
    assert (found.best, found.within) == (None, False)
    assert "All 2 results are broken" in found.text
    assert found.command == "kvfold verify models/source models/x --text my.txt --window 64"


def test_a_source_without_a_perplexity():
    found = verdict(make_result("x", ratio=None), source=make_source(**LOST | {"loss": None}))
    assert found.best is None and "source itself has no finite" in found.text


LOST = {"perplexity": None, "perplexity_ratio": None, "loss": 900.0, "passed": False, "reason": "worse than guessing"}


def test_where_the_source_is_worse_than_guessing_results_are_held_against_it():
    """Its perplexity may be too large to be said, and results have a ratio to it all the same."""
    source = make_source(**LOST | {"perplexity": 1e5})
    copy = make_result("copy", "MLA", 1.0, perplexity=1e5, passed=False)
    bad = make_result("bad", "MQA", 3.0, perplexity=3e5, passed=False)
    nothing = make_result("nothing", "MQA", None, loss=None, kl=None, passed=False)
    rows, found = judged(bad, copy, nothing, source=source)
    assert [row.verdict for row in rows] == ["source", "wants uptraining", "as good", "broken"]
    assert [row.pareto for row in rows] == [False, True, True, False]
    assert (found.best, found.within, found.command) == ("copy", True, "")
    assert "source itself is worse than guessing on this text" in found.text and "25 %" in found.text
    assert "Use it" not in found.next
    assert judged(copy, source=make_source(**LOST))[1].best == "copy"


@pytest.mark.parametrize("ratio", [1.0, 1.4])
@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"kv_ratio": 1.0, "kv_elements_ratio": 1.0}, "100 % of the source's KV cache, saves no cache; are SRC and"),
        ({"kv_ratio": 1.5, "kv_elements_ratio": 1.5}, "1.5 times the source's KV cache, saves no cache; are SRC and"),
        ({"kv_ratio": 1.0, "kv_dtype": "float32"}, "saves no cache; it is stored in float32, the source in bfloat16"),
    ],
)
def test_a_cache_that_is_no_smaller_is_not_praised(figures, said, ratio):
    found = verdict(make_result("x", ratio=ratio, **figures))
    assert said in found.text and (found.best, found.within) == ("x", ratio == 1.0)
    assert "Use it" not in found.next and not found.command


def test_few_tokens_are_said_in_the_verdict():
    found = judged(make_result("x"), tokens=1999)[1]
    assert found.text.endswith("So few tokens (1,999) tell little.") and found.next.startswith("Give more text")
    assert "few tokens" not in judged(make_result("x"), tokens=2000)[1].text


def test_the_front_is_what_no_other_beats_in_both():
    rows, _ = judged(make_result("a", "MLA", 1.2), make_result("b", "MLA", 1.3), make_result("c", "GQA", 1.25))
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
