"""Operations of a window of T tokens, products of matrices only (see `eval.flops`), with C those of causal attention.

    forward                2 T (all weights of linear layers) + C
    backward, activations  the same, attention twice: 2 T (...) + 2 C. Where what comes in is frozen up to the first
                           attention, that one's query, key and value projections need no gradient of their input
    backward, weights      2 T (weights of linear layers that are trained)
    checkpointing          the layers' forward pass once more, but for each one's last product, which torch skips

A step that matches layers has no head in it, neither forward nor backward, nor in its teacher. Adapters are counted as
the weights that they stand for, and where attention and MLP run side by side, the first MLP's gradient too, which
nothing asks for.
"""

from __future__ import annotations

from ...eval.flops import LINEAR, causal_attention, linear
from ...eval.shape import Shape

# The parts of `eval.flops.LINEAR` whose weights are trained, by what `train` says.
_TRAINED = {
    "attention": ("q", "kv", "o"),
    "attention+norms": ("q", "kv", "o"),
    "all": tuple(LINEAR),
}


def forward_flops(shape: Shape, window: int, *, head: bool) -> int:
    """Operations of one window's forward pass.

    Args:
        shape: of the model.
        window: its tokens, T.
        head: whether the head is run, at every token.
    """
    return window * (linear(shape) - (0 if head else LINEAR["head"](shape))) + causal_attention(shape, window)


def training_flops(shape: Shape, window: int, *, train: str, head: bool, checkpointing: bool = False) -> int:
    """Operations of one window's forward and backward pass.

    Args:
        shape: of the model.
        window: its tokens, T.
        train: which weights are trained, a key of `uptrain.selection.TRAINED`.
        head: whether the head is run, and gradients come through it.
        checkpointing: whether the layers are run once more in the backward pass.
    """
    forward = forward_flops(shape, window, head=head)
    backward = forward + causal_attention(shape, window)
    if train == "attention" and not checkpointing:  # for which transformers asks for the gradient of the embeddings
        backward -= window * _first_projections(shape)
    weights = sum(LINEAR[part](shape) for part in _TRAINED[train] if head or part != "head")
    again = 0
    if checkpointing:
        down = LINEAR["mlp"](shape) // (3 if shape.gated_mlp else 2)
        again = forward_flops(shape, window, head=False) - window * down
    return forward + backward + window * weights + again


def _first_projections(shape: Shape) -> int:
    """Of one token, what the first layer's attention does with what comes in: its queries, and what is cached."""
    layers, hidden = shape.need("num_hidden_layers", "hidden_size")
    return 2 * (shape.q_weights() // layers + hidden * shape.kv_elements())
