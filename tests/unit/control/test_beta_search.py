"""The search over runs against the best point of the whole grid."""

import json
import math

import pytest

from betahook import BetaSearch

PEAKS = {
    "round": lambda x: -(x**2),
    "steep below": lambda x: -x if x > 0 else 9 * x,
    "steep above": lambda x: -9 * x if x > 0 else x,
    "nearly flat": lambda x: -math.log1p(x**2),
}
"""Scores of one peak, at 0."""

OPTIMA = [-2.6, -1.0, -0.3, 0.0, 0.13, 0.5, 1.77, 2.95]


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
    complete(search, lambda x: score)
    assert search.ask() is None
    assert search.best == (1.0, pytest.approx(score, nan_ok=True))


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
        *[({"resolution": x}, r"resolution=\.\.\.\) must be above 0 and at most 1; got ") for x in (0, 1.5, math.nan)],
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=rf"BetaSearch\({message}"):
        BetaSearch(**options)
