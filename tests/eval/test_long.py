"""Loss by position, and the passkey test."""

from __future__ import annotations

import math

import pytest
import torch

from kvfold.common.errors import CheckFailed, UserError
from kvfold.common.loading import load_model
from kvfold.eval import long as module
from kvfold.eval.long import long
from kvfold.eval.passkey import Case, ask, make_cases
from kvfold.eval.ppl import perplexity

from .conftest import VOCABULARY, make_model, make_tokenizer
from .test_ppl import token_ids

CONTEXT = 640


@pytest.fixture
def path(save):
    return save(make_model("llama", max_position_embeddings=CONTEXT))


@pytest.fixture
def book(tmp_path):
    """A text of 1,500 bytes."""
    path = tmp_path / "book.txt"
    letters = torch.randint(97, 123, (1500,), generator=torch.Generator().manual_seed(2)).tolist()
    path.write_text(bytes(letters).decode())
    return str(path)


def test_buckets_are_the_losses_of_their_positions(path, book):
    report = long(path, text=[book], max_windows=3, keys=0)
    ids = token_ids(book)
    model = load_model(path)
    losses: dict[int, list[float]] = {}
    for start in range(0, len(ids), CONTEXT):
        window = ids[start : start + CONTEXT]
        with torch.no_grad():
            found = model(torch.tensor([window])).logits[0].double().log_softmax(-1)
        for position in range(1, len(window)):
            losses.setdefault(position, []).append(-found[position - 1, window[position]].item())
    (row,) = report.results
    assert [(b.start, b.stop) for b in row.buckets] == [(1, 128), (128, 256), (256, 512), (512, 640)]
    for bucket in row.buckets:
        expected = [loss for position in range(bucket.start, bucket.stop) for loss in losses.get(position, [])]
        assert bucket.tokens == len(expected)
        assert bucket.loss == pytest.approx(math.fsum(expected) / len(expected), rel=1e-6)
        assert bucket.above_source == 0
    assert row.loss == pytest.approx(perplexity(path, text=[book], window=CONTEXT).loss, rel=1e-9)
    assert (row.found, row.passkeys) == (None, [])
    assert long(path, [path], text=[book], max_windows=3, keys=0).results == [row, row]


def test_a_result_stands_beside_its_source_and_batches_change_nothing(path, save, book):
    """A rotation that is too slow is hardly seen at near positions."""
    other = make_model("llama", max_position_embeddings=CONTEXT)
    other.config.rope_parameters = {"rope_type": "default", "rope_theta": 20000.0}
    out = save(other, "other")
    one, four = (long(path, [out], text=[book], batch_size=size, keys=1, length=[300]) for size in (1, 4))
    assert [row.model for row in one.results] == [path, out]
    apart = [bucket.above_source for bucket in one.results[1].buckets]
    assert 0 < abs(apart[0]) < max(map(abs, apart[1:]))
    for row, again in zip(one.results, four.results, strict=True):
        assert [b.loss for b in row.buckets] == pytest.approx([b.loss for b in again.buckets], rel=1e-6)
        assert row.passkeys == again.passkeys


def test_default_lengths_and_windows(path, book, text_file):
    assert module._halves(8192) == [1024, 2048, 4096, 8192]
    assert module._halves(200) == [200]
    assert long(path, text=[text_file], keys=0).protocol.window == 203 < CONTEXT  # all that the text fills


def test_cases_hold_one_note_at_its_depth_and_end_with_its_answer():
    tokenizer, filler = make_tokenizer(), list(range(60, 90)) * 40
    cases = make_cases(tokenizer, filler, [300, 700], [0, 0.5, 1], 2)
    assert cases == make_cases(tokenizer, filler, [300, 700], [0, 0.5, 1], 2)
    assert [(c.length, c.depth) for c in cases] == [(n, d) for n in (300, 700) for d in (0, 0.5, 1) for _ in range(2)]
    assert len({case.ids[-5:] for case in cases}) == len(cases)  # each its own key
    for case in cases:
        assert len(case.ids) == case.length and case.answer == len(" 12345")
        said = tokenizer.decode(case.ids, skip_special_tokens=True)
        key = said[-5:]
        assert said.count(key) == 3 and key.isdigit()
        before, after = said.split("\n\nA note in between: ")[0], said.split("is the secret number.\n\n")[1]
        rest = len(after) - len("\n\nAbove, ") - len(after.split("\n\nAbove, ")[1])
        assert len(before) / (len(before) + rest) == pytest.approx(case.depth, abs=0.01)


def test_an_answer_counts_when_each_token_of_it_is_likeliest(path):
    model = load_model(path)
    ids = [5, 6, 7, 8]
    with torch.no_grad():
        for _ in range(2):
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    right, wrong = Case(6, 0.5, tuple(ids), 2), Case(6, 0.5, (*ids[:5], (ids[5] + 1) % VOCABULARY), 2)
    assert ask(model, right)[0] and not ask(model, wrong)[0]
    assert ask(model, right)[1] < ask(model, wrong)[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 641}, "window 641 is longer than the model's context 640"),
        ({"length": [641]}, "length 641 is longer than the model's context 640"),
        ({"length": [100]}, r"a length of 100 has no room for note and question; give 1\d\d"),
        ({"depth": [1.5]}, "depths 1.5 are not between 0 and 1"),
        ({"keys": -1}, "-1 keys ask nothing"),
        ({"max_windows": 0}, "0 windows score nothing"),
    ],
)
def test_refusals(options, message, path, book):
    with pytest.raises(UserError, match=message):
        long(path, text=[book], **options)


def test_a_text_that_does_not_fill_a_prompt(path, text_file):
    with pytest.raises(UserError, match="203 tokens of text do not fill a length of 640; give more text"):
        long(path, text=[text_file], length=[640])


def test_a_loss_that_is_not_a_number(save, book):
    model = make_model("llama", max_position_embeddings=CONTEXT)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    with pytest.raises(CheckFailed, match="the loss at positions 1:128 is nan"):
        long(save(model), text=[book], keys=0)
