"""Controllers that need no explanation beyond a formula: Monitor, Variance, Gradient, Cap, Clip.

`betahook.control.base.apply` runs them; `betahook.step.clipping` asks `Clip` for the factors on the weights. As in all
controllers, only `explain` reads tensors back to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from betahook.control.base import Controller, Memory, Observation, ceiling, is_positive, reaches_logit, require
from betahook.control.notes import Note, downhill
from betahook.measure.statistics import Statistics

MARGIN = 1e-5
"""Relative margin by which `Clip` stays below its threshold, so that rounding takes no logit above it."""


@dataclass(frozen=True, repr=False)
class Monitor(Controller):
    """Leave beta where it is."""

    moves_beta: ClassVar[bool] = False

    def is_due(self, step: int) -> bool:
        return False

    def update(self, beta: Tensor, observation: Observation, state: Memory) -> tuple[Tensor, Memory]:
        return beta, state


@dataclass(frozen=True, repr=False)
class Variance(Controller):
    """Let beta follow `target / std`, so that the logits keep a standard deviation of `target`.

    The paper's first algorithm: beta is the reciprocal of the standard deviation of the scores, either measured or
    predicted from W_q and W_k. The smoothing, in log beta, is ours.

    Args:
        target: desired standard deviation of the logits.
        source: "measured" for the std of the scores themselves, "weights" for its prediction from W_q, W_k and their
            input.
        smoothing: weight of the old log beta in the new one, from 0 to below 1.

    Raises:
        ValueError: an option has an invalid value.
    """

    needs_every_step: ClassVar[bool] = True

    target: float = 1.0
    source: Literal["measured", "weights"] = "measured"
    smoothing: float = 0.9

    def __post_init__(self) -> None:
        require(self, "target", is_positive, "a positive number")
        require(self, "source", lambda source: source in ("measured", "weights"), '"measured" or "weights"')
        require(self, "smoothing", lambda share: 0 <= share < 1, "a number from 0 to below 1")

    def update(self, beta: Tensor, observation: Observation, state: Memory) -> tuple[Tensor, Memory]:
        std = observation.statistics.std if self.source == "measured" else observation.predicted_std()
        wanted = (self.target / std).log()
        return (self.smoothing * beta.log() + (1 - self.smoothing) * wanted).exp(), state

    def explain(self, beta: Tensor, observation: Observation, state: Memory) -> Sequence[Note]:
        if self.source == "measured":
            return [Note(reason=f"moves the measured std of the logits to {self.target:g}")] * len(beta)
        acts = Note(reason=f"keeps the std that W_q and W_k predict of the logits at {self.target:g}")
        idle = Note(reason="leaves beta alone: W_q, W_k or their input is out of reach, so that they predict no std")
        return [idle if unknown else acts for unknown in observation.predicted_std().isnan().tolist()]


@dataclass(frozen=True, repr=False)
class Gradient(Controller):
    """Adam on log beta, driven by the sensitivity `dL/d log beta`. Ours; the optimiser is Kingma and Ba's.

    Args:
        learning_rate: Adam's learning rate, in log beta.
        betas: decay rates of Adam's two running averages.

    Raises:
        ValueError: an option has an invalid value.
    """

    learning_rate: float = 0.02
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        require(self, "learning_rate", is_positive, "a positive number")
        expected = "two numbers from 0 to below 1"
        require(self, "betas", lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas), expected)

    def start(self, beta: Tensor) -> Memory:
        zero = torch.zeros_like(beta)
        return {"steps": zero, "mean": zero, "square": zero}

    def update(self, beta: Tensor, observation: Observation, state: Memory) -> tuple[Tensor, Memory]:
        sensitivity = observation.statistics.sensitivity
        decay, decay_square = self.betas
        steps = state["steps"] + 1
        mean = torch.lerp(sensitivity, state["mean"], decay)
        square = torch.lerp(sensitivity.square(), state["square"], decay_square)
        corrected = mean / (1 - decay**steps)
        scale = (square / (1 - decay_square**steps)).sqrt()
        # Scale-free, hence without an epsilon: if there was never a sensitivity, the step is 0 rather than 0 / 0.
        step = -self.learning_rate * (corrected / scale).nan_to_num(nan=0.0)
        return beta * step.exp(), {"steps": steps, "mean": mean, "square": square}

    def explain(self, beta: Tensor, observation: Observation, state: Memory) -> Sequence[Note]:
        return [Note(reason=downhill(-mean)) for mean in state["mean"].tolist()]


@dataclass(frozen=True, repr=False)
class Cap(Controller):
    """Keep `beta <= threshold / max|score|`, the largest score of the last measured step.

    QK-clip (Kimi K2, 2025) limits the growth of attention logits in the same way, but scales the weights instead of
    beta. The maximum is taken over all pairs.

    Args:
        threshold: largest absolute logit allowed; QK-clip uses 100. A healthy layer may need 70.

    Raises:
        ValueError: an option has an invalid value.
    """

    needs_every_step: ClassVar[bool] = True
    exact_max_logit: ClassVar[bool] = True

    threshold: float = 100.0

    def __post_init__(self) -> None:
        require(self, "threshold", is_positive, "a positive number")

    def update(self, beta: Tensor, observation: Observation, state: Memory) -> tuple[Tensor, Memory]:
        return torch.minimum(beta, ceiling(self.threshold, observation.statistics.max_score_bound)), state

    def explain(self, beta: Tensor, observation: Observation, state: Memory) -> Sequence[Note]:
        held = reaches_logit(self.threshold, beta, observation.statistics.max_score_bound).tolist()
        return [Note(reason=f"Cap holds the largest logit at {self.threshold:g}") if each else Note() for each in held]


@dataclass(frozen=True, repr=False)
class Clip(Controller):
    """Scale down the weights of each head whose largest logit exceeds a threshold, to the threshold; beta stays.

    This is QK-clip, with which Kimi K2 was trained (MuonClip, 2025), for any model and any optimizer. It acts on single
    heads, even if a layer has one beta, and after the other controllers, whatever its place in the list. The largest
    logit is taken over all pairs of the step, before biases and soft caps, for the inputs that the layer had.

    The state of the optimizer is left alone, as in MuonClip.

    Args:
        threshold: largest absolute logit allowed; Kimi K2 used 100. A healthy layer may need 70.
        log_only: only count the steps in which each head would have been clipped (the metric `clips`).

    Raises:
        ValueError: an option has an invalid value.
    """

    moves_beta: ClassVar[bool] = False
    needs_every_step: ClassVar[bool] = True
    exact_max_logit: ClassVar[bool] = True

    threshold: float = 100.0
    log_only: bool = False

    def __post_init__(self) -> None:
        require(self, "threshold", is_positive, "a positive number")
        require(self, "log_only", lambda value: isinstance(value, bool), "True or False")

    def update(self, beta: Tensor, observation: Observation, state: Memory) -> tuple[Tensor, Memory]:
        return beta, state

    def explain(self, beta: Tensor, observation: Observation, state: Memory) -> Sequence[Note]:
        does = "would scale" if self.log_only else "scales"
        reason = f"Clip {does} the weights of heads with a logit above {self.threshold:g}"
        exceeds = (beta * observation.statistics.max_score > self.threshold).tolist()
        return [Note(reason=reason) if each else Note() for each in exceeds]

    def factor(self, beta: Tensor, statistics: Statistics) -> Tensor:
        """Return the factor on the scores of each head, 1 where no logit exceeds the threshold.

        Args:
            beta: `[heads]`, float32.
            statistics: those of the step, for each head.
        """
        logit = beta * statistics.max_score
        clipped = (1 - MARGIN) * self.threshold / logit
        return torch.where(logit > self.threshold, clipped, 1.0).to(beta)
