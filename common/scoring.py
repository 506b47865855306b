"""Token losses of a causal language model, and how far two models are apart, without ever holding the logits
of a whole batch.

Legend: B sequences, T positions, D hidden size, V vocabulary, n positions of one chunk.

The base model runs once and gives hidden states [B, T, D]; the head then turns them into logits chunk by
chunk. The head is the model's own class, run on a shell of the model whose base hands through what it is
given. So biases, logit scales and soft caps apply as the class wrote them, with no table of families here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import CheckFailed, UserError
from .progress import Progress
from .windows import Window, batches

if TYPE_CHECKING:
    from .parallel import Workers

T = TypeVar("T")

# Logits held at a time by default. The fp32 copy of so many is 128 MiB.
CHUNK_ELEMENTS = 2**25
# On a CPU 28 MiB: from 32 MiB on, glibc gives memory back at once and takes it anew, and to touch it for the first time
# costs several times what is computed in it. Less is slower where a gradient of the whole head comes with each chunk.
CPU_CHUNK_ELEMENTS = 7 * 2**20

UNSCORED = -100  # the label of a token that is no target


class _BaseOutput(tuple):
    """What a head reads of its base model's output: the hidden states, and nothing under any other name."""

    __slots__ = ()

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class _PassThrough(nn.Module):
    """A base model whose last hidden state is its input."""

    @property
    def decoder(self) -> _PassThrough:  # OPT calls `model.decoder`
        return self

    def forward(self, *_, inputs_embeds: Tensor, **__) -> _BaseOutput:
        return _BaseOutput((inputs_embeds,))


def hidden_states(model, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """Last hidden states [B, T, D] of `input_ids` [B, T], as the head takes them.

    Args:
        positions: of the tokens, [B, T]; by default 0, 1, ..., T - 1. Where they start again, so does attention.

    Raises:
        UserError: the class does not separate a base model from its head.
    """
    if model.base_model is model:
        raise UserError(f"{type(model).__name__} has no head over a base model; load a causal language model")
    placed = {} if positions is None else {"position_ids": positions}
    return model.base_model(input_ids=input_ids, use_cache=False, return_dict=True, **placed).last_hidden_state


def head_logits(model, hidden: Tensor) -> Tensor:
    """Logits [B, n, V] of hidden states [B, n, D]: the class's own head with all that it does afterwards.

    Gradients reach the head and `hidden`. The model itself is left untouched, so calls may nest.
    """
    shell = copy.copy(model)
    shell.__dict__["_modules"] = model._modules | {model.base_model_prefix: _PassThrough()}
    # The class's forward, since hooks that live on the instance would run the original instead of its shell. A slice of
    # positions is made contiguous, as torch multiplies it sequence by sequence otherwise, at half the speed.
    return type(model).forward(shell, inputs_embeds=hidden.contiguous(), use_cache=False, return_dict=True).logits


def chunk_elements(device: str) -> int:
    """Logits held at a time by default on a type of device."""
    return min(CHUNK_ELEMENTS, CPU_CHUNK_ELEMENTS) if device == "cpu" else CHUNK_ELEMENTS


def position_chunks(model, hidden: Tensor, chunk: int | None = None) -> Iterator[slice]:
    """Yield the positions of `hidden` [B, T, D] in order, a chunk at a time.

    Args:
        chunk: positions at a time; by default as many as keep to `chunk_elements` logits.
    """
    if chunk is None:
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        chunk = max(1, chunk_elements(hidden.device.type) // (hidden.shape[0] * vocabulary))
    for start in range(0, hidden.shape[1], chunk):
        yield slice(start, min(start + chunk, hidden.shape[1]))


def logit_chunks(model, hidden: Tensor, chunk: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Yield `(positions, logits [B, n, V])` over all positions of `hidden` [B, T, D]; see `position_chunks`."""
    for positions in position_chunks(model, hidden, chunk):
        yield positions, head_logits(model, hidden[:, positions])


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihoods [...] in nats of `targets` [...] under `logits` [..., V], in fp32 or fp64.

    A target of -100 costs nothing.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none", ignore_index=UNSCORED).view_as(
        targets
    )


def sequence_nll(model, input_ids: Tensor, *, first: int = 1, chunk: int | None = None) -> Tensor:
    """Negative log-likelihoods [B, T - first] of the tokens `first:` of `input_ids` [B, T]; `first` >= 1."""
    # Position t predicts token t + 1, and the last token nothing: the model need not see it.
    hidden = hidden_states(model, input_ids[:, :-1])[:, first - 1 :]
    targets = input_ids[:, first:]
    parts = [token_nll(logits, targets[:, part]) for part, logits in logit_chunks(model, hidden, chunk)]
    return torch.cat(parts, dim=1)


class Comparison(NamedTuple):
    """What two models say about the same tokens, each field [...] with one value a predicted token.

    Attributes:
        kl: forward Kullback-Leibler divergence KL(source || result), in nats.
        agrees: whether both give the highest logit to the same token.
        nll: negative log-likelihood of the token under the result, in nats.
        source_nll: the same under the source.
    """

    kl: Tensor
    agrees: Tensor
    nll: Tensor
    source_nll: Tensor


def compare_logits(source: Tensor, result: Tensor, targets: Tensor) -> Comparison:
    """Compare logits [..., V] of two models that predict `targets` [...], in fp32 or fp64.

    Raises:
        UserError: the vocabularies differ, so that there is no divergence.
    """
    check_vocabularies(source, result)
    agrees = source.argmax(-1) == result.argmax(-1)
    source, result = (log_probabilities(logits) for logits in (source, result))
    kl = divergence(source, result)
    nll, source_nll = (-x.gather(-1, targets[..., None])[..., 0] for x in (result, source))
    return Comparison(kl, agrees, nll, source_nll)


def check_vocabularies(source: Tensor, result: Tensor) -> None:
    """Refuse logits [..., V] of two models between which there is no divergence.

    Raises:
        UserError: their V differ.
    """
    if source.shape[-1] != result.shape[-1]:
        raise UserError(
            f"the source has logits for {source.shape[-1]} tokens, the result for {result.shape[-1]}; "
            "models compare over one vocabulary only"
        )


def divergence(source: Tensor, result: Tensor) -> Tensor:
    """Forward KL(source || result) [...] in nats, of log-probabilities [..., V]."""
    # The other way around, sum(p (log q - log p)): the gradient of the result is then not negated element by element.
    return -(source.exp() * (result - source)).sum(-1)


def log_probabilities(logits: Tensor) -> Tensor:
    """Log-probabilities [..., V] of `logits` [..., V], in fp32 or fp64."""
    return logits.log_softmax(-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)


def comparison_chunks(
    source, source_hidden: Tensor, result, hidden: Tensor, targets: Tensor, *, chunk: int | None = None
) -> Iterator[tuple[slice, Comparison]]:
    """Yield `(positions, comparison [B, n])` over all positions, in order.

    Gradients reach both heads and both hidden states, unless the caller forbids it; going backward from each
    chunk as it comes keeps the logits of no other.

    Args:
        source, result: the models.
        source_hidden, hidden: what `hidden_states` gave for each, [B, T, D]; D may differ.
        targets: the tokens that these positions predict, [B, T].
        chunk: positions at a time; by default as many as keep both to `chunk_elements` logits together.

    Raises:
        UserError: the vocabularies differ.
    """
    if chunk is None:
        vocabulary = source.config.get_text_config(decoder=True).vocab_size
        chunk = max(1, chunk_elements(hidden.device.type) // (2 * hidden.shape[0] * vocabulary))
    pairs = zip(logit_chunks(source, source_hidden, chunk), logit_chunks(result, hidden, chunk), strict=True)
    for (positions, source_logits), (_, logits) in pairs:
        yield positions, compare_logits(source_logits, logits, targets[:, positions])


def compare_hidden(
    source, source_hidden: Tensor, result, hidden: Tensor, targets: Tensor, *, chunk: int | None = None
) -> Comparison:
    """The comparison [B, T] over all positions at once; see `comparison_chunks`."""
    chunks = comparison_chunks(source, source_hidden, result, hidden, targets, chunk=chunk)
    fields = zip(*(compared for _, compared in chunks), strict=True)
    return Comparison(*(torch.cat(parts, dim=1) for parts in fields))


@contextmanager
def evaluating(model) -> Iterator[None]:
    """No gradients and no dropout inside; the model's mode is put back afterwards.

    Not inference mode: a rotary table rebuilt inside it could not be trained through afterwards.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def check_ids(model, highest: int) -> None:
    """Refuse a text whose highest token id the model has no embedding for.

    Raises:
        UserError: so it is.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    if highest >= rows:
        raise UserError(f"token id {highest} lies beyond the model's {rows} embeddings; use the model's own tokenizer")


def window_nll(
    model,
    ids: Sequence[int],
    windows: Sequence[Window],
    *,
    lead_id: int | None = None,
    batch_size: int = 1,
    chunk: int | None = None,
    workers: Workers | None = None,
    progress: Progress | None = None,
) -> list[float]:
    """Summed negative log-likelihood, in nats, of the tokens that each window scores.

    Args:
        ids: the whole text.
        lead_id: the token that stands in front of the windows that are led.
        batch_size: windows at a time; a matter of speed, not of the result.
        workers: the processes that take batches by turns, each with a model like this one; all get all sums.
        progress: called with `(windows done, windows in all)` after every batch.

    Raises:
        UserError: an id lies outside the model's vocabulary.
        CheckFailed: a loss is not finite.
    """
    ids = torch.as_tensor(ids)
    check_ids(model, max(int(ids.max()), lead_id or 0))

    def sums(batch: list[Window]) -> list[float]:
        totals = batch_nll(model, ids, batch, lead_id=lead_id, chunk=chunk).sum(1).tolist()
        for window, total in zip(batch, totals, strict=True):
            if not math.isfinite(total):
                raise CheckFailed(
                    f"the loss of tokens {window.first_scored}:{window.stop} is {total}; "
                    "look for non-finite weights, or try a wider dtype"
                )
        return totals

    with evaluating(model):
        return list(chain.from_iterable(map_batches(sums, windows, batch_size, workers, progress)))


def batch_nll(
    model, ids: Tensor, batch: Sequence[Window], *, lead_id: int | None = None, chunk: int | None = None
) -> Tensor:
    """Negative log-likelihoods [B, scored] in nats of what B windows of one shape score; see `window_nll`."""
    tokens = torch.stack([ids[w.start : w.stop] for w in batch])
    if batch[0].led:
        tokens = F.pad(tokens, (1, 0), value=lead_id)
    nll = sequence_nll(model, tokens.to(model.device), first=tokens.shape[1] - batch[0].scored, chunk=chunk)
    return nll.cpu().double()  # to be summed on the CPU, as not every accelerator has fp64


def map_batches(
    work: Callable[[list[Window]], T],
    windows: Sequence[Window],
    batch_size: int,
    workers: Workers | None = None,
    progress: Progress | None = None,
) -> list[T]:
    """What `work` makes of each batch of windows, in order; several processes take batches by turns.

    Which windows are run together does not depend on how many processes there are, nor does any figure then.

    Args:
        work: gives something that can be pickled.
        progress: called with `(windows done, windows in all)` after every batch.
    """
    todo = list(batches(windows, batch_size))
    done = list(accumulate(map(len, todo)))
    others = workers.size - 1 if workers else 0

    def one(number: int) -> T:
        made = work(todo[number])
        if progress:  # the others are about as far
            progress(done[min(number + others, len(done) - 1)], len(windows))
        return made

    return workers.spread(one, range(len(todo))) if workers else [one(number) for number in range(len(todo))]
