"""Number formats against what torch itself rounds."""

import math

import pytest
import torch

from betahook.report.precision import FORMATS, judge


def judged(max_logit, beta=1.0):
    heads = torch.tensor(max_logit, dtype=torch.float64)
    return {each.dtype: each for each in judge({"max_logit/layer": heads, "beta/layer": torch.full_like(heads, beta)})}


@pytest.mark.parametrize("largest", [0.3, 6.1, 12.0, 30.0, 63.0, 120.0])
@pytest.mark.parametrize("dtype", FORMATS)
def test_the_error_bounds_that_of_rounded_logits_and_is_reached(dtype, largest):
    logits = torch.linspace(0, largest, 200_001, dtype=torch.float64)
    error = (logits.to(dtype).double() - logits).exp().sub(1).abs().max()
    bound = judged([largest])[dtype].weight_error[0]
    assert bound * 0.95 < error <= bound * (1 + 1e-9)


def test_what_has_no_error_and_what_has_no_bound():
    found = judged([0.0, math.inf, math.nan])[torch.bfloat16].weight_error
    assert torch.equal(found.nan_to_num(nan=-1.0, posinf=math.inf), torch.tensor([0.0, math.inf, -1.0]).double())


def test_the_range_is_that_of_the_scores_before_beta():
    found = judged([1_000.0, 5_000.0, 10_000.0], beta=0.125)[torch.float16]
    assert torch.equal(found.range_used, torch.tensor([8_000.0, 40_000.0, 80_000.0], dtype=torch.float64) / 65_504)
    assert (found.overflowing, found.near_overflow) == ([2], [1])
    assert found.verdict == "overflows"
    assert torch.tensor(80_000.0).to(torch.float16).isinf()


def test_an_overflow_is_worse_than_any_rounding_and_what_was_not_measured_is_no_concern():
    overflowing = judged([70_000.0, 1.0])[torch.float16]
    coarse = judged([300.0, 1.0])[torch.bfloat16]
    near = judged([20_000.0, 1.0], beta=1.0)[torch.float16]
    fine, idle = judged([5.0, 1.0])[torch.float16], judged([math.nan, math.nan])[torch.float16]
    assert [each.is_concern for each in (overflowing, near, coarse, fine, idle)] == [True, True, True, False, False]
    assert sorted([coarse, overflowing, fine, near], key=lambda each: each.gravity) == [fine, coarse, near, overflowing]


def test_a_nan_hides_no_concern_and_is_not_fine():
    overflowing, fine = judged([math.nan, 70_000.0])[torch.float16], judged([math.nan, 1.0])[torch.float16]
    assert (overflowing.verdict, overflowing.unmeasured) == ("overflows", [0])
    assert overflowing.gravity > judged([20_000.0, 1.0])[torch.float16].gravity
    assert (fine.verdict, fine.is_concern) == ("not measured", False)


@pytest.mark.parametrize(
    ("max_logit", "dtype", "verdict"),
    [
        (5.0, torch.bfloat16, "fine"),
        (60.0, torch.bfloat16, "weights off by 13%"),
        (8.0, torch.float8_e4m3fn, "weights off by 65%"),
        (20.0, torch.float8_e4m3fn, "weights off 2.7-fold"),
        (1_792.0, torch.bfloat16, "weights off 55-fold"),
        (224.0, torch.float8_e4m3fn, "near overflow (50% of the range)"),
        (float("nan"), torch.float16, "not measured"),
        (float("inf"), torch.float16, "overflows"),
    ],
)
def test_verdicts(max_logit, dtype, verdict):
    assert judged([max_logit, 0.5 if max_logit == max_logit else max_logit])[dtype].verdict == verdict
