"""The picture at a glance: layer by step and layer by head of what attention does. Needs matplotlib.

`TensorBoardWriter` draws one now and then from its `History`. Colours are fixed by meaning, not by the data: blue is
flat, pale is healthy, orange is sharp, dark red looks at one key, with the limits of `report.conditions`. Beta has
another scale, purple to green. Both can be told apart by the colour-blind.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median_high
from typing import TYPE_CHECKING, Any

import numpy

from betahook.control.base import DECADES
from betahook.report.conditions import RULES, Condition, Numbers, classify
from betahook.report.findings import Findings
from betahook.report.history import Column, History

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

PIXELS, DPI = (1200, 760), 100
INK, GREY, PAPER, UNKNOWN = "#1a1a1a", "#666666", "#ffffff", "#c4c4c4"
LEVELS, GREYS = 40, 24
"""Colours of each scale, and of text. The file has no others, which makes it a third as large."""

MARKS = {Condition.SINK: "o", Condition.DEAD: "x"}
"""Markers of matplotlib for conditions that no colour shows."""

LIMITS = {rule.condition: rule.limit for rule in reversed(RULES)}
FLAT, HEALTHY, SHARP = 0.2, 0.7, 0.85
"""Ends of flat, healthy and sharp on the scale, from 0 to 1."""

SCALE = (
    (0.0, FLAT, ("#123e7c", "#5f9bd6")),
    (FLAT, HEALTHY, ("#d3e4f3", "#f7f6f1", "#fbe3c0")),
    (HEALTHY, SHARP, ("#f7a43c", "#e4671e")),
    (SHARP, 1.0, ("#b3200f", "#40060c")),
)
"""Begin, end and colours of each part: the steps between them are the limits."""


@dataclass(frozen=True)
class Panel:
    """One quantity.

    Attributes:
        title: its name.
        hint: how to read it.
        of_numbers: numbers and beta over the model's own to a place on the scale, from 0 to 1.
        ticks: places on the scale, with their labels.
        words: places on the scale of the names of its parts.
        scale: name of the scale.
        lowest: place at which its legend begins.
        marks_heads: True to mark the heads that `MARKS` names.
    """

    title: str
    hint: str
    of_numbers: Callable[[Numbers, float], float]
    ticks: Sequence[tuple[float, str]]
    words: Sequence[tuple[float, str]]
    scale: str = "meaning"
    lowest: float = 0.0
    marks_heads: bool = False


def draw(history: History, labels: Sequence[str]) -> bytes:
    """Draw the history as a PNG.

    Args:
        history: with at least one log.
        labels: a short name for each layer.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the history is empty.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from PIL import Image
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install matplotlib") from error
    if history.latest is None:
        raise ValueError("the history is empty: add the findings of a step first")
    figure = Figure(figsize=(PIXELS[0] / DPI, PIXELS[1] / DPI), dpi=DPI, facecolor=PAPER)
    canvas = FigureCanvasAgg(figure)
    first, _, rest = history.latest.summary.partition(". ")
    figure.text(0.03, 0.972, first, fontsize=11, color=INK, va="center", weight="bold")
    figure.text(0.97, 0.972, rest, fontsize=10, color=INK, va="center", ha="right")
    grid = figure.add_gridspec(2, 2, left=0.055, right=0.935, top=0.875, bottom=0.065, wspace=0.33, hspace=0.42)
    for index, panel in enumerate(_panels(history)):
        _draw_panel(figure, grid[divmod(index, 2)], panel, history, labels)
    canvas.draw()  # type: ignore[no-untyped-call]
    image = Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")  # type: ignore[no-untyped-call]
    file = io.BytesIO()
    palette = Image.new("P", (1, 1))
    palette.putpalette(_palette())
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


def _panels(history: History) -> list[Panel]:
    keys = _typical_keys(history)
    return [
        Panel(
            "Std of the logits",
            "as softmax sees them, within rows",
            lambda numbers, gain: _interpolate(numbers.logit_std, *STD_SCALE),
            [(place, f"{value:g}") for value, place in zip(*STD_SCALE, strict=True) if value > 0.01],
            ((0.1, "flat"), (0.45, "healthy"), (0.85, "sharp")),
        ),
        Panel(
            "Keys looked at",
            f"exp(entropy), of {keys:.0f}; \u25cb sink, \u00d7 dead",
            lambda numbers, gain: _place_of_entropy(numbers),
            [(place, _count(keys**ratio)) for place, ratio in ((HEALTHY, 0.25), (SHARP, 0.1), (0.45, 0.62))]
            + [(1.0, "1"), (FLAT, _count(0.95 * keys)), (0.0, _count(keys))],
            ((0.1, "flat"), (0.45, "healthy"), (0.775, "sharp"), (0.925, "1 key")),
            marks_heads=True,
        ),
        Panel(
            "Largest logit",
            f"in size; exploding above {LIMITS[Condition.EXPLODING]:g}",
            lambda numbers, gain: _interpolate(numbers.max_logit, *LOGIT_SCALE),
            [(place, f"{value:g}") for value, place in zip(*LOGIT_SCALE, strict=True)],
            ((0.52, "fine"), (0.775, "large"), (0.925, "too large")),
            lowest=LOGIT_SCALE[1][0],
        ),
        Panel(
            "Beta over the model's own",
            "triangles: it turned back",
            lambda numbers, gain: _place_of_gain(gain),
            [(_place_of_gain(gain), f"{gain:g}") for gain in (1e-3, 1e-2, 0.1, 0.5, 1, 2, 10, 100, 1e3)],
            ((0.12, "lowered"), (0.88, "raised")),
            scale="gain",
        ),
    ]


STD_SCALE = ((0.01, 0.32, 1.0, 3.0, 10.0, 30.0, 100.0), (0.0, FLAT, 0.37, 0.53, HEALTHY, SHARP, 1.0))
"""Stds of the logits, and their places."""
LOGIT_SCALE = ((0.5, 10.0, 30.0, 50.0, 100.0, 1000.0), (0.3, 0.5, 0.6, HEALTHY, SHARP, 1.0))


def _interpolate(value: float, values: Sequence[float], places: Sequence[float]) -> float:
    """The place of a value, linear in its logarithm between those given; NaN for NaN."""
    return float(numpy.interp(math.log(max(value, values[0])), numpy.log(values), places))


def _place_of_entropy(numbers: Numbers) -> float:
    """The share of keys in the flat part, beyond it the entropy over that of flat attention."""
    share, ratio, limit = numbers.keys_share, numbers.relative_entropy, LIMITS[Condition.FLAT]
    if math.isnan(ratio):
        return math.nan
    if share > limit:
        return FLAT * min(max((1 - share) / (1 - limit), 0.0), 1.0)
    flat = 1 + math.log(limit) / numbers.flat_entropy
    places = ((flat, FLAT), (LIMITS[Condition.SHARP], HEALTHY), (LIMITS[Condition.ONE_KEY], SHARP), (0.0, 1.0))
    for (high, begin), (low, end) in pairwise(places):
        if ratio >= low:
            return begin + (high - ratio) / (high - low) * (end - begin) if high > low else end
    return 1.0


def _place_of_gain(gain: float) -> float:
    """Half at 1; the root spreads the small changes, the ends are the bounds of the controllers."""
    if not gain > 0:
        return math.nan
    decades = math.log10(gain) / DECADES
    return 0.5 + 0.5 * math.copysign(min(abs(decades), 1.0) ** 0.5, decades)


def _typical_keys(history: History) -> float:
    flat = [x.flat_entropy for x in history.columns[-1].numbers if x.flat_entropy == x.flat_entropy]
    return math.exp(median_high(flat)) if flat else math.nan


def _count(keys: float) -> str:
    return f"{keys:.0f}" if keys >= 10 else f"{keys:.2g}"


def _colormap(scale: str) -> Colormap:
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap

    if scale == "gain":
        return colormaps["PRGn"].resampled(LEVELS).with_extremes(bad=UNKNOWN)
    stops: list[tuple[float, str]] = []
    for begin, end, part in SCALE:
        stops += [(begin + (end - begin) * i / (len(part) - 1), colour) for i, colour in enumerate(part)]
    return LinearSegmentedColormap.from_list("meaning", stops, N=LEVELS).with_extremes(bad=UNKNOWN)


def _palette() -> list[int]:
    """Red, green and blue of every colour, from 0 to 255."""
    from matplotlib.colors import to_rgb

    scales = [_colormap(scale)(level)[:3] for scale in ("meaning", "gain") for level in range(LEVELS)]
    greys = [(shade / (GREYS - 1),) * 3 for shade in range(GREYS)]
    return [round(255 * part) for colour in [*scales, *greys, to_rgb(UNKNOWN)] for part in colour]


def _draw_panel(figure: Figure, place: Any, panel: Panel, history: History, labels: Sequence[str]) -> None:
    over_time, now, bar = place.subgridspec(1, 3, width_ratios=[3.3, 1.5, 0.2], wspace=0.1).subplots()
    colours = _colormap(panel.scale)
    columns, latest = history.columns, history.latest
    assert latest is not None
    values = [[panel.of_numbers(*each) for each in zip(c.numbers, c.gains, strict=True)] for c in columns]
    logs = sum(column.logs for column in columns)
    spacing = (columns[-1].last - columns[0].first) / (logs - 1) if logs > 1 else 1
    edges = [columns[0].first - spacing] + [column.last for column in columns]
    heads = max(len(finding.head_numbers) for finding in latest)
    by_head = [
        [panel.of_numbers(*each) for each in zip(finding.head_numbers, finding.head_gains, strict=True)]
        + [math.nan] * (heads - len(finding.head_numbers))
        for finding in latest
    ]
    maps = ((over_time, edges, numpy.transpose(values), "step"), (now, range(heads + 1), by_head, "head, now"))
    for axes, columns_at, values_at, label in maps:
        axes.pcolormesh(columns_at, range(len(labels) + 1), values_at, cmap=colours, vmin=0, vmax=1, rasterized=True)
        axes.set_xlabel(label, fontsize=9, color=INK, labelpad=2)
        axes.invert_yaxis()
        axes.tick_params(labelsize=8, length=2, pad=2, colors=INK)
        for spine in axes.spines.values():
            spine.set_color(GREY)

    over_time.set_title(panel.title, loc="left", fontsize=11.5, color=INK, pad=14, weight="bold")
    now.set_title(panel.hint, loc="right", fontsize=9, color=GREY, pad=14)
    over_time.set_ylabel("layer", fontsize=9, color=INK, labelpad=3)
    every = math.ceil(len(labels) / 16)
    shown = range(0, len(labels), every)
    over_time.set_yticks([layer + 0.5 for layer in shown], [labels[layer] for layer in shown])
    now.set_yticks([])
    ticks = range(0, heads, math.ceil(heads / (8 if heads <= 8 else 4)))
    now.set_xticks([head + 0.5 for head in ticks], [str(head) for head in ticks])
    over_time.locator_params(axis="x", nbins=6, integer=True)
    if panel.marks_heads:
        _mark_heads(now, latest, heads)
    if panel.scale == "gain":
        _draw_phases(over_time, columns, edges)
        _draw_turns(over_time, columns, edges, len(labels))
    _draw_scale(bar, panel, colours)


def _draw_phases(axes: Axes, columns: Sequence[Column], edges: Sequence[float]) -> None:
    """Write the phase of most layers above the map, with a line where it changes."""
    common = [(max(set(column.phases), key=column.phases.count), column.last) for column in columns]
    begin, span = edges[0], edges[-1] - edges[0]
    for phase, group in groupby(common, key=lambda each: each[0]):
        end = [last for _, last in group][-1]
        if phase:
            if end < edges[-1]:
                axes.axvline(end, color=INK, linewidth=0.8, linestyle=(0, (3, 2)))
            if end - begin > 0.022 * len(phase) * span:
                axes.text(begin, 1.01, phase, fontsize=8, color=INK, transform=axes.get_xaxis_transform())
        begin = end


def _draw_turns(axes: Axes, columns: Sequence[Column], edges: Sequence[float], layers: int) -> None:
    """Mark the cells in which beta turned back."""
    centres = numpy.add(edges[:-1], edges[1:]) / 2
    turns = numpy.array([column.turns for column in columns])
    for sign, marker in ((1, "^"), (-1, "v")):
        column, layer = numpy.nonzero(turns == sign)
        axes.scatter(centres[column], layer + 0.5, s=min(22.0, 260.0 / layers), marker=marker, color=INK, linewidths=0)


def _mark_heads(axes: Axes, latest: Findings, heads: int) -> None:
    """Mark the heads in conditions that no colour shows."""
    size = min(6.0, 50.0 / heads, 100.0 / len(latest))  # points: half of a cell
    for condition, marker in MARKS.items():
        places = [
            (head + 0.5, layer + 0.5)
            for layer, finding in enumerate(latest)
            for head, numbers in enumerate(finding.head_numbers)
            if classify(numbers) is condition
        ]
        xs, ys = [x for x, _ in places], [y for _, y in places]
        ink = INK if condition is Condition.SINK else PAPER  # the dead are dark
        axes.plot(xs, ys, marker, markersize=size, fillstyle="none", markeredgecolor=ink, markeredgewidth=size / 5)


def _draw_scale(bar: Axes, panel: Panel, colours: Colormap) -> None:
    bar.imshow([[i / 255] for i in range(256)], cmap=colours, vmin=0, vmax=1, aspect="auto", extent=(0, 1, 1, 0))
    bar.set_ylim(panel.lowest, 1)
    bar.set_xticks([])
    bar.yaxis.tick_right()
    bar.set_yticks([place for place, _ in panel.ticks], [label for _, label in panel.ticks])
    bar.tick_params(labelsize=8, length=2, pad=2, colors=INK)
    for place, word in panel.words:
        ink = INK if 0.3 < place < 0.8 else PAPER
        bar.text(0.5, place, word, fontsize=7.5, color=ink, ha="center", va="center", rotation=90)
