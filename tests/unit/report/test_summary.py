"""The few numbers of a whole model."""

import math

import pytest

from betahook.report.summary import summarise
from support.made_up_findings import ALL_KEYS, finding, findings, numbers


def test_the_numbers():
    sharp = finding(1, [numbers(0.15), numbers(0.25, max_logit=40.0)], gain=10.0)
    flat = finding(2, [numbers(0.999)] * 2, gain=0.1)
    found = summarise(findings(1, 4, layer_1=sharp, layer_2=flat))
    assert found == pytest.approx(
        {
            "layers_healthy": 0.5,
            "layers_flat": 0.25,
            "layers_sharp": 0.25,
            "layers_one_key": 0.0,
            "max_logit": 40.0,
            "max_logit_layer": 1,
            "max_logit_head": 1,
            "lowest_entropy": 0.2 * ALL_KEYS,
            "log10_beta_over_own_lowest": -1,
            "log10_beta_over_own_highest": 1,
        }
    )


def test_flags_are_there_when_they_fire():
    exploding = finding(1, [numbers(max_logit=200.0)])
    assert summarise(findings(1, layer_1=exploding))["layers_exploding"] == pytest.approx(1 / 3)


def test_what_was_not_measured_is_left_out():
    nothing = finding(0, [numbers(math.nan, math.nan, math.nan)], gain=math.nan)
    found = summarise(findings(0, 1, layer_0=nothing))
    assert {name for name in found if not name.startswith("layers_")} == set()
    assert found["layers_unmeasured"] == 1
