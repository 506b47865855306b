"""The passkey test: can a model find a number again that was said somewhere in a long text?

After Mohtashami and Jaggi (arXiv 2305.16300), with two differences. The filler is a real text, since a sentence that
repeats itself is easier to look past; and the model does not generate: it reads the answer too, and an answer counts
if every one of its tokens was the likeliest where it stands, which is when greedy generation would have given it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..common.errors import UserError
from ..common.tokens import leading_ids, plain_ids

_NOTE = "\n\nA note in between: the secret number is {key}. Keep it in mind, {key} is the secret number.\n\n"
_QUESTION = "\n\nAbove, a note in between told the secret number. The secret number is"
_DIGITS = 5


@dataclass(frozen=True)
class Case:
    """One prompt with its answer.

    Attributes:
        length: tokens of both together.
        depth: where the note stands in the filler, from 0 (its beginning) to 1.
        ids: prompt and answer.
        answer: how many of the last tokens are the answer.
    """

    length: int
    depth: float
    ids: tuple[int, ...]
    answer: int


def check_depths(depths: Sequence[float]) -> None:
    """Refuse what is no place in a text.

    Raises:
        UserError: so it is.
    """
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise UserError(f"depths {', '.join(map(str, depths))} are not between 0 and 1; try 0.1, 0.5 and 0.9")


def make_cases(
    tokenizer: Any, filler: Sequence[int], lengths: Sequence[int], depths: Sequence[float], keys: int
) -> list[Case]:
    """The same prompts at every call: `keys` of them for each length and depth.

    Args:
        tokenizer: of the source.
        filler: tokens of a text, of which each prompt takes another part, from the beginning again when it is over.
        lengths: tokens of prompt and answer together.
        depths: from 0 to 1.

    Raises:
        UserError: a depth is none, a number is too small, or the text or a length has no room for the note.
    """
    check_depths(depths)
    if keys < 1:
        raise UserError(f"{keys} keys ask nothing; give at least 1")
    draw = random.Random(0)
    lead = leading_ids(tokenizer)
    question = plain_ids(tokenizer, _QUESTION)
    cases = []
    for length in lengths:
        for depth in depths:
            for _ in range(keys):
                key = str(draw.randrange(10 ** (_DIGITS - 1), 10**_DIGITS))
                note, answer = plain_ids(tokenizer, _NOTE.format(key=key)), _after(tokenizer, question, key)
                room = length - sum(map(len, (lead, note, question, answer)))
                if room < 1:
                    raise UserError(f"a length of {length} has no room for note and question; give {length - room + 1}")
                if room > len(filler):
                    raise UserError(f"{len(filler)} tokens of text do not fill a length of {length}; give more text")
                start = draw.randrange(len(filler) - room + 1)
                before = round(depth * room)
                body = [*filler[start : start + before], *note, *filler[start + before : start + room]]
                cases.append(Case(length, depth, (*lead, *body, *question, *answer), len(answer)))
    return cases


def _after(tokenizer: Any, question: Sequence[int], key: str) -> list[int]:
    """The tokens of an answer where it follows the question."""
    whole = plain_ids(tokenizer, f"{_QUESTION} {key}")
    if whole[: len(question)] != list(question):  # a tokenizer that joins both; the answer is then a text of its own
        return plain_ids(tokenizer, f" {key}")
    return whole[len(question) :]


def ask(model: Any, case: Case) -> tuple[bool, float]:
    """Whether a loaded model finds the number, and what the answer costs it in nats a token."""
    import torch

    from ..common.scoring import evaluating, head_logits, hidden_states, token_nll

    ids = torch.tensor([case.ids], device=model.device)
    answer = ids[:, -case.answer :]
    with evaluating(model):
        hidden = hidden_states(model, ids[:, :-1])[:, -case.answer :]  # position t predicts token t + 1
        logits = head_logits(model, hidden)  # [1, answer, V]
        found = bool((logits.argmax(-1) == answer).all())
        return found, token_nll(logits, answer).double().mean().item()
