"""The picture at a glance: its size, and that colours mean what they say, read back from the file."""

import io
import itertools
import math
from dataclasses import replace

import pytest

from betahook.control.notes import Note
from betahook.control.opening import Phase
from betahook.report import panels, pictures
from betahook.report.conditions import Condition, Numbers, classify
from betahook.report.findings import Findings
from betahook.report.history import History
from betahook.report.panels import FLAT, HEALTHY, SHARP
from betahook.report.pictures import PIXELS, draw
from support.made_up_findings import finding, findings, numbers

Image = pytest.importorskip("PIL.Image")
matplotlib = pytest.importorskip("matplotlib")

BOX = pictures.Box(66, 95, 280, 254)
"""A map of layers by step."""


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
    return draw(history)


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
    image = colours(draw(history))
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
    assert panels.place_of_entropy(numbers(ratio)) == pytest.approx(place, abs=1e-6)


def test_the_scale_has_no_gap_where_flat_ends():
    beyond = numbers(1 + math.log(0.9499) / math.log(100))
    assert panels.place_of_entropy(beyond) == pytest.approx(FLAT, abs=1e-3)


def test_the_scale_agrees_with_the_conditions():
    names = {Condition.FLAT: (0, FLAT), Condition.HEALTHY: (FLAT, HEALTHY)}
    names |= {Condition.SHARP: (HEALTHY, SHARP), Condition.ONE_KEY: (SHARP, 1)}
    for thousandths in range(1, 1000):
        each = numbers(thousandths / 1000)
        low, high = names[classify(each)]
        assert low - 1e-9 <= panels.place_of_entropy(each) <= high + 1e-9


def test_a_beta_beyond_the_bounds_of_controllers_lies_at_the_end_of_its_scale():
    """As one that was set by hand."""
    assert [panels.place_of_gain(gain) for gain in (1e-5, 1e-3, 1.0, 1e3, 1e5)] == pytest.approx([0, 0, 0.5, 1, 1])


def test_what_was_not_measured_has_no_colour():
    assert math.isnan(panels.place_of_entropy(numbers(math.nan)))
    assert math.isnan(panels.place_of_gain(math.nan))
    nothing = replace(finding(0, [numbers(math.nan, math.nan, math.nan)], gain=math.nan), layer="0")
    history = History()
    history.add(findings(0, 1, layer_0=nothing), 0)
    red, green, blue = colours(draw(history)).getpixel((800, 220))
    assert red == green == blue


def test_heads_that_are_sinks_or_dead_are_marked():
    def shades(head):
        """Of the map of keys by head, where layer 0 has one head."""
        history = History()
        history.add(findings(1, 1, layer_0=replace(finding(0, [head]), layer="0")), 1)
        return {pixel for _, pixel in colours(draw(history)).crop((990, 120, 1080, 330)).getcolors()}

    dead, flat = numbers(1.0, logit_std=0.001), numbers(1.0, logit_std=0.003)
    assert len(shades(numbers())) == len(shades(flat)) == 1
    assert min(map(max, shades(replace(numbers(), sink=0.9)))) < 50
    assert max(map(min, shades(dead))) > 200


def history_of(*steps, **change):
    history = History()
    for step in steps:
        history.add(findings(step, **change), step)
    return history


def shares(columns):
    return [index / columns for index in range(columns + 1)]


@pytest.mark.parametrize(
    "settings",
    [
        {"text.usetex": True},
        {"pcolor.shading": "nearest", "figure.autolayout": True, "path.sketch": (1, 100, 2), "font.size": 20},
        {"figure.constrained_layout.use": True, "lines.linewidth": 5, "text.hinting": "none", "savefig.dpi": 50},
    ],
)
def test_the_settings_of_matplotlib_change_nothing(settings):
    """A picture in the middle of a training must not fail because plots of the user's are made for LaTeX."""
    history = history_of(1, 2)
    expected = draw(history)
    with matplotlib.rc_context(settings):
        assert draw(history) == expected
        assert matplotlib.rcParams | settings == matplotlib.rcParams


def test_long_labels_stay_on_the_page_and_off_the_maps():
    names = {index: f"{index}.block.layer.1.EncDecAttention.{index}" for index in range(4)}
    layers = {f"layer_{index}": replace(finding(index, [numbers()]), layer=name) for index, name in names.items()}
    image = colours(draw(history_of(1, layers=4, **layers)))
    for left, right in ((0, 15), (580, 618)):  # before the labels of the left maps, and of the right ones
        assert image.crop((left, 96, right, 340)).getcolors() == [((right - left) * 244, (255, 255, 255))]


@pytest.mark.parametrize("layers", [1, 8])
def test_names_of_any_length_leave_room_for_the_maps_and_stay_on_the_page(layers):
    """Eight differ in three places that no short name has."""
    places = [f"{index:03b}" for index in range(layers)]
    names = ("stage_with_a_very_descriptive_name_".join([*place, ""]) for place in places)
    named = {f"layer_{i}": replace(finding(i, [numbers()]), layer=name) for i, name in enumerate(names)}
    image = colours(draw(history_of(1, layers=layers, **named)))
    assert image.crop((1166, 0, 1200, 60)).getcolors() == [(34 * 60, (255, 255, 255))]
    assert len(image.crop((300, 100, 380, 340)).getcolors()) == 1  # within the first map
    assert image.getpixel((300, 100)) != (255, 255, 255)


@pytest.mark.parametrize(("layers", "lines"), [(1, 1), (12, 2)])
def test_the_header_takes_two_lines_where_one_is_too_short(layers, lines):
    kinds = [numbers(), numbers(0.05), numbers(0.2), numbers(0.999), numbers(max_logit=200.0), numbers(logit_std=1e-3)]
    alike = {f"layer_{index}": finding(index, [kinds[index % 6]]) for index in range(layers)}
    history = History()
    history.add(findings(1, 0, **alike), 1)
    second = colours(draw(history)).crop((0, 34, 1200, 52))
    assert (len(second.getcolors()) > 1) is (lines == 2)


def test_the_header_names_the_step_of_the_axis():
    def header(step_of_hook):
        history = History()
        history.add(findings(step_of_hook), 4000)
        return colours(draw(history)).crop((0, 0, 1200, 50)).tobytes()

    assert header(7) == header(4000)


@pytest.mark.parametrize(
    ("steps", "edges"),
    [
        ((1,), [0, 1]),
        ((0,), [0, 1]),
        ((1, 50, 100), [0, 1, 50, 100]),  # as with logging_first_step
        ((310, 320, 330), [300, 310, 320, 330]),
        ((0, 10, 20), [0, 10, 20, 30]),
    ],
)
def test_no_column_begins_before_the_run(steps, edges):
    assert pictures._edges(history_of(*steps).columns) == edges


def test_dollars_in_the_name_of_a_layer_are_no_formula():
    history = History()
    layers = (finding(layer, [numbers(0.6)] * 2) for layer in range(2))
    history.add(Findings.at(1, [replace(each, layer=f"$\\frac$ of ${at}$") for at, each in enumerate(layers)]), 1)
    assert colours(draw(history))


def test_rows_of_one_key_have_no_ticks():
    one_key = Numbers(0.0, 8.0, 0.0, math.nan, math.nan)
    history = history_of(1, layers=1, layer_0=replace(finding(0, [one_key]), numbers=one_key))
    panel = panels.panels(history.columns[-1])[1]
    assert (panel.hint, panel.ticks) == ("one key a row", [])
    nothing = replace(one_key, logit_std=math.nan)
    history = history_of(1, layers=1, layer_0=replace(finding(0, [nothing]), numbers=nothing))
    assert panels.panels(history.columns[-1])[1].hint == "exp(entropy)"
    assert panels.panels(history_of(1).columns[-1])[1].hint == "exp(entropy), of 100"


@pytest.mark.parametrize("share", range(1, 10))
def test_the_words_of_phases_do_not_overlap(share):
    history, page = History(), pictures.new_page()
    for step in range(1, 31):
        note = Note(Phase.WARM_UP if step <= share else Phase.CLIMB, 0.1)
        history.add(findings(step, 1, layer_0=finding(0, [numbers()], note=note)), step)
    pictures._draw_phases(page, BOX, history.columns, shares(30))
    boxes = sorted((text.get_window_extent() for text in page.texts), key=lambda box: box.x0)
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert [text.get_text() for text in page.texts][-1] == "climb"


@pytest.mark.parametrize("logs", [10, 64])
def test_turns_do_not_merge_into_a_bar(logs):
    history, page = History(), pictures.new_page()
    for step in range(logs):
        note = Note(Phase.SEARCH, 0.1 * (-1) ** step)
        history.add(findings(step, 1, layer_0=finding(0, [numbers()], note=note)), step)
    assert pictures._draw_turns(page, BOX, history.columns, shares(logs))
    size = page.collections[0].get_sizes()[0] ** 0.5 * pictures.DPI / 72
    places = sorted(each[0] for every in page.collections for each in every.get_offsets())
    assert min(right - left for left, right in itertools.pairwise(places)) > size
    assert len(places) == logs - 1 if logs == 10 else 15 < len(places) < 40


def test_marks_on_dark_cells_are_white():
    """The upper layer is at the upper bound of beta, the lower one near the model's own."""
    history = History()
    for step in range(1, 7):
        note = Note(Phase.SEARCH, 0.1 * (-1) ** step)
        layers = {f"layer_{i}": finding(i, [numbers()], gain=gain, note=note) for i, gain in enumerate((1e3, 1.1))}
        history.add(findings(step, 0, **layers), step)
    image = colours(draw(history))
    dark, pale = image.crop((680, 460, 940, 580)), image.crop((680, 585, 940, 705))
    assert max(min(pixel) for _, pixel in dark.getcolors()) > 200
    assert min(max(pixel) for _, pixel in pale.getcolors()) < 60


def test_the_last_step_stays_off_the_next_map():
    page = pictures.new_page()
    pictures._write_below(page, BOX, {0.0: "0", 1.0: "20000"}, "step")
    assert max(text.get_window_extent().x1 for text in page.texts) <= BOX.right + 6


def test_labels_of_steps_do_not_touch():
    page = pictures.new_page()
    pictures._write_below(page, replace(BOX, width=170), {i / 5: f"1.2000{i}M" for i in range(6)}, "step")
    boxes = [text.get_window_extent() for text in page.texts[:-1]]
    assert len(boxes) == 3
    assert all(right.x0 - left.x1 > 2 for left, right in itertools.pairwise(boxes))


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((0, 500, 9000, 20_000, 1_200_000), ["0", "500", "9000", "20k", "1.2M"]),
        ((1_200_010, 1_200_020), ["1.20001M", "1.20002M"]),
        ((1_200_000, 1_200_001), ["1200000", "1200001"]),
    ],
)
def test_steps_take_little_room_and_are_told_apart(steps, said):
    assert pictures._short(steps) == said


@pytest.mark.parametrize(("heads", "layers", "are_marked"), [(32, 32, True), (64, 48, False), (8, 100, False)])
def test_marks_too_small_to_read_are_left_out(heads, layers, are_marked):
    alike = {f"layer_{index}": finding(index, [numbers(1.0, logit_std=0.001)] * heads) for index in range(layers)}
    history = History()
    history.add(findings(1, 0, **alike), 1)
    image = colours(draw(history))
    assert (len(image.crop((970, 100, 1085, 340)).getcolors()) > 1) is are_marked


def test_what_was_not_finite_is_neither_grey_nor_on_the_scale():
    lost = Numbers(1.0, math.nan, math.nan, math.nan, math.nan)
    history = history_of(1, layers=2, layer_0=replace(finding(0, [lost, numbers()]), numbers=lost))
    image = colours(draw(history))
    for y in (150, 520):
        assert image.getpixel((200, y)) == (255, 225, 25)
    assert image.getpixel((990, 150)) == (255, 225, 25)  # its first head
    assert image.getpixel((1060, 150)) == image.getpixel((200 + 603, 280))  # its second, as the other layer
    assert image.getpixel((800, 520)) != (255, 225, 25)  # beta was not lost
