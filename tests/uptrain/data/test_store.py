"""Tokens in files: nothing lost, the same bytes whoever makes them and whatever interrupts, and batches of them."""

import signal
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from kvfold.common.errors import EnvironmentFailure, UserError
from kvfold.uptrain.data import documents, packing, store
from kvfold.uptrain.data.store import Store, Tensors, open_store

from ...eval.conftest import BOS_ID, make_tokenizer
from .conftest import CHATML, CONFIG, EOS_ID, documents_of, paragraphs, text_of


def contents(folder):
    (tokens,) = folder.iterdir()
    return {path.name: path.read_bytes() for path in tokens.iterdir()}


@pytest.fixture
def texts(write):
    """A table, a book and a text to judge on."""
    return (
        write("rows.jsonl", paragraphs(0, 80, 60)),
        write("book", "\n\n".join(paragraphs(1, 60))),
        write("j", "Judge."),
    )


@pytest.mark.parametrize("bos", [True, False])
def test_documents_follow_each_other_in_full_windows(write, build, bos):
    rows = ["Hello there.", "é", "A third one, longer than a window of 16 is."]
    made = build(write("t.jsonl", rows), held_out=0, eval_texts=[write("j", "Judge.")], window=16, bos=bos)
    tokenizer = make_tokenizer()
    stream = []
    for row in rows:
        stream += [BOS_ID] * bos + tokenizer(row, add_special_tokens=False)["input_ids"] + [EOS_ID]
    part = made.train[0]
    batch = made.batch(range(made.windows))
    assert part.windows == -(-len(stream) // 16) and part.last == len(stream) % 16
    filling = [EOS_ID] * (-len(stream) % 16)
    assert batch.ids.flatten().tolist() == stream + filling and batch.positions is None
    labels = batch.ids.clone()
    labels[:, 0] = -100
    labels[-1, part.last :] = -100
    assert_close(batch.labels, labels, rtol=0, atol=0)
    assert batch.ids.dtype == batch.labels.dtype == torch.int64


@pytest.mark.parametrize("knobs", [{}, {"reset_positions": True}])
def test_scored_is_what_labels_count(texts, build, knobs):
    made = build(*texts[:2], **knobs)
    for index in range(made.windows):
        assert made.scored([index]) == int((made.batch([index]).labels >= 0).sum())
    assert made.scored([0, 1, 0]) == made.scored([0]) * 2 + made.scored([1])
    last = made.train[0].windows - 1
    assert 0 < made.scored([last]) < 31 and made.train[0].last < 32
    assert made.scored([]) == 0


def test_one_token_alone_fills_no_window(write, build):
    rows = [letter * 14 for letter in "abcd"]  # 16 tokens with their marks
    rows[-1] += "x"
    made = build(write("t.jsonl", rows), held_out=0, eval_texts=[write("j", "Judge.")], window=16)
    assert made.windows == 4 and made.train[0].last == 16


def test_positions_start_anew_with_every_document(write, build):
    rows = ["one", "a second that is long", "x", "three"]
    made = build(write("t.jsonl", rows), held_out=0, eval_texts=[write("j", "Judge.")], window=16, reset_positions=True)
    batch = made.batch(range(made.windows))
    for ids, labels, positions in zip(batch.ids, batch.labels, batch.positions, strict=True):
        since = 0
        for place in range(16):
            since = 0 if place == 0 or ids[place] == BOS_ID else since + 1
            assert positions[place] == since
            assert since or labels[place] == -100, "what follows another document follows nothing"
    assert (batch.positions == 0).sum() > made.windows
    assert batch.positions.dtype == torch.int64


def test_training_windows_are_numbered_through(texts, build):
    made = build(*texts[:2])
    assert made.sizes == [part.windows for part in made.train] and made.windows == sum(made.sizes)
    first = made.sizes[0]
    mixed = [first, 0, first - 1, first + 2]
    batch = made.batch(mixed)
    places = [(1, 0), (0, 0), (0, first - 1), (1, 2)]
    for row, (part, index) in enumerate(places):
        assert_close(batch.ids[row], made.train[part].batch([index]).ids[0], rtol=0, atol=0)
        assert_close(batch.labels[row], made.train[part].batch([index]).labels[0], rtol=0, atol=0)


def test_windows_in_memory_offer_the_same():
    ids = torch.arange(12).view(3, 4)
    windows = Tensors(ids)
    assert (windows.windows, windows.window, windows.scored([0, 2, 2])) == (3, 4, 9)
    batch = windows.batch([2, 0])
    assert_close(batch.ids, ids[[2, 0]], rtol=0, atol=0)
    assert batch.labels.tolist() == [[-100, 9, 10, 11], [-100, 1, 2, 3]] and batch.positions is None
    assert ids[0, 0] == 0, "the windows themselves stay"


CHAT = [[{"role": "user", "content": p}, {"role": "assistant", "content": p[::-1]}] for p in paragraphs(3, 40, 50)]


@pytest.mark.parametrize(("pieces", "characters"), [(1, 10**9), (3, 10**9), (1000, 1), (1000, 700)])
def test_batches_of_the_tokenizer_change_nothing(texts, write, build, monkeypatch, tmp_path, pieces, characters):
    """Each text ends at a piece within a batch; half of what is judged on is trained on but for that."""
    monkeypatch.setattr(documents, "_LEAST_TOKENS", 1)
    chat, book = write("chat.jsonl", CHAT), write("long", "\n\n".join(paragraphs(1, 600)))
    judge = write("judge.jsonl", paragraphs(0, 40, 60))
    talks = {"chat": True, "loss_on": "assistant", "template": CHATML, "reset_positions": True, "eval_texts": texts[1:]}
    plain = {"held_out": 0.2, "eval_texts": [judge], "needed_windows": 90}
    for attempt in ("", "again"):
        build(chat, folder=f"chat{attempt}", eval_windows=2, **talks)
        made = build(texts[0], book, folder=f"plain{attempt}", eval_windows=1, **plain)
        monkeypatch.setattr(packing, "_BATCH_PIECES", pieces)
        monkeypatch.setattr(packing, "_BATCH_CHARACTERS", characters)
    assert made.sizes[1] == 90 and made.held_out[2].stored == 16
    for name in ("chat", "plain"):
        assert contents(tmp_path / name) == contents(tmp_path / f"{name}again")


def test_no_more_than_a_batch_is_tokenised_at_a_time(write, build, monkeypatch):
    monkeypatch.setattr(packing, "_BATCH_CHARACTERS", 5000)
    sizes, encode = [], packing.encode

    def spy(tokenizer, texts, **options):
        sizes.append(sum(map(len, texts)))
        return encode(tokenizer, texts, **options)

    monkeypatch.setattr(packing, "encode", spy)
    build(write("book", "\n\n".join(paragraphs(1, 400))))
    assert sum(sizes) >= 79_000 and max(sizes) <= 5000 + 1250


SCRIPT = """
import sys, time
from pathlib import Path
from kvfold.uptrain.data import documents, packing, store
from tests.uptrain.data.conftest import CONFIG, DataSpec, make_tokenizer

folder, log, pause, *texts = sys.argv[1:]
write, build = packing.PartWriter._write, store._build
writes = []

def slow(self, rows):
    write(self, rows)
    writes.append(1)
    if len(writes) == 12:
        for file in self._files:
            file.flush()
        print("writing", flush=True)
        time.sleep(float(pause))

def noted(*arguments):
    with open(log, "a") as file:
        file.write("built ")
    return build(*arguments)

packing.PartWriter._write, store._build = slow, noted
print(store.build_store(Path(folder), make_tokenizer(), DataSpec(texts, 32), CONFIG).digest, flush=True)
"""


def start(folder, log, pause, texts):
    command = [sys.executable, "-c", SCRIPT, str(folder), str(log), str(pause), *texts]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_build_that_was_killed_is_made_again_equal(texts, build, tmp_path):
    build(*texts[:2], folder="whole")
    process = start(tmp_path / "half", tmp_path / "log", 60, texts[:2])
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    (inner,) = (tmp_path / "half").iterdir()
    half = contents(tmp_path / "half")
    assert "tokens.json" not in half and any(name.endswith(".ids") and data for name, data in half.items())
    with pytest.raises(UserError, match="holds no tokens of a run"):
        open_store(inner)
    (inner / "train-7.ids").write_bytes(b"of a spec with more texts")
    build(*texts[:2], folder="half")
    assert contents(tmp_path / "half") == contents(tmp_path / "whole")


def test_processes_at_once_build_once(texts, build, tmp_path):
    whole = build(*texts[:2], folder="whole")
    processes = [start(tmp_path / "shared", tmp_path / "log", 1.0, texts[:2]) for _ in range(2)]
    said = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert {words[-1] for words in said} == {whole.digest}
    assert (tmp_path / "log").read_text() == "built "
    assert contents(tmp_path / "shared") == contents(tmp_path / "whole")


def test_a_store_is_made_once_and_read_ever_after(texts, build, tmp_path):
    made = build(*texts[:2], folder="one")
    marker = made.folder / "tokens.json"
    written = marker.stat().st_mtime_ns
    assert build(*texts[:2], folder="one") == open_store(made.folder) == made
    assert isinstance(made, Store) and len(made.digest) == 64
    assert marker.stat().st_mtime_ns == written


def test_another_request_gets_tokens_of_its_own(texts, write, build, monkeypatch, tmp_path):
    """Whatever changed: how they are cut, the tokenizer, the text itself, or how we write them."""
    made = [build(*texts[:2], folder="one"), build(*texts[:2], folder="one", window=16)]
    made += [build(*texts[:2], folder="one", bos=False)]
    write("rows.jsonl", paragraphs(7, 80, 60))
    made += [build(*texts[:2], folder="one")]
    monkeypatch.setattr(store, "FORMAT_VERSION", 99)
    made += [build(*texts[:2], folder="one")]
    assert len({each.folder for each in made}) == 5 == len(list((tmp_path / "one").iterdir()))
    assert len({each.train_digest for each in made}) == 4, "the last two read the same"
    store.forget_others(tmp_path / "one", made[3])
    assert list((tmp_path / "one").iterdir()) == [made[3].folder]


def test_damage_is_seen(texts, build):
    made = build(*texts[:2], folder="one")
    path = made.folder / "train-1.ids"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(EnvironmentFailure, match=r"train-1\.ids is damaged"):
        build(*texts[:2], folder="one")
    path.write_bytes(whole[:-2])
    with pytest.raises(EnvironmentFailure, match=r"train-1\.ids is damaged"):
        open_store(made.folder)
    for said in ("", "[]", "{}"):
        (made.folder / "tokens.json").write_text(said)
        with pytest.raises(EnvironmentFailure, match=r"tokens\.json is damaged; remove"):
            build(*texts[:2], folder="one")


def test_digests_tell_tokens_apart(texts, write, build):
    one, again = (build(texts[0]).digest for _ in range(2))
    assert one == again
    write("rows.jsonl", [*paragraphs(0, 79, 60), "Another one."])
    assert build(texts[0]).digest != one


def test_large_vocabularies_take_more_bytes(texts, build, monkeypatch, tmp_path):
    small = build(texts[0], folder="small")
    monkeypatch.setattr(CONFIG, "vocab_size", 1 << 17)
    large = build(texts[0], folder="large")
    assert (small.train[0].dtype, large.train[0].dtype) == ("uint16", "uint32")
    assert text_of(small.train[0]) == text_of(large.train[0])


def test_tokenizers_that_cannot_be(texts, build, monkeypatch, tmp_path):
    with pytest.raises(UserError, match="neither an EOS nor a BOS"):
        store.build_store(tmp_path / "x", make_tokenizer(bos=False), store.DataSpec(texts[:1], 32), CONFIG)
    monkeypatch.setattr(CONFIG, "vocab_size", 100)
    with pytest.raises(UserError, match="lies beyond the model's vocabulary of 100"):
        build(texts[0])


def test_documents_survive(texts, build):
    made = build(texts[0], held_out=0.2, eval_windows=1000)
    documents = documents_of(made.train[0]) + documents_of(made.held_out[0])
    assert sorted(documents) == sorted(paragraphs(0, 80, 60))
