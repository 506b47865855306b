"""What calibration, conversion and refinement hold in memory and on the disk: closed forms over plain numbers.

So it can be said of a checkpoint that fits nowhere. Each form follows the tensors that are there at the moment of the
peak; `python -m kvfold.recipes.bench.plan` holds them to measured peaks.

Legend: D hidden size; K = G d coordinates of all KV heads; Q = H d of all query heads; M = D + 1. In fp64, of which all
sums and factors are: A = 8 M^2 bytes of a moment of inputs, B = 8 K^2 of a moment of keys or values, C = 8 K M of the
rows of a projection, W = 8 Q M.
"""

from __future__ import annotations

from dataclasses import dataclass

# Anonymous memory of a process before it has read anything: with torch, and with transformers too.
TORCH = 155_000_000
TRANSFORMERS = 300_000_000
HIDDEN_LIMIT = 1 << 30  # of hidden states in memory, see `calibration.hidden`; beyond it they go to the disk
_THREADS = 2  # that write a checkpoint
FP64 = 8  # bytes of an element of all sums and factors


@dataclass(frozen=True)
class Extent:
    """The numbers of a source that memory depends on.

    Attributes:
        layers: L.
        hidden, keys, queries: D, K and Q.
        layer: parameters of a decoder layer, the largest.
        others: parameters outside the layers.
        largest: elements of the largest tensor that the conversion does more with than copy.
        vocabulary: V.
        still: whether gradients of keys without position are summed too, see `calibration.still`.
    """

    layers: int
    hidden: int
    keys: int
    queries: int
    layer: int
    others: int
    largest: int
    vocabulary: int
    still: bool

    @property
    def inputs_moment(self) -> int:
        """A."""
        return FP64 * (self.hidden + 1) ** 2

    @property
    def keys_moment(self) -> int:
        """B."""
        return FP64 * self.keys**2

    @property
    def rows(self) -> int:
        """C."""
        return FP64 * self.keys * (self.hidden + 1)

    @property
    def query_rows(self) -> int:
        """W."""
        return FP64 * self.queries * (self.hidden + 1)


@dataclass(frozen=True)
class Held:
    """Bytes at the peak.

    Attributes:
        device: of the device that computes.
        host: of the process's own memory besides; where the device is the CPU, both are one.
        disk: of temporary files and of what is made.
    """

    device: int
    host: int
    disk: int = 0


def sums_bytes(extent: Extent, *, fisher: bool) -> int:
    """Of one layer's running sums: two moments of inputs, the stacked gradients of the keys, those of the values."""
    if not fisher:
        return extent.inputs_moment
    return 2 * extent.inputs_moment + extent.keys_moment * ((4 if extent.still else 1) + 1)


def statistics_bytes(extent: Extent, *, fisher: bool) -> int:
    """Of the file of statistics: every moment in fp32, of all layers."""
    moments = extent.inputs_moment + extent.keys_moment * ((4 if extent.still else 2) if fisher else 0)
    return extent.layers * moments // 2


def calibration(
    extent: Extent, *, tokens: int, width: int, offload: bool, fisher: bool, activations: int, logits: int
) -> Held:
    """Of `kvfold calibrate`.

    A segment's weights and sums are there together, all layers' where nothing is offloaded. A product in fp32 is added
    to a sum through a copy of it in fp64.

    Args:
        tokens: of all windows.
        width: bytes of an element of the computation's dtype.
        activations: bytes that one layer keeps of a window for its backward pass.
        logits: bytes of a chunk of logits and what is made of them.
    """
    segment = 1 if offload else extent.layers
    widest = max(extent.hidden + 1, (2 if extent.still else 1) * extent.keys if fisher else 0)
    adding = (4 + FP64) * widest**2
    # A graph of every layer, with the still keys beside the others, and what one layer's backward pass makes of it.
    graph = activations * (segment * (1.5 if extent.still else 1) + 1) if fisher else activations
    device = int(
        width * (extent.others + segment * extent.layer)
        + segment * sums_bytes(extent, fisher=fisher)
        + adding
        + graph
        + logits * fisher
    )
    # While the embedding is loaded it is there twice.
    device = max(device, width * (extent.others + extent.vocabulary * extent.hidden // 2))
    entering = tokens * extent.hidden * width
    kept = entering if entering <= HIDDEN_LIMIT // extent.layers else 0
    buffers = (extent.layers - 1) * offload
    disk = statistics_bytes(extent, fisher=fisher) + buffers * (entering - kept)
    return Held(device, TRANSFORMERS + buffers * kept, disk)


def factoring(extent: Extent, method: str) -> int:
    """Of the statistics of one layer, what is worked out from them, and the maps that come of it.

    Args:
        method: a key of `FACTORS`.
    """
    inputs, keys, rows = FACTORS[method]
    return inputs * extent.inputs_moment + keys * extent.keys_moment + rows * extent.rows


# How often A, B and C are there at the peak, by what computes them. Heads that are kept whole need no moments. The
# mixtures: statistics, and moments of the stacked heads with their ridges. The latent: the same, and the roots and the
# singular vectors of keys and values side by side, [2K, 2K] and [2K, M].
FACTORS = {"whole": (0, 0, 0), "mixed": (3, 10, 4), "latent": (6, 25, 12)}


def conversion(extent: Extent, *, method: str, width: int, on_cpu: bool) -> Held:
    """Of `kvfold convert`, its statistics given; it does not depend on the number of layers.

    Two threads write tensors, each with its sources as they are stored, the result, and rows in fp64 in between; a
    layer's factors are made by one of them while the other waits.

    Args:
        method: a key of `FACTORS`.
        width: bytes of a stored element.
        on_cpu: whether the factors are computed in the process's own memory.
    """
    made = factoring(extent, method)
    if method == "whole":
        return Held(0, TORCH + 3 * width * extent.keys * extent.hidden)  # both threads' sources, and a result
    rows = 2 * extent.query_rows if method == "mixed" else 0
    writing = _THREADS * width * extent.largest
    if on_cpu:
        return Held(0, TRANSFORMERS + max(made + rows, writing))
    return Held(made, TRANSFORMERS + max(_THREADS * 2 * extent.query_rows, writing))


def refinement(
    extent: Extent, *, tokens: int, attention: int, width: int, activations: int, method: str, on_cpu: bool
) -> Held:
    """Of `kvfold convert --refine`, beside which the conversion's own peak is: embeddings and one layer of source and
    result in fp32, Adam's state of its attention, and three buffers of hidden states.

    Args:
        tokens: of all windows.
        attention: parameters of a layer's attention in the result.
        width: bytes of a stored element.
        activations: bytes that a layer keeps of a window.
        method: a key of `FACTORS`, by which a layer of the result is computed before it is trained.
        on_cpu: whether the device's memory is the process's own.
    """
    models = 4 * 2 * (extent.others + extent.layer)
    device = models + max(factoring(extent, method), 4 * 4 * attention + activations)
    state = 4 * tokens * extent.hidden
    kept = 3 * state if state <= HIDDEN_LIMIT // 3 else 0
    disk = 3 * state - kept + width * attention * extent.layers
    host = TRANSFORMERS + kept + (0 if on_cpu else _THREADS * 2 * extent.query_rows)
    return Held(device, host, disk)
