"""What `kvfold eval speed` reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SpeedProtocol:
    """What must be equal for figures to be comparable, besides the machine.

    Attributes:
        device, dtype: what the models ran on and in.
        device_name: the accelerator's, or the processor's architecture.
        threads: of torch, on the CPU.
        steps: tokens that each sequence gets in a block.
        runs: counted blocks of each model.
        prefill_runs: counted prompts of each model, at most; see `eval.speed.turns.PROMPT_SECONDS`.
        cuda_graphs: whether steps were replayed from a CUDA graph.
        torch, transformers: their versions.
    """

    device: str
    device_name: str
    dtype: str
    threads: int
    steps: int
    runs: int
    prefill_runs: int
    cuda_graphs: bool
    torch: str
    transformers: str


@dataclass(frozen=True)
class SpeedRow:
    """One model at one context and batch size. Figures with a minimum and a maximum are medians of all blocks.

    Tokens a second are those of the steps: the median is that of the median step, the minimum that of the longest.

    Attributes:
        decoding: what is attended to: `heads`, `latent, absorbed` or `latent, expanded`.
        context: tokens of the prompt, and tokens cached before the first step.
        batch_size: sequences at a time.
        tokens_per_second: decoded, of all sequences together.
        milliseconds_per_step: in which every sequence gets one token.
        x_first: times the speed of the first model, the ratio of both medians.
        memory_floor_ms: both kinds of bytes over the copy bandwidth.
        arithmetic_floor_ms: the operations over the matrix rate.
        bound: the larger floor, `memory` or `arithmetic`.
        floor_share: the larger floor over the median step; 1 is as fast as can be.
        read_weight_bytes, read_cache_bytes: that a step reads at least; see `eval.speed.floors.StepWork`.
        flops_per_step: that it computes at least.
        weight_bytes: of the model as loaded, tied weights once.
        prefill_tokens_per_second: of all prompts together, read at once; None where no prompt was timed.
        largest_batch_size: sequences of this context that fit into the memory budget, and 0 if the weights do not:
            weights and caches only, activations left out. None without a budget, and if any number fits, as in a model
            that caches nothing.
        largest_context: tokens a sequence that fit for this batch size, likewise; at most the model's context, and
            None if that sets no bound either.
    """

    model: str
    decoding: str
    context: int
    batch_size: int
    tokens_per_second: float
    tokens_per_second_min: float
    tokens_per_second_max: float
    milliseconds_per_step: float
    milliseconds_per_step_min: float
    milliseconds_per_step_max: float
    x_first: float
    memory_floor_ms: float
    arithmetic_floor_ms: float
    bound: str
    floor_share: float
    read_weight_bytes: int
    read_cache_bytes: int
    flops_per_step: int
    weight_bytes: int
    prefill_tokens_per_second: float | None
    prefill_tokens_per_second_min: float | None
    prefill_tokens_per_second_max: float | None
    largest_batch_size: int | None
    largest_context: int | None


@dataclass(frozen=True)
class SpeedReport:
    """The result of `speed`.

    Attributes:
        results: context by context, batch size by batch size, model by model.
        copy_bytes_per_second: read and written, the best of the run.
        matrix_flops_per_second: of a large product of matrices, the best of the run.
        memory_budget_bytes: what was asked for.
    """

    results: list[SpeedRow]
    copy_bytes_per_second: float
    matrix_flops_per_second: float
    memory_budget_bytes: int | None
    protocol: SpeedProtocol
