"""How fast kvfold's loop trains, and in how much memory, beside transformers' Trainer on the same model.

    python -m kvfold.recipes.bench.uptrain [--train attention all] [--precision fp32] [--teacher] [--runs 7]

A random Llama, the same batches, trained parameters, precision, AdamW and clipping on both sides. Each is a process of
its own, both are up together and take one step in turn, so that the machine's moods hit both alike; a ratio is the
median of those of every turn, and the first step of each is not counted. See `sides` for what is inside the clock.

Memory is the peak of each whole process. What kvfold does not hold are logits: Trainer has those of the whole batch at
once, in fp32, and their log-probabilities and gradient beside them; kvfold has those of a chunk. The table counts them
once.

With --teacher, kvfold learns from a multi-head model of the same size as well: a step with it, against a step without
it and one forward pass of the teacher, which is transformers' own.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack

from ...common.scoring import chunk_elements
from ...uptrain.selection import TRAINED
from ..tables import row, rule
from .sides import DTYPES, Ending, Job, Side


def jobs(options: argparse.Namespace, train: str) -> dict[str, Job]:
    """What is to be measured beside each other, by what it is called in the tables."""
    model = {
        "model_type": "llama",
        "vocab_size": options.vocabulary,
        "hidden_size": options.hidden,
        "intermediate_size": options.intermediate,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.hidden // options.heads,
        "max_position_embeddings": options.window,
        "tie_word_embeddings": options.tied,
    }
    source = {**model, "num_key_value_heads": options.heads}

    def job(side: str, model: dict = model, teacher: dict | None = None) -> Job:
        return Job(
            side=side,
            model=model,
            teacher=teacher,
            train=train,
            precision=options.precision,
            device="cpu",
            batch=options.batch,
            window=options.window,
            block=1,
            blocks=1 + options.runs,
        )

    table = {"Trainer": job("Trainer"), "kvfold": job("kvfold")}
    if options.teacher:
        table |= {"kvfold with a teacher": job("kvfold", teacher=source), "forward": job("forward", source)}
    return table


def measure(table: dict[str, Job]) -> tuple[dict[str, list[float]], dict[str, Ending]]:
    """Seconds of every block but the first, and what each side says at its end."""
    with ExitStack() as stack:
        sides = {name: stack.enter_context(Side(job)) for name, job in table.items()}
        blocks = {job.blocks for job in table.values()}
        times = [{name: side.block() for name, side in sides.items()} for _ in range(*blocks)]
        endings = {name: side.end() for name, side in sides.items()}
    return {name: [each[name] for each in times[1:]] for name in table}, endings


def median_ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    """Median over the turns of one side's seconds over another's."""
    return statistics.median(own / other for own, other in zip(seconds, base, strict=True))


def saved_bytes(job: Job) -> int:
    """Bytes of fp32 logits of a batch that are not there together, counted once."""
    return 4 * max(0, job.batch * job.window * job.model["vocab_size"] - chunk_elements(job.device))


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs="+", choices=TRAINED, default=["attention", "all"])
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--teacher", action="store_true", help="measure what a teacher costs too")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=1408)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--tied", action="store_true", help="tie the head to the embedding")
    parser.add_argument("--runs", type=int, default=7, help="counted steps of each side")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    options = parse(args)
    print(
        f"Llama of {options.layers} layers, hidden {options.hidden}, {options.heads} heads, {options.kv_heads} KV "
        f"heads, vocabulary {options.vocabulary:,}; {options.batch} x {options.window} tokens in {options.precision}, "
        f"{options.runs} alternating steps"
    )
    titles = ("trained", "loop", "median tokens/s", "min", "max", "x Trainer", "peak MB", "lower by MB")
    print(row(*titles, "logits not held MB", "mean loss"))
    print(rule(len(titles) + 2))
    costs = []
    for train in options.train:
        table = jobs(options, train)
        times, endings = measure(table)
        for name in ("Trainer", "kvfold"):
            job, end = table[name], endings[name]
            speeds = [job.block_tokens / seconds for seconds in times[name]]
            ratio = median_ratio(times["Trainer"], times[name])
            lower = endings["Trainer"].peak - end.peak
            cells = [
                f"{end.trained / 1e6:.1f} M of {end.parameters / 1e6:.1f} M ({train})",
                name,
                *(f"{speed:.0f}" for speed in (statistics.median(speeds), min(speeds), max(speeds))),
                f"{ratio:.2f}",
                f"{end.peak / 1e6:.0f}",
                f"{lower / 1e6:.0f}",
                f"{saved_bytes(job) / 1e6:.0f}" if name == "kvfold" else "0",
                f"{end.loss:.5f}",
            ]
            print(row(*cells), flush=True)
        if options.teacher:
            step, forward, taught = (times[name] for name in ("kvfold", "forward", "kvfold with a teacher"))
            ratio = median_ratio(taught, [sum(pair) for pair in zip(step, forward, strict=True)])
            costs.append((train, *map(statistics.median, (step, forward, taught)), ratio))
    if costs:
        print()
        print(row("trained", "step s", "forward pass of the teacher s", "step with a teacher s", "x step and pass"))
        print(rule(5))
    for train, *figures in costs:
        print(row(train, *(f"{each:.2f}" for each in figures)))


if __name__ == "__main__":
    main()
