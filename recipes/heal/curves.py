"""How fast each way to convert the embedded model heals, at the same cached elements: the GQA paper's figure 5.

    python -m kvfold.recipes.heal.curves [--only WAY ...] [--tokens 1638400] [--learning-rate 1e-3] [--plot FILE.svg]
                                         [--at-once 2] [--cache DIR]

The model is folded from 8 KV heads to 2 and to 1, or to latents as small, and trained on by cross entropy on the
built-in text, which it learnt from: attention only, one batch, one learning rate for all, and that constant after the
warm-up, so that each point of a curve is a training that might have ended there. All are judged on the same held-out
windows. alpha is the paper's (arXiv 2305.13245): tokens of uptraining as a share of those the model was trained on.

The rate was tried at 8 -> 1 for 100 steps: 3e-4, 1e-3 and 3e-3 left svd at 3.486, 3.457 and 3.466 nats a token, and
1e-3 and 3e-3 left mean at 3.691 and 3.590. So 1e-3 suits what is nearly healed, and 3e-3, the peak of the model's own
training, what is far off.

Results are kept in the cache, so a lane that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...common.cache import cache_folder
from ...common.errors import UserError
from ...common.status import leave, prepare_process, status_of
from ...common.text import BUILTIN
from ..plots import Panel, draw_losses
from ..tables import row, rule
from ..timed import Job, conversion, run_jobs, uptraining
from ..tiny import MODEL_DIR
from .looks import Looks, read_looks

PRETRAIN_TOKENS = 3000 * 8 * 512  # of the embedded model: recipes/tiny/train.py
HEADS = {2: "8 -> 2", 1: "8 -> 1 (MQA)"}
METHODS = ("svd", "aligned", "mean", "first", "random")
MLA = "mla"
WAYS = (*METHODS, MLA)
HEAD_ELEMENTS = 64  # cached for a KV head: its key and value
# The loss that is within 2 % of the source's, and the one whose perplexity is: of 3.4 nats a token 2 % are 0.07, of
# its perplexity 0.02.
NEAR: dict[str, Callable[[float], float]] = {
    "loss": lambda source: 1.02 * source,
    "perplexity": lambda source: source + math.log(1.02),
}
SHOWN = (0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # shares of the tokens in the table
LOOKS = 16  # at the held-out text, after the first


@dataclass(frozen=True)
class Plan:
    """What all runs have in common; `window` and `calib_window` in tokens, the other counts in windows."""

    tokens: int = 1_638_400
    learning_rate: float = 1e-3
    batch_size: int = 8
    window: int = 512
    eval_windows: int = 40
    calib_windows: int = 64
    calib_window: int = 512

    @property
    def name(self) -> str:
        """Ends the names of results, so that those of several rates are kept side by side."""
        return f"{self.tokens}-{self.learning_rate:g}"

    @property
    def steps(self) -> int:
        """Optimizer steps, of which every `LOOKS`th part ends with a look.

        Raises:
            UserError: there are too few tokens for that.
        """
        a_look = self.batch_size * self.window * LOOKS
        if self.tokens < a_look:
            raise UserError(f"{self.tokens:,} tokens are fewer than {LOOKS} steps; give at least {a_look:,}")
        return self.tokens // a_look * LOOKS

    def recipe(self) -> dict[str, Any]:
        return {
            "data": [BUILTIN],
            "reference": str(MODEL_DIR),
            "window": self.window,
            "steps": self.steps,
            "batch_size": self.batch_size,
            "micro_batch_size": min(2, self.batch_size),  # what caches hold; more is no faster
            "learning_rate": self.learning_rate,
            "schedule": "constant",
            "warmup_steps": min(20, self.steps // 4),
            "eval_windows": self.eval_windows,
            "eval_every": self.steps // LOOKS,
            "save_every": self.steps // LOOKS,
            "keep": 1,
            "device": "cpu",
        }

    def conversion(self, way: str, heads: int, out: Path) -> Job:
        options = {"--calib-windows": str(self.calib_windows), "--calib-window": str(self.calib_window)}
        if way == MLA:
            return conversion(
                MODEL_DIR, out, {"--kv-elements": str(heads * HEAD_ELEMENTS), "--form": "plain", **options}, "mla"
            )
        return conversion(MODEL_DIR, out, {"--kv-heads": str(heads), "--method": way, **options})


PLAN = Plan()

Curves = Mapping[int, Mapping[str, Looks]]
"""What each way came to, by KV heads and the way's name."""


def run_lane(cache: Path, ways: Sequence[str], plan: Plan, at_once: int) -> Curves:
    """Convert the embedded model in each way, and train the results, `at_once` at a time.

    Raises:
        UserError: a number does not fit.
        CheckFailed: a command failed; it has said why.
    """
    recipe = plan.recipe()
    starts = {(heads, way): cache / "curves" / f"{way}-{heads}" for heads in HEADS for way in ways}
    run_jobs(plan.conversion(way, heads, out) for (heads, way), out in starts.items())
    healed = {key: start.with_name(f"{start.name}-{plan.name}") for key, start in starts.items()}
    run_jobs((uptraining(starts[key], out, recipe) for key, out in healed.items()), at_once)
    return {heads: {way: read_looks(healed[heads, way]) for way in ways} for heads in HEADS}


def first_near(looks: Looks, what: str) -> float | None:
    """The alpha of the first look at which the loss, or its perplexity, is within 2 % of the source's; None if it never
    is."""
    enough = NEAR[what](looks.source[BUILTIN])
    return next((tokens / PRETRAIN_TOKENS for tokens, loss in looks.points(BUILTIN) if loss <= enough), None)


def compare(heads: str, curve: Looks, other: Looks, names: tuple[str, str]) -> str:
    """Whether one curve lies below another throughout, in a sentence."""
    ours, theirs = curve.losses[BUILTIN], other.losses[BUILTIN]
    gaps = [there - here for here, there in zip(ours, theirs, strict=True)]
    if min(gaps) > 0:
        return f"{heads}: {names[0]} lies below {names[1]} throughout, by at least {min(gaps):.4f} nats a token"
    place = next(place for place, gap in enumerate(gaps) if gap <= 0)
    return f"{heads}: {names[0]} does not lie below {names[1]} throughout: not at {curve.tokens[place]:,} tokens"


def report(curves: Curves) -> Iterator[str]:
    """The table and what is to be read from it, line by line."""
    any_looks = next(iter(next(iter(curves.values())).values()))
    shown = sorted({round(share * (len(any_looks.tokens) - 1)) for share in SHOWN})
    titles = [f"{any_looks.tokens[place]:,} tokens" for place in shown]
    yield row("KV heads", "way", *titles, *(f"alpha, {what} within 2 %" for what in NEAR), "seconds")
    yield rule(3 + len(shown) + len(NEAR))
    source = any_looks.source[BUILTIN]
    yield row(8, "source", *(f"{source:.4f}" for _ in shown), *(0 for _ in NEAR), "")
    for heads, ways in curves.items():
        for way, looks in ways.items():
            near = ["-" if (alpha := first_near(looks, what)) is None else f"{alpha:.3f}" for what in NEAR]
            losses = (f"{looks.losses[BUILTIN][place]:.4f}" for place in shown)
            yield row(HEADS[heads], way, *losses, *near, f"{looks.seconds:.0f}")
    for heads, ways in curves.items():
        order = sorted(ways, key=lambda way: ways[way].losses[BUILTIN][-1])
        yield f"{HEADS[heads]}: from the lowest loss to the highest at the end: {', '.join(order)}"
        if {"svd", "mean"} <= ways.keys():
            yield compare(HEADS[heads], ways["svd"], ways["mean"], ("svd", "mean"))


def panels(curves: Curves) -> list[Panel]:
    return [
        Panel(
            HEADS[heads],
            {way: looks.points(BUILTIN) for way, looks in ways.items()},
            next(iter(ways.values())).source[BUILTIN],
        )
        for heads, ways in curves.items()
    ]


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=cache_folder())
    parser.add_argument("--only", action="append", choices=WAYS, metavar="WAY", help=f"one of {', '.join(WAYS)}")
    parser.add_argument("--tokens", type=int, default=PLAN.tokens, help="to train each result on")
    parser.add_argument("--learning-rate", type=float, default=PLAN.learning_rate)
    parser.add_argument("--at-once", type=int, default=2, help="trainings at a time, which share the cores")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves as an SVG")
    options = parser.parse_args(args)
    plan = replace(PLAN, tokens=options.tokens, learning_rate=options.learning_rate)
    curves = run_lane(options.cache.resolve(), list(dict.fromkeys(options.only or WAYS)), plan, options.at_once)
    for line in report(curves):
        print(line)
    print(
        f"held-out loss in nats a token on {plan.eval_windows} windows of {plan.window}; {plan.steps} steps of "
        f"{plan.batch_size} windows, learning rate {plan.learning_rate:g}, constant; the model was trained on "
        f"{PRETRAIN_TOKENS:,} tokens"
    )
    if options.plot:
        draw_losses(panels(curves), options.plot)
    return 0


if __name__ == "__main__":
    prepare_process()
    leave(status_of(main))
