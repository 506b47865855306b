"""Of conversations, exactly what the assistant says is learned."""

import pytest

from kvfold.common.errors import UserError
from kvfold.common.loading import load_tokenizer
from kvfold.recipes.tiny import MODEL_DIR
from kvfold.uptrain.data.chat import assistant_spans, tokens_in

from ...eval.conftest import make_tokenizer
from .conftest import CHATML, paragraphs, text_of


def turns(*said):
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return [{"role": roles[one[0]], "content": one[2:]} for one in said]


TALKS = [
    turns("u:one", "a:two"),
    turns("s:be kind", "u:three", "a:four and <user>", "u:five", "a:six"),
    turns("u:seven", "a:eight", "u:nine"),
    turns("u:ten", "a:", "a:twice\n"),
]
SCORED = ["two</s>\n", "four and <user></s>\nsix</s>\n", "eight</s>\n", "</s>\ntwice\n</s>\n"]


def scored_text(part):
    batch = part.batch(range(part.windows))
    return make_tokenizer().decode(batch.labels[batch.labels >= 0].tolist())


@pytest.mark.parametrize("window", [512, 11])
def test_only_what_assistants_say_is_scored(write, build, window):
    judge = write("judge.jsonl", [turns("u:judge", "a:me")])
    data = {
        "template": CHATML,
        "chat": True,
        "loss_on": "assistant",
        "held_out": 0,
        "eval_texts": [judge],
        "bos": False,
    }
    path = write("chat.jsonl", TALKS)
    whole = build(path, window=512, **data)
    assert scored_text(whole.train[0]) == "".join(SCORED) and scored_text(whole.held_out[0]) == "me</s>\n"
    assert whole.windows == 1

    part = build(path, window=window, **data).train[0]
    labels = whole.batch([0]).labels[0, : whole.train[0].last]
    cuts = list(labels.split(window))
    for cut in cuts:
        cut[0] = -100  # nothing precedes it
    useful = [cut for cut in cuts if (cut >= 0).any()]
    assert len(useful) < len(cuts) or window == 512, "a window without any target is left out"
    found = part.batch(range(part.windows)).labels
    assert found[found >= 0].tolist() == [label for cut in useful for label in cut.tolist() if label >= 0]
    assert [part.scored([index]) for index in range(part.windows)] == [int((cut >= 0).sum()) for cut in useful]


def test_all_of_a_conversation_is_scored_by_default(write, build):
    path = write("chat.jsonl", TALKS[:2])
    store = build(path, template=CHATML, chat=True, window=512, held_out=0.5)
    rendered = "<user>one</s>\n<assistant>two</s>\n"
    texts = [scored_text(side[0]) for side in (store.train, store.held_out)]
    assert any(text == rendered[1:] for text in texts), "the template says where it ends: no separator is added"


@pytest.mark.parametrize("spans", ["between words", "within words"])
def test_tokens_of_a_real_tokenizer(spans):
    """Tokens of many characters, some of blanks alone, some across a border."""
    tokenizer = load_tokenizer(MODEL_DIR)
    said, wall = ("a good   answer\n", "\n") if spans == "between words" else ("swer", "")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:" + repr(wall)[1:-1] + "{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:" + repr(wall)[1:-1] + "{% endif %}"
    )
    talk = [*turns("u:tell me "), {"role": "assistant", "content": said}, *turns("u:thanks")]
    text, ((start, stop),) = assistant_spans(tokenizer, "chat", talk)
    assert text[start:stop] == said + ";"
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    inside = tokens_in(encoded["offset_mapping"], [(start, stop)])
    decoded = tokenizer.decode([i for i, out in zip(encoded["input_ids"], inside, strict=True) if out])
    assert decoded == said + ";"


def test_a_token_across_a_border_is_nobodys():
    offsets = [(0, 2), (2, 4), (4, 4), (4, 6), (6, 8), (8, 8), (8, 10)]
    assert tokens_in(offsets, [(4, 8)]).tolist() == [False, False, False, True, True, True, False]
    assert tokens_in(offsets, [(3, 7)]).tolist() == [False, False, True, True, False, False, False]
    assert tokens_in(offsets, []).tolist() == [False] * 7
    assert tokens_in([], [(0, 1)]).tolist() == []


def test_plain_text_beside_conversations(write, build):
    chat, plain = write("chat.jsonl", TALKS), write("plain", "\n\n".join(paragraphs(0, 9)))
    store = build(chat, plain, template=CHATML, chat=True, held_out=0.3, eval_windows=1000)
    assert text_of(store.train[1]).startswith("<s>") and "<user>" in text_of(store.train[0])
    judged = build(chat, template=CHATML, chat=True, loss_on="assistant", held_out=0, eval_texts=[plain])
    part = judged.held_out[0]
    assert part.scored([0]) == 31, "what is only judged on counts as a whole"


REWRITES = CHATML.replace("</s>", "{% if loop.last or m.role == 'user' %}</s>{% endif %}")
OTHER_PROMPT = CHATML.replace("%}<assistant>{%", "%}<bot>{%")


def test_chat_that_cannot_be(write, build):
    good, plain = write("good.jsonl", TALKS[:3]), write("plain.jsonl", ["some text"] * 9)
    asked = write("asked.jsonl", [turns("u:a"), turns("u:b"), turns("u:c")])
    alien = write("alien.jsonl", [[{"from": "human", "value": "x"}]])
    cases = [
        (good, None, "the tokenizer has no chat template; leave chat out"),
        (plain, CHATML, "plain.jsonl has no assistant turns; leave it out, or set loss_on all"),
        (asked, CHATML, "asked.jsonl has no assistant turns"),
        (alien, CHATML, "messages without 'role' or 'content'"),
        (good, REWRITES, "rewrites earlier turns when another follows, so message . of a conversation"),
        (good, OTHER_PROMPT, "rewrites earlier turns"),
        (good, "{{ raise_exception('never') }}", "refuses a conversation: never"),
    ]
    for path, template, match in cases:
        with pytest.raises(UserError, match=match) as caught:
            build(path, template=template, chat=True, loss_on="assistant", held_out=0.2)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="uptraining with chat=true"):
        build(good)
