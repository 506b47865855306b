"""The charts of a report. Each is drawn three times: for a wide page, for a phone, and as a PNG with all names beside.

Colour and marker say the kind of attention, a number says which result: the one that it has in the report's table.
What is in front (no other result has both a smaller cache and a lower perplexity) is strong, the rest is pale.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from pathlib import PurePath
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.markers import CARETUP
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from .labels import place_labels, spread
from .palette import LIGHT
from .record import Report, Result
from .say import say_bytes, say_bytes_tick, say_number, say_tick
from .svg import inline

PNG_DPI = 160
_SETTINGS = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "kvfold",  # the same file at every run
    "text.parse_math": False,  # names may hold dollars
    "font.family": ["DejaVu Sans"],  # which comes with matplotlib
}
_POINT = 72  # points an inch: at that many dots an inch one point is one CSS pixel
_TEXT = 12
_LOG_FROM = 4.0  # from this ratio of largest to smallest on, an axis is logarithmic
_NEAR = 2.0  # times the source's perplexity
_HEAD, _KEY = 34, 200  # what a picture has around its chart
_FEW = 5  # sizes of caches that the axis names one by one
_MANY = 8  # results from which on labels in front only have their names

# Of a kind of attention: marker, and its size.
_MARKERS = {"MHA": ("^", 9), "GQA": ("o", 9), "MQA": ("s", 8), "MLA": ("D", 7.5)}
_DASHES = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)))


@dataclass(frozen=True)
class Size:
    """Of one drawing, in CSS pixels.

    Attributes:
        narrow: whether numbers take the place of names.
        head, key: room at the top for a title, and at the right for a list of all names; the page has its own.
    """

    width: float
    height: float
    narrow: bool = False
    head: float = 0
    key: float = 0


@dataclass(frozen=True)
class Chart:
    """One chart in all its forms.

    Attributes:
        key: of its file, and of its place in the page.
        title, description: what it shows, in words.
        wide, narrow: SVG elements.
        png: a file.
    """

    key: str
    title: str
    description: str
    wide: str
    narrow: str
    png: bytes


@dataclass
class Canvas:
    """A figure while it is drawn, and what to say of its parts when they are pointed at, by their id."""

    figure: Figure
    size: Size
    hints: dict[str, str] = field(default_factory=dict)

    def axes(self, left: float, right: float, top: float = 34, bottom: float = 46) -> Any:
        """Axes with margins in CSS pixels; the y axis is named above it, where it takes no room."""
        width, height = self.size.width, self.size.height
        right, top = right + self.size.key, top + self.size.head
        axes = self.figure.add_axes(
            (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
        )
        axes.set_facecolor(LIGHT["surface"])
        axes.grid(color=LIGHT["grid"], linewidth=1)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(LIGHT["line"])
        axes.tick_params(length=0, pad=6, labelsize=_TEXT, labelcolor=LIGHT["muted"])
        return axes

    def name_axes(self, axes: Any, x: str, y: str) -> None:
        place = axes.get_position()
        style = {"fontsize": _TEXT, "color": LIGHT["muted"]}
        top = 1 - (12 + self.size.head) / self.size.height
        self.figure.text(8 / self.size.width, top, y, va="center", weight="bold", **style)
        self.figure.text((place.x0 + place.x1) / 2, 12 / self.size.height, x, ha="center", va="center", **style)


def draw_charts(report: Report) -> list[Chart]:
    """Draw what the report has figures for."""
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font of the PNG lacks
        charts = [
            _draw(report, "trade-off", "Quality against cache", _tradeoff_words(report), draw_tradeoff, 760, 470),
            _draw(report, "cache", "Cache growth with context", _growth_words(report), draw_growth),
        ]
        if any(any(error is not None for error in row.layer_errors) for row in report.results):
            charts.append(_draw(report, "layers", "Error layer by layer", _layer_words(report), draw_layers))
        if report.speed:
            charts.append(_draw(report, "speed", "Decode speed", _speed_words(report), draw_speed))
        for number, run in enumerate(report.uptraining):
            words = f"Training and held-out loss of {run.model} against the tokens read, in nats a token."
            title = f"Uptraining of {_short(run.model, 26)}"
            charts.append(_draw(report, f"uptraining-{number}", title, words, _uptraining(number), names=False))
    return charts


def _draw(
    report: Report,
    key: str,
    title: str,
    description: str,
    draw: Callable[[Canvas, Report], None],
    width: float = 500,
    height: float = 350,
    *,
    names: bool = True,
) -> Chart:
    sizes = {"wide": Size(width, height), "narrow": Size(330, 330, narrow=True)}
    shown = {}
    for form, size in sizes.items():
        canvas = _canvas(size)
        draw(canvas, report)
        shown[form] = inline(
            _svg(canvas), prefix=f"{key}-{form}", title=title, description=description, hints=canvas.hints
        )
    room = _KEY if names else 0
    canvas = _canvas(Size(width + room, height + _HEAD, head=_HEAD, key=room))
    draw(canvas, report)
    _add_title_and_key(canvas, title, report)
    return Chart(key, title, description, shown["wide"], shown["narrow"], _png(canvas))


def _add_title_and_key(canvas: Canvas, title: str, report: Report) -> None:
    """What the page says around a chart."""
    width, height = canvas.size.width, canvas.size.height
    text = f"{title}: {_short(report.title, 40)}"
    style = {"fontsize": 14, "weight": "bold", "color": LIGHT["ink"]}
    canvas.figure.text(8 / width, 1 - 14 / height, text, va="center", **style)
    step = min(18, (height - _HEAD - 20) / len(report.results))
    for number, row in enumerate(report.results if canvas.size.key else ()):
        canvas.figure.text(
            1 - (canvas.size.key - 12) / width,
            1 - (_HEAD + 34 + step * number) / height,
            _label(number, row),
            va="center",
            fontsize=min(_TEXT, step),
            color=LIGHT[colour_of(row)],
            weight="bold" if row.name == report.verdict.best else "normal",
        )


def _canvas(size: Size) -> Canvas:
    figure = Figure(figsize=(size.width / _POINT, size.height / _POINT), dpi=_POINT)
    FigureCanvasAgg(figure)
    return Canvas(figure, size)


def _png(canvas: Canvas) -> bytes:
    file = io.BytesIO()
    canvas.figure.savefig(file, format="png", dpi=PNG_DPI, facecolor=LIGHT["surface"], metadata={"Software": None})
    return file.getvalue()


def _svg(canvas: Canvas) -> str:
    """A file without backgrounds: the page has its own."""
    for part in (canvas.figure, *canvas.figure.axes):
        part.patch.set_visible(False)
    file = io.BytesIO()
    canvas.figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue().decode()


def colour_of(row: Result) -> str:
    """The name of a model's colour."""
    return "ink" if row.verdict == "source" else row.attention_kind.lower()


def draw_tradeoff(canvas: Canvas, report: Report) -> None:
    """Perplexity against cached bytes a token; lower left is better."""
    axes = canvas.axes(58 if canvas.size.narrow else 62, 22, bottom=48)
    shown = [(number, row) for number, row in enumerate(report.results) if row.perplexity is not None]
    if not shown:
        canvas.name_axes(axes, "KV cache per token, all layers", "perplexity: of no model")
        return
    sizes = sorted({row.kv_bytes_per_token for _, row in shown})
    _scale(axes.xaxis, sizes, say_bytes_tick, base=2, pad=0.12, log=True)
    if len(sizes) <= _FEW and all(2 * b >= 3 * a for a, b in pairwise(sizes)):
        axes.xaxis.set_major_locator(FixedLocator(sizes))
    good = report.source.perplexity and report.source.perplexity * report.verdict.max_ratio
    top = _scale_perplexity(axes, report, good)
    if good and axes.get_ylim()[0] < good:
        axes.axhspan(axes.get_ylim()[0], min(good, top.limit), color=LIGHT["good-soft"], zorder=0.5, linewidth=0)
        _note(axes, good, f"within {report.verdict.max_ratio:g}×", "bottom", "good")
    within = [(number, row) for number, row in shown if row.perplexity <= top.limit]
    front = sorted((row.kv_bytes_per_token, row.perplexity) for _, row in within if row.pareto)
    if front:
        axes.plot(*zip(*front, strict=True), color=LIGHT["faint"], linewidth=1.5, linestyle=(0, (4, 3)), zorder=2)
    named = len(shown) <= _MANY
    labels = []
    for number, row in within:
        marker, size = ("*", 15) if number == 0 else _MARKERS[row.attention_kind]
        _mark(canvas, axes, number, row, row.perplexity, marker, size)
        style = {
            "color": LIGHT[colour_of(row)],
            "weight": "bold" if row.name == report.verdict.best else "normal",
        }
        text = _label(number, row, name=not canvas.size.narrow and (named or row.pareto))
        labels.append((row, (text, row.kv_bytes_per_token, row.perplexity, style)))
    labels.sort(key=lambda pair: (not pair[0].pareto, pair[0].perplexity))
    place_labels(axes, [label for _, label in labels], size=_TEXT)
    canvas.name_axes(axes, "KV cache per token, all layers", f"perplexity{_log(axes.yaxis)}, lower is better")
    _put_beyond(canvas, axes, [pair for pair in shown if pair not in within], top, named)


def _mark(canvas: Canvas, axes: Any, number: int, row: Result, height: float, marker: Any, size: float) -> None:
    colour = LIGHT[colour_of(row)]
    (drawn,) = axes.plot(
        row.kv_bytes_per_token,
        height,
        marker=marker,
        markersize=size,
        linestyle="none",
        color=colour,
        markerfacecolor=colour if row.pareto else LIGHT["surface"],
        markeredgewidth=1.6,
        zorder=5 if row.pareto else 3,
    )
    drawn.set_gid(f"point-{number}")
    canvas.hints[f"point-{number}"] = _hint(number, row)


def _note(axes: Any, height: float, text: str, side: str, colour: str) -> None:
    """A few words at the right end of a level."""
    place = axes.get_yaxis_transform()
    axes.text(1, height, text, transform=place, color=LIGHT[colour], fontsize=_TEXT, ha="right", va=side)


def _put_beyond(canvas: Canvas, axes: Any, beyond: Sequence[tuple[int, Result]], top: Top, named: bool) -> None:
    """Put results that are beyond the scale above it: one arrow for those with equal caches, and their figures."""
    if not beyond:
        return
    axes.axhline(top.limit, color=LIGHT["line"], linewidth=1.2, zorder=1)
    _note(axes, top.limit, "above: beyond the scale", "top", "muted")
    middle = axes.transData.inverted().transform(axes.get_window_extent().get_points().mean(axis=0))[0]
    for size in sorted({row.kv_bytes_per_token for _, row in beyond}):
        group = [(number, row) for number, row in beyond if row.kv_bytes_per_token == size]
        for number, row in group:
            _mark(canvas, axes, number, row, top.place, CARETUP, 11)
        if canvas.size.narrow:
            text = _numbers([number for number, _ in group])
        else:
            name = named and len(group) == 1
            text = ", ".join(f"{_label(number, row, name=name)} ({say_tick(row.perplexity)})" for number, row in group)
        left = size > middle
        axes.annotate(
            text,
            (size, top.place),
            (-11 if left else 11, 1),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=_TEXT,
            color=LIGHT[colour_of(group[0][1])],
        )


@dataclass(frozen=True)
class Top:
    """Of an axis: up to which perplexity it is a scale, and where what is beyond is put."""

    limit: float
    place: float


def _scale_perplexity(axes: Any, report: Report, good: float | None) -> Top:
    """Scale the y axis to the perplexities of models that work, and to that up to which a result will do; if most are
    near the source's and some far from it, to those that are near: a few bad results would press all that matter flat.
    """
    everything = [row.perplexity for row in report.results if row.perplexity is not None]
    found = [row.perplexity for row in report.results if row.perplexity is not None and row.passed] or everything
    near = [value for value in found if good and value <= max(_NEAR * report.source.perplexity, good)]
    if 2 * len(near) > len(found) and max(found) > _LOG_FROM * min(found):
        found = near
    if good and good <= 2 * max(found):
        found = [*found, good]
    _scale(axes.yaxis, found, say_tick, pad=0.12)
    low, high = map(float, axes.get_ylim())
    if max(everything) <= high:
        return Top(high, high)
    log = axes.get_yscale() == "log"
    rise = (high / low) if log else (high - low)
    axes.set_ylim(low, high * rise**0.13 if log else high + 0.13 * rise)
    return Top(high, high * rise**0.065 if log else high + 0.065 * rise)


def draw_layers(canvas: Canvas, report: Report) -> None:
    """The relative error of each result's hidden states, layer by layer."""
    rows = [row for row in report.results if any(error is not None for error in row.layer_errors)]
    found = [error for row in rows for error in row.layer_errors if error is not None]
    axes = canvas.axes(58, _room(canvas))
    positive = [error for error in found if error > 0]
    if positive and max(positive) / min(positive) > 10:
        _scale(axes.yaxis, positive, say_tick, pad=0.06)
    else:
        axes.set_ylim(0, max(found) * 1.08 or 1)
        axes.yaxis.set_major_locator(MaxNLocator(5))
    depth = max(len(row.layer_errors) for row in rows)
    axes.set_xlim(-0.3 if depth > 1 else -0.5, depth - 1 + (0.1 if depth > 1 else 0.5))
    axes.xaxis.set_major_locator(MaxNLocator(min(8, depth), integer=True, min_n_ticks=1))
    curves = [
        Curve(number, row, list(range(len(row.layer_errors))), row.layer_errors)
        for number, row in enumerate(report.results)
        if row in rows
    ]
    _draw_curves(canvas, axes, report, curves)
    canvas.name_axes(axes, "decoder layer", f"relative error of its output{_log(axes.yaxis)}")


def draw_growth(canvas: Canvas, report: Report) -> None:
    """Bytes that a sequence keeps cached, against its length."""
    growth = report.cache_growth
    by_name = {row.model: row.kv_bytes for row in growth.results}
    axes = canvas.axes(62 if canvas.size.narrow else 70, _room(canvas, 100, 196))
    several, ticks = len(growth.contexts) > 1, 5 if canvas.size.narrow else 8
    _scale(axes.xaxis, growth.contexts, _say_tokens, base=2, pad=0, log=several, ticks=ticks)
    _scale(axes.yaxis, [b for held in by_name.values() for b in held], say_bytes_tick, base=2, pad=0.05, log=True)
    curves = [
        Curve(number, row, growth.contexts, by_name[row.name], say_bytes_tick(by_name[row.name][-1]))
        for number, row in enumerate(report.results)
        if row.name in by_name
    ]
    _draw_curves(canvas, axes, report, curves)
    canvas.name_axes(axes, "tokens of context", "KV cache of one sequence")


def draw_speed(canvas: Canvas, report: Report) -> None:
    """Tokens a second against tokens cached, of the smallest batch that was measured."""
    assert report.speed
    rows = [row for row in report.speed.results if row.tokens_per_second]
    axes = canvas.axes(62, _room(canvas))
    if not rows:
        canvas.name_axes(axes, "tokens of context", "tokens decoded per second")
        return
    batch = min(row.batch_size for row in rows)
    rows = [row for row in rows if row.batch_size == batch]
    contexts = sorted({row.context for row in rows})
    _scale(axes.xaxis, contexts, _say_tokens, base=2, pad=0.02, log=len(contexts) > 1)
    speeds = [row.tokens_per_second for row in rows if row.tokens_per_second]
    if max(speeds) / min(speeds) > _LOG_FROM:
        _scale(axes.yaxis, speeds, say_tick, pad=0.06)
    else:
        axes.set_ylim(0, max(speeds) * 1.1)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: say_tick(value)))
    curves = []
    for number, row in enumerate(report.results):
        found = {one.context: one.tokens_per_second for one in rows if one.model == row.name}
        if found:
            curves.append(Curve(number, row, list(found), list(found.values())))
    _draw_curves(canvas, axes, report, curves, markers=True)
    canvas.name_axes(axes, "tokens cached", f"tokens decoded per second, batch {batch}{_log(axes.yaxis)}")


def _uptraining(number: int) -> Callable[[Canvas, Report], None]:
    def draw(canvas: Canvas, report: Report) -> None:
        run = report.uptraining[number]
        axes = canvas.axes(58, 24, top=56)
        axes.plot(run.tokens, run.training_loss, color=LIGHT["faint"], linewidth=1.2, label="training")
        colours = cycle(("gqa", "mqa", "mla", "mha"))
        for part, colour in zip(run.held_out, colours, strict=False):
            style = {"color": LIGHT[colour], "linewidth": 2}
            losses = [float("nan") if loss is None else loss for loss in part.loss]
            name = f"held out: {_short(PurePath(part.text).name, 18 if canvas.size.narrow else 30)}"
            axes.plot(part.tokens, losses, marker="o", markersize=4, label=name, **style)
            if part.reference is not None:
                axes.axhline(part.reference, linestyle=(0, (4, 3)), **style | {"linewidth": 1.4})
        axes.xaxis.set_major_locator(MaxNLocator(4 if canvas.size.narrow else 7))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _say_tokens(value)))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        canvas.name_axes(axes, "tokens of uptraining", "loss, nats a token")
        canvas.figure.legend(
            loc="upper left",
            bbox_to_anchor=(2 / canvas.size.width, 1 - (20 + canvas.size.head) / canvas.size.height),
            ncols=2 if canvas.size.narrow else 4,
            frameon=False,
            fontsize=_TEXT,
            labelcolor=LIGHT["ink"],
            handlelength=1.8,
            columnspacing=1.2,
            borderpad=0.2,
        )
        if canvas.size.narrow:
            place = axes.get_position()
            axes.set_position((place.x0, place.y0, place.width, place.height - 0.06))

    return draw


@dataclass(frozen=True)
class Curve:
    """A line of one model, and what is said at its end; a y of None leaves a gap."""

    number: int
    row: Result
    x: Sequence[float]
    y: Sequence[float | None]
    end: str = ""


def _draw_curves(canvas: Canvas, axes: Any, report: Report, curves: Sequence[Curve], *, markers: bool = False) -> None:
    """Draw lines, named at their right ends; lines that are the same are drawn once, with all their names."""
    groups: dict[tuple, list[Curve]] = {}
    for curve in curves:
        groups.setdefault((*curve.x, None, *curve.y), []).append(curve)
    seen: dict[str, int] = {}
    ends = []
    for same in sorted(groups.values(), key=lambda same: not any(curve.row.pareto for curve in same)):
        lead = min(same, key=lambda curve: (not curve.row.pareto, curve.number))
        strong = lead.row.pareto or len(groups) <= 6
        colour = colour_of(lead.row)
        dash = _DASHES[seen.setdefault(colour, 0) % len(_DASHES)]
        seen[colour] += 1
        y = [float("nan") if value is None else value for value in lead.y]
        (line,) = axes.plot(
            lead.x,
            y,
            color=LIGHT[colour],
            linewidth=2.2 if strong else 1.2,
            alpha=1 if strong else 0.45,
            linestyle=dash,
            marker=_MARKERS[lead.row.attention_kind][0] if markers or len(lead.x) == 1 else None,
            markersize=5,
            zorder=4 if strong else 3,
        )
        line.set_gid(f"curve-{lead.number}")
        canvas.hints[f"curve-{lead.number}"] = "; ".join(_label(one.number, one.row) for one in same)
        last = next((place for place in reversed(range(len(y))) if lead.y[place] is not None), None)
        if last is not None:
            ends.append((same, lead, strong, lead.x[last], y[last]))
    _name_ends(canvas, axes, ends)


def _name_ends(canvas: Canvas, axes: Any, ends: Sequence[tuple]) -> None:
    width, height = canvas.size.width, canvas.size.height
    points = [axes.transData.transform((x, y)) for *_, x, y in ends]
    box = axes.get_window_extent()
    ups = spread([float(y) for _, y in points], _TEXT + 2, box.y0 + 2, box.y1)
    for (same, lead, strong, *_), (x, y), up in zip(ends, points, ups, strict=True):
        if len(same) == 1:
            text = _label(lead.number, lead.row, name=not canvas.size.narrow)
        else:
            text = _numbers([one.number for one in same])
        if lead.end and not canvas.size.narrow:
            text = f"{_short(text, 14)} · {lead.end}"
        canvas.figure.text(
            (box.x1 + 12) / width,
            up / height,
            _short(text, 13 if canvas.size.narrow else 26 if lead.end else 20),
            color=LIGHT[colour_of(lead.row)],
            fontsize=_TEXT,
            weight="bold" if strong else "normal",
            va="center",
        )
        axes.annotate(
            "",
            (x, y),
            (box.x1 + 12, up),
            xycoords="figure points",
            textcoords="figure points",
            arrowprops={
                "arrowstyle": "-",
                "color": LIGHT[colour_of(lead.row)],
                "linewidth": 0.7,
                "shrinkA": 1,
                "shrinkB": 2,
            },
            annotation_clip=False,
        )


def _room(canvas: Canvas, narrow: float = 62, wide: float = 168) -> float:
    """What the names of lines take at the right, in CSS pixels."""
    return narrow if canvas.size.narrow else wide


def _numbers(numbers: Sequence[int]) -> str:
    """`1, 2, 3, 7` as `1-3, 7`, and the source's as a star."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1 and runs[-1][0] > 0:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join("★" if run == [0] else str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _label(number: int, row: Result, *, name: bool = True) -> str:
    mark = "★" if number == 0 else str(number)
    return f"{mark} {_short(row.name, 26)}" if name else mark


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _hint(number: int, row: Result) -> str:
    return (
        f"{_label(number, row)}: perplexity {say_number(row.perplexity)}, "
        f"{say_bytes(row.kv_bytes_per_token)} a token, {row.verdict}"
    )


def _say_tokens(tokens: float) -> str:
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens / size:g}{unit}"
    return say_tick(tokens) if tokens < 10_000 else f"{tokens / 1000:g}k" if tokens < 1e6 else f"{tokens / 1e6:g}M"


def _log(axis: Any) -> str:
    return " (log)" if axis.get_scale() == "log" else ""


def _scale(
    axis: Any,
    values: Sequence[float],
    say: Callable[[float], str],
    *,
    base: int = 10,
    pad: float,
    log: bool | None = None,
    ticks: int = 8,
) -> None:
    """Scale an axis to values: logarithmic where they differ by much, with ticks that are round numbers.

    Args:
        pad: of the whole range, left free at both ends.
        ticks: at most, of a scale to base 2.
    """
    low, high = min(values), max(values)
    if log is None:
        log = low > 0 and high / low > _LOG_FROM
    name = axis.axis_name
    if log and low > 0:
        getattr(axis.axes, f"set_{name}scale")("log", base=base)
        span = max(high / low, 1.3) ** pad
        bounds = (low / span, high * span) if pad else (low, high if high > low else 2 * low)
        locator = (
            LogLocator(base=2, numticks=ticks)
            if base == 2
            else LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,), numticks=10)
        )
    else:
        span = ((high - low) or abs(high) or 1) * pad
        bounds = (low - span, high + span) if pad else (low, high if high > low else low + 1)
        locator = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
    getattr(axis.axes, f"set_{name}lim")(*bounds)
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: say(value)))
    axis.set_minor_formatter(NullFormatter())


def _tradeoff_words(report: Report) -> str:
    rows = "; ".join(_hint(number, row) for number, row in enumerate(report.results) if row.perplexity is not None)
    return f"Perplexity against cached bytes a token. {rows}."


def _growth_words(report: Report) -> str:
    growth = report.cache_growth
    last = ", ".join(f"{row.model} {say_bytes(row.kv_bytes[-1])}" for row in growth.results)
    return f"Bytes of one sequence's cache against its tokens. At {growth.contexts[-1]:,} tokens: {last}."


def _layer_words(report: Report) -> str:
    ends = ", ".join(
        f"{row.name} {say_number(row.layer_errors[-1])}"
        for row in report.results
        if row.layer_errors and row.layer_errors[-1] is not None
    )
    return f"Relative error of each decoder layer's output. After the last layer: {ends}."


def _speed_words(report: Report) -> str:
    assert report.speed
    rows: Mapping[str, str] = {
        row.model: f"{row.model} {say_number(row.tokens_per_second)} at {row.context:,}"
        for row in report.speed.results
        if row.tokens_per_second
    }
    return f"Tokens decoded a second against tokens cached. At the longest measured: {', '.join(rows.values())}."
