"""The losses of an uptraining."""

from __future__ import annotations

from itertools import cycle
from pathlib import PurePath

from matplotlib.ticker import FuncFormatter, MaxNLocator

from ..palette import LIGHT
from ..record import Uptraining
from .canvas import TEXT, Canvas
from .words import say_tokens, short


def draw_uptraining(canvas: Canvas, run: Uptraining) -> None:
    """The cross entropy of training text and held-out losses against the tokens read; what they are compared with as a
    dashed line."""
    axes = canvas.axes(58, 24, top=56)
    trained = "training text" if canvas.size.narrow else "training text, cross entropy"
    axes.plot(run.tokens, run.training_loss, color=LIGHT["faint"], linewidth=1.2, label=trained)
    colours = cycle(("gqa", "mqa", "mla", "mha"))
    for part, colour in zip(run.held_out, colours, strict=False):
        style = {"color": LIGHT[colour], "linewidth": 2}
        losses = [float("nan") if loss is None else loss for loss in part.loss]
        name = f"held out: {short(PurePath(part.text).name, 18 if canvas.size.narrow else 30)}"
        axes.plot(part.tokens, losses, marker="o", markersize=4, label=name, **style)
        if part.reference is not None:
            axes.axhline(part.reference, linestyle=(0, (4, 3)), **style | {"linewidth": 1.4})
    axes.xaxis.set_major_locator(MaxNLocator(4 if canvas.size.narrow else 7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: say_tokens(value)))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    canvas.name_axes(axes, "tokens of uptraining", "loss, nats a token")
    canvas.figure.legend(
        loc="upper left",
        bbox_to_anchor=(2 / canvas.size.width, 1 - (20 + canvas.size.head) / canvas.size.height),
        ncols=2 if canvas.size.narrow else 4,
        frameon=False,
        fontsize=TEXT,
        labelcolor=LIGHT["ink"],
        handlelength=1.8,
        columnspacing=1.2,
        borderpad=0.2,
    )
    if canvas.size.narrow:
        place = axes.get_position()
        axes.set_position((place.x0, place.y0, place.width, place.height - 0.06))
