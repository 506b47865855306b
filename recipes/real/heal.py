"""Healing a real checkpoint: SmolLM2-135M-Instruct, folded from 3 KV heads to 1 and trained on local text.

    python -m kvfold.recipes.real.heal [--only START ...] [--tokens 199680] [--learning-rate 1e-3]
                                       [--layer-learning-rate 1e-3] [--at-once N] [--plot FILE.svg] [--cache DIR]

Each start is a way of the lane `smollm2` (whose results are used again), and learns from the model that it was folded
from: first each layer's attention outputs, then its distribution of the next token, on the training side of the
built-in text, attention only. Judged as that lane judges, before and after: on the built-in text that is never
trained on, the training's own domain, and on the Debian handbook, text of another kind.

Teacher and student in fp32 take about 6 s a window of 512 tokens on two idle cores, so a start takes 40 minutes.
Results are kept in the cache, and a run saves where it is, so a lane that was stopped goes on there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...common.cache import cache_folder
from ...common.errors import UserError
from ...common.status import leave, prepare_process, status_of
from ...common.text import BUILTIN
from ...convert.source import open_source
from ...eval.ppl import perplexity
from ..heal.looks import Looks, read_looks
from ..plots import Panel, draw_losses
from ..tables import row, rule
from ..timed import JUDGING, Made, code_digest, remembered, run_jobs, timed_convert, uptraining
from .handbook import fetch_handbook
from .smollm2 import WAYS, WINDOW, fetch_source, result_of

STARTS = ("svd", "mean")
CHOICES = ("svd", "mean", "svd-refined", "mean-refined")
DOMAIN, OTHER = "built-in", "handbook"
# What the start svd must come to, x the source's perplexity, on no more than so many tokens.
TARGETS = {DOMAIN: 1.8, OTHER: 2.8}
MOST_TOKENS = 200_000


@dataclass(frozen=True)
class Plan:
    """What all starts have in common.

    Attributes:
        tokens: to train on.
        learning_rate, layer_learning_rate: peaks of the two stages.
        layer_share: share of the steps in the first stage.
        data: texts to train on.
        batch_size, window: windows a step, tokens a window.
        looks: at the held-out text, after the first; each costs about as much as ten windows of training.
        eval_windows: windows of a look, of each text.
        judge_windows: windows that perplexity is measured on, of each text.
        calib_windows: windows that conversions are calibrated on.
    """

    tokens: int = 199_680
    learning_rate: float = 1e-3
    layer_learning_rate: float = 1e-3
    layer_share: float = 0.2
    data: Sequence[str] = (BUILTIN,)
    batch_size: int = 4
    window: int = WINDOW
    looks: int = 6
    eval_windows: int = 8
    judge_windows: int = 16
    calib_windows: int = 64

    def recipe(self, source: Path, texts: Mapping[str, str]) -> dict[str, Any]:
        """The recipe of a run, but for the model.

        Raises:
            UserError: there are too few tokens for the looks.
        """
        steps = self.tokens // (self.batch_size * self.window)
        if steps < self.looks:
            raise UserError(f"{self.tokens:,} tokens are {steps} steps, and {self.looks} looks are wanted; give more")
        return {
            "teacher": str(source),
            "data": list(self.data),
            "eval_text": [text for text in texts.values() if text not in self.data],
            "window": self.window,
            "steps": steps,
            "batch_size": self.batch_size,
            "learning_rate": self.learning_rate,
            "layer_share": self.layer_share,
            "layer_learning_rate": self.layer_learning_rate,
            "warmup_steps": max(1, steps // 20),
            "eval_windows": self.eval_windows,
            "eval_every": -(-steps // self.looks),
            "save_every": 5,  # two minutes
            "keep": 1,
            "device": "cpu",
        }


@dataclass(frozen=True)
class Healed:
    """One start.

    Attributes:
        before, after: perplexity by text.
        made: the healed checkpoint, and what the last process of its run took.
        looks: the run's curve.
    """

    before: dict[str, float]
    after: dict[str, float]
    made: Made
    looks: Looks


def run_lane(
    cache: Path, source: Path, texts: Mapping[str, str], starts: Sequence[str], plan: Plan, at_once: int
) -> tuple[dict[str, float], dict[str, Healed]]:
    """Convert, judge, heal and judge again; the source's perplexities, and a result by start.

    Args:
        source: the checkpoint.
        texts: what to judge on, by name.
        at_once: how many starts to train at a time.

    Raises:
        UserError: a number does not fit.
        CheckFailed: a command failed; it has said why.
    """
    recipe = plan.recipe(source, texts)
    reference = judge(cache, source, texts, plan)
    say("source", reference)
    folded = {}
    for start in starts:
        way = WAYS[start]
        options = way.flags(cache, plan.calib_windows)
        folded[start] = timed_convert(source, result_of(cache, start), options, way.to).folder
    before = {start: judge(cache, folder, texts, plan) for start, folder in folded.items()}
    for start, figures in before.items():
        say(start, figures)
    jobs = [uptraining(folder, result_of(cache, f"{start}-healed"), recipe) for start, folder in folded.items()]
    results = {}
    for start, made in zip(starts, run_jobs(jobs, at_once), strict=True):
        after = judge(cache, made.folder, texts, plan)
        say(f"{start}, healed", after)
        results[start] = Healed(before[start], after, made, read_looks(made.folder))
    return reference, results


def judge(cache: Path, folder: Path, texts: Mapping[str, str], plan: Plan) -> dict[str, float]:
    """Perplexity by text."""
    protocol = {"window": plan.window, "max_windows": plan.judge_windows, "batch_size": 4}

    def measure() -> dict[str, float]:
        return {name: perplexity(folder, text=[text], **protocol).perplexity for name, text in texts.items()}

    with open_source(str(folder)) as source:
        asked = {"model": source.digest(), "texts": dict(texts), "protocol": protocol, "code": code_digest(JUDGING)}
    return remembered(cache / f"{folder.name}.judged.json", asked, measure)


def say(name: str, figures: Mapping[str, float]) -> None:
    said = ", ".join(f"{text} {figure:,.2f}" for text, figure in figures.items())
    print(f"{name}: perplexity {said}", file=sys.stderr, flush=True)


def report(reference: Mapping[str, float], results: Mapping[str, Healed]) -> Iterator[str]:
    """The tables and what is to be read from them, line by line."""
    titles = [f"{text} {side} | x source" for text in reference for side in ("before", "after")]
    yield row("start", *titles, "tokens", "minutes of steps", "peak GB")
    yield rule(4 + 2 * len(titles))
    for start, healed in results.items():
        cells = []
        for text, figure in reference.items():
            for side in (healed.before, healed.after):
                cells += [f"{side[text]:,.2f}", f"{side[text] / figure:,.2f}"]
        took = (f"{healed.looks.seconds / 60:.1f}", f"{healed.made.peak_bytes / 1e9:.2f}")
        yield row(start, *cells, f"{healed.looks.tokens[-1]:,}", *took)
    yield "source: " + ", ".join(f"{text} {figure:,.2f}" for text, figure in reference.items())
    for start, healed in results.items():
        for text in healed.looks.losses:
            points = ", ".join(f"{loss:.3f} at {tokens:,}" for tokens, loss in healed.looks.points(text))
            yield f"{start}, {Path(text).stem}: nats a token {points} (source {healed.looks.source[text]:.3f})"
    if healed := results.get("svd"):
        yield from (verdict(healed, text, figure) for text, figure in reference.items())


def verdict(healed: Healed, text: str, reference: float) -> str:
    """Whether a start has come to where it must, in a sentence."""
    ratio, tokens = healed.after[text] / reference, healed.looks.tokens[-1]
    reached = ratio <= TARGETS[text] and tokens <= MOST_TOKENS
    wanted = f"at most {TARGETS[text]} on {MOST_TOKENS:,}"
    return f"{text}: {ratio:.2f} x source on {tokens:,} tokens, {wanted}: {'reached' if reached else 'MISSED'}"


def panels(results: Mapping[str, Healed]) -> list[Panel]:
    """A panel a text."""
    any_looks = next(iter(results.values())).looks
    return [
        Panel(Path(text).stem, {start: healed.looks.points(text) for start, healed in results.items()}, loss)
        for text, loss in any_looks.source.items()
    ]


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=cache_folder())
    parser.add_argument(
        "--only", action="append", choices=CHOICES, metavar="START", help=f"of {', '.join(CHOICES)}; default svd, mean"
    )
    for name in ("tokens", "batch_size", "learning_rate", "layer_learning_rate", "layer_share", "calib_windows"):
        default = getattr(Plan, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"{default}")
    parser.add_argument("--data", action="append", metavar="TEXT", help="to train on; builtin by default")
    parser.add_argument("--at-once", type=int, default=1, help="trainings at a time, which share the cores")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves as an SVG")
    options = parser.parse_args(args)
    known = {field.name for field in fields(Plan)}
    plan = Plan(**{name: value for name, value in vars(options).items() if name in known and value is not None})
    cache = options.cache.resolve()
    source = fetch_source(cache)
    texts = {DOMAIN: BUILTIN} | ({OTHER: str(path)} if (path := fetch_handbook(cache)) else {})
    starts = list(dict.fromkeys(options.only or STARTS))
    reference, results = run_lane(cache, source, texts, starts, plan, options.at_once)
    for line in report(reference, results):
        print(line)
    if options.plot:
        draw_losses(panels(results), options.plot)
    return 0


if __name__ == "__main__":
    prepare_process()
    leave(status_of(main))
