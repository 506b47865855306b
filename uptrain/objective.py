"""What a step of uptraining minimises, computed inside one forward pass.

    cross entropy             of the next token
    with a teacher            (1 - c) T^2 KL(teacher_T || student_T) + c CE, where p_T = softmax(logits / T)
    layers, before logits     mean over layers of |y - t|^2 / |t|^2, y and t being what attention gives out

T^2 keeps the divergence's gradient of one size whatever T is (Hinton et al., arXiv 1503.02531). With `top_k` the
divergence is between two distributions of k + 1 outcomes: the teacher's k likeliest tokens, and all others as one.
(Dropping the others instead would not be a divergence, and would leave the student free to waste mass on them.)

All of it, the head too, runs inside `Trainee.forward`, since DDP, FSDP2 and DeepSpeed prepare parameters and count
their gradients there and nowhere else.

Legend: B windows, S tokens a window, D hidden size, V vocabulary, L layers, n positions of one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..common.errors import UserError
from ..common.scoring import (
    UNSCORED,
    check_vocabularies,
    evaluating,
    hidden_states,
    log_probabilities,
)
from .chunked import chunked_sum, head_parameters
from .losses import cross_entropy_sum, divergence_sum
from .teacher import TeacherView, attention_outputs

# Squared length that an attention output is taken to have at least; below it an error is absolute.
SMALLEST_SQUARE = 1e-8

Stage = Literal["loss", "layers", "eval"]


@dataclass(frozen=True)
class Objective:
    """The knobs of the loss.

    Attributes:
        temperature: T, by which both models' logits are divided in the divergence.
        ce_share: c, the share of cross entropy where there is a teacher.
        top_k: the teacher's tokens that stand for themselves; 0 for all.

    Raises:
        UserError: a number is out of range.
    """

    temperature: float = 1.0
    ce_share: float = 0.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}; it must be above 0 (1 leaves the logits as they are)")
        if not 0 <= self.ce_share <= 1:
            raise UserError(f"ce_share is {self.ce_share}; it is a share, between 0 and 1")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}; it must be at least 1, or 0 for all tokens")


class Trainee(nn.Module):
    """A student and its objective as the one module that accelerate prepares.

    Args:
        model: a causal language model.
        objective: the knobs.
        attention: names of its attention modules, one a layer, for the stage `layers`.
        chunk: positions whose logits are held at a time; by default see `common.scoring.position_chunks`.
    """

    def __init__(
        self, model: Any, objective: Objective | None = None, attention: Sequence[str] = (), chunk: int | None = None
    ):
        super().__init__()
        self.model = model
        self.objective = objective or Objective()
        self.attention = tuple(attention)
        self.chunk = chunk
        self.config = model.config
        self._no_split_modules = getattr(model, "_no_split_modules", None)

    def tie_weights(self) -> None:
        """accelerate unties what it moves to the meta device, and calls this afterwards."""
        self.model.tie_weights()

    def forward(
        self,
        ids: Tensor,
        labels: Tensor,
        positions: Tensor | None = None,
        view: TeacherView | None = None,
        stage: Stage = "loss",
    ) -> Tensor:
        """Sums [3] over the targets of this batch: objective, cross entropy, divergence or layer error.

        Only the first carries a gradient; what was not computed is 0. Position t predicts token t + 1, which is a
        target where its label is not -100. The caller divides by the number of targets of the whole step.

        Args:
            ids: [B, S] int64.
            labels: [B, S] int64; the token, or -100 where it is no target.
            positions: [B, S] int64, starting from 0 in every document; see `check_packing`.
            view: what the teacher makes of the batch; with `layers=True` for the stage `layers`.
            stage: `loss`; `layers`, which runs no head; or `eval`, the sums of `loss` without dropout or gradients.
                (Under DDP call `eval` with gradients off, or DDP waits for a backward pass.)

        Raises:
            UserError: the vocabularies of student and teacher differ.
        """
        targets = F.pad(labels[:, 1:], (0, 1), value=UNSCORED)  # [B, S]
        if stage == "layers":
            assert view is not None
            return self._layers(ids, targets, positions, view)
        if stage == "eval":
            with evaluating(self.model):
                return self._loss(ids, targets, positions, view)
        return self._loss(ids, targets, positions, view)

    def _loss(self, ids: Tensor, targets: Tensor, positions: Tensor | None, view: TeacherView | None) -> Tensor:
        def sums(logits: Tensor, part: slice) -> Tensor:
            return token_sums(logits, None if view is None else view.logits(part), targets[:, part], self.objective)

        return chunked_sum(self.model, hidden_states(self.model, ids, positions), sums, self.chunk)

    def _layers(self, ids: Tensor, targets: Tensor, positions: Tensor | None, view: TeacherView) -> Tensor:
        with attention_outputs(self.model, self.attention) as outputs:
            hidden = hidden_states(self.model, ids, positions)
        error = layer_error(outputs, view.attention, targets != UNSCORED)
        # What follows the last attention has no part in the error. But DDP waits for a gradient of every parameter,
        # and FSDP2 gathers a layer's parameters again when a gradient comes in at the layer's end.
        unused = sum(each.sum(dtype=error.dtype) for each in (hidden, *head_parameters(self.model)))
        nothing = torch.zeros_like(error)
        return torch.stack([error + 0.0 * unused, nothing, error.detach()])


def token_sums(logits: Tensor, teacher: Tensor | None, targets: Tensor, knobs: Objective) -> Tensor:
    """Sums [3] over the targets of objective, cross entropy and divergence, in fp32 or fp64.

    Args:
        logits: the student's, [B, n, V].
        teacher: the teacher's, [B, n, V]; without one the objective is cross entropy.
        targets: [B, n], -100 where there is none.

    Raises:
        UserError: the V differ.
    """
    logits, targets = logits.flatten(0, 1), targets.flatten()  # [B * n, V], [B * n]
    if teacher is None:
        entropy = cross_entropy_sum(logits, targets)
        return torch.stack([entropy, entropy.detach(), torch.zeros_like(entropy)])
    check_vocabularies(teacher, logits)
    own, theirs = log_probabilities(logits), log_probabilities(teacher.flatten(0, 1))
    entropy = F.nll_loss(own, targets, ignore_index=UNSCORED, reduction="sum")
    # A log-softmax of log-probabilities gives them back, so these serve as logits of what follows.
    if knobs.temperature != 1:
        own, theirs = (log_probabilities(each / knobs.temperature) for each in (own, theirs))
    if 0 < knobs.top_k < theirs.shape[-1]:
        kept = theirs.topk(knobs.top_k, dim=-1).indices  # [B * n, k]
        own, theirs = (log_probabilities(bucketed(each, kept)) for each in (own, theirs))
    apart = divergence_sum(theirs, own, targets != UNSCORED)
    objective = (1 - knobs.ce_share) * knobs.temperature**2 * apart
    if knobs.ce_share:  # else its gradient would be computed, and be zeros
        objective = objective + knobs.ce_share * entropy
    return torch.stack([objective, entropy.detach(), apart.detach()])


def bucketed(logits: Tensor, kept: Tensor) -> Tensor:
    """Logits [..., k + 1] of `kept` [..., k] and of all other tokens as one outcome, from logits [..., V]."""
    others = logits.scatter(-1, kept, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logits.gather(-1, kept), others], dim=-1)


def layer_error(outputs: Sequence[Tensor], targets: Sequence[Tensor], scored: Tensor) -> Tensor:
    """Squared relative error of attention outputs, summed over positions and averaged over layers.

    Args:
        outputs: the student's, L times [B, S, D].
        targets: the teacher's.
        scored: which positions count, [B, S].
    """
    assert len(outputs) == len(targets) > 0, (len(outputs), len(targets))
    errors = []
    for output, target in zip(outputs, targets, strict=True):
        dtype = torch.float64 if output.dtype == torch.float64 else torch.float32
        output, target = output.to(dtype), target.to(dtype)
        square = target.square().sum(-1).clamp_min(SMALLEST_SQUARE)
        error = (output - target).square().sum(-1) / square  # [B, S]
        errors.append(torch.where(scored, error, 0.0).sum())
    return torch.stack(errors).mean()


def check_packing(model: Any) -> None:
    """Refuse a model in which documents of one window, told apart by positions that start again, see each other.

    Runs a few tokens, so call it before the model is sharded.

    Raises:
        UserError: so they do.
    """
    documents = torch.arange(1, 9, device=model.device).view(2, 4)
    positions = torch.arange(4, device=model.device).expand(2, 4)
    with evaluating(model):
        alone = hidden_states(model, documents, positions).flatten(0, 1)  # [2 * 4, D]
        packed = hidden_states(model, documents.view(1, 8), positions.reshape(1, 8))[0]
    # Rounding differs between the two shapes; a document that is seen moves the hidden states by as much as they are.
    allowed = torch.finfo(packed.dtype).eps ** 0.5 * alone.abs().max()
    if (packed - alone).abs().max() > allowed:
        raise UserError(
            f"{type(model).__name__} lets documents of one window see each other, whatever their positions; "
            "use reset_positions=false"
        )
