"""The search over runs against the best point of the whole grid."""

import json
import math

import pytest
import torch

from betahook import BetaSearch

PEAKS = {
    "round": lambda x: -(x**2),
    "steep below": lambda x: -x if x > 0 else 9 * x,
    "steep above": lambda x: -9 * x if x > 0 else x,
    "nearly flat": lambda x: -math.log1p(x**2),
}
"""Scores of one peak, at 0."""

OPTIMA = [-2.6, -1.0, -0.3, 0.0, 0.13, 0.5, 1.77, 2.95]

TRIALS = {
    "round": [10, 10, 9, 9, 9, 9, 10, 7],
    "steep below": [11, 10, 9, 9, 9, 9, 10, 7],
    "steep above": [9, 10, 10, 9, 9, 9, 9, 8],
    "nearly flat": [10, 10, 9, 9, 9, 9, 10, 7],
}
"""Trials that these peaks at `OPTIMA` took before the search went on through plateaus and failures."""


def complete(search, score):
    """Run the search to its end; the trials as decades from its start, in order."""
    while (beta := search.ask()) is not None:
        search.tell(beta, score(math.log10(beta / search.start)))
        assert len(search.trials) < 100
    return [math.log10(beta / search.start) for beta, _ in search.trials]


@pytest.mark.parametrize("optimum", OPTIMA)
@pytest.mark.parametrize("peak", PEAKS)
@pytest.mark.parametrize(("start", "resolution"), [(1.0, 1.0), (0.2, 0.5), (1.0, 1 / 8), (7.0, 1 / 16)])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_best_of_the_grid_is_found(mode, start, resolution, peak, optimum):
    def score(x):
        return PEAKS[peak](x - optimum) * (1 if mode == "max" else -1)

    search = BetaSearch(start, mode=mode, resolution=resolution)
    trials = complete(search, score)
    steps = round(3 / resolution)
    grid = [resolution * i for i in range(-steps, steps + 1)]
    beta, best = search.best
    assert best == pytest.approx({"max": max, "min": min}[mode](map(score, grid)), abs=1e-9)
    assert abs(math.log10(beta / start) - optimum) <= resolution
    # Start, one look back and the way out to the edge; then two for every halving.
    assert len(trials) <= 5 + 2 * round(math.log2(1 / resolution))
    assert len({round(x, 9) for x in trials}) == len(trials)


@pytest.mark.parametrize("peak", PEAKS)
def test_a_smooth_peak_takes_as_many_trials_as_ever(peak):
    trials = [complete(BetaSearch(), lambda x, top=optimum: PEAKS[peak](x - top)) for optimum in OPTIMA]
    assert [len(x) for x in trials] == TRIALS[peak]


def flicker(x):
    """Noise of +- 0.02 that is the same in every run."""
    return 0.02 * math.sin(1e4 * x + 1)


OBJECTIVES = {
    # Score as a function of log10 beta, the best beta, the factor that it is to be found within, options.
    "plateau": (lambda x: 0.01 + 0.9 * math.exp(-(((x - math.log10(200)) / 0.3) ** 2)), 200, 1.2, {}),
    "plateau with a peak between decades": (lambda x: 0.9 if abs(x + 2.5) < 0.2 else 0.01, 10**-2.5, 1.6, {}),
    "failures at the start": (lambda x: math.nan if abs(x) < 1.5 else -abs(x + 2.2), 10**-2.2, 1.2, {}),
    "all but a narrow window fails": (lambda x: -abs(x - 2.4) if abs(x - 2.4) < 0.2 else math.nan, 10**2.4, 1.3, {}),
    "failures on one side": (lambda x: math.nan if x > -1.2 else -abs(x + 1.4), 10**-1.4, 1.2, {}),
    "noise": (lambda x: flicker(x) + 0.5 * math.exp(-(((x - 1.8) / 0.6) ** 2)), 10**1.8, 1.6, {"noise": 0.05}),
    "edge low": (lambda x: -x, 1e-3, 1.0, {}),
    "edge high": (lambda x: x, 1e3, 1.0, {}),
}
"""What has no smooth peak beside the start."""


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_plateaus_failures_noise_and_edges_are_no_end(name, mode):
    score, expected, factor, options = OBJECTIVES[name]
    search = BetaSearch(mode=mode, **options)
    sign = 1 if mode == "max" else -1
    while (beta := search.ask()) is not None and len(search.trials) < 15:
        search.tell(beta, sign * score(math.log10(beta)))
    found, best = search.best
    assert 1 / factor <= found / expected <= factor * (1 + 1e-9)
    assert math.isfinite(best)
    assert search.at_edge is name.startswith("edge")
    assert search.state_dict()["at_edge"] is search.at_edge


@pytest.mark.parametrize("peak", PEAKS)
def test_a_smooth_peak_takes_nine_to_eleven_trials(peak):
    """As its page says, of peaks within 2.5 decades of the start."""
    trials = [complete(BetaSearch(), lambda x, top=step / 20: PEAKS[peak](x - top)) for step in range(-50, 51)]
    assert {len(x) for x in trials} == {9, 10, 11}


def test_a_plateau_above_a_worse_score_is_followed_away_from_it():
    trials = complete(BetaSearch(resolution=0.5), lambda x: 1 if x <= 0 else -x)
    # The half step ties with both of its neighbours: only then, for a smooth peak may lie between two alike.
    assert trials == pytest.approx([0, 1, -1, 0.5, -0.5, -2, -3])


def test_a_bounded_plateau_around_the_best_is_not_searched_further():
    trials = complete(BetaSearch(resolution=0.25), lambda x: -max(1.1, abs(x - 1)))
    assert trials == pytest.approx([0, 1, -1, 0.5, 2, 3, -0.5, 0.25, -0.25])  # neither -2 nor -3


def test_scores_within_the_noise_tie():
    """A slope below the noise leads nowhere: both sides are walked."""
    quiet, noisy = (complete(BetaSearch(noise=noise, resolution=1), lambda x: 0.01 * x) for noise in (0, 0.2))
    assert quiet == pytest.approx([0, 1, 2, 3])
    assert noisy == pytest.approx([0, 1, -1, 2, -2, 3, -3])


def test_no_beta_above_the_largest_is_tried():
    search = BetaSearch(largest_beta=709 / 20)
    trials = complete(search, lambda x: x)
    assert max(trials) <= math.log10(709 / 20) < max(trials) + 0.125
    assert search.at_edge
    assert BetaSearch.from_state_dict(search.state_dict()).largest_beta == 709 / 20
    inside = BetaSearch(largest_beta=709 / 20)
    complete(inside, lambda x: -abs(x - 0.5))
    assert not inside.at_edge


def test_the_largest_beta_may_be_a_trial():
    search = BetaSearch(largest_beta=100, resolution=1)
    assert complete(search, lambda x: x) == pytest.approx([0, 1, 2])
    assert search.at_edge


def test_a_state_from_before_noise_and_bounds_loads():
    old = {"start": 2.0, "mode": "min", "decades": 2, "resolution": 0.25, "trials": [[0.0, 3.5], [1.0, None]]}
    search = BetaSearch.from_state_dict(old)
    assert search.trials[0] == (2.0, 3.5)
    assert (search.noise, search.largest_beta, search.at_edge) == (0, None, False)
    assert search.ask() == pytest.approx(0.2)


def test_the_first_trials_are_decades():
    trials = complete(BetaSearch(resolution=0.5), lambda x: -abs(x + 1.6))
    assert trials == pytest.approx([0, 1, -1, -2, -3, -1.5, -2.5])


@pytest.mark.parametrize("decades", [1, 2])
@pytest.mark.parametrize("sign", [1, -1])
def test_no_trial_leaves_the_range(decades, sign):
    search = BetaSearch(decades=decades)
    assert max(map(abs, complete(search, lambda x: sign * x))) <= decades
    assert math.log10(search.best[0]) == pytest.approx(sign * decades)


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize(
    "failing", [lambda x: x > 0.8, lambda x: x < 0.3, lambda x: x == 0], ids=["high", "low", "start"]
)
def test_runs_that_fail_are_avoided(mode, failing):
    sign = 1 if mode == "max" else -1
    search = BetaSearch(mode=mode, resolution=1 / 8)
    complete(search, lambda x: math.nan if failing(x) else -sign * abs(x - 0.6))
    assert math.log10(search.best[0]) == pytest.approx(0.625)
    assert search.best[1] == pytest.approx(-sign * 0.025)


@pytest.mark.parametrize("score", [math.nan, 0.5], ids=["all fail", "all alike"])
def test_a_search_without_a_peak_ends(score):
    search = BetaSearch()
    trials = complete(search, lambda x: score)
    assert search.ask() is None
    assert search.best == (None if math.isnan(score) else (1.0, score))
    assert search.at_edge is False
    assert sorted(trials) == pytest.approx([x / 2 for x in range(-6, 7)])


def test_asking_again_changes_nothing():
    search = BetaSearch(start=0.3)
    assert search.best is None
    assert search.trials == []
    assert search.ask() == search.ask() == 0.3
    search.tell(0.3, 1)
    assert search.ask() == search.ask() == pytest.approx(3)
    assert search.trials == [(0.3, 1.0)]
    assert search.best == (0.3, 1.0)


@pytest.mark.parametrize("told", [0, 1, 4, 7])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_search_resumes_from_json(mode, told):
    def score(x):
        return math.nan if x > 1.2 else -abs(x - 0.7)

    search = BetaSearch(2.5, mode=mode, decades=2, resolution=0.05)
    for _ in range(told):
        beta = search.ask()
        search.tell(beta, score(math.log10(beta / 2.5)))
    resumed = BetaSearch.from_state_dict(json.loads(json.dumps(search.state_dict())))
    assert resumed.ask() == search.ask() is not None
    assert len(resumed.trials) == told
    assert complete(resumed, score) == complete(search, score)
    assert repr(resumed.trials) == repr(search.trials)  # as text, where NaN equals itself
    assert resumed.best == search.best
    assert resumed.state_dict().keys() == search.state_dict().keys()


@pytest.mark.parametrize("failed", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_run_that_failed_is_worse_than_any_other(mode, failed):
    search = BetaSearch(mode=mode)
    search.tell(search.ask(), failed)
    search.tell(search.ask(), 3.0)
    assert search.best == (10.0, 3.0)
    json.dumps(search.state_dict(), allow_nan=False)


@pytest.mark.parametrize("beta", [1.0000001, 10.0, -1.0, math.nan])
def test_the_score_of_another_beta_is_refused(beta):
    search = BetaSearch()
    with pytest.raises(ValueError, match=rf"expected the score of beta=1\.0, .*; got one of beta={beta}"):
        search.tell(beta, 1.0)
    assert search.trials == []
    search.tell(1.0 + 1e-12, 1.0)  # rounding, as by a configuration file, is forgiven


def test_a_score_after_the_end_is_refused():
    search = BetaSearch(resolution=1, decades=1)
    complete(search, lambda x: -abs(x))
    with pytest.raises(ValueError, match=r"the search is over, no score is expected; best: \(1\.0, -?0\.0\)"):
        search.tell(1.0, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[({"start": x}, r"start=\.\.\.\) must be a positive number; got ") for x in (0, -1.0, math.nan, math.inf)],
        ({"mode": "best"}, r"mode=\.\.\.\) must be \"max\" or \"min\"; got 'best'"),
        *[({"decades": x}, r"decades=\.\.\.\) must be a whole number, 1 or more; got ") for x in (0, 2.9)],
        *[({"noise": x}, r"noise=\.\.\.\) must be a number, 0 or more; got ") for x in (-0.1, math.nan, math.inf)],
        *[
            ({"largest_beta": x}, r"largest_beta=\.\.\.\) must be a number, start or more, or None; got ")
            for x in (0.9, math.nan, math.inf)
        ],
        *[({"resolution": x}, r"resolution=\.\.\.\) must be above 0 and at most 1; got ") for x in (0, 1.5, math.nan)],
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=rf"BetaSearch\({message}"):
        BetaSearch(**options)


def test_its_state_is_json_whatever_its_numbers_were():
    search = BetaSearch(torch.tensor(2.0), resolution=torch.tensor(0.5), largest_beta=torch.tensor(8.0))
    assert json.loads(json.dumps(search.state_dict())) == search.state_dict()
    assert (search.start, search.resolution, search.largest_beta) == (2.0, 0.5, 8.0)
