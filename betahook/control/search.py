"""`Search`, the default controller, put together from `opening`, `sign_search` and a limit on increases of beta.

`betahook.control.base.apply` runs it; only `explain` and `is_in_transition` read tensors back to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from betahook.control.base import (
    DECADES,
    Controller,
    Memory,
    Observation,
    at_least,
    ceiling,
    is_positive,
    reaches_logit,
    require,
)
from betahook.control.notes import Note, downhill
from betahook.control.opening import Course, Opening, Phase
from betahook.control.sign_search import SignSearch

WORDS = {
    Phase.UNSEEN: "W_q and W_k were not examined yet",
    Phase.WAIT: "trained weights wait for the search",
    Phase.WARM_UP: "beta is low while the weights are fresh",
    Phase.PLATEAU: "beta is very low while W_q and W_k have not begun to learn",
    Phase.CLIMB: "beta rises whatever the sensitivity",
}
"""Explanations of the phases before the search."""
WITHOUT_GRADIENT = "no gradient reaches beta: a frozen layer, rows of one key, or no backward() before hook.step()"

COURSE = tuple(field.name for field in fields(Course) if field.name != "beta")
"""Names of the attributes of a `Course` that are kept in the memory."""

_Part = TypeVar("_Part", Opening, SignSearch)


@dataclass(frozen=True, repr=False)
class Search(Controller):
    """Descend on log beta by the sign of the sensitivity `dL/d log beta`, summed over a window of batches.

    The step halves when the sign changes and grows while it persists (Rprop's rule; Riedmiller and Braun, 1993), so the
    search widens again when the optimum drifts. The halving and the overflow bound come from the paper's second
    algorithm, which tries `beta = 10^N` and bisects over whole training runs. A fresh model, one whose W_q and W_k are
    random before the first update, begins with an opening of our own: see the table in `betahook.control.opening`.
    Frozen layers do not count there, unless all layers are frozen.

    No step takes the largest logit above the paper's bound, the logarithm of the largest number of the softmax's dtype,
    or above half of it in a model that was fresh: if two logits are further apart than the bound, the smaller weight
    underflows, and so does the gradient that could correct attention to the wrong place. The largest logit is that of
    the rows looked at (32 of a long sequence; all with `exact_max_logit=True`). If logits exceed the bound for
    another reason, beta is not lowered.

    Args:
        window: batches between two steps.
        warmup: batches before the first window, or before the rise of a fresh model. If there are very few, nothing
            has learned by their end, and every fresh model waits as on a plateau.
        rise: give fresh models the opening; otherwise they wait for the search as trained ones do.
        opening: first step, in decades.
        growth: factor on the step while the sign persists; 1 keeps the step as it is.
        smallest: smallest step, in decades.
        largest: largest step, in decades.
        fresh_ratio: largest spectral ratio at which W_q and W_k count as random: it is about 1 for fresh weights, and
            soon larger for weights that have learned.
        early_share: share of the warm-up, from its start, in which W_q and W_k learn only at a very high learning rate.
        warmup_decades: decades by which beta of a fresh model is below the model's own in the warm-up.
        plateau_decades: the same on a plateau.
        plateau_batches: batches spent there. With 0, beta climbs from there at once; `plateau_decades=0` as well leaves
            the plateau out.
        plateau_fall: on a plateau, the training loss changes by less than this share of itself in the warm-up. Without
            a loss from the model or `Hook.step(loss=...)`, only the weights and the scores decide.
        plateau_growth: on a plateau, the std of no layer's scores grows by this factor in the warm-up.
        rise_decades: decades above the model's own beta at which the rise ends.
        rise_batches: batches that the rise takes.
        rise_logit_std: std of the logits beyond which the rise does not go.
        fresh_bound: share of the overflow bound that limits the logits of a model that was fresh.

    Raises:
        ValueError: an option has an invalid value.
    """

    window: int = 10
    warmup: int = 30
    rise: bool = True
    opening: float = 0.1
    growth: float = 1.5
    smallest: float = 0.01
    largest: float = 0.2
    fresh_ratio: float = 1.1
    early_share: float = 1 / 3
    warmup_decades: float = 0.5
    plateau_decades: float = 2.0
    plateau_batches: int = 70
    plateau_fall: float = 0.03
    plateau_growth: float = 1.12
    rise_decades: float = 1.0
    rise_batches: int = 100
    rise_logit_std: float = 3.0
    fresh_bound: float = 0.5

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("warmup", 0), ("plateau_batches", 0), ("rise_batches", 1)):
            require(self, name, at_least(least), f"a whole number, {least} or more")
        require(self, "rise", lambda rise: isinstance(rise, bool), "True or False")
        require(self, "smallest", lambda smallest: 0 < smallest <= self.largest, "above 0, at most largest")
        require(self, "opening", lambda step: self.smallest <= step <= self.largest, "between smallest and largest")
        require(self, "growth", lambda growth: growth >= 1, "1 or more")
        for name in ("fresh_ratio", "plateau_growth", "rise_logit_std"):
            require(self, name, is_positive, "a positive number")
        for name in ("warmup_decades", "plateau_decades", "rise_decades"):
            require(self, name, lambda decades: 0 <= decades <= DECADES, f"a number from 0 to {DECADES:g}")
        require(self, "early_share", lambda share: 0 <= share <= 1, "a number from 0 to 1")
        for name in ("plateau_fall", "fresh_bound"):
            require(self, name, lambda share: 0 < share <= 1, "above 0, at most 1")

    @classmethod
    def brief(cls) -> Search:
        """Return a search with a brief opening, for training of a few hundred batches.

        A fresh model keeps its own beta for 30 batches, and reaches three times that after 47.
        """
        return cls(warmup_decades=0.0, rise_decades=0.5, rise_batches=17)

    def start(self, beta: Tensor) -> Memory:
        zero = torch.zeros_like(beta)
        places = {"phase": zero + Phase.UNSEEN, "left": zero + self.warmup, "fresh": zero}
        losses = {"early": zero + torch.nan, "late": zero + torch.nan}
        return {**places, **losses, "spread": zero, **self._sign_search.start(beta)}

    def update(self, beta: Tensor, observation: Observation, state: Memory) -> tuple[Tensor, Memory]:
        if self._searches_alone(observation.step):
            return self._search(beta, observation, state)
        opening, sensitivity = self._opening, observation.statistics.sensitivity
        course = Course(beta, **{name: state[name] for name in COURSE})
        if self.rise:
            course = opening.decide(opening.watch(course, observation), observation)
        course = opening.expire(course)
        found, search = self._sign_search.advance(course.phase == Phase.SEARCH, sensitivity, state)
        decades = torch.where(course.phase == Phase.CLIMB, opening.climb(course, observation), found)
        course = replace(course, left=(course.left - 1).clamp(min=0))
        new, bound = course.beta * 10**decades, self._bound(course.fresh, observation)
        memory = {**{name: getattr(course, name) for name in COURSE}, **search}
        return limit_increase(new, beta, bound, observation), memory

    def _search(self, beta: Tensor, observation: Observation, state: Memory) -> tuple[Tensor, Memory]:
        """Update when all units are in the search phase, with windows that end together."""
        state = {**state, "phase": torch.full_like(state["phase"], Phase.SEARCH)}
        total = torch.add(state["total"], observation.statistics.sensitivity, alpha=observation.batches)
        if not self._ends_window(observation.step):
            return beta, {**state, "total": total}
        decades, search = self._sign_search.finish(total, state)
        bound = self._bound(state["fresh"], observation)
        return limit_increase(beta * 10**decades, beta, bound, observation), {**state, **search}

    def is_due(self, step: int) -> bool:
        return not self._searches_alone(step) or self._ends_window(step)

    def _searches_alone(self, step: int) -> bool:
        """Return whether the opening of all units is over, even if they were unused or not finite for a while."""
        return step >= 2 * max(self.opening_batches, self.warmup)

    def _ends_window(self, step: int) -> bool:
        """Return whether a batch is the last one of a window that all units share."""
        return (step + 1) % self.window == 0

    @property
    def opening_batches(self) -> int:
        """The longest path through the phases before the search, which itself needs only the sensitivity."""
        return self._opening.batches if self.rise else 0

    @property
    def loss_batches(self) -> int:
        """The warm-up of a fresh model, at whose end the loss helps to recognise a plateau."""
        return self.warmup + 1 if self.rise else 0

    def is_in_transition(self, state: Memory) -> bool:
        if not state:
            return False
        phase, left = state["phase"], state["left"]
        return bool(((phase == Phase.WARM_UP) | (phase == Phase.PLATEAU) | (phase == Phase.CLIMB) & (left > 0)).any())

    def explain(self, beta: Tensor, observation: Observation, state: Memory) -> Sequence[Note]:
        bound = self._bound(state["fresh"], observation)
        columns = {
            **{name: state[name] for name in ("phase", "left", "direction", "step")},
            "bound": bound,
            "at_bound": reaches_logit(bound, beta, observation.statistics.max_score),
            "held": beta * observation.statistics.std >= self.rise_logit_std * (1 - 1e-4),
            "without_gradient": observation.statistics.sensitivity == 0,
        }
        rows = torch.stack([column.to(beta) for column in columns.values()]).T.tolist()
        return [_note(self, **dict(zip(columns, row, strict=True))) for row in rows]

    def _bound(self, fresh: Tensor, observation: Observation) -> Tensor:
        """Return the largest logit to which a step up may lead."""
        bound = torch.full_like(fresh, observation.overflow, dtype=torch.float32)  # float32, as in recorded runs
        return bound.masked_fill(fresh > 0, observation.overflow * self.fresh_bound)

    @classmethod
    def migrate(cls, state: Memory) -> Memory:
        """Convert the memory of an older version."""
        state = _from_version_2(state) if "wait" in state else state
        if "phase" not in state or "early" in state:
            return state
        # Version 0.4 looked at neither loss nor scores, and 0.6 did not keep two separate means of the loss.
        zero = torch.zeros_like(state["phase"])
        known = {name: value for name, value in state.items() if name != "fall"}
        return {"early": zero + torch.nan, "late": zero + torch.nan, "spread": zero, **known}

    @cached_property
    def _opening(self) -> Opening:
        return self._part(Opening)

    @cached_property
    def _sign_search(self) -> SignSearch:
        return self._part(SignSearch)

    def _part(self, kind: type[_Part]) -> _Part:
        """Create a part from the options that it shares with this controller."""
        return kind(**{field.name: getattr(self, field.name) for field in fields(kind)})


def limit_increase(new: Tensor, old: Tensor, logit: float | Tensor, observation: Observation) -> Tensor:
    """Limit an increase of beta so that the largest logit stays within `logit`; if it is above already, keep `old`."""
    return torch.minimum(new, torch.maximum(old, ceiling(logit, observation.statistics.max_score)))


def _note(
    rule: Search,
    *,
    phase: float,
    left: float,
    direction: float,
    step: float,
    bound: float,
    at_bound: float,
    held: float,
    without_gradient: float,
) -> Note:
    """Explain what the search did with one unit."""
    stage = Phase(int(phase))
    if stage != Phase.SEARCH:
        limited = stage == Phase.CLIMB and held
        words = WORDS[stage] if rule.rise or stage != Phase.UNSEEN else "waits for the search"
        reason = f"holds the std of the logits at {rule.rise_logit_std:g}" if limited else words
        return Note(stage, reason=f"{reason}, {left:.0f} batch{'es' * (left != 1)} left")
    if without_gradient:
        return Note(stage, reason=WITHOUT_GRADIENT)
    if not direction:
        return Note(stage, reason="waits for the end of its first window")
    if direction > 0 and at_bound:
        return Note(stage, reason=f"no move beyond a largest logit of {bound:.3g}, though {downhill(direction)}")
    move = direction * step
    return Note(stage, move, downhill(direction))


def _from_version_2(state: Memory) -> Memory:
    """Convert the memory of version 2 of the state file, which had `wait` and `rise` instead of `phase` and `left`.

    That version did not distinguish the plateau from the warm-up. Both become WARM_UP, which also waits once the
    warm-up is over.
    """
    wait, rise, fresh = state["wait"], state["rise"], state["fresh"]
    phase = torch.full_like(wait, Phase.SEARCH)
    phase = torch.where(wait > 0, Phase.WAIT, phase)
    phase = torch.where(fresh < 0, Phase.UNSEEN, phase)
    phase = torch.where(rise > 0, Phase.CLIMB, phase)
    phase = torch.where(rise == 100, Phase.WARM_UP, phase)  # the whole rise is still ahead
    left = torch.where(phase == Phase.CLIMB, rise, wait)
    search = {name: state[name] for name in ("batches", "total", "direction", "step")}
    return {"phase": phase, "left": left, "fresh": fresh.clamp(min=0), **search}
