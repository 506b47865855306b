"""Train the embedded demo model from nothing but the English inside CPython.

    python -m kvfold.recipes.tiny.train --out kvfold-tiny

The model is a stock multi-head Llama of 2.4 M parameters with its own byte-level BPE of 2048 tokens. It
learns from the training part of the built-in text (`kvfold.common.text`), and is judged on the held-out tenth
against a unigram model, the best that can be done without looking at the context.

The text is small, 0.6 M tokens read some twenty times, so the recipe leans on what keeps a model from learning
by heart: dropout on every branch, strong weight decay, and documents packed anew for each pass. The defaults
are those of the shipped model; the same machine with as many threads gives the same bits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import click
import torch
from accelerate import Accelerator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ...common.atomic import output_directory
from ...common.errors import KvfoldError, UserError
from ...common.loading import load_model
from ...common.scoring import window_nll
from ...common.text import builtin_documents, join_documents, text_hash
from ...common.windows import split_windows
from ...uptrain.data.store import Tensors
from ...uptrain.loop import LoopKnobs, Training
from ...uptrain.objective import Trainee
from ...uptrain.order import Order
from ...uptrain.schedule import Schedule, course

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 2048
LOG_EVERY = 50  # steps
CONTEXT = 512  # tokens: the length of a training window, and max_position_embeddings
REGULARISED = ("embed_tokens", "o_proj", "down_proj")  # what is added to the residual stream


def build_tokenizer(documents: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE with exactly GPT-2's pre-tokenizer, which llama.cpp knows by that name.

    `END_OF_TEXT`, id 0, is both bos and eos. Nothing is added to a text by itself.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model(seed: int) -> LlamaForCausalLM:
    """An untrained fp32 model: 4 layers of 8 heads of 32, with as many key/value heads as query heads."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def training_windows(documents: list[list[int]], passes: int, seed: int) -> torch.Tensor:
    """Pack tokenised documents, each closed by id 0, into windows of `CONTEXT` tokens, int64, (W, S).

    Each pass shuffles the documents, so that a window never comes back with the same cut. The last tokens of
    a pass that fill no window are left out, other ones each time.
    """
    rows = []
    for number in range(passes):
        order = random.Random(f"{seed}/{number}").sample(documents, len(documents))
        stream = torch.tensor(list(chain(*((*document, 0) for document in order))))
        whole = len(stream) // CONTEXT * CONTEXT
        rows.append(stream[:whole].view(-1, CONTEXT))  # (S*n,) -> (n, S)
    return torch.cat(rows)


def model_loss(model: PreTrainedModel, ids: list[int]) -> float:
    """Mean loss in nats a token, scored as `kvfold eval ppl` does: windows of `CONTEXT`, no BOS."""
    windows = split_windows(len(ids), CONTEXT)
    return sum(window_nll(model, ids, windows)) / sum(window.scored for window in windows)


def unigram_loss(documents: list[list[int]], ids: list[int]) -> float:
    """What `model_loss` is for token frequencies alone, counted in the documents, with add-one smoothing."""
    counts = torch.bincount(torch.tensor(list(chain(*documents))), minlength=VOCAB_SIZE) + 1
    log_p = torch.log(counts / counts.sum())  # (vocabulary,)
    scored = [ids[window.first_scored : window.stop] for window in split_windows(len(ids), CONTEXT)]
    return -log_p[list(chain(*scored))].mean().item()


def add_dropout(model: LlamaForCausalLM, rate: float) -> None:
    """Drop out what each branch adds to the residual stream, in training only.

    Llama has no such dropout of its own. A hook leaves the architecture, and the saved model, stock.
    """

    def drop(module: torch.nn.Module, _: tuple, output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(output, rate, module.training)

    for name, module in model.named_modules():
        if name.endswith(REGULARISED):
            module.register_forward_hook(drop)


@click.command(context_settings={"show_default": True})
@click.option("--out", type=click.Path(path_type=Path), default="kvfold-tiny", help="New directory to write.")
@click.option("--steps", default=3000, help="Optimizer steps.")
@click.option("--batch-size", default=8, help=f"Windows of {CONTEXT} tokens a step.")
@click.option("--learning-rate", default=3e-3, help="Peak, after the warm-up.")
@click.option("--weight-decay", default=0.3, help="Decoupled, on matrices.")
@click.option("--dropout", default=0.2, help="Share of each branch that is dropped in training.")
@click.option("--seed", default=0, help="Initial weights, order of the text, dropout.")
@click.option("--precision", type=click.Choice(["no", "bf16"]), default="bf16", help="Of the products.")
@click.option("--eval-every", default=500, help="Steps between two looks at the held-out loss.")
def main(
    out: Path,
    steps: int,
    batch_size: int,
    learning_rate: float,
    weight_decay: float,
    dropout: float,
    seed: int,
    precision: str,
    eval_every: int,
) -> None:
    """Train the tiny demo model on the text inside CPython, and print how good it became."""
    if out.exists():
        raise UserError(f"{out} exists; name a new directory with --out")
    started = time.monotonic()
    knobs = LoopKnobs(
        course(steps, Schedule("cosine", min(200, steps // 10)), learning_rate=learning_rate),
        batch_size,
        batch_size,
        weight_decay=weight_decay,
        seed=seed,
    )

    texts = builtin_documents(held_out=False)
    tokenizer = build_tokenizer(texts)
    documents = [tokenizer(text, verbose=False).input_ids for text in texts]
    tokens = sum(map(len, documents)) + len(documents)
    windows = training_windows(documents, passes=-(-steps * batch_size * CONTEXT // tokens) + 1, seed=seed)
    seen = tokenizer(join_documents(texts[::10]), verbose=False).input_ids
    held_out = join_documents(builtin_documents(held_out=True))
    unseen = tokenizer(held_out, verbose=False).input_ids

    model = build_model(seed)
    add_dropout(model, dropout)

    click.echo(f"training text {text_hash(join_documents(texts))}, {tokens} tokens a pass")
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    training = Training(Trainee(model), Tensors(windows), Order([len(windows)], seed=seed), knobs, accelerator)
    losses = []
    for report in training.steps():
        losses.append(report.loss)
        if report.step % LOG_EVERY and report.step < steps:
            continue
        mean = sum(losses[-LOG_EVERY:]) / len(losses[-LOG_EVERY:])
        line = f"step {report.step:5d}  loss {mean:.4f}  lr {report.learning_rate:.2e}"
        if report.step % eval_every == 0:
            line += f"  held-out {model_loss(model, unseen):.4f}"
        click.echo(f"{line}  {time.monotonic() - started:.0f} s")
    training.finish()

    with output_directory(out) as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    saved = load_model(out, dtype="checkpoint", device="cpu")
    loss, unigram = model_loss(saved, unseen), unigram_loss(documents, unseen)
    click.echo(f"parameters         {saved.num_parameters()}")
    click.echo(f"train loss         {model_loss(saved, seen):.4f} (a tenth of the training documents)")
    click.echo(f"held-out loss      {loss:.4f} (text {text_hash(held_out)}, windows of {CONTEXT}, bf16)")
    click.echo(f"held-out, unigram  {unigram:.4f}")
    click.echo(f"gap                {unigram - loss:.4f} nats a token")
    click.echo(f"seconds            {time.monotonic() - started:.0f}")


if __name__ == "__main__":
    try:
        main()
    except KvfoldError as error:
        click.echo(f"error: {error}", err=True)
        raise SystemExit(error.exit_status) from None
