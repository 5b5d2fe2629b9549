"""The few numbers of a whole model."""

import math
from dataclasses import replace

import pytest

from betahook.report.conditions import Condition, Numbers
from betahook.report.summary import Summary, summarise
from support.made_up_findings import ALL_KEYS, finding, findings, numbers


def test_the_numbers():
    sharp = finding(1, [numbers(0.15), numbers(0.25, max_logit=40.0)], gain=10.0)
    flat = finding(2, [numbers(0.999)] * 2, gain=0.1)
    flat = replace(flat, numbers=replace(flat.numbers, logit_std=0.5, weight_std_q=0.3, weight_std_k=0.1))
    other = finding(3, [numbers()])
    other = replace(other, numbers=replace(other.numbers, weight_std_q=0.1, weight_std_k=0.2))
    found = summarise(findings(1, 4, layer_1=sharp, layer_2=flat, layer_3=other))
    assert found == pytest.approx(
        {
            "attention/layers_healthy": 0.5,
            "attention/layers_flat": 0.25,
            "attention/layers_sharp": 0.25,
            "attention/layers_one_key": 0.0,
            "attention/max_logit": 40.0,
            "attention/max_logit_layer": 1,
            "attention/max_logit_head": 1,
            "attention/lowest_entropy": 0.2 * ALL_KEYS,
            "attention/highest_logit_std": 2.0,
            "attention/highest_weight_std_q": 0.3,
            "attention/highest_weight_std_k": 0.2,
            "attention/log10_beta_over_own_lowest": -1,
            "attention/log10_beta_over_own_highest": 1,
        }
    )


def test_flags_are_there_when_they_fire():
    exploding = finding(1, [numbers(max_logit=200.0)])
    assert summarise(findings(1, layer_1=exploding))["attention/layers_exploding"] == pytest.approx(1 / 3)


def test_what_was_not_measured_is_left_out():
    nothing = finding(0, [numbers(math.nan, math.nan, math.nan)], gain=math.nan)
    found = summarise(findings(0, 1, layer_0=nothing))
    assert {name for name in found if not name.startswith("attention/layers_")} == set()
    assert found["attention/layers_unmeasured"] == 1


def test_a_layer_that_is_not_finite_has_no_entropy_to_compare():
    lost = replace(finding(0, [numbers()]), condition=Condition.NONFINITE, numbers=Numbers(1.0, *[math.nan] * 4))
    found = summarise(findings(1, layer_0=lost))
    assert found["attention/layers_nonfinite"] == pytest.approx(1 / 3)
    assert found["attention/lowest_entropy"] == pytest.approx(0.6 * ALL_KEYS)


def test_a_condition_that_was_there_once_is_reported_from_then_on():
    exploding, calm = findings(1, layer_1=finding(1, [numbers(max_logit=200.0)])), findings(1)
    summary, tag = Summary(), "attention/layers_exploding"
    reported = [summary(found).get(tag) for found in (calm, exploding, calm, calm)]
    assert reported == [None, pytest.approx(1 / 3), 0.0, 0.0]
