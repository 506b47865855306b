"""Which windows a model is calibrated on: how kinds are mixed, texts cut, and conversations made."""

import json
import re
import string
from itertools import pairwise

import pytest
import torch
from transformers import AutoConfig

from kvfold.common.errors import UserError
from kvfold.common.loading import load_tokenizer
from kvfold.common.text import KINDS, builtin_documents, join_documents
from kvfold.convert.calibration import text as calib_text
from kvfold.convert.calibration.text import CalibText, calibration_windows
from kvfold.recipes.tiny import MODEL_DIR

from ...eval.conftest import BOS_ID, CONTEXT, VOCABULARY, make_tokenizer

CONFIG = AutoConfig.for_model("llama", vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
ALL = [f"builtin:{kind}" for kind in KINDS]
CHATML = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m.role }}{% if m.name is defined %} {{ m.name }}{% endif %}>{{ m.content }}\n{% endfor %}"
)


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        (tmp_path / name).write_text(content)
        return str(tmp_path / name)

    return write


def letters(seed, length):
    """Text that repeats nothing, so that a window's place in it can be found."""
    drawn = torch.randint(26, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return "".join(string.ascii_lowercase[i] if n % 7 else " " for n, i in enumerate(drawn, 1))


def cut(bos=False, template=None, **knobs):
    """Windows of the byte tokenizer, and their texts."""
    tokenizer = make_tokenizer(bos)
    tokenizer.chat_template = template
    windows = calibration_windows(tokenizer, CalibText(**knobs), CONFIG)
    return windows, [tokenizer.decode(ids, skip_special_tokens=True) for ids in windows.ids]


@pytest.mark.parametrize(
    ("texts", "builtin", "shares"),
    [
        ([], True, dict.fromkeys(ALL, 4)),
        (["builtin"], True, dict.fromkeys(ALL, 4)),
        (["builtin:code"], True, {"builtin:code": 16}),
        (["builtin:code", "builtin:topics"], True, {"builtin:code": 8, "builtin:topics": 8}),
        (["a"], True, {"a": 8, **dict.fromkeys(ALL, 2)}),
        (["a", "b"], True, {"a": 4, "b": 4, **dict.fromkeys(ALL, 2)}),
        (["a", "a", "builtin"], True, {"a": 8, **dict.fromkeys(ALL, 2)}),
        (["a", "builtin:readmes"], True, {"a": 8, "builtin:readmes": 8}),
        (["a", "b"], False, {"a": 8, "b": 8}),
    ],
)
def test_shares(write, texts, builtin, shares):
    files = {name: write(name, letters(seed, 2000)) for seed, name in enumerate("ab")}
    windows, _ = cut(texts=tuple(files.get(name, name) for name in texts), builtin=builtin, windows=16, window=32)
    assert windows.counts == {files.get(name, name): number for name, number in shares.items()}
    assert windows.tokens == 16 * 32
    for prefix in range(17):  # none is ever a window ahead of its share
        counts = windows.first(prefix).counts
        for name, number in shares.items():
            assert abs(counts.get(files.get(name, name), 0) - prefix * number / 16) < 1


def test_a_prefix_is_a_smaller_request(write):
    texts = (write("long", letters(0, 5000)), write("short", letters(1, 150)))
    many, _ = cut(texts=texts, windows=40, window=48)
    for fewer in (1, 7, 39):
        few, _ = cut(texts=texts, windows=fewer, window=48)
        assert few.kinds == many.kinds[:fewer] and few.digest == many.first(fewer).digest
        torch.testing.assert_close(few.ids, many.ids[:fewer], rtol=0, atol=0)
    assert few.digest != many.digest


def test_held_out_text_is_not_calibrated_on():
    kinds = ("topics", "code", "readmes")
    held_out, kept = (join_documents(builtin_documents(held_out=side, kinds=kinds)) for side in (True, False))
    _, texts = cut(texts=tuple(f"builtin:{kind}" for kind in kinds), windows=64, window=64)
    inside = [text for text in (text.strip("\n\ufffd") for text in texts) if "\n\n" not in text]
    assert len(inside) > 20
    assert all(text in kept for text in inside)
    assert sum(text in held_out for text in inside) < 0.1 * len(inside)  # a licence may be on both sides


def test_a_long_text_is_sampled_over_its_whole_length(write):
    text = letters(0, 64_000)
    _, texts = cut(texts=(write("long", text),), builtin=False, windows=64, window=32)
    places = sorted(text.index(max(part.strip("\n").split("\n\n"), key=len)) for part in texts)
    assert len(set(places)) == 64
    assert max(later - place for place, later in pairwise([0, *places, len(text)])) < len(text) / 4


def test_a_long_text_is_used_up_and_nothing_twice(write):
    text = letters(0, 3000)
    _, texts = cut(texts=(write("long", text),), builtin=False, windows=1000, window=32)
    whole = "".join(texts).replace("\n\n", "")
    assert sorted(whole) == sorted(text.replace("\n\n", ""))
    assert all(part in text for part in "".join(texts).split("\n\n"))


def test_a_text_is_cut_between_paragraphs(write):
    paragraphs = [letters(number, 40) for number in range(100)]
    _, texts = cut(texts=(write("long", "\n\n".join(paragraphs)),), builtin=False, windows=1000, window=32)
    found = "".join(texts).split("\n\n")
    assert found != paragraphs and sorted(found) == sorted(paragraphs)


def test_a_table_may_have_no_end(monkeypatch):
    rows = (f"{number:04d}" for number in range(100_000))  # as good as none, but the test ends
    monkeypatch.setattr(calib_text, "stream_text", lambda name, **_: rows)
    monkeypatch.setattr(calib_text, "_BLOCK", 4000)
    _, texts = cut(texts=("endless",), builtin=False, windows=32, window=32)
    seen = [int(row) for row in re.findall(r"\d{4}", "".join(texts))]
    assert 800 < max(seen) < 1000 == next(map(int, rows))  # all over the first thousand rows, and no more are read
    assert sum(later == row + 1 for row, later in pairwise(seen)) > 0.9 * len(seen)  # rows stay together


def test_many_documents_in_few_windows():
    sources = builtin_documents(held_out=False, kinds=["code"])
    _, texts = cut(texts=("builtin:code",), windows=64, window=64)
    seen = set()
    for text in texts:
        homes = [number for number, source in enumerate(sources) if text in source]
        seen.update(homes if len(homes) == 1 else ())
    assert len(seen) >= 6  # of 8 that take part, as bytes are tokens here
    assert min(seen) < len(sources) / 3 and max(seen) > len(sources) * 2 / 3


def test_only_what_is_needed_is_tokenised():
    tokenizer, calls = make_tokenizer(), []

    def listen(text, **options):
        calls.append(text)
        return tokenizer(text, **options)

    listen.chat_template = None
    windows = calibration_windows(listen, CalibText(windows=8, window=64), CONFIG)
    assert sum(map(len, calls)) < 10 * windows.tokens


@pytest.mark.parametrize("joined", [["abcdefgh"], ["ab", "cd"], ["abcdefghi"], ["abcdefgh\nij", "k"]])
def test_documents_are_joined_by_a_blank_line(write, joined):
    path = write("rows.jsonl", "\n".join(json.dumps({"text": text}) for text in joined))
    _, texts = cut(texts=(path,), builtin=False, windows=9, window=4)
    whole = "\n\n".join(joined)
    assert "".join(texts) == (whole[:-1] if len(whole) % 4 == 1 else whole)  # one token alone predicts nothing


def test_short_texts_give_what_they_have(write):
    tiny, short = write("tiny", "abc"), write("short", letters(0, 70))
    windows, texts = cut(texts=(tiny, short), windows=16, window=32)
    assert len(windows) == 16  # the others took over what is missing
    assert (windows.counts[tiny], windows.counts[short]) == (1, 3)
    assert texts[windows.kinds.index(tiny)] == "abc"
    assert sum(map(len, windows.ids)) == windows.tokens == 14 * 32 + 3 + 6
    batches = windows.batches(5)
    assert [tuple(batch.shape) for batch in batches] == [(1, 3), (5, 32), (5, 32), (4, 32), (1, 6)]
    with pytest.raises(UserError, match="batch size 0"):
        windows.batches(0)


def test_three_tokens_are_enough(write):
    windows, texts = cut(texts=(write("tiny", "abc"),), builtin=False)
    assert texts == ["abc"] and windows.ids[0].dtype == torch.int64


def test_every_window_begins_as_the_tokenizer_begins_a_text(write):
    path = write("text", letters(0, 300))
    plain, texts = cut(texts=(path,), builtin=False, windows=9, window=32)
    marked, marked_texts = cut(bos=True, texts=(path,), builtin=False, windows=9, window=33)
    assert marked_texts == texts
    assert all(ids[0] == BOS_ID and BOS_ID not in ids[1:] for ids in marked.ids)
    assert all(BOS_ID not in ids for ids in plain.ids)
    assert [len(ids) for ids in marked.ids] == [len(ids) + 1 for ids in plain.ids]
    with pytest.raises(UserError, match="has no room") as caught:
        calibration_windows(_two_leads(), CalibText(window=2), CONFIG)
    assert "2 leading tokens" in str(caught.value)


def _two_leads():
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    special = [("<s>", BOS_ID), ("</s>", BOS_ID + 1)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> </s> $A </s>", special_tokens=special)
    return tokenizer


@pytest.mark.parametrize("bos", [False, True])
def test_joined_windows_are_the_same_text_of_one_kind_each(write, bos):
    texts = [write("a", letters(1, 100)), write("b", letters(2, 55))]
    windows, _ = cut(bos, texts=texts, window=10 + bos, builtin=False, windows=100)
    lead = [BOS_ID] if bos else []
    joined = windows.joined(35 + bos, lead)
    for name in texts:
        short, long = ([i for i, kind in zip(w.ids, w.kinds, strict=True) if kind == name] for w in (windows, joined))
        assert [len(ids) - bos for ids in long[:-1]] == [30] * (len(long) - 1)
        plain = [torch.cat([ids[bos:] for ids in some]).tolist() for some in (short, long)]
        assert plain[0] == plain[1]
        assert all(ids[: len(lead)].tolist() == lead for ids in long)
    assert sum(joined.counts.values()) == len(joined) == 4 + 2
    as_they_are = windows.joined(5, lead)  # no room for two of them
    assert sorted(ids.tolist() for ids in as_they_are.ids) == sorted(ids.tolist() for ids in windows.ids)


def test_defaults_with_a_real_tokenizer():
    config = AutoConfig.from_pretrained(MODEL_DIR)
    windows = calibration_windows(load_tokenizer(MODEL_DIR), CalibText(), config)
    assert windows.counts == dict.fromkeys(ALL, 16)
    assert {len(ids) for ids in windows.ids} == {512}
    assert 0 not in torch.cat(windows.ids)  # end of text, which this tokenizer does not add


def test_the_models_context_bounds_a_window(write):
    path = write("text", letters(0, 300))
    windows, _ = cut(texts=(path,), builtin=False, windows=1)
    assert len(windows.ids[0]) == CONTEXT < 512
    with pytest.raises(UserError, match=f"calibration window {CONTEXT + 1} is longer than the model's context"):
        cut(texts=(path,), window=CONTEXT + 1)


@pytest.mark.parametrize(
    ("knobs", "match"),
    [
        ({"windows": 0}, "0 calibration windows are not possible"),
        ({"window": 1}, "window of 1 predicts nothing"),
        ({"texts": ("none", "a")}, "'none' stands alone; leave it or 'a' out"),
        ({"builtin": False}, "no calibration text is left"),
        ({"texts": ("a", "builtin:code"), "builtin": False}, "'builtin:code' contradicts --no-calib-builtin"),
        ({"texts": ("a", "builtin", "builtin:coda")}, "unknown built-in text 'coda'; did you mean code"),
    ],
)
def test_knobs_that_cannot_be(knobs, match):
    with pytest.raises(UserError, match=match):
        CalibText(**knobs)


def test_none_is_no_text():
    assert CalibText(texts=("none",)).weights_only
    assert not CalibText().weights_only


def test_wrong_texts(write):
    one, chat = write("one", "x"), write("chat.jsonl", json.dumps({"messages": []}))
    wrong = {"nowhere": "does not exist", one: "fewer than 2 tokens", chat: "reads its 'messages' with --chat"}
    for name, match in wrong.items():
        with pytest.raises(UserError, match=match):
            cut(texts=(write("good", "good"), name), windows=1)  # though the first text alone would do
    small = AutoConfig.for_model("llama", vocab_size=50)
    with pytest.raises(UserError, match="beyond the model's vocabulary of 50"):
        calibration_windows(make_tokenizer(), CalibText(texts=(write("good", "good"),)), small)


def test_chat_renders_conversations(write):
    rows = [
        [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two", "name": None}],
        [{"role": "user", "content": "three"}],
    ]
    path = write("chat.jsonl", "\n".join(json.dumps({"messages": row}) for row in rows))
    _, texts = cut(template=CHATML, chat=True, texts=(path,), builtin=False)
    assert texts == ["<user>one\n<assistant>two\n<user>three\n"]
    rows = [[{"role": "user", "content": str(number)}] for number in range(1000)]
    path = write("chat.jsonl", "\n".join(json.dumps({"messages": row}) for row in rows))
    _, texts = cut(template=CHATML, chat=True, texts=(path,), builtin=False, windows=4)
    asked = [int(turn) for text in texts for turn in re.findall(r"<user>(\d+)\n", text)]
    assert max(later - number for number, later in pairwise(sorted([0, *asked, 1000]))) < 150


def test_chat_makes_conversations_of_paragraphs(write):
    said = [f"Paragraph number {number}, {'long ' * 10}" for number in range(6)]
    path = write("plain", "\n\n".join(["Heading", *said[:2], "***", *said[2:]]))
    _, texts = cut(template=CHATML, chat=True, texts=(path,), builtin=False, window=64)
    turns = ["<user>", said[0], "\n<assistant>", "\n\n".join(said[1:4]), "\n<user>", said[4], "\n<assistant>", said[5]]
    assert "".join(texts) == "".join(turns) + "\n"
    _, texts = cut(template=CHATML, chat=True, texts=(write("tiny", "abc\n"),), builtin=False)
    assert texts == ["<user>abc\n"]
    windows, texts = cut(template=CHATML, chat=True, windows=8)
    assert windows.counts == dict.fromkeys(ALL, 2) and all("<user>" in text for text in texts[:4])


def test_chat_templates_write_their_own_bos(write):
    path = write("text", letters(0, 300))
    windows, _ = cut(bos=True, template="<s>" + CHATML, chat=True, texts=(path,), builtin=False, window=64)
    assert all(ids[0] == BOS_ID and BOS_ID not in ids[1:] for ids in windows.ids) and len(windows) > 3


def test_chat_is_the_same_on_every_day(write):
    path = write("tiny", "abc")
    _, texts = cut(template="{{ strftime_now('%Y') }}" + CHATML, chat=True, texts=(path,), builtin=False)
    assert texts == ["01 Jan 2025<user>abc\n"]


def test_chat_that_cannot_be(write):
    with pytest.raises(UserError, match="has no chat template; leave --chat out"):
        cut(chat=True)
    for message, match in {"system": "refuses a conversation: no system", None: "without 'role' or 'content'"}.items():
        row = {"role": message, "content": "x"} if message else {"from": "human", "value": "x"}
        path = write("chat.jsonl", json.dumps({"messages": [row]}))
        with pytest.raises(UserError, match=match):
            cut(template=CHATML, chat=True, texts=(path,))
