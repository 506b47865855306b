"""A loaded model as lm-evaluation-harness takes it, shared by several processes. Needs lm-eval to be installed.

lm-eval would give each process documents of its own, draw few-shot examples afresh in each, and gather the metrics
process by process: figures, and bootstrapped errors, then depend on how many there are. Here every process makes all
requests, answers its share of them, and hears the other answers; what lm-eval computes of them is the same everywhere.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from ..attention.absorb import absorb
from ..common.errors import CheckFailed, EnvironmentFailure, KvfoldError, UserError
from ..common.parallel import Workers
from ..common.progress import Progress
from ..common.scoring import check_ids
from ..common.sources import first_line, quiet

_AT_ONCE = 4  # batches of documents between two steps of the progress of rolling requests


class Harness(HFLM):
    """A causal language model behind lm-eval's interface; processes share its requests.

    Args:
        model: as `load_model` gives it, on this process's device.
        tokenizer: its own; lm-eval gives it a token to pad with.
        workers: the processes that share the requests; each has a `Harness` over a model like this one.
        batch_size: sequences at a time.
        progress: called with `(requests answered, requests in all)` of this process.

    Raises:
        UserError: the tokenizer has no token to stand before a text.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, workers: Workers, batch_size: int = 1, progress: Progress | None = None
    ) -> None:
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            raise UserError("the model's tokenizer has neither BOS nor EOS, one of which lm-eval begins a text with")
        super().__init__(pretrained=model, backend="causal", tokenizer=tokenizer, batch_size=batch_size)
        self._workers = workers
        self._count = _Count(progress)
        self.set_cache_hook(self._count)

    def tok_encode(self, string: str, *args: Any, **kwargs: Any) -> list[int]:
        """The ids of a text: all that the model is asked about comes through here.

        Raises:
            UserError: the model has no embedding for one.
        """
        ids = super().tok_encode(string, *args, **kwargs)
        check_ids(self.model, max(ids, default=0))
        return ids

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._share(super().loglikelihood, requests, lambda answer: answer[0])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        # lm-eval says nothing of any document before it is through with all.
        step = _AT_ONCE * self.batch_size
        ask = super().loglikelihood_rolling

        def in_steps(requests: list[Instance]) -> list[float]:
            parts = (requests[start : start + step] for start in range(0, len(requests), step))
            return [answer for part in parts for answer in ask(part)]

        return self._share(in_steps, requests, lambda answer: answer)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        if self.tokenizer.eos_token_id is None:
            raise UserError("the model's tokenizer has no EOS, at which lm-eval ends a text; leave such tasks out")
        with _absorbed(self.model):
            return self._share(super().generate_until, requests)

    def _share(
        self,
        ask: Callable[[list[Instance]], list[Any]],
        requests: Sequence[Instance],
        likelihood: Callable[[Any], float] = lambda answer: 0.0,
    ) -> list[Any]:
        """Answers to all requests, of which each process finds some.

        The requests of one document go to one process, as lm-eval saves work where they begin alike.

        Raises:
            CheckFailed: a log-likelihood is not a number.
        """
        documents: dict[Any, int] = {}
        places = [documents.setdefault((r.task_name, r.doc_id), len(documents)) for r in requests]
        size = self._workers.size
        shares = [[n for n, place in enumerate(places) if place % size == rank] for rank in range(size)]

        def answer(share: list[int]) -> list[Any]:
            if not share:
                return []
            self._count.begin(len(share))
            with one_line(str(requests[share[0]].task_name)):
                answers = ask([requests[number] for number in share])
            for number, found in zip(share, answers, strict=True):
                if math.isnan(likelihood(found)):
                    request = requests[number]
                    raise CheckFailed(
                        f"the likelihood of document {request.doc_id} of task {request.task_name} is not a number; "
                        "look for non-finite weights, or try a wider dtype"
                    )
            return answers

        told = self._workers.spread(answer, shares)
        found: list[Any] = [None] * len(requests)
        for share, answers in zip(shares, told, strict=True):
            for number, one in zip(share, answers, strict=True):
                found[number] = one
        return found


class _Count:
    """Stands where lm-eval would keep answers for another time, and counts them."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self._total, self._done = progress, 0, 0

    def begin(self, total: int) -> None:
        self._total, self._done = total, 0

    def add_partial(self, *_: Any) -> None:
        self._done += 1
        if self._progress:
            self._progress(self._done, self._total)


def _absorbed(model: Any) -> AbstractContextManager[Any]:
    """Stock MLA decodes in latent space inside; what cannot be absorbed decodes as it is."""
    try:
        return absorb(model)
    except UserError:
        return nullcontext()


@contextmanager
def one_line(name: str) -> Iterator[None]:
    """Turn what lm-eval and datasets raise over a task into our errors."""
    try:
        yield
    except (KvfoldError, MemoryError):
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ConnectionError | TimeoutError) or "offline" in type(cause).__name__.lower():
                raise EnvironmentFailure(
                    f"the data of task {name} cannot be downloaded ({first_line(error)}); check the network, or give a "
                    "task file with local data"
                ) from error
            cause = cause.__cause__ or cause.__context__
        theirs = isinstance(error, RecursionError) or "scripts are no longer supported" in str(error)
        if isinstance(error, RuntimeError) and not theirs:
            raise  # torch's; the machine's or ours
        if isinstance(error, OSError) and error.errno and not isinstance(error, FileNotFoundError):
            raise
        raise UserError(f"task {name} cannot be run{_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What is wrong with a task, and the way out: in our words where theirs say nothing."""
    if isinstance(error, StopIteration):
        return ": its data holds no document; fill it, or name another split"
    if isinstance(error, RecursionError):
        return ": it contains itself, or is nested too deeply; untangle its file"
    kind, said = type(error).__name__, error
    if isinstance(error, LookupError) or not str(error):  # says what was looked up, but not for what
        frames = traceback.extract_tb(error.__traceback__)[::-1]
        kind += f" in {next((frame for frame in frames if 'lm_eval' in frame.filename), frames[0]).name}"
    if isinstance(error, KeyError) and len(error.args) == 1 and "\n" in str(error.args[0]):
        said = error.args[0]  # which printing would put into one line
    return f" ({kind}): {first_line(said)}; look at its file and data, and at what was asked of it"


@contextmanager
def hushed() -> Iterator[None]:
    """Keep lm-eval from standard output, its bars and remarks from the screen, and its statistics in this process.

    lm-eval would compute its bootstrap in a pool of forked processes, which inherit our signal handlers, threads and
    accelerator; in one process it is the same figure.
    """
    log, draw, pool = logging.getLogger("lm_eval"), tqdm.__init__, os.environ.get("DISABLE_MULTIPROC")
    level = log.level

    def draw_nothing(self: tqdm, *args: Any, **kwargs: Any) -> None:
        draw(self, *args, **{**kwargs, "disable": True})

    log.setLevel(logging.CRITICAL)
    tqdm.__init__ = draw_nothing  # many of its bars cannot be turned off in another way
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with quiet(), redirect_stdout(sys.stderr):
            yield
    finally:
        log.setLevel(level)
        tqdm.__init__ = draw
        if pool is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = pool
