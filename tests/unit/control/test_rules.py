"""Each of the small rules against updates computed by hand."""

import math

import numpy
import pytest
import torch

from betahook import Cap, Clip, Gradient, Monitor, Search, Variance
from support.observations import approx, decades, observe, run, sensitivities

NAN = math.nan


def test_monitor_keeps_beta():
    assert run(Monitor(), [observe(std=3, sensitivity=5, max_score=1e9)] * 2, 0.7) == [0.7, 0.7]


@pytest.mark.parametrize(
    ("source", "measured"), [("measured", {"std": 4}), ("weights", {"predicted_std": 4})], ids=["measured", "weights"]
)
@pytest.mark.parametrize("target", [1.0, 3.0])
def test_variance_reaches_target_over_std(source, measured, target):
    other = {"std": 9, "predicted_std": 9} | measured
    assert run(Variance(target, source, smoothing=0), [observe(**other)]) == approx([target / 4])


def test_variance_smooths_log_beta():
    history = run(Variance(smoothing=0.75), [observe(std=100), observe(std=100), observe(std=0.1)])
    # A quarter of the way to -2 decades, a quarter of the rest, a quarter of the way to +1.
    assert decades(history) == approx([-0.5, -0.875, -0.875 + 1.875 / 4])


@pytest.mark.parametrize("source", ["measured", "weights"])
def test_variance_without_a_std_keeps_beta(source):
    unknown = {"std": 2, "predicted_std": 2} | {"std" if source == "measured" else "predicted_std": NAN}
    assert run(Variance(source=source), [observe(**unknown)], 0.7) == [0.7]


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.8)])
def test_gradient_is_adam_on_log_beta(betas):
    slopes = torch.randn(30, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    log_beta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([log_beta], lr=0.03, betas=betas, eps=1e-30)
    expected = []
    for slope in slopes:
        log_beta.grad = slope.clone()
        adam.step()
        expected.append(log_beta.detach().exp())
    history = run(Gradient(0.03, betas), [observe(units=2, sensitivity=slope) for slope in slopes], [1.0, 1.0])
    torch.testing.assert_close(torch.tensor(history, dtype=torch.float64), torch.stack(expected))


def test_gradient_without_sensitivity_keeps_beta():
    assert run(Gradient(), sensitivities(0, 0), 0.7) == [0.7, 0.7]


def test_cap_bounds_the_largest_logit():
    observation = observe(units=3, max_score=[10, 10, NAN])
    assert run(Cap(5.0), [observation], [2.0, 0.3, 2.0]) == [[0.5, 0.3, 2.0]]


def test_cap_goes_by_the_bound_and_not_by_what_sampled_rows_show():
    assert run(Cap(5.0), [observe(max_score=10, max_score_bound=50)], 2.0) == [0.1]


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (Variance, {"target": True}, r"Variance\(target=\.\.\.\) must be a positive number; got True"),
        (Variance, {"target": 0}, r"Variance\(target=\.\.\.\) must be a positive number; got 0"),
        (Variance, {"source": "guess"}, r"Variance\(source=\.\.\.\) must be \"measured\" or \"weights\"; got 'guess'"),
        (Variance, {"smoothing": 1.0}, r"Variance\(smoothing=\.\.\.\) must be a number from 0 to below 1; got 1\.0"),
        (Variance, {"smoothing": -0.1}, r"Variance\(smoothing"),
        (Gradient, {"learning_rate": True}, r"Gradient\(learning_rate=\.\.\.\) must be a positive number"),
        (Gradient, {"learning_rate": 0}, r"Gradient\(learning_rate=\.\.\.\) must be a positive number; got 0"),
        (
            Gradient,
            {"betas": (0.9, 1.0)},
            r"Gradient\(betas=\.\.\.\) must be two numbers from 0 to below 1; got \(0\.9",
        ),
        (Gradient, {"betas": (0.9,)}, r"Gradient\(betas=\.\.\.\)"),
        (Cap, {"threshold": -1}, r"Cap\(threshold=\.\.\.\) must be a positive number; got -1"),
        (Cap, {"threshold": "30"}, r"Cap\(threshold=\.\.\.\) must be a positive number; got '30'"),
        (Cap, {"threshold": True}, r"Cap\(threshold=\.\.\.\) must be a positive number; got True"),
        (Clip, {"threshold": torch.tensor(50.0)}, r"Clip\(threshold=\.\.\.\) must be a positive number; got tensor"),
        (Gradient, {"betas": 0.9}, r"Gradient\(betas=\.\.\.\) must be two numbers from 0 to below 1; got 0\.9"),
        *[(rule, {option: NAN}, "got nan") for rule, option in [(Variance, "target"), (Cap, "threshold")]],
    ],
)
def test_options_that_make_no_sense_are_refused(rule, options, message):
    with pytest.raises(ValueError, match=message):
        rule(**options)


@pytest.mark.parametrize("rule", [Cap, Clip])
@pytest.mark.parametrize("number", [numpy.float32(50), numpy.float64(50), numpy.int64(50)], ids=lambda x: str(x.dtype))
def test_a_threshold_of_numpy_is_one_that_a_checkpoint_can_hold(rule, number):
    plain = "50" if number.dtype.kind == "i" else "50.0"
    assert repr(rule(number)) == f"{rule.__name__}(threshold={plain})"
    assert repr(rule(50)) == f"{rule.__name__}(threshold=50)"


def test_numbers_of_numpy_become_plain_in_every_option():
    assert repr(Search(window=numpy.int64(5), growth=numpy.float32(1.25))) == "Search(window=5, growth=1.25)"
    with pytest.raises(ValueError, match=r"window=.*whole number, 1 or more; got 0"):
        Search(window=numpy.int64(0))


def test_the_defaults():
    assert (Variance().target, Variance().source, Variance().smoothing) == (1.0, "measured", 0.9)
    assert (Gradient().learning_rate, Gradient().betas) == (0.02, (0.9, 0.999))
    assert Cap().threshold == 100.0
