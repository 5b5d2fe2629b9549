"""The picture at a glance: layer by step and layer by head of what attention does. Needs matplotlib.

`TensorBoardWriter` draws one now and then from its `History`; `report.panels` has what it shows, and in which colours.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy

from betahook.report.conditions import Condition, classify
from betahook.report.findings import Findings
from betahook.report.history import Column, History
from betahook.report.names import fitting
from betahook.report.panels import Panel, colormap, palette, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

PIXELS, DPI = (1200, 760), 100
INK, GREY, PAPER = "#1a1a1a", "#666666", "#ffffff"
MARKS = {Condition.SINK: "o", Condition.DEAD: "x"}
"""Markers of matplotlib for conditions that no colour shows."""
LEGIBLE = 2.5
"""Pixels of a marker below which it is left out."""
LABEL = 28
"""Characters of a layer's label beyond which it is shortened."""
NARROWEST = 66
"""Pixels left of a map of layers by step, wide enough for the labels of most models."""


def draw(history: History, labels: Sequence[str]) -> bytes:
    """Draw the history as a PNG, with a short label for each layer.

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
    _write_header(figure, history)
    labels = fitting(labels, LABEL)
    margin = max(NARROWEST, 48 + max(_width(label, 8) for label in labels))
    between, right = margin + 84, 0.935 * PIXELS[0]
    wspace = between / ((right - margin - between) / 2)
    grid = figure.add_gridspec(
        2, 2, left=margin / PIXELS[0], right=right / PIXELS[0], top=0.875, bottom=0.065, wspace=wspace, hspace=0.42
    )
    for index, panel in enumerate(panels(history)):
        _draw_panel(grid[divmod(index, 2)], panel, history, labels, margin)
    canvas.draw()  # type: ignore[no-untyped-call]
    image = Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")  # type: ignore[no-untyped-call]
    file = io.BytesIO()
    colours = Image.new("P", (1, 1))
    colours.putpalette(palette())
    image.quantize(palette=colours, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


def _width(text: str, size: float, weight: str = "normal") -> float:
    """Width of a text of so many points, in pixels."""
    if not text:
        return 0.0
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    return float(TextPath((0, 0), text, size * DPI / 72, prop=FontProperties(weight=weight)).get_extents().width)


def _write_header(figure: Figure, history: History) -> None:
    """Write the summary in one line, or in two where it does not fit; and what yellow is where it occurs."""
    latest, columns = history.latest, history.columns
    assert latest is not None
    summary = latest.summary.removeprefix(f"Step {latest.step}: ")
    first, _, rest = f"Step {columns[-1].last}: {summary}".partition(". ")
    first = first.removesuffix(".")
    fits = _width(first, 11, "bold") + _width(rest, 10) + 30 < 0.94 * PIXELS[0]
    figure.text(0.03, 0.972, first, fontsize=11, color=INK, va="center", weight="bold")
    if fits:
        figure.text(0.97, 0.972, rest, fontsize=10, color=INK, va="center", ha="right")
    else:
        figure.text(0.03, 0.942, rest, fontsize=10, color=INK, va="center")
    shown = [numbers for column in columns for numbers in column.numbers]
    shown += [numbers for finding in latest for numbers in finding.head_numbers]
    if any(numbers.nonfinite > 0 for numbers in shown):
        figure.text(0.4, 0.013, "yellow: NaN or infinity; grey: not measured", fontsize=9, color=GREY, va="center")


def _draw_panel(place: Any, panel: Panel, history: History, labels: Sequence[str], margin: float) -> None:
    over_time, now, bar = place.subgridspec(1, 3, width_ratios=[3.3, 1.5, 0.2], wspace=0.1).subplots()
    colours = colormap(panel.scale)
    columns, latest = history.columns, history.latest
    assert latest is not None
    edges, heads = _edges(columns), max(len(finding.head_numbers) for finding in latest)
    values = [[panel.place(*each) for each in zip(c.numbers, c.gains, strict=True)] for c in columns]
    by_head = [
        [panel.place(*each) for each in zip(finding.head_numbers, finding.head_gains, strict=True)]
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

    over_time.set_ylabel("layer", fontsize=9, color=INK, labelpad=3)
    every = math.ceil(len(labels) / 16)
    shown = range(0, len(labels), every)
    over_time.set_yticks([layer + 0.5 for layer in shown], [labels[layer] for layer in shown])
    now.set_yticks([])
    ticks = range(0, heads, math.ceil(heads / (8 if heads <= 8 else 4)))
    now.set_xticks([head + 0.5 for head in ticks], [str(head) for head in ticks])
    over_time.locator_params(axis="x", nbins=max(2, int(over_time.get_window_extent().width / 46)), integer=True)
    if panel.scale == "gain":
        _draw_phases(over_time, columns, edges)
        is_marked = _draw_turns(over_time, columns, edges, len(labels))
    else:
        is_marked = bool(panel.marks) and _mark_heads(now, latest, heads)
    hints = [panel.hint, panel.marks if is_marked else ""]
    begin = (NARROWEST - margin) / over_time.get_window_extent().width  # above the labels, where the hint leaves room
    over_time.set_title(panel.title, loc="left", x=begin, fontsize=11.5, color=INK, pad=14, weight="bold")
    now.set_title("; ".join(filter(None, hints)), loc="right", fontsize=9, color=GREY, pad=14)
    _draw_scale(bar, panel, colours)


def _edges(columns: Sequence[Column]) -> list[float]:
    """Steps at which columns begin and end: a log is of the steps before it, in a run that counts from 0 from it on."""
    logs = sum(column.logs for column in columns)
    spacing = (columns[-1].last - columns[0].first) / (logs - 1) if logs > 1 else 1
    if columns[0].first > 0:
        return [max(columns[0].first - spacing, 0), *(column.last for column in columns)]
    return [*(column.first for column in columns), columns[-1].last + spacing]


def _draw_phases(axes: Axes, columns: Sequence[Column], edges: Sequence[float]) -> None:
    """Write the phase of most layers above the map, with a line where it changes."""
    common = [max(set(column.phases), key=column.phases.count) for column in columns]
    pixels, begin = axes.get_window_extent().width / (edges[-1] - edges[0]), edges[0]
    for phase, group in groupby(zip(common, edges[1:], strict=True), key=lambda each: each[0]):
        end = [edge for _, edge in group][-1]
        if phase:
            if end < edges[-1]:
                axes.axvline(end, color=INK, linewidth=0.8, linestyle=(0, (3, 2)))
            if (end - begin) * pixels > _width(phase, 8) + 6:
                axes.text(begin, 1.01, phase, fontsize=8, color=INK, transform=axes.get_xaxis_transform())
        begin = end


def _draw_turns(axes: Axes, columns: Sequence[Column], edges: Sequence[float], layers: int) -> bool:
    """Mark the cells in which beta turned back, of those too close to tell apart the first; tell if that is legible."""
    size = min(_mark_size(axes, 1, layers), 4.7)
    apart = 1.4 * size * DPI / 72 / axes.get_window_extent().width * (edges[-1] - edges[0])
    centres = numpy.add(edges[:-1], edges[1:]) / 2
    marked: dict[int, list[tuple[float, float]]] = {1: [], -1: []}
    for layer in range(layers if size else 0):
        last = -math.inf
        for centre, column in zip(centres, columns, strict=True):
            if column.turns[layer] and centre - last >= apart:
                marked[column.turns[layer]].append((centre, layer + 0.5))
                last = centre
    for sign, marker in ((1, "^"), (-1, "v")):
        xs, ys = [x for x, _ in marked[sign]], [y for _, y in marked[sign]]
        axes.scatter(xs, ys, s=size**2, marker=marker, color=INK, linewidths=0)
    return size > 0


def _mark_heads(axes: Axes, latest: Findings, heads: int) -> bool:
    """Mark the heads in conditions that no colour shows; tell if that is legible."""
    size = _mark_size(axes, heads, len(latest))
    for condition, marker in MARKS.items() if size else ():
        places = [
            (head + 0.5, layer + 0.5)
            for layer, finding in enumerate(latest)
            for head, numbers in enumerate(finding.head_numbers)
            if classify(numbers) is condition
        ]
        xs, ys = [x for x, _ in places], [y for _, y in places]
        ink = INK if condition is Condition.SINK else PAPER  # the dead are dark
        axes.plot(xs, ys, marker, markersize=size, fillstyle="none", markeredgecolor=ink, markeredgewidth=size / 5)
    return size > 0


def _mark_size(axes: Axes, columns: int, rows: int) -> float:
    """Points of a marker in a map of so many cells; 0 if it would be too small to be read."""
    box = axes.get_window_extent()
    pixels = 0.75 * float(min(box.width / columns, box.height / rows))
    return min(pixels * 72 / DPI, 6.0) if pixels >= LEGIBLE else 0.0


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
