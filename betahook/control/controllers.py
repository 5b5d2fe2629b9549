"""Rules that choose beta from what was observed: tensors in, tensors out, nothing read back to the host.

A unit is a layer, or a head with `per_head=True`; every tensor here has shape `[units]`. All decisions are made from
statistics that are already pooled over ranks, so every rank computes the same beta.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from betahook.measure.statistics import Statistics

DECADES = 3.0
"""Beta stays within so many decades of the model's own."""

FRESH_RATIO = 1.1
"""Up to this `spectral_ratio` W_q and W_k pass for random: fresh ones have 0.85 to 1.05, what learned soon has more."""

WARMUP_DECADES = -0.5
"""Beta of a fresh model in the warm-up, in decades from its own."""

RISE_DECADES, RISE_BATCHES, RISE_LOGIT_STD = 1.0, 100, 4.0
"""The rise of a fresh model: how far above its own beta it ends, how long it takes, the std of the logits in it."""

PLATEAU_DECADES, PLATEAU_BATCHES = -2.0, 70
"""Where W_q and W_k have not learned by the end of the warm-up: at which beta the rise waits to begin, and how long."""


@dataclass(frozen=True)
class Observation:
    """What a controller may look at after a step.

    Attributes:
        beta_default: the model's own inverse temperature, `[units]`, float32.
        statistics: of this step; of the last measured one where this step was not measured. The sensitivity is always
            this step's. The std of W_q and W_k is not in it.
        predicted_std: returns the standard deviation of the scores that W_q and W_k predict, `[units]`, NaN where they
            were not found. A function, since it reads them all.
        overflow: the largest logit whose exponential is finite in the dtype of the softmax.
        step: number of updates before this one, skipped optimizer steps not counted.
        spectral_ratio: returns, as a scalar, the largest `theory.spectral_ratio` of all W_q and W_k, NaN where one was
            not found. A function, since it takes a score of products with each of them.
    """

    beta_default: Tensor
    statistics: Statistics
    predicted_std: Callable[[], Tensor]
    overflow: float
    step: int
    spectral_ratio: Callable[[], Tensor]


@dataclass
class Controller(ABC):
    """A rule for beta. Subclasses are dataclasses of numbers, with their memory in `state`.

    Attributes:
        state: tensors `[units]` by name. A unit whose observation is not finite keeps its beta and its state, whatever
            `update` does to them.
    """

    state: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def start(self, beta: Tensor) -> dict[str, Tensor]:
        """The state before the first update."""
        return {}

    @abstractmethod
    def update(self, beta: Tensor, observation: Observation) -> Tensor:
        """The next beta. Element-wise and without host synchronisation; replaces `state`, never mutates its tensors.

        Args:
            beta: `[units]`, as the controllers before this one in the list left it.
            observation: what was measured.

        Returns:
            `[units]`; where it is NaN, infinite or not positive, beta stays.
        """

    def is_in_transition(self) -> bool:
        """Whether beta is on its way somewhere: training that ends now ends too early. Reads the device back."""
        return False


@dataclass
class Monitor(Controller):
    """Beta stays where it is."""

    def update(self, beta: Tensor, observation: Observation) -> Tensor:
        return beta


@dataclass
class Variance(Controller):
    """Beta follows `target / std`, so that the logits keep a standard deviation of `target`.

    The paper's first algorithm: beta is the reciprocal of the standard deviation of the scores, measured, or predicted
    from W_q and W_k. The smoothing, in log beta, is ours.

    Args:
        target: standard deviation that the logits shall have.
        source: "measured", the scores themselves; or "weights", the prediction from W_q, W_k and their input.
        smoothing: share of the old log beta in the new one, from 0 to below 1.

    Raises:
        ValueError: an option has a value that makes no sense.
    """

    target: float = 1.0
    source: Literal["measured", "weights"] = "measured"
    smoothing: float = 0.9

    def __post_init__(self) -> None:
        _require(self.target > 0, "Variance(target=...)", "a positive number", self.target)
        _require(self.source in ("measured", "weights"), "Variance(source=...)", '"measured" or "weights"', self.source)
        _require(0 <= self.smoothing < 1, "Variance(smoothing=...)", "a number from 0 to below 1", self.smoothing)

    def update(self, beta: Tensor, observation: Observation) -> Tensor:
        std = observation.statistics.std if self.source == "measured" else observation.predicted_std()
        wanted = (self.target / std).log()
        return (self.smoothing * beta.log() + (1 - self.smoothing) * wanted).exp()


@dataclass
class Search(Controller):
    """Search for beta by decades and bisection inside one training run.

    The paper's second algorithm tries `beta = 10^N` and bisects, one training run a trial. Here the trial is a window
    of batches and the outcome the sign of the summed sensitivity `dL/d log beta`: log beta steps against it, a
    reversal halves the step (bisection), a sign that persists lets it grow again, so that the bracket re-opens when
    the optimum drifts.

    No step takes the largest logit above the paper's bound, the logarithm of the largest number of the softmax's dtype,
    or above half of it in a model that was fresh: further apart than the bound, the smaller of two weights underflows,
    and so does the gradient that could correct attention to the wrong place. Logits that are there already, or grow by
    themselves, cost beta nothing.

    A fresh model, one whose W_q and W_k are random at the first step, begins with a rise, which is ours. Its attention
    is flat, and while it is, the sensitivity is next to nothing: it sees the loss of this batch, not that W_q and W_k
    learn in proportion to beta. A layer that is first used later rises with the others, or after their warm-up at once.
    Where beta goes depends on what W_q and W_k look like (`theory.spectral_ratio`), and on `beta_0`, the model's own:

    * usually: `beta_0 / 3` in the warm-up, then from `beta_0` to `10 beta_0` in 100 batches, whatever the sensitivity,
      but in no unit beyond a logit std of 4: where the scores grow, beta falls;
    * if W_q and W_k learn within the first third of the warm-up, the learning rate is very high, and what they learn
      from flat attention decides how the run ends: the logits have that std at once, and the 100 batches begin;
    * if W_q and W_k still look random after the warm-up, training stands on a plateau: `beta_0 / 100` for 70 batches,
      where gradients are so small beside those that Adam remembers that W_q and W_k hold still while the rest of the
      model learns, then to `10 beta_0` in 100 batches, where they are so large that W_q and W_k learn faster. For that
      Adam must not remember much, and it remembers a thousand batches: hence the third in the warm-up.

    Args:
        window: batches between two steps.
        warmup: batches before the first window, in which beta stays, or those before the rise. After very few nothing
            has learned yet, and every fresh model waits as on a plateau.
        rise: whether fresh models begin with a rise.
        opening: first step, in decades.
        growth: factor on the step while the sign persists; 1 keeps it.
        smallest: smallest step, in decades.
        largest: largest step, in decades.

    Raises:
        ValueError: an option has a value that makes no sense.
    """

    window: int = 10
    warmup: int = 30
    rise: bool = True
    opening: float = 0.1
    growth: float = 1.5
    smallest: float = 0.01
    largest: float = 0.2

    def __post_init__(self) -> None:
        for name, value, least in (("window", self.window, 1), ("warmup", self.warmup, 0)):
            whole = isinstance(value, int) and value >= least
            _require(whole, f"Search({name}=...)", f"a whole number, {least} or more", value)
        _require(isinstance(self.rise, bool), "Search(rise=...)", "True or False", self.rise)
        _require(0 < self.smallest <= self.largest, "Search(smallest=...)", "above 0, at most largest", self.smallest)
        ordered = self.smallest <= self.opening <= self.largest
        _require(ordered, "Search(opening=...)", "between smallest and largest", self.opening)
        _require(self.growth >= 1, "Search(growth=...)", "1 or more", self.growth)

    def start(self, beta: Tensor) -> dict[str, Tensor]:
        zero = torch.zeros_like(beta)
        return {
            "wait": zero + self.warmup,  # batches left in which beta stays
            "rise": zero,  # batches left of the rise that comes then
            "fresh": zero - 1,  # 1 where W_q and W_k were random at the first look, 0 where not; -1 before it
            "batches": zero,  # of the window so far, and the sensitivity summed over them
            "total": zero,
            "direction": zero,  # of the last step of the search, and its size
            "step": zero + self.opening,
        }

    def update(self, beta: Tensor, observation: Observation) -> Tensor:
        old = beta
        if self.rise:
            looks = observation.step <= self.warmup / 3 or observation.step == self.warmup
            random = observation.spectral_ratio() <= FRESH_RATIO if looks else None
            beta = self._plan_rise(beta, observation.step, random)
            if random is not None:
                beta = self._revise_plan(beta, observation, random)
        wait, rise = self.state["wait"], self.state["rise"]
        waiting = wait > 0
        rising = ~waiting & (rise > 0)
        self.state = {
            **self.state,
            "wait": torch.where(waiting, wait - 1, wait),
            "rise": torch.where(rising, rise - 1, rise),
        }
        search = self._search(~waiting & ~rising, observation.statistics.sensitivity)
        new = beta * 10 ** torch.where(rising, _climb(beta, rise, observation), search)
        bound = torch.where(self.state["fresh"] > 0, observation.overflow / 2, observation.overflow)
        return torch.maximum(torch.minimum(new, old), _capped(new, bound, observation))

    def is_in_transition(self) -> bool:
        return bool((self.state["rise"] > 0).any()) if self.state else False

    def _plan_rise(self, beta: Tensor, step: int, random: Tensor | None) -> Tensor:
        """Plan the rise of the units that are seen for the first time, all of them or none by what the first ones saw.

        `random` is whether W_q and W_k look random now, None where nobody looked.
        """
        state = self.state
        seen_before = state["fresh"].max()
        fresh = seen_before if random is None else torch.where(seen_before < 0, random.to(beta), seen_before)
        new = state["fresh"] < 0
        rises = new & (fresh > 0)
        self.state = {
            **state,
            "wait": torch.where(rises, max(self.warmup - step, 0), state["wait"]),
            "rise": torch.where(rises, RISE_BATCHES, state["rise"]),
            "fresh": torch.where(new, fresh, state["fresh"]),
        }
        return torch.where(rises, beta * 10**WARMUP_DECADES, beta) if step <= self.warmup else beta

    def _revise_plan(self, beta: Tensor, observation: Observation, random: Tensor) -> Tensor:
        """By what W_q and W_k look like some batches later: beta to wait at, or to begin from."""
        state = self.state
        planned = state["rise"] == RISE_BATCHES
        if observation.step == self.warmup:
            plateau = planned & random
            beta = torch.where(planned, beta / 10**WARMUP_DECADES, beta)
            beta = torch.where(plateau, observation.beta_default * 10**PLATEAU_DECADES, beta)
            wait = torch.where(plateau, PLATEAU_BATCHES, state["wait"])
        else:
            learns_fast = planned & ~random
            beta = torch.where(learns_fast, RISE_LOGIT_STD / observation.statistics.std, beta)
            wait = torch.where(learns_fast, 0, state["wait"])
        self.state = {**state, "wait": wait}
        return beta

    def _search(self, searching: Tensor, sensitivity: Tensor) -> Tensor:
        """The step in decades, `[units]`: 0 but at the end of a window."""
        batches = torch.where(searching, self.state["batches"] + 1, 0)
        total = torch.where(searching, self.state["total"] + sensitivity, 0)
        due = batches >= self.window
        direction = -total.sign()
        agreement = direction * self.state["direction"]
        step = torch.where(agreement < 0, self.state["step"] / 2, self.state["step"])
        step = torch.where(agreement > 0, step * self.growth, step).clamp(self.smallest, self.largest)
        self.state = {
            **self.state,
            "batches": torch.where(due, 0, batches),
            "total": torch.where(due, 0, total),
            "direction": torch.where(due & (direction != 0), direction, self.state["direction"]),
            "step": torch.where(due, step, self.state["step"]),
        }
        return torch.where(due, direction * step, 0)


def _climb(beta: Tensor, rise: Tensor, observation: Observation) -> Tensor:
    """Decades to rise in this batch: an equal share of what is left, or fewer to hold the std of the logits."""
    share = (observation.beta_default * 10**RISE_DECADES / beta).log10().clamp(min=0) / rise
    return torch.minimum(share, (RISE_LOGIT_STD / (beta * observation.statistics.std)).log10())


@dataclass
class Gradient(Controller):
    """Adam on log beta, driven by the sensitivity `dL/d log beta`. Ours; the optimiser is Kingma and Ba's.

    Args:
        learning_rate: step of Adam in log beta.
        betas: decay of Adam's two averages.

    Raises:
        ValueError: an option has a value that makes no sense.
    """

    learning_rate: float = 0.02
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        _require(self.learning_rate > 0, "Gradient(learning_rate=...)", "a positive number", self.learning_rate)
        valid = len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas)
        _require(valid, "Gradient(betas=...)", "two numbers from 0 to below 1", self.betas)

    def start(self, beta: Tensor) -> dict[str, Tensor]:
        zero = torch.zeros_like(beta)
        return {"steps": zero, "mean": zero, "square": zero}

    def update(self, beta: Tensor, observation: Observation) -> Tensor:
        sensitivity = observation.statistics.sensitivity
        decay, decay_square = self.betas
        steps = self.state["steps"] + 1
        mean = torch.lerp(sensitivity, self.state["mean"], decay)
        square = torch.lerp(sensitivity.square(), self.state["square"], decay_square)
        self.state = {"steps": steps, "mean": mean, "square": square}
        corrected = mean / (1 - decay**steps)
        scale = (square / (1 - decay_square**steps)).sqrt()
        # Scale-free, so no epsilon: without any sensitivity the step is 0 and not 0 / 0.
        return beta * (-self.learning_rate * (corrected / scale).nan_to_num(nan=0.0)).exp()


@dataclass
class Cap(Controller):
    """`beta <= threshold / max|score|`: no logit grows beyond `threshold`.

    The remedy against attention-logit growth that QK-clip applies to the weights (Kimi K2, 2025), applied to beta. The
    maximum is that of the sampled query rows.

    Args:
        threshold: largest absolute logit; 100 is that of QK-clip. A healthy layer may need 70.

    Raises:
        ValueError: an option has a value that makes no sense.
    """

    threshold: float = 100.0

    def __post_init__(self) -> None:
        _require(self.threshold > 0, "Cap(threshold)", "a positive number", self.threshold)

    def update(self, beta: Tensor, observation: Observation) -> Tensor:
        return _capped(beta, self.threshold, observation)


def apply(controllers: Iterable[Controller], beta: Tensor, observation: Observation) -> Tensor:
    """Run the controllers in order; a unit keeps beta and state where anything is not finite, or was never measured.

    The controllers compute in the precision of the statistics, float64 where the device has it. Wherever they move
    beta, it stays within `DECADES` of the model's own.
    """
    measured = observation.statistics.finite & (observation.statistics.count > 0)
    healthy = measured & observation.beta_default.isfinite()
    old = new = beta.to(observation.statistics.std.dtype)
    for controller in controllers:
        before = controller.state or controller.start(old)
        controller.state = before
        proposed = controller.update(new, observation)
        if controller.state.keys() != before.keys():
            made, controller.state = controller.state, before
            raise ValueError(
                f"update() of {controller} made the state {sorted(made)}, but start() {sorted(before)}; start() must "
                "return every name of the state"
            )
        # A rule without an answer (a prediction without weights, say) leaves the others theirs.
        new = torch.where(proposed.isfinite() & (proposed > 0), proposed, new)
        controller.state = {name: torch.where(healthy, controller.state[name], before[name]) for name in before}
    limit = 10**DECADES
    bounded = new.clamp(observation.beta_default / limit, observation.beta_default * limit)
    return torch.where(healthy & (new != old), bounded.to(beta), beta)


def at_bound(beta: Tensor, beta_default: Tensor) -> Tensor:
    """Whether beta is as far from the model's own as `apply` lets it go, up to rounding; boolean, as `beta`."""
    return (beta / beta_default).log10().abs() >= DECADES - 1e-4


def _capped(beta: Tensor, logit: float | Tensor, observation: Observation) -> Tensor:
    """Beta, at most such that the largest score makes `logit`; without a measured score there is no ceiling."""
    ceiling = logit / observation.statistics.max_score
    return torch.minimum(beta, ceiling.nan_to_num(nan=torch.inf))


def _require(condition: bool, what: str, expected: str, given: object) -> None:
    if not condition:
        raise ValueError(f"{what} must be {expected}; got {given!r}")
