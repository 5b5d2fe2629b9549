"""The paper's search for a fixed beta over whole training runs, as an ask/tell object without training code."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal


class BetaSearch:
    """Decades first, `beta = start * 10^N` outward until the best is bracketed, then bisection in log beta.

    The third step of the paper's five-step procedure. One trial is one training run with a fixed beta:

        search = BetaSearch()
        while (beta := search.ask()) is not None:
            search.tell(beta, train_and_evaluate(beta))
        print(search.best)

    Args:
        start: first beta.
        mode: "max" if a higher score is better, "min" if a lower one is.
        decades: how far from `start` to look, in either direction.
        resolution: stop when the next step in log10 beta would be smaller.

    Raises:
        ValueError: an option has a value that makes no sense.
    """

    def __init__(
        self,
        start: float = 1.0,
        *,
        mode: Literal["max", "min"] = "max",
        decades: int = 3,
        resolution: float = 0.1,
    ) -> None:
        if not (math.isfinite(start) and start > 0):
            raise ValueError(f"BetaSearch(start=...) must be a positive number; got {start!r}")
        if mode not in ("max", "min"):
            raise ValueError(f'BetaSearch(mode=...) must be "max" or "min"; got {mode!r}')
        if not isinstance(decades, int) or decades < 1:
            raise ValueError(f"BetaSearch(decades=...) must be a whole number, 1 or more; got {decades!r}")
        if not 0 < resolution <= 1:
            raise ValueError(f"BetaSearch(resolution=...) must be above 0 and at most 1; got {resolution!r}")
        self.start = float(start)
        self.mode = mode
        self.decades = decades
        self.resolution = float(resolution)
        self._scores: dict[float, float] = {}  # log10(beta / start) to score; sums of powers of two, hence exact

    def ask(self) -> float | None:
        """The beta to try next, the same until it is told; None when the search is over."""
        offset = self._next()
        return None if offset is None else self.start * 10**offset

    def tell(self, beta: float, score: float) -> None:
        """Report the score of the beta last asked for; NaN or an infinity stands for a run that failed.

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
        """Beta and score of the best trial so far; None before the first."""
        if not self._scores:
            return None
        offset = self._best(self._scores)
        return self.start * 10**offset, self._scores[offset]

    @property
    def trials(self) -> list[tuple[float, float]]:
        """Beta and score of every trial, in order."""
        return [(self.start * 10**offset, score) for offset, score in self._scores.items()]

    def state_dict(self) -> dict[str, Any]:
        """Options and trials, ready for JSON."""
        options = {"start": self.start, "mode": self.mode, "decades": self.decades, "resolution": self.resolution}
        # Strict JSON knows no NaN: a failed run is written as None.
        trials = [[offset, None if math.isnan(score) else score] for offset, score in self._scores.items()]
        return {**options, "trials": trials}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> BetaSearch:
        """The search that `state_dict` described."""
        options = dict(state)
        trials = options.pop("trials")
        search = cls(**options)
        search._scores = {float(offset): math.nan if score is None else float(score) for offset, score in trials}
        return search

    def _next(self) -> float | None:
        """The next trial as an offset in decades: a function of the trials so far, and of nothing else."""
        if not self._scores:
            return 0.0
        step = 1.0
        best = self._best(offset for offset in self._scores if offset == int(offset))
        while step >= self.resolution:
            for offset in (best + step, best - step):
                if offset not in self._scores and abs(offset) <= self.decades:
                    return offset
            step /= 2
            # Of the trials on this grid: those of a finer one belong to a later halving.
            best = self._best(offset for offset in self._scores if offset % (2 * step) == 0)
        return None

    def _best(self, offsets: Iterable[float]) -> float:
        sign = 1 if self.mode == "max" else -1

        def rank(offset: float) -> float:
            score = self._scores[offset]
            return -math.inf if math.isnan(score) else sign * score

        return max(offsets, key=rank)
