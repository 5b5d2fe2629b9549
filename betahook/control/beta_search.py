"""The paper's search for a fixed beta over whole training runs, as an ask/tell object without training code.

Users call it around their own training. It uses no models and no tensors, and must not draw random numbers: the next
trial depends only on the trials so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any, Literal

from betahook.control.base import at_least, require


@dataclass(eq=False)
class BetaSearch:
    """Search over decades, `beta = start * 10^N`, until the best beta is bracketed, then bisection in log beta.

    The third step of the paper's five-step procedure. One trial is one training run with a fixed beta:

        search = BetaSearch()
        while (beta := search.ask()) is not None:
            search.tell(beta, train_and_evaluate(beta))
        print(search.best, search.at_edge)

    If the first run fails, all scores tie, or three or more tie for the best, the search goes on through the decades on
    both sides of the best, up to the nearest worse score. If these all fail or tie, it tries the half decades, too.

    Args:
        start: first beta.
        mode: "max" if a higher score is better, "min" if a lower one is.
        decades: how far from `start` to look, in either direction.
        resolution: stop when the next step in log10 beta would be smaller than this.
        noise: scores that differ by no more than this tie. Use about four times their standard deviation over seeds.
        largest_beta: largest beta to try; None for no bound. The paper's bound is where the exponential of a logit
            overflows: 709 in float64 and 88.7 in float32, divided by the largest score.

    Raises:
        ValueError: an option has an invalid value.
    """

    start: float = 1.0
    _: KW_ONLY
    mode: Literal["max", "min"] = "max"
    decades: int = 3
    resolution: float = 0.1
    noise: float = 0.0
    largest_beta: float | None = None

    def __post_init__(self) -> None:
        require(self, "start", lambda start: 0 < start < math.inf, "a positive number")
        require(self, "mode", lambda mode: mode in ("max", "min"), '"max" or "min"')
        require(self, "decades", at_least(1), "a whole number, 1 or more")
        require(self, "resolution", lambda decades: 0 < decades <= 1, "above 0 and at most 1")
        require(self, "noise", lambda noise: 0 <= noise < math.inf, "a number, 0 or more")
        bound = "a number, start or more, or None"
        require(self, "largest_beta", lambda beta: beta is None or self.start <= beta < math.inf, bound)
        self.start, self.resolution, self.noise = float(self.start), float(self.resolution), float(self.noise)
        self.largest_beta = None if self.largest_beta is None else float(self.largest_beta)
        self._scores: dict[float, float] = {}  # by log10(beta / start): sums of powers of two, hence exact

    def ask(self) -> float | None:
        """Return the beta to try next, the same until its score is told; None when the search is over."""
        offset = self._next()
        return None if offset is None else self.start * 10**offset

    def tell(self, beta: float, score: float) -> None:
        """Report the score of the beta last asked for; NaN or an infinity stands for a failed run.

        Raises:
            ValueError: `beta` is not the one that was asked for.
        """
        offset = self._next()
        if offset is None:
            raise ValueError(f"the search is over, no score is expected; best: {self.best}")
        expected = self.start * 10**offset
        if not math.isclose(beta, expected, rel_tol=1e-9):
            raise ValueError(f"expected the score of beta={expected!r}, which ask() returned; got one of beta={beta!r}")
        self._scores[offset] = float(score) if math.isfinite(score) else math.nan

    @property
    def best(self) -> tuple[float, float] | None:
        """Beta and score of the best trial so far; None until a run has succeeded."""
        finite = self._finite()
        if not finite:
            return None
        offset = self._best(finite)
        return self.start * 10**offset, self._scores[offset]

    @property
    def at_edge(self) -> bool:
        """True if `decades` or `largest_beta` ends the search right beside the best: a wider one may find better."""
        finite = self._finite()
        finest: float = 2 ** math.floor(math.log2(1 / self.resolution))
        best = self._best(finite or [0.0])
        return bool(finite) and not all(self._is_allowed(best + side / finest) for side in (1, -1))

    @property
    def trials(self) -> list[tuple[float, float]]:
        """Beta and score of every trial, in order."""
        return [(self.start * 10**offset, score) for offset, score in self._scores.items()]

    def state_dict(self) -> dict[str, Any]:
        """Return options, trials and `at_edge`, ready for JSON."""
        options = asdict(self)
        # Strict JSON has no NaN: a failed run is written as None.
        trials = [[offset, None if math.isnan(score) else score] for offset, score in self._scores.items()]
        return {**options, "trials": trials, "at_edge": self.at_edge}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> BetaSearch:
        """Restore a search from its `state_dict`."""
        options = {name: value for name, value in state.items() if name != "at_edge"}  # it follows from the trials
        trials = options.pop("trials")
        search = cls(**options)
        search._scores = {float(offset): math.nan if score is None else float(score) for offset, score in trials}
        return search

    def _next(self) -> float | None:
        """Return the next trial as an offset in decades, which depends only on the trials so far."""
        if not self._scores:
            return 0.0
        finite, tied = self._finite(), self._tied()
        if len(tied) >= 3 or len(tied) == len(finite) or math.isnan(self._scores[0.0]):
            offset = self._nearest_untried(1.0, tied)
            # Look around a single run that succeeded. If none did, or all tie, the best may lie between decades.
            if offset is None and len(tied) == len(finite) != 1:
                return self._nearest_untried(0.5, tied) if self.resolution <= 0.5 else None
            if offset is not None:
                return offset
        return self._bisect()

    def _bisect(self) -> float | None:
        """Return the next trial beside the best one: a decade away until it is bracketed, then half the step before."""
        step = 1.0
        best = self._best(offset for offset in self._scores if offset == int(offset))
        while step >= self.resolution:
            for offset in (best + step, best - step):
                if offset not in self._scores and self._is_allowed(offset):
                    return offset
            step /= 2
            # Only trials on this grid count: those on a finer one belong to a later halving.
            best = self._best(offset for offset in self._scores if offset % (2 * step) == 0)
        return None

    def _nearest_untried(self, step: float, tied: list[float]) -> float | None:
        """Return the untried multiple of `step` nearest to the first of `tied`, short of the nearest worse scores."""
        worse = [offset for offset in self._finite() if offset not in tied]
        low = max((offset for offset in worse if offset < min(tied)), default=-math.inf)
        high = min((offset for offset in worse if offset > max(tied)), default=math.inf)
        centre = tied[0] if tied else 0.0
        steps = round(self.decades / step)
        grid = (step * index for index in range(-steps, steps + 1))
        untried = [x for x in grid if low < x < high and self._is_allowed(x) and x not in self._scores]
        return min(untried, key=lambda offset: (abs(offset - centre), -offset), default=None)

    def _is_allowed(self, offset: float) -> bool:
        highest = math.inf if self.largest_beta is None else self.largest_beta * (1 + 1e-9)  # tolerates rounding
        return abs(offset) <= self.decades and self.start * 10**offset <= highest

    def _finite(self) -> list[float]:
        """Return the offsets of the runs that succeeded, in order."""
        return [offset for offset, score in self._scores.items() if not math.isnan(score)]

    def _tied(self) -> list[float]:
        """Return the offsets of the best score and of all scores within the noise of it, in order."""
        finite = self._finite()
        best = max(map(self._rank, finite), default=math.nan)
        return [offset for offset in finite if best - self._rank(offset) <= self.noise]

    def _best(self, offsets: Iterable[float]) -> float:
        return max(offsets, key=self._rank)

    def _rank(self, offset: float) -> float:
        score = self._scores.get(offset, math.nan)
        return -math.inf if math.isnan(score) else score if self.mode == "max" else -score
