"""Panels side by side, saved as an SVG that is the same at every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Panel:
    """Losses of several ways against tokens.

    Attributes:
        title: stands above.
        curves: points (tokens, nats a token) of each way.
        source: the loss of what was converted.
    """

    title: str
    curves: Mapping[str, Sequence[tuple[int, float]]]
    source: float


def open_panels(count: int) -> tuple[Any, list[Any]]:
    """A figure of panels that share their y axis."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"], matplotlib.rcParams["svg.hashsalt"] = "none", "kvfold"
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, count, figsize=(4.6 * count, 4), sharey=True, squeeze=False)
    return figure, list(panels[0])


def save_svg(figure: Any, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})


def draw_losses(panels: Sequence[Panel], path: Path) -> None:
    """Loss against tokens, with the source as a line."""
    figure, axes = open_panels(len(panels))
    for panel, axis in zip(panels, axes, strict=True):
        for name, points in panel.curves.items():
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axis.axhline(panel.source, color="black", linestyle="--", label="source")
        axis.set(title=panel.title, xlabel="tokens of uptraining")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out loss, nats a token")
    axes[-1].legend(fontsize=8)
    save_svg(figure, path)
