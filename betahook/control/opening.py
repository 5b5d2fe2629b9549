"""The opening phases of `betahook.control.search`: beta before the search. Pure functions of tensors `[units]`.

| from | to | when | beta | batches |
|---|---|---|---|---|
| UNSEEN | WAIT | W_q and W_k have learned at the first look | | unchanged |
| UNSEEN | WARM_UP | they look random | `warmup_decades` down, during the warm-up | the rest of the warm-up |
| WARM_UP | CLIMB | they learn early in the warm-up | brings the logits to `rise_logit_std` | `rise_batches` |
| WARM_UP | WARM_UP | the warm-up ends | up again | unchanged |
| WARM_UP | PLATEAU | and training stands still | `plateau_decades` below the model's own | `plateau_batches` |
| UNSEEN, WAIT, CLIMB | SEARCH | no batch is left | | |
| WARM_UP, PLATEAU | CLIMB | no batch is left | | `rise_batches` |

The attention of a fresh model is flat, and while it is, the sensitivity is almost zero: it measures the effect of beta
on the loss of this batch, but not that W_q and W_k learn in proportion to beta. So beta climbs whatever the
sensitivity, but only up to a given std of the logits: where the scores grow, it falls. If W_q and W_k learn early, the
learning rate is very high, and what they learn from flat attention decides how the run ends, so beta brings the logits
to that std at once.

Training stands on a plateau if, after the warm-up, W_q and W_k still look random, no layer's scores have grown, and the
training loss, if known, has hardly moved. Beta then falls to a hundredth, where the gradients of W_q and W_k are so
small compared with those that Adam remembers that both hold still while the rest of the model learns. At the end of the
climb their gradients are so large that they learn faster. This requires that Adam remembers no large gradients, and
since it remembers a thousand batches, beta is low in the warm-up already. Measurements are in docs/ABLATIONS.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from betahook.control.base import Observation


class Phase(IntEnum):
    """Phases of a unit; all but SEARCH last a number of batches. Checkpoints store the values: never change one."""

    UNSEEN = 0  # W_q and W_k were not looked at yet; counts the warm-up meanwhile
    WAIT = 1  # a trained model in its warm-up
    WARM_UP = 2  # a fresh model: beta is below the model's own
    PLATEAU = 3  # a fresh model that has not begun to learn: beta is far below
    CLIMB = 4  # beta rises
    SEARCH = 5


@dataclass(frozen=True)
class Course:
    """Beta and the position of each unit in the opening.

    Attributes:
        beta: the current beta.
        phase: the `Phase`, as a number.
        left: number of batches left in the phase.
        fresh: 1 where W_q and W_k were random at the first look, else 0.
        early: mean training loss in the first window of the warm-up; NaN without a loss.
        late: mean training loss in the last window of the warm-up; NaN without a loss.
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
        """Move the units of phase `source` in `where` to phase `target`, and give the named attributes new values."""
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
        """The longest path through the phases, in batches."""
        return self.warmup + self.plateau_batches + self.rise_batches

    def look(self, observation: Observation) -> Tensor | None:
        """Return whether W_q and W_k look random now, a boolean scalar; None in batches that do not depend on it."""
        if observation.step > self.warmup * self.early_share and observation.step != self.warmup:
            return None
        return observation.spectral_ratio() <= self.fresh_ratio  # False for NaN, when weights were not found

    def watch(self, course: Course, observation: Observation) -> Course:
        """Record the score std of the first batch, and the mean loss in the first and last windows of the warm-up.

        In a short warm-up, these windows are its two halves.
        """
        step = observation.step
        if step == 0:
            course = replace(course, spread=observation.statistics.std.to(course.spread))
        window = min(self.window, max((self.warmup + 1) // 2, 1))  # the two do not overlap
        into_last = step - (self.warmup - window)
        if step < window:
            course = replace(course, early=_mean(course.early, observation.loss(), step + 1))
        if 0 < into_last <= window:
            course = replace(course, late=_mean(course.late, observation.loss(), into_last))
        return course

    def decide(self, course: Course, observation: Observation) -> Course:
        """Make the moves that depend on W_q and W_k; units seen later follow the first ones."""
        step, random = observation.step, self.look(observation)
        seen, fresh = (course.phase != Phase.UNSEEN).any(), course.fresh.any()
        if random is not None:
            seen, fresh = torch.ones_like(seen), torch.where(seen, fresh, random)
        down = 10**-self.warmup_decades
        if 0 < step - self.warmup <= self.window:  # units not measured or not finite when it ended
            missed = ~course.early.isnan() | (course.spread > 0)
            furthest = (course.fresh * course.phase).amax()  # all units that ended it on time went the same way
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
        """Return whether training stands still, i.e. nothing shows that it has begun to learn; a boolean scalar."""
        learns = (course.early - course.late).abs() > self.plateau_fall * course.late.abs()  # False for NaN
        grown = (observation.statistics.std >= self.plateau_growth * course.spread) & (course.spread > 0)
        return ~(learns | grown).any()

    def _end_warm_up(self, course: Course, observation: Observation, where: Tensor, stands: Tensor) -> Course:
        """Take beta up again, or down to the plateau if training `stands` still; done once per unit."""
        below = observation.beta_default * 10**-self.plateau_decades
        course = course.move(Phase.WARM_UP, Phase.PLATEAU, where & stands, beta=below, left=self.plateau_batches)
        up = course.beta / 10**-self.warmup_decades
        return course.move(Phase.WARM_UP, Phase.WARM_UP, where, beta=up, early=torch.nan, spread=0.0)

    def expire(self, course: Course) -> Course:
        """Move units that have no batch left in their phase to the next phase."""
        over = course.left == 0
        climbs = over & ((course.phase == Phase.WARM_UP) | (course.phase == Phase.PLATEAU))
        phase = course.phase.masked_fill(over, Phase.SEARCH).masked_fill(climbs, Phase.CLIMB)
        return replace(course, phase=phase, left=course.left.masked_fill(climbs, self.rise_batches))

    def climb(self, course: Course, observation: Observation) -> Tensor:
        """Return the decades to rise in this batch: an equal share of the rest, or less to hold the logit std."""
        top = observation.beta_default * 10**self.rise_decades
        share = (top / course.beta).log10().clamp(min=0) / course.left
        return torch.minimum(share, (self.rise_logit_std / (course.beta * observation.statistics.std)).log10())


def _mean(mean: Tensor, loss: Tensor, number: int) -> Tensor:
    """Update a mean with the `number`-th loss; a mean of NaN stands for no loss yet, and a loss of NaN is skipped."""
    more = torch.where(mean.isnan(), loss, mean + (loss - mean) / number)
    return torch.where(loss.isnan(), mean, more)
