"""The picture at a glance: maps of what attention does, by layer and step and by layer and head. Needs matplotlib.

`report.glance.Picture` draws one from its `History`; `report.panels` defines its quantities and colours.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy

from betahook.report.charts import ticks
from betahook.report.conditions import Condition, classify
from betahook.report.findings import Findings
from betahook.report.history import Column, History
from betahook.report.names import elided, shorten_to
from betahook.report.panels import Panel, colormap, palette, panels, place_of_entropy, place_of_gain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PIXELS, DPI = (1200, 760), 100
INK, GREY, PAPER = "#1a1a1a", "#666666", "#ffffff"
Mark = tuple[float, float, str]
"""A position in pixels, and a colour."""
MARKS = {Condition.SINK: "o", Condition.DEAD: "x"}
"""Matplotlib's markers for conditions that no colour shows."""
LEGIBLE = 2.5
"""Smallest size of a marker, in pixels; a smaller one is left out."""
LABEL = 28
"""Largest number of characters in the label of a layer; a longer one is shortened."""
WIDEST = 210
"""Largest width of a label, in pixels. The middle of a wider one is left out, even if labels then look alike."""
NARROWEST = 66
"""Smallest width left of a map of layers by step, in pixels, enough for the labels of most models."""
TOPS, HEIGHT, RIGHT = (95, 456), 254, 1122
"""Tops of the upper and lower maps, their height, and the right end of the rightmost scale, in pixels."""
TICK, GAP = 3, 5
"""Length of a tick, and smallest gap between two labels, in pixels."""


@dataclass(frozen=True)
class Box:
    """A rectangle of the page, in pixels from the upper left corner."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, share: Any) -> Any:
        """Return the position at a share of the width, 0 at the left; takes a number or an array."""
        return self.left + self.width * share

    def y(self, share: Any) -> Any:
        """Return the position at a share of the height, 0 at the top; takes a number or an array."""
        return self.top + self.height * share


def draw(history: History) -> bytes:
    """Draw a history that is not empty as a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure
        from PIL import Image
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install matplotlib") from error
    # The user's matplotlib settings, e.g. for a paper, may require LaTeX or make drawing fail.
    defaults = {name: each for name, each in matplotlib.rcParamsDefault.items() if not name.startswith("backend")}
    with matplotlib.rc_context(defaults):
        pixels = _pixels(history)
    image = Image.frombuffer("RGBA", PIXELS, pixels).convert("RGB")
    file = io.BytesIO()
    colours = Image.new("P", (1, 1))
    colours.putpalette(palette())
    image.quantize(palette=colours, dither=Image.Dither.NONE).save(file, "PNG")
    return file.getvalue()


def _pixels(history: History) -> bytes:
    """Draw a history, and return red, green, blue and alpha of each pixel."""
    page, latest, columns = new_page(), history.latest, history.columns
    assert latest is not None
    _write_header(page, columns, latest)
    labels = [_shorten_to_width(page, label, 8, WIDEST) for label in shorten_to(latest.labels, LABEL)]
    margin = max(NARROWEST, 48 + max(_width(page, label, 8) for label in labels))
    between = margin + 84
    width = (RIGHT - margin - between) / 2
    for index, panel in enumerate(panels(columns[-1])):
        row, column = divmod(index, 2)
        box = Box(margin + column * (width + between), TOPS[row], width, HEIGHT)
        _write(page, box.left + NARROWEST - margin, box.top - 24, panel.title, 11.5, weight="bold")  # above the labels
        _draw_panel(page, box, panel, columns, latest, labels)
    canvas: Any = page.figure.canvas
    canvas.draw()
    return bytes(canvas.buffer_rgba())


def new_page() -> Axes:
    """Return an empty page, whose coordinates are pixels from the upper left corner.

    All maps are drawn on it, with ticks of our own: matplotlib's axes would take most of the time of a picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(PIXELS[0] / DPI, PIXELS[1] / DPI), dpi=DPI, facecolor=PAPER)
    FigureCanvasAgg(figure)
    page = figure.add_axes((0, 0, 1, 1))
    page.set_axis_off()
    page.set(xlim=(0, PIXELS[0]), ylim=(PIXELS[1], 0), autoscale_on=False)
    return page


def _width(page: Axes, text: str, size: float, weight: str = "normal") -> float:
    """Return the width in pixels of a text of `size` points."""
    from matplotlib.font_manager import FontProperties

    canvas: Any = page.figure.canvas
    font = FontProperties(size=size, weight=weight)
    return float(canvas.get_renderer().get_text_width_height_descent(text, font, False)[0])


def _shorten_to_width(page: Axes, text: str, size: float, room: float, weight: str = "normal") -> str:
    """Leave out the middle of a text that is wider than `room` pixels."""
    shown, length = text, math.ceil(len(text) * room / max(_width(page, text, size, weight), 1))
    while _width(page, shown, size, weight) > room:
        shown, length = elided(text, length // 2, length), length - 1
    return shown


def _write(
    page: Axes, x: float, y: float, text: str, size: float, ha: str = "left", color: str = INK, **options: Any
) -> None:
    # The name of a layer may contain dollars, between which matplotlib would parse a formula.
    page.text(x, y, text, fontsize=size, color=color, ha=ha, va="center", parse_math=False, **options)


def _write_header(page: Axes, columns: Sequence[Column], latest: Findings) -> None:
    """Write the summary in one line, or in two if it does not fit; explain yellow and grey if a cell is yellow."""
    summary = latest.summary.removeprefix(f"Step {latest.step}: ")
    first, _, rest = f"Step {columns[-1].last}: {summary}".partition(". ")
    first = first.removesuffix(".")
    left, right = 0.03 * PIXELS[0], 0.97 * PIXELS[0]
    _write(page, left, 21, _shorten_to_width(page, first, 11, right - left, "bold"), 11, weight="bold")
    if _width(page, first, 11, "bold") + _width(page, rest, 10) + 30 < right - left:
        _write(page, right, 21, rest, 10, "right")
    else:
        _write(page, left, 44, _shorten_to_width(page, rest, 10, right - left), 10)
    shown = [numbers for column in columns for numbers in column.numbers]
    shown += [numbers for finding in latest for numbers in finding.head_numbers]
    if any(numbers.nonfinite > 0 for numbers in shown):
        _write(page, 480, 750, "yellow: NaN or infinity; grey: not measured", 9, color=GREY)


def _draw_panel(
    page: Axes, box: Box, panel: Panel, columns: Sequence[Column], latest: Findings, labels: Sequence[str]
) -> None:
    """Draw a map of layers by step, one of layers by head, and the scale."""
    gap = box.width / 32
    part = (box.width - 2 * gap) / 5
    over_time = Box(box.left, box.top, 3.3 * part, box.height)
    now = Box(over_time.right + gap, box.top, 1.5 * part, box.height)
    edges, heads = _edges(columns), max(len(finding.head_numbers) for finding in latest)
    values = [[panel.place(*each) for each in zip(c.numbers, c.gains, strict=True)] for c in columns]
    by_head = [
        [panel.place(*each) for each in zip(finding.head_numbers, finding.head_gains, strict=True)]
        + [math.nan] * (heads - len(finding.head_numbers))
        for finding in latest
    ]
    shares = _shares(edges, edges)
    _draw_map(page, over_time, shares, numpy.transpose(values), panel.scale)
    _draw_map(page, now, numpy.linspace(0, 1, heads + 1), by_head, panel.scale)

    shown = range(0, len(labels), math.ceil(len(labels) / 16))
    _write_layers(page, over_time, {(layer + 0.5) / len(labels): labels[layer] for layer in shown})
    steps = [step for step in ticks(edges[0], edges[-1], False) if step == int(step)]
    _write_below(page, over_time, dict(zip(_shares(steps, edges), _short(steps), strict=True)), "step")
    shown = range(0, heads, math.ceil(heads / (8 if heads <= 8 else 4)))
    _write_below(page, now, {(head + 0.5) / heads: str(head) for head in shown}, "head, now")
    if panel.scale == "gain":
        _draw_phases(page, over_time, columns, shares)
        is_marked = _draw_turns(page, over_time, columns, shares)
    else:
        is_marked = bool(panel.marks) and _mark_heads(page, now, latest, heads)
    hints = filter(None, [panel.hint, panel.marks if is_marked else ""])
    _write(page, now.right, box.top - 24, "; ".join(hints), 9, "right", GREY)
    _draw_scale(page, Box(now.right + gap, box.top, 0.2 * part, box.height), panel)


def _edges(columns: Sequence[Column]) -> list[float]:
    """Return the steps where columns begin and end: a log covers the steps before it, or after it if one is at 0."""
    logs = sum(column.logs for column in columns)
    spacing = (columns[-1].last - columns[0].first) / (logs - 1) if logs > 1 else 1
    if columns[0].first > 0:
        return [max(columns[0].first - spacing, 0), *(column.last for column in columns)]
    return [*(column.first for column in columns), columns[-1].last + spacing]


def _shares(steps: Sequence[float], edges: Sequence[float]) -> list[float]:
    """Return the positions of steps on the axis of steps, from 0 to 1."""
    return [(step - edges[0]) / (edges[-1] - edges[0]) for step in steps]


def _short(steps: Sequence[float]) -> list[str]:
    """Write steps in a few characters, `500`, `20k`, `1.2M`, or with all digits if two would look alike."""
    written = [
        f"{step / 1e6:g}M" if step >= 1e6 else f"{step / 1e3:g}k" if step >= 1e4 else f"{step:g}" for step in steps
    ]
    return written if len(set(written)) == len(steps) else [f"{step:.0f}" for step in steps]


def _draw_map(page: Axes, box: Box, columns: Any, values: Any, scale: str) -> None:
    """Draw rows of cells; `columns` holds the edges between columns as shares of the width."""
    from matplotlib.patches import Rectangle

    rows = numpy.linspace(0, 1, len(values) + 1)
    places = box.x(numpy.asarray(columns)), box.y(rows)
    page.pcolormesh(*places, values, cmap=colormap(scale), vmin=0, vmax=1, rasterized=True)
    page.add_patch(Rectangle((box.left, box.top), box.width, box.height, fill=False, edgecolor=GREY, linewidth=0.8))


def _write_layers(page: Axes, box: Box, labels: Mapping[float, str]) -> None:
    """Write labels of layers at the left of a map, at shares of its height."""
    page.hlines([box.y(share) for share in labels], box.left - TICK, box.left, INK, linewidth=0.8)
    for share, label in labels.items():
        _write(page, box.left - TICK - 3, box.y(share), label, 8, "right")
    longest = max(_width(page, label, 8) for label in labels.values())
    _write(page, box.left - TICK - 16 - longest, box.y(0.5), "layer", 9, "center", rotation=90)


def _write_below(page: Axes, box: Box, labels: Mapping[float, str], name: str) -> None:
    """Write labels below a map, at shares of its width, except those that would touch, and the name of the axis."""
    page.vlines([box.x(share) for share in labels], box.bottom, box.bottom + TICK, INK, linewidth=0.8)
    end = -math.inf
    for share, label in labels.items():
        half = _width(page, label, 8) / 2
        x = min(box.x(share), box.right + 5 - half)  # the next map begins there
        if x - half >= end + GAP:
            _write(page, x, box.bottom + 10, label, 8, "center")
            end = x + half
    _write(page, box.x(0.5), box.bottom + 25, name, 9, "center")


def _draw_phases(page: Axes, box: Box, columns: Sequence[Column], shares: Sequence[float]) -> None:
    """Write the phase that most layers are in above the map, with a line where it changes."""
    common = [max(set(column.phases), key=column.phases.count) for column in columns]
    begin = 0.0
    for phase, group in groupby(zip(common, shares[1:], strict=True), key=lambda each: each[0]):
        end = [share for _, share in group][-1]
        if phase:
            if end < 1:
                page.vlines(box.x(end), box.top, box.bottom, INK, linewidth=0.8, linestyle=(0, (3, 2)))
            if (end - begin) * box.width > _width(page, phase, 8) + 6:
                _write(page, box.x(begin), box.top - 7, phase, 8)
        begin = end


def _draw_turns(page: Axes, box: Box, columns: Sequence[Column], shares: Sequence[float]) -> bool:
    """Mark cells in which beta turned back, only the first if marks would touch; return whether marks are legible."""
    layers = len(columns[0].turns)
    size = min(_mark_size(box, 1, layers), 4.7)
    centres = box.x(numpy.add(shares[:-1], shares[1:]) / 2)
    marked: dict[int, list[Mark]] = {1: [], -1: []}
    for layer in range(layers if size else 0):
        last = -math.inf
        for centre, column in zip(centres, columns, strict=True):
            if column.turns[layer] and centre - last >= 1.4 * size * DPI / 72:
                ink = _ink(place_of_gain(column.gains[layer]))
                marked[column.turns[layer]].append((centre, box.y((layer + 0.5) / layers), ink))
                last = centre
    for sign, marker in ((1, "^"), (-1, "v")):
        if marked[sign]:
            xs, ys, inks = zip(*marked[sign], strict=True)
            # A list: matplotlib 3.8 would take a tuple of two colours for one colour and its alpha.
            page.scatter(xs, ys, s=size**2, marker=marker, color=[*inks], linewidths=0)
    return size > 0


def _mark_heads(page: Axes, box: Box, latest: Findings, heads: int) -> bool:
    """Mark the heads in conditions that no colour shows; return whether marks are legible."""
    size = _mark_size(box, heads, len(latest))
    for condition, marker in MARKS.items() if size else ():
        places = [
            (box.x((head + 0.5) / heads), box.y((layer + 0.5) / len(latest)), _ink(place_of_entropy(numbers)))
            for layer, finding in enumerate(latest)
            for head, numbers in enumerate(finding.head_numbers)
            if classify(numbers) is condition
        ]
        for ink in {ink for _, _, ink in places}:
            xs, ys = zip(*((x, y) for x, y, own in places if own == ink), strict=True)
            page.plot(xs, ys, marker, markersize=size, fillstyle="none", markeredgecolor=ink, markeredgewidth=size / 5)
    return size > 0


def _mark_size(box: Box, columns: int, rows: int) -> float:
    """Return the size in points of a marker in a map of `columns` by `rows` cells; 0 if it would be too small."""
    pixels = 0.75 * min(box.width / columns, box.height / rows)
    return min(pixels * 72 / DPI, 6.0) if pixels >= LEGIBLE else 0.0


def _ink(place: float) -> str:
    """Return the colour for text at a place of a scale, whose ends are dark."""
    return INK if 0.2 <= place < 0.8 else PAPER


def _draw_scale(page: Axes, box: Box, panel: Panel) -> None:
    """Draw the colours of a scale, the highest place on top, with ticks and the names of its parts."""
    shown = 1 - panel.lowest
    levels = 1 - shown * (numpy.arange(256) + 0.5) / 256
    _draw_map(page, box, [0, 1], levels[:, None], panel.scale)
    labels = {box.y((1 - place) / shown): label for place, label in panel.ticks}
    page.hlines(list(labels), box.right, box.right + TICK, INK, linewidth=0.8)
    for y, label in labels.items():
        _write(page, box.right + TICK + 3, y, label, 8)
    for place, word in panel.words:
        _write(page, box.x(0.5), box.y((1 - place) / shown), word, 7.5, "center", _ink(place), rotation=90)
