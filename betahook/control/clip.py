"""`Clip`: QK-clip, which scales weights and leaves beta to the other controllers.

`Hook.step` asks it for a factor for each head and writes that into the weights, see `betahook.step.clipping`; like all
controllers it never reads a tensor back to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from betahook.control.base import Controller, Memory, Observation, require
from betahook.measure.statistics import Statistics

MARGIN = 1e-5
"""Share of its threshold by which `Clip` stays below it, so that rounding takes no logit above."""


@dataclass(frozen=True, repr=False)
class Clip(Controller):
    """Scale the weights of each head whose largest logit exceeds a threshold, so that it does not; beta stays.

    QK-clip, as Kimi K2 was trained with (MuonClip, 2025), for any model and any optimizer. It acts after the other
    controllers, whatever their place in the list, on single heads, also where a layer has one beta. The largest logit
    is that of all pairs of the step, before biases and soft caps.

    The state of the optimizer is left alone, as in MuonClip.

    Args:
        threshold: largest absolute logit; 100 is that of Kimi K2. A healthy layer may need 70.
        log_only: count the steps in which each head would have been clipped, the metric `clips`, and change nothing.

    Raises:
        ValueError: an option has a value that makes no sense.
        TypeError: `log_only` is not a boolean.
    """

    threshold: float = 100.0
    log_only: bool = False
    moves_beta: ClassVar[bool] = False
    needs_every_step: ClassVar[bool] = True
    exact_max_logit: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self, "threshold", lambda logit: logit > 0, "a positive number")
        if not isinstance(self.log_only, bool):
            raise TypeError(f"Clip(log_only=...) must be True or False; got {self.log_only!r}")

    def update(self, beta: Tensor, observation: Observation, state: Memory) -> tuple[Tensor, Memory]:
        return beta, state

    def factor(self, beta: Tensor, statistics: Statistics) -> Tensor:
        """Factor on the scores of each head, 1 where no logit exceeds the threshold.

        Args:
            beta: `[heads]`, float32.
            statistics: of the step, by head.
        """
        logit = beta * statistics.max_score
        clipped = (1 - MARGIN) * self.threshold / logit
        return torch.where(logit > self.threshold, clipped, 1.0).to(beta)
