"""The opening part of `betahook.control.search`: beta before the search. Pure functions of tensors `[units]`.

| from | to | when | beta | batches |
|---|---|---|---|---|
| UNSEEN | WAIT | W_q and W_k had learned at the first look | | as they are |
| UNSEEN | WARM_UP | they looked random | `warmup_decades` down, in the warm-up | the rest of the warm-up |
| WARM_UP | CLIMB | they learn early in the warm-up | that of `rise_logit_std` | `rise_batches` |
| WARM_UP | WARM_UP | the warm-up ends | up again | as they are |
| WARM_UP | PLATEAU | and training stands still | `plateau_decades` below the model's own | `plateau_batches` |
| UNSEEN, WAIT, CLIMB | SEARCH | no batch is left | | |
| WARM_UP, PLATEAU | CLIMB | no batch is left | | `rise_batches` |

Attention of a fresh model is flat, and while it is, the sensitivity is next to nothing: it sees the loss of this batch,
not that W_q and W_k learn in proportion to beta. So beta climbs whatever the sensitivity, but not beyond a std of the
logits: where the scores grow, it falls. Where W_q and W_k learn early, the learning rate is very high, and what they
learn from flat attention decides how the run ends: the logits have that std at once. Where they still look random after
the warm-up, no layer's scores have grown, and the training loss, if it is known, has hardly moved, training stands on a
plateau. Gradients at a hundredth of beta are so small beside those that Adam remembers that W_q and W_k hold still
while the rest of the model learns; at the end of the climb they are so large that W_q and W_k learn faster. For that
Adam must not remember much, and it remembers a thousand batches: hence the low beta in the warm-up. Measurements are in
docs/ABLATIONS.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from betahook.control.base import Observation


class Phase(IntEnum):
    """Phases of a unit; all but SEARCH last a number of batches. Checkpoints hold the numbers: never change one."""

    UNSEEN = 0  # nobody has looked at W_q and W_k yet; counts the warm-up meanwhile
    WAIT = 1  # a trained model in its warm-up
    WARM_UP = 2  # a fresh one: beta is below the model's own
    PLATEAU = 3  # a fresh one that has not begun to learn: beta is far below
    CLIMB = 4  # beta rises
    SEARCH = 5


@dataclass(frozen=True)
class Course:
    """Beta and the place of each unit in the opening.

    Attributes:
        beta: of the model now.
        phase: the `Phase`, as a number.
        left: batches left of it.
        fresh: 1 where W_q and W_k were random at the first look, else 0.
        early: mean of the training loss in the first window of the warm-up; NaN without a loss.
        late: in the last one.
        spread: standard deviation of the scores in the first batch; 0 where it was not measured then.
    """

    beta: Tensor
    phase: Tensor
    left: Tensor
    fresh: Tensor
    early: Tensor
    late: Tensor
    spread: Tensor

    def move(self, source: Phase, target: Phase, where: Tensor, **changes: Tensor | float) -> Course:
        """Take the units of a phase to another, with new values of the attributes named."""
        moved = where & (self.phase == source)

        def put(old: Tensor, value: Tensor | float) -> Tensor:
            return torch.where(moved, value, old) if isinstance(value, Tensor) else old.masked_fill(moved, value)

        values = changes if target == source else {"phase": target, **changes}
        return replace(self, **{name: put(getattr(self, name), value) for name, value in values.items()})


@dataclass(frozen=True)
class Opening:
    """The phases of a model before its search. The options are those of `Search`."""

    window: int
    warmup: int
    fresh_ratio: float
    early_share: float
    warmup_decades: float
    plateau_batches: int
    plateau_decades: float
    plateau_fall: float
    plateau_growth: float
    rise_batches: int
    rise_decades: float
    rise_logit_std: float

    @property
    def batches(self) -> int:
        """The longest way through the phases, in batches."""
        return self.warmup + self.plateau_batches + self.rise_batches

    def look(self, observation: Observation) -> Tensor | None:
        """Judge if W_q and W_k look random now, a scalar; None in batches in which nothing is decided by it."""
        if observation.step > self.warmup * self.early_share and observation.step != self.warmup:
            return None
        return observation.spectral_ratio() <= self.fresh_ratio  # False for NaN, of weights that were not found

    def watch(self, course: Course, observation: Observation) -> Course:
        """Note the scores of the first batch, and the loss in the first window and the last of the warm-up.

        In a short warm-up they are its halves.
        """
        step = observation.step
        if step == 0:
            course = replace(course, spread=observation.statistics.std.to(course.spread))
        window = min(self.window, max((self.warmup + 1) // 2, 1))  # two that do not overlap
        into_last = step - (self.warmup - window)
        if step < window:
            course = replace(course, early=_mean(course.early, observation.loss(), step + 1))
        if 0 < into_last <= window:
            course = replace(course, late=_mean(course.late, observation.loss(), into_last))
        return course

    def decide(self, course: Course, observation: Observation) -> Course:
        """Make the moves that depend on W_q and W_k; units seen later do what the first ones did."""
        step, random = observation.step, self.look(observation)
        seen, fresh = (course.phase != Phase.UNSEEN).any(), course.fresh.any()
        if random is not None:
            seen, fresh = torch.ones_like(seen), torch.where(seen, fresh, random)
        down = 10**-self.warmup_decades
        if 0 < step - self.warmup <= self.window:  # units that were not measured, or not finite, as it ended
            missed = ~course.early.isnan() | (course.spread > 0)
            furthest = (course.fresh * course.phase).amax()  # all that ended it on time went the same way
            ended, waits = furthest > Phase.WARM_UP, furthest == Phase.PLATEAU
            stands = torch.where(ended, waits, self._stands(course, observation))
            course = self._end_warm_up(course, observation, missed, stands)
        low = course.beta * down if step <= self.warmup else course.beta
        course = course.move(Phase.UNSEEN, Phase.WAIT, seen & ~fresh)
        left = max(self.warmup - step, 0)
        course = course.move(Phase.UNSEEN, Phase.WARM_UP, seen & fresh, beta=low, left=left, fresh=1.0)
        if random is None:
            return course
        if step == self.warmup:
            return self._end_warm_up(course, observation, seen, random & self._stands(course, observation))
        held = self.rise_logit_std / observation.statistics.std
        return course.move(Phase.WARM_UP, Phase.CLIMB, ~random, beta=held, left=self.rise_batches)

    def _stands(self, course: Course, observation: Observation) -> Tensor:
        """Tell if nothing shows that training has begun to learn, a scalar."""
        learns = (course.early - course.late).abs() > self.plateau_fall * course.late.abs()  # False where none is known
        grown = (observation.statistics.std >= self.plateau_growth * course.spread) & (course.spread > 0)
        return ~(learns | grown).any()

    def _end_warm_up(self, course: Course, observation: Observation, where: Tensor, stands: Tensor) -> Course:
        """Take beta up again, or down to the plateau where training `stands` on one; once a unit."""
        below = observation.beta_default * 10**-self.plateau_decades
        course = course.move(Phase.WARM_UP, Phase.PLATEAU, where & stands, beta=below, left=self.plateau_batches)
        up = course.beta / 10**-self.warmup_decades
        return course.move(Phase.WARM_UP, Phase.WARM_UP, where, beta=up, early=torch.nan, spread=0.0)

    def expire(self, course: Course) -> Course:
        """Move the units on that have no batch left in their phase."""
        over = course.left == 0
        climbs = over & ((course.phase == Phase.WARM_UP) | (course.phase == Phase.PLATEAU))
        phase = course.phase.masked_fill(over, Phase.SEARCH).masked_fill(climbs, Phase.CLIMB)
        return replace(course, phase=phase, left=course.left.masked_fill(climbs, self.rise_batches))

    def climb(self, course: Course, observation: Observation) -> Tensor:
        """Decades to rise in this batch: an equal share of what is left, or fewer to hold the std of the logits."""
        top = observation.beta_default * 10**self.rise_decades
        share = (top / course.beta).log10().clamp(min=0) / course.left
        return torch.minimum(share, (self.rise_logit_std / (course.beta * observation.statistics.std)).log10())


def _mean(mean: Tensor, loss: Tensor, number: int) -> Tensor:
    """The mean of losses with one more, the `number`-th of them; NaN stands for none, and is passed over."""
    more = torch.where(mean.isnan(), loss, mean + (loss - mean) / number)
    return torch.where(loss.isnan(), mean, more)
