"""The four quantities of the picture at a glance: their names, colours and scales.

`report.pictures` draws them. Colours have a fixed meaning, independent of the data: blue is flat, pale healthy, orange
sharp, and dark red looks at one key, with the limits of `report.conditions`. Beta has another scale, purple to green.
The colour-blind can read both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_high
from typing import TYPE_CHECKING

import numpy

from betahook.control.base import DECADES
from betahook.report.conditions import RULES, Condition, Numbers
from betahook.report.history import Column

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

UNKNOWN, LOST = "#c4c4c4", "#ffe119"
"""Colours for values that were not measured, and that were not finite; they are on no scale."""
LEVELS, GREYS = 40, 24
"""Number of colours of each scale, and of text. The file has no others, which makes it a third as large."""

LIMITS = {rule.condition: rule.limit for rule in reversed(RULES)}
"""The limit of each condition, taken from its first rule."""
FLAT, HEALTHY, SHARP = 0.2, 0.7, 0.85
"""Ends of the flat, healthy and sharp parts of the scale, which goes from 0 to 1."""

SCALE = (
    (0.0, FLAT, ("#123e7c", "#5f9bd6")),
    (FLAT, HEALTHY, ("#d3e4f3", "#f7f6f1", "#fbe3c0")),
    (HEALTHY, SHARP, ("#f7a43c", "#e4671e")),
    (SHARP, 1.0, ("#b3200f", "#40060c")),
)
"""Begin, end and colours of each part; the colour jumps at the limits between them."""


@dataclass(frozen=True)
class Panel:
    """One quantity.

    Attributes:
        title: name of the quantity.
        hint: how to read it.
        of_numbers: function from numbers and gain (beta over the model's own) to a place on the scale, from 0 to 1.
        ticks: places on the scale, with their labels.
        words: places on the scale, with the names of its parts.
        scale: name of the scale.
        lowest: place at which the legend of the scale begins.
        marks: meaning of the marks, shown if they are legible; empty without marks.
    """

    title: str
    hint: str
    of_numbers: Callable[[Numbers, float], float]
    ticks: Sequence[tuple[float, str]]
    words: Sequence[tuple[float, str]]
    scale: str = "meaning"
    lowest: float = 0.0
    marks: str = ""

    def place(self, numbers: Numbers, gain: float) -> float:
        """Return the place on the scale: NaN if not measured, beyond the end if not finite."""
        return 2.0 if self.scale == "meaning" and numbers.nonfinite > 0 else self.of_numbers(numbers, gain)


def panels(last: Column) -> list[Panel]:
    """Return the panels of a picture, with ticks for the number of keys in the last column of its history."""
    keys = _typical_keys(last)
    counted = keys > 1
    measured = not all(math.isnan(numbers.logit_std) for numbers in last.numbers)
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
            f"exp(entropy), of {keys:.0f}" if counted else "one key a row" if measured else "exp(entropy)",
            lambda numbers, gain: place_of_entropy(numbers),
            _ticks_of_keys(keys) if counted else [],
            ((0.1, "flat"), (0.45, "healthy"), (0.775, "sharp"), (0.925, "1 key")),
            marks="\u25cb sink, \u00d7 dead",
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
            "",
            lambda numbers, gain: place_of_gain(gain),
            [(place_of_gain(gain), f"{gain:g}") for gain in (1e-3, 1e-2, 0.1, 0.5, 1, 2, 10, 100, 1e3)],
            ((0.12, "lowered"), (0.88, "raised")),
            scale="gain",
            marks="triangles: it turned back",
        ),
    ]


STD_SCALE = ((0.01, 0.32, 1.0, 3.0, 10.0, 30.0, 100.0), (0.0, FLAT, 0.37, 0.53, HEALTHY, SHARP, 1.0))
"""Stds of the logits, and their places on the scale."""
LOGIT_SCALE = ((0.5, 10.0, 30.0, 50.0, 100.0, 1000.0), (0.3, 0.5, 0.6, HEALTHY, SHARP, 1.0))


def _interpolate(value: float, values: Sequence[float], places: Sequence[float]) -> float:
    """Return the place of a value, by linear interpolation in its logarithm; NaN for NaN."""
    return float(numpy.interp(math.log(max(value, values[0])), numpy.log(values), places))


def place_of_entropy(numbers: Numbers) -> float:
    """Return a place by the share of keys in the flat part, beyond it by the entropy over that of flat attention."""
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


def place_of_gain(gain: float) -> float:
    """Return the place of a gain: 0.5 for 1, and the ends for the controllers' bounds; a root spreads small changes."""
    if not gain > 0:
        return math.nan
    decades = math.log10(gain) / DECADES
    return 0.5 + 0.5 * math.copysign(min(abs(decades), 1.0) ** 0.5, decades)


def _typical_keys(last: Column) -> float:
    flat = [x.flat_entropy for x in last.numbers if not math.isnan(x.flat_entropy)]
    return math.exp(median_high(flat)) if flat else math.nan


def _ticks_of_keys(keys: float) -> list[tuple[float, str]]:
    ratios = ((HEALTHY, LIMITS[Condition.SHARP]), (SHARP, LIMITS[Condition.ONE_KEY]), (0.45, 0.62))
    places = [(place, keys**ratio) for place, ratio in ratios]
    places += [(1.0, 1), (FLAT, LIMITS[Condition.FLAT] * keys), (0.0, keys)]
    return [(place, _count(count)) for place, count in places]


def _count(keys: float) -> str:
    return f"{keys:.0f}" if keys >= 10 else f"{keys:.2g}"


@functools.cache
def colormap(scale: str) -> Colormap:
    """Return the colormap of a scale."""
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap

    if scale == "gain":
        return colormaps["PRGn"].resampled(LEVELS).with_extremes(bad=UNKNOWN, over=LOST)
    stops: list[tuple[float, str]] = []
    for begin, end, part in SCALE:
        stops += [(begin + (end - begin) * i / (len(part) - 1), colour) for i, colour in enumerate(part)]
    return LinearSegmentedColormap.from_list("meaning", stops, N=LEVELS).with_extremes(bad=UNKNOWN, over=LOST)


@functools.cache
def palette() -> tuple[int, ...]:
    """Return red, green and blue of every colour in the picture, from 0 to 255."""
    from matplotlib.colors import to_rgb

    scales = [colormap(scale)(level)[:3] for scale in ("meaning", "gain") for level in range(LEVELS)]
    greys = [(shade / (GREYS - 1),) * 3 for shade in range(GREYS)]
    return tuple(round(255 * part) for colour in [*scales, *greys, to_rgb(UNKNOWN), to_rgb(LOST)] for part in colour)
