"""Colours of lines in charts: told apart by the colour-blind, and legible on both papers of a page."""

import itertools
import re
from importlib import resources

import numpy
import pytest

from betahook.cli.pages import COLOURS
from betahook.report.charts import DISTINCT
from betahook.report.conditions import Condition

SEEN_BY = {
    "most people": numpy.eye(3),
    "protanopes": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopes": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}
"""Matrices of Machado, Oliveira and Fernandes (2009) for linear red, green and blue."""
XYZ = numpy.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = XYZ.sum(1)
PALETTES = {"conditions": tuple(COLOURS.values()), "few lines": DISTINCT}


def linear(colour):
    parts = numpy.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return numpy.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(light):
    share = XYZ @ light.clip(0, 1) / WHITE
    x, y, z = numpy.where(share > (6 / 29) ** 3, numpy.cbrt(share), share * (29 / 6) ** 2 / 3 + 4 / 29)
    return numpy.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one, other):
    """The ratio of WCAG."""
    low, high = sorted(XYZ[1] @ linear(colour) + 0.05 for colour in (one, other))
    return high / low


def test_the_measures_are_those_of_the_standards():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert lab(linear("#ff0000")) == pytest.approx([53.24, 80.09, 67.2], abs=0.05)


def test_every_condition_has_a_colour():
    assert {condition.name.lower().replace("_", " ") for condition in Condition} == COLOURS.keys()


@pytest.mark.parametrize("matrix", SEEN_BY.values(), ids=SEEN_BY)
@pytest.mark.parametrize("colours", PALETTES.values(), ids=PALETTES)
def test_lines_are_told_apart(colours, matrix):
    """By a distance of CIE76 of 10, where 2 is just noticed."""
    seen = [lab(numpy.asarray(matrix) @ linear(colour)) for colour in colours]
    assert min(numpy.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2)) > 10


@pytest.mark.parametrize("colours", PALETTES.values(), ids=PALETTES)
def test_lines_are_legible_on_both_papers(colours):
    css = resources.files("betahook.report").joinpath("page.css").read_text(encoding="utf-8")
    papers = re.findall(r"--paper: (#\w+)", css)
    assert len(papers) == 2
    assert min(contrast(colour, paper) for colour, paper in itertools.product(colours, papers)) > 3
