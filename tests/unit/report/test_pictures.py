"""The picture at a glance: its size, and that colours mean what they say, read back from the file."""

import io
import math
from dataclasses import replace

import pytest

from betahook.control.notes import Note
from betahook.control.opening import Phase
from betahook.report import pictures
from betahook.report.conditions import Condition, classify
from betahook.report.history import History
from betahook.report.pictures import FLAT, HEALTHY, PIXELS, SHARP, draw
from support.made_up_findings import finding, findings, numbers

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("matplotlib")


def drawn(logs, layers, heads, at=None):
    """A picture of a run in which layer 1 has become sharp and layer 2 is flat."""
    history = History()
    for step in range(1, logs + 1):
        beta = dict(gain=1 + 0.2 * math.sin(step), note=Note(Phase.SEARCH, math.sin(step)))
        changes = {
            "layer_1": finding(1, [numbers(0.05 if 2 * step > logs else 0.6, logit_std=30.0)] * heads, **beta),
            "layer_2": finding(2, [numbers(0.9999, logit_std=0.05)] * heads, **beta),
        }
        history.add(findings(step, layers, heads, **changes), step)
    return draw(history, history.latest.labels)


def colours(picture):
    image = Image.open(io.BytesIO(picture))
    assert image.size == PIXELS
    return image.convert("RGB")


def is_reddish(pixel):
    return pixel[0] > 1.5 * pixel[2]


def is_bluish(pixel):
    return pixel[2] > 1.5 * pixel[0]


def test_colours_tell_flat_healthy_and_one_key_apart():
    image = colours(drawn(20, 3, 4))
    # The map of keys over time is at the top right: rows of equal height from 96 to 348, steps from 670 to 955.
    sharp, flat, healthy = (image.getpixel((930, y)) for y in (222, 306, 138))
    assert is_reddish(sharp)
    assert is_bluish(flat)
    assert min(healthy) > 190
    assert min(image.getpixel((690, 222))) > 190  # layer 1, before


def test_the_colours_of_beta_are_others():
    history = History()
    history.add(findings(1, 2, layer_1=finding(1, [numbers()] * 2, gain=100.0)), 1)
    image = colours(draw(history, history.latest.labels))
    assert min(image.getpixel((800, 500))) > 220  # the model's own
    red, green, blue = image.getpixel((800, 650))
    assert green > max(red, blue)


@pytest.mark.parametrize(("logs", "layers", "heads", "kilobytes"), [(100, 12, 8, 40), (5, 64, 64, 100), (1, 1, 1, 40)])
def test_the_size_of_the_file(logs, layers, heads, kilobytes):
    layers = max(layers, 3)
    assert len(drawn(logs, layers, heads)) <= kilobytes * 1000


@pytest.mark.parametrize(
    ("ratio", "place"),
    [(1.0, 0.0), (1 + math.log(0.95) / math.log(100), FLAT), (0.25, HEALTHY), (0.1, SHARP), (0, 1.0)],
)
def test_the_limits_of_the_conditions_are_steps_of_the_scale(ratio, place):
    assert pictures._place_of_entropy(numbers(ratio)) == pytest.approx(place, abs=1e-6)


def test_the_scale_has_no_gap_where_flat_ends():
    beyond = numbers(1 + math.log(0.9499) / math.log(100))
    assert pictures._place_of_entropy(beyond) == pytest.approx(FLAT, abs=1e-3)


def test_the_scale_agrees_with_the_conditions():
    names = {Condition.FLAT: (0, FLAT), Condition.HEALTHY: (FLAT, HEALTHY)}
    names |= {Condition.SHARP: (HEALTHY, SHARP), Condition.ONE_KEY: (SHARP, 1)}
    for thousandths in range(1, 1000):
        each = numbers(thousandths / 1000)
        low, high = names[classify(each)]
        assert low - 1e-9 <= pictures._place_of_entropy(each) <= high + 1e-9


def test_what_was_not_measured_has_no_colour():
    assert math.isnan(pictures._place_of_entropy(numbers(math.nan)))
    assert math.isnan(pictures._place_of_gain(math.nan))
    nothing = finding(0, [numbers(math.nan, math.nan, math.nan)], gain=math.nan)
    history = History()
    history.add(findings(0, 1, layer_0=nothing), 0)
    red, green, blue = colours(draw(history, ["0"])).getpixel((800, 220))
    assert red == green == blue


def test_an_empty_history_cannot_be_drawn():
    with pytest.raises(ValueError, match="the history is empty: add the findings of a step first"):
        draw(History(), [])


def test_heads_that_are_sinks_or_dead_are_marked():
    def shades(head):
        """Of the map of keys by head, where layer 0 has one head."""
        history = History()
        history.add(findings(1, 1, layer_0=finding(0, [head])), 1)
        return {pixel for _, pixel in colours(draw(history, ["0"])).crop((990, 120, 1080, 330)).getcolors()}

    dead, flat = numbers(1.0, logit_std=0.001), numbers(1.0, logit_std=0.003)
    assert len(shades(numbers())) == len(shades(flat)) == 1
    assert min(map(max, shades(replace(numbers(), sink=0.9)))) < 50
    assert max(map(min, shades(dead))) > 200
