"""Documents as pages: escaped, closed, and charts whose lines are where the numbers are."""

import math
import os
import re

import pytest

from betahook.cli.pages import COLOURS
from betahook.report import charts, html
from betahook.report.document import Chart, Document, Image, Table, Text

EVIL = '<script>alert("1")</script>&'


def test_everything_is_escaped():
    blocks = [
        Text(EVIL),
        Text(EVIL, strong=True),
        Table([EVIL], [[EVIL]], EVIL, EVIL),
        Image(b"\x89PNG", EVIL, EVIL, EVIL),
        Chart(EVIL, {EVIL: [(0, 1.0), (1, 2.0)], "b": [(0, 1.0)]}, note=EVIL),
    ]
    page = html.render(Document(EVIL, blocks))
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 10
    assert "data:image/png;base64,iVBORw==" in page.replace("\n", "") or "base64,iVBORw" in page


def test_columns_of_numbers_are_aligned_and_empty_ones_left_out():
    table = Table(["name", "number", "empty"], [["a", "1.5 x", ""], ["b", "", ""]])
    assert [table.is_numeric(column) for column in range(3)] == [False, True, False]
    assert list(table.compact().header) == ["name", "number"]
    assert list(table.compact(without=["number"]).header) == ["name"]
    assert list(Table(["name", "number"], []).compact().header) == ["name", "number"]
    page = html.render(Document("t", [table]))
    assert '<th class="number">number</th>' in page
    assert "empty" not in page.partition("<body>")[2]


def test_a_page_replaces_an_older_one_at_once(tmp_path):
    file = tmp_path / "page.html"
    file.write_text("old")
    html.write(Document("new", []), file)
    assert "<title>new</title>" in file.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def points(svg):
    return [tuple(map(float, pair.split(","))) for pair in re.search(r'points="([^"]+)"', svg).group(1).split()]


def test_a_page_goes_through_a_link_and_into_a_pipe(tmp_path):
    link, file, pipe = (tmp_path / name for name in ("link.html", "file.html", "pipe"))
    link.symlink_to(file)
    html.write(Document("title", []), link)
    assert link.is_symlink()
    assert "<h1>title</h1>" in file.read_text(encoding="utf-8")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    html.write(Document("title", []), pipe)
    assert os.read(reader, 2**16).decode() == file.read_text(encoding="utf-8")
    os.close(reader)
    assert sorted(tmp_path.iterdir()) == [file, link, pipe]
    assert pipe.is_fifo()


def test_lines_are_where_the_numbers_are():
    (a, b, c) = points(charts.draw(Chart("t", {"x": [(0, 0.0), (5, 1.0), (10, 2.0)]})))
    assert a[0] == charts.LEFT
    assert c[0] == charts.WIDTH - charts.RIGHT
    assert b == pytest.approx(((a[0] + c[0]) / 2, (a[1] + c[1]) / 2), abs=0.1)
    assert a[1] > c[1]  # up is more
    (a, b, c) = points(charts.draw(Chart("t", {"x": [(0, 0.1), (5, 1.0), (10, 10.0)]}, logarithmic=True)))
    assert b[1] == pytest.approx((a[1] + c[1]) / 2, abs=0.1)


def test_what_cannot_be_drawn_is_left_out():
    nan, inf = float("nan"), float("inf")
    assert len(points(charts.draw(Chart("t", {"x": [(0, 1.0), (1, nan), (2, inf), (3, 2.0)]})))) == 2
    assert len(points(charts.draw(Chart("t", {"x": [(0, 1.0), (1, 0.0), (3, 2.0)]}, logarithmic=True)))) == 2
    assert "nothing was logged" in charts.draw(Chart("t", {"x": []}))
    assert "<circle" in charts.draw(Chart("t", {"x": [(3, 2.0)]}))


def test_what_is_not_finite_is_marked_at_its_step():
    nan, inf = float("nan"), float("inf")
    drawn = charts.draw(Chart("t", {"x": [(0, 1.0), (5, nan), (7, inf), (10, 2.0)], "y": [(5, nan)]}))
    middle, later = (charts.LEFT + share * (charts.WIDTH - charts.LEFT - charts.RIGHT) for share in (0.5, 0.7))
    crosses = re.findall(r'style="fill:(#\w+)" x="([\d.]+)" y="([\d.]+)"[^>]*>\u00d7', drawn)
    assert [colour for colour, _, _ in crosses] == [*charts.DISTINCT[:1] * 2, charts.DISTINCT[1]]
    assert [float(x) for _, x, _ in crosses] == pytest.approx([middle, later, middle], abs=0.5)
    tips = re.findall("<title>(.*?)</title>", drawn)
    assert tips == ["x: 1 at step 0, 2 at 10; not finite at step 5 and 1 more", "y: not finite at step 5"]
    assert drawn.count("<span>") == 2
    alone = charts.draw(Chart("t", {"x": [(0, nan), (1, inf)]}))
    assert "not finite at any step" in alone
    assert "svg" not in alone


def test_thousands_of_crosses_are_no_more_than_there_are_pixels():
    line = [(0, 1.0), *((step, float("nan")) for step in range(1, 10_000))]
    assert charts.draw(Chart("t", {"x": line})).count("\u00d7") <= charts.WIDTH


def test_the_legend_of_many_lines_has_the_colours_that_they_have():
    lines = {name: [(1, 0.1), (2, 0.2)] for name in list(COLOURS)[:7]}
    drawn = charts.draw(Chart("t", lines, colours=COLOURS))
    assert re.findall('background:([^"]+)"', drawn) == re.findall('stroke="([^"]+)"', drawn)


def test_few_lines_are_named_and_many_run_through_a_scale():
    line = [(0, 1.0), (1, 2.0)]
    assert "legend" not in charts.draw(Chart("t", {"x": line}))
    assert "legend" in charts.draw(Chart("t", {"healthy": line}, colours={"healthy": "#123456"}))
    assert charts.draw(Chart("t", {f"l{index}": line for index in range(6)})).count("<span>") == 6
    many = charts.draw(Chart("t", {f"l{index}": line for index in range(64)}))
    assert re.findall(r"<span>(\w+)<.*>(\w+)</span>", many) == [("l0", "l63")]
    assert len(set(re.findall(r'stroke="(rgb[^"]+)"', many))) > 30


@pytest.mark.parametrize(
    ("line", "logarithmic", "lowest", "highest"),
    [
        ([2.0, 6.0], False, 1.8, 6.2),
        ([5.0, 5.0], False, 4.5, 5.5),
        ([0.0, 0.0], False, -1.0, 1.0),
        ([1e-3, 1e17], True, 1e-4, 1e18),
        ([1.0, 2.0], True, 1 / 1.1, 2.2),
    ],
)
def test_an_axis_leaves_some_room(line, logarithmic, lowest, highest):
    """A twentieth of the range on either side, or a tenth of the number; the line keeps off the edges accordingly."""
    drawn = points(charts.draw(Chart("t", {"x": list(enumerate(line))}, logarithmic=logarithmic)))
    scale = math.log if logarithmic else float
    low, high = scale(lowest), scale(highest)
    height = charts.HEIGHT - charts.TOP - charts.BOTTOM
    expected = [charts.HEIGHT - charts.BOTTOM - height * (scale(value) - low) / (high - low) for value in line]
    assert [y for _, y in drawn] == pytest.approx(expected, abs=0.06)


def test_an_axis_of_given_steps():
    drawn = points(charts.draw(Chart("t", {"x": [(50, 1.0), (100, 2.0)]}, steps=(0, 100))))
    assert [x for x, _ in drawn] == [(charts.LEFT + charts.WIDTH - charts.RIGHT) / 2, charts.WIDTH - charts.RIGHT]


def test_an_axis_of_given_ends():
    drawn = charts.draw(Chart("t", {"share": [(0, 1.0), (1, 1.0)]}, ends=(-0.05, 1.05)))
    assert [label for label in ("0", "0.5", "1", "1.1") if f">{label}</text>" in drawn] == ["0", "0.5", "1"]


@pytest.mark.parametrize(("last", "is_moved"), [(10, False), (100, False), (2000, True), (1_000_000, True)])
def test_the_last_step_is_not_cut_at_the_edge(last, is_moved):
    drawn = charts.draw(Chart("t", {"x": [(0, 1.0), (last, 2.0)]}))
    ((x, anchor),) = re.findall(rf'<text x="([\d.]+)" y="[\d.]+" text-anchor="(\w+)">{last:,}</text>', drawn)
    expected = (charts.WIDTH, "end") if is_moved else (charts.WIDTH - charts.RIGHT, "middle")
    assert (float(x), anchor) == expected


def test_a_colour_with_a_meaning_stays_with_its_line():
    lines = {"a": [(0, 1.0), (1, 2.0)], "flat": [(0, 1.0), (1, 2.0)]}
    drawn = charts.draw(Chart("t", lines, colours={"flat": "#123456", "gone": "#654321"}))
    assert re.findall('stroke="([^"]+)"', drawn) == [charts.DISTINCT[0], "#123456"]
    assert drawn.count("#123456") == 2  # in the legend too


@pytest.mark.parametrize(
    ("low", "high", "logarithmic", "expected"),
    [
        (0.0, 10.0, False, [0, 2, 4, 6, 8, 10]),
        (-0.3, 0.31, False, [-0.2, 0, 0.2]),
        (0.5, 60.0, True, [1, 10]),
        (0.9, 30.0, True, [1, 2, 5, 10, 20]),
        (4.5, 5.5, True, [4.6, 4.8, 5.0, 5.2, 5.4]),
        (1e-6, 1e3, True, [1e-6, 1e-4, 1e-2, 1.0, 100.0]),
    ],
)
def test_ticks_are_round(low, high, logarithmic, expected):
    assert charts.ticks(low, high, logarithmic) == pytest.approx(expected)
