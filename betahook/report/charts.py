"""A chart of lines over steps as SVG, with axes, a legend and the numbers in tooltips; for `report.html`."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from betahook.report.document import Chart

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 10, 30
CHARACTER = 8
"""Width of a digit, enough for any font."""
IN_LEGEND = 6
"""Number of lines that a legend names at most; more lines take the colours of `RAMP`."""
DISTINCT = ("#4a92c8", "#e3761b", "#56a372", "#8d4aef", "#b88b44", "#cd0018")
"""Colours for few lines, which the colour-blind can tell apart."""
RAMP = ((59, 130, 246), (16, 160, 130), (230, 150, 30), (214, 60, 80))
"""From the first line to the last: blue, green, orange, red; legible on white and on black."""

Point = tuple[float, float]


def draw(chart: Chart) -> str:
    """Draw a chart. Crosses mark steps whose value is not finite; a logarithmic axis shows positive values only."""
    lines = {name: [point for point in points if _is_drawn(point, chart)] for name, points in chart.lines.items()}
    lost = {name: [step for step, value in points if not math.isfinite(value)] for name, points in chart.lines.items()}
    names = [name for name in lines if lines[name] or lost[name]]
    values = [value for points in lines.values() for _, value in points]
    if not values:
        return f'<p class="note">{"not finite at any step" if names else "nothing was logged"}</p>'
    low, high = chart.ends or _range(values, chart.logarithmic)
    first, last = chart.steps or steps_of([chart])

    def place(point: Point) -> str:
        return f"{_x(point[0], first, last):.1f},{_y(point[1], low, high, chart.logarithmic):.1f}"

    colours = [chart.colours.get(name, colour) for name, colour in zip(names, _colours(len(names)), strict=True)]
    parts = [_axes(chart, (first, last), (low, high))]
    for colour, name in zip(colours, names, strict=True):
        points = lines[name]
        shape = f'<polyline stroke="{colour}" points="{" ".join(map(place, points))}"/>' if len(points) > 1 else ""
        if len(points) == 1:
            x, y = place(points[0]).split(",")
            shape = f'<circle fill="{colour}" cx="{x}" cy="{y}" r="3"/>'
        crosses = (
            f'<text style="fill:{colour}" x="{x}" y="{HEIGHT - BOTTOM + 4}" text-anchor="middle">\u00d7</text>'
            for x in sorted({round(_x(step, first, last)) for step in lost[name]})
        )
        parts.append(f"<g><title>{html.escape(_tip(name, points, lost[name]))}</title>{shape}{''.join(crosses)}</g>")
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(chart.title)}">{"".join(parts)}</svg>'
    )
    named = len(names) <= IN_LEGEND or bool(chart.colours)
    return svg + (_legend(names, colours, named) if len(names) > 1 or chart.colours else "")


def steps_of(charts: Iterable[Chart]) -> Point:
    """Return the ends of an axis of steps that fits all points of some charts."""
    steps = [step for chart in charts for points in chart.lines.values() for step, _ in points]
    return min(steps), max(max(steps), min(steps) + 1)


def _is_drawn(point: Point, chart: Chart) -> bool:
    return math.isfinite(point[1]) and (point[1] > 0 or not chart.logarithmic)


def _tip(name: str, points: Sequence[Point], lost: Sequence[float]) -> str:
    said = []
    if points:
        (first, begin), (last, end) = points[0], points[-1]
        said.append(f"{begin:.4g} at step {first:g}, {end:.4g} at {last:g}")
    if lost:
        said.append(f"not finite at step {lost[0]:g}" + f" and {len(lost) - 1} more" * (len(lost) > 1))
    return f"{name}: {'; '.join(said)}"


def _range(values: Sequence[float], logarithmic: bool) -> Point:
    """Return the ends of an axis for these values, with some room."""
    low, high = min(values), max(values)
    if logarithmic:
        room = max((high / low) ** 0.05, 1.1)
        return low / room, high * room
    room = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return low - room, high + room


def _x(step: float, first: float, last: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / (last - first)


def _y(value: float, low: float, high: float, logarithmic: bool) -> float:
    if logarithmic:
        value, low, high = math.log(value), math.log(low), math.log(high)
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)


def ticks(low: float, high: float, logarithmic: bool) -> list[float]:
    """Return about five round numbers between two numbers."""
    if logarithmic and high / low > 4:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        factors = (1, 2, 5) if high / low < 100 else (1,)
        found = [factor * 10.0**decade for decade in decades for factor in factors]
        found = [value for value in found if low <= value <= high]
        return found[:: math.ceil(len(found) / 6)]
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [step * count for count in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _axes(chart: Chart, steps: Point, values: Point) -> str:
    parts = [f'<text x="{LEFT - 24}" y="{HEIGHT - 8}" text-anchor="end">step</text>']
    for value in ticks(*values, chart.logarithmic):
        y = _y(value, *values, chart.logarithmic)
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_label(value)}</text>')
    for step in ticks(*steps, False):
        if step == int(step):
            label, x, anchor = f"{int(step):,}", _x(step, *steps), "middle"
            if x + len(label) * CHARACTER / 2 > WIDTH:  # else it would be cut off
                x, anchor = WIDTH, "end"
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{label}</text>')
    return "".join(parts)


def _label(value: float) -> str:
    return f"{value:,.10g}" if abs(value) < 1e6 else f"{value:.3g}"


def _colours(count: int) -> list[str]:
    if count <= IN_LEGEND:
        return list(DISTINCT[:count])
    return [_between(index / (count - 1)) for index in range(count)]


def _between(share: float) -> str:
    position = share * (len(RAMP) - 1)
    index = min(int(position), len(RAMP) - 2)
    mix = [round(a + (b - a) * (position - index)) for a, b in zip(RAMP[index], RAMP[index + 1], strict=True)]
    return f"rgb({mix[0]},{mix[1]},{mix[2]})"


def _legend(names: Sequence[str], colours: Sequence[str], named: bool) -> str:
    if named:
        entries = [
            f'<span><i style="background:{colour}"></i>{html.escape(name)}</span>'
            for name, colour in zip(names, colours, strict=True)
        ]
    else:
        ramp = f"linear-gradient(to right,{','.join(_between(step / 6) for step in range(7))})"
        first, last = html.escape(names[0]), html.escape(names[-1])
        entries = [f'<span>{first}<i class="ramp" style="background:{ramp}"></i>{last}</span>']
    return f'<div class="legend">{"".join(entries)}</div>'
