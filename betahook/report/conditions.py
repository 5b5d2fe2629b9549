"""Conditions that attention can be in, their limits, and advice: pure functions of numbers.

`report.findings` uses them to judge layers and heads. `RULES` holds the limits, the docstring of `Condition` states
them in words, and `docs/FINDINGS.md` gives the reason for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

HELP = "Conditions and their limits: help(betahook.Condition)"
"""Note below every table of findings."""

FLAT = 0.95
"""Attention that looks at more than this share of the keys is flat."""

SLACK = 0.1
"""Hysteresis: a condition ends when its number is back inside by this share of the limit, so hovering is no news."""


class Condition(IntEnum):
    """Conditions that the attention of a layer or head can be in.

    The condition is the first of these that holds:

    non-finite: there was a NaN, an infinity or a skipped optimizer step since the last pooling.
    exploding: the largest absolute logit is above 100.
    dead: the std of the logits within rows is below 0.00195, so that all keys get the same weight in bfloat16.
    sink: the share of attention on the first key, beyond that under flat attention, is above 0.5 of the rest.
    one key: the entropy of the rows is below 0.1 times that of flat attention.
    sharp: the entropy is below 0.25 times that, or the std of the logits within rows is above 10.
    flat: the number of keys looked at, exp of the mean entropy, is above 0.95 times that of flat attention.
    healthy: none of these; also if no row may use more than one key, and so has no choice.
    not measured: no forward pass was measured yet.

    A condition ends only when its number is back inside by a tenth of the limit.
    """

    # Checkpoints store these numbers: never change one.
    UNMEASURED = 0
    HEALTHY = 1
    FLAT = 2
    SHARP = 3
    ONE_KEY = 4
    SINK = 5
    DEAD = 6
    EXPLODING = 7
    NONFINITE = 8

    def __str__(self) -> str:
        return {Condition.UNMEASURED: "not measured", Condition.NONFINITE: "non-finite"}.get(
            self, self.name.lower().replace("_", " ")
        )

    @property
    def predicate(self) -> str:
        """The condition, worded to follow `attention is`."""
        return {Condition.ONE_KEY: "on one key", Condition.SINK: "on a sink"}.get(self, str(self))


@dataclass(frozen=True)
class Numbers:
    """Numbers by which a layer or a head is judged; NaN if not measured.

    Attributes:
        nonfinite: 1 if a NaN or an infinity kept the controllers from acting when the sums were last pooled.
        max_logit: the largest absolute logit.
        logit_std: std of the logits within rows.
        entropy: mean entropy of the attention rows, in nats.
        flat_entropy: the entropy that flat attention would have; NaN if each row may use only one key.
        sink: mean share of the attention that goes to the first key.
        weight_std_q, weight_std_k: std of W_q and W_k, with which logits grow; no condition depends on them.
    """

    nonfinite: float = math.nan
    max_logit: float = math.nan
    logit_std: float = math.nan
    entropy: float = math.nan
    flat_entropy: float = math.nan
    sink: float = math.nan
    weight_std_q: float = math.nan
    weight_std_k: float = math.nan

    @property
    def spread(self) -> float:
        """The std of the logits within rows; NaN if each row has only one key, whose logit has no effect."""
        return math.nan if math.isnan(self.flat_entropy) else self.logit_std

    @property
    def keys(self) -> float:
        """Effective number of keys that a row looks at: the exponential of the entropy."""
        return math.exp(self.entropy)

    @property
    def keys_share(self) -> float:
        """Keys looked at, as a share of those under flat attention: 1 if attention is flat."""
        return math.exp(self.entropy - self.flat_entropy) if self.flat_entropy else math.nan

    @property
    def relative_entropy(self) -> float:
        """The entropy over that of flat attention: 0 for one key, 1 for flat attention."""
        return self.entropy / self.flat_entropy if self.flat_entropy else math.nan

    @property
    def sink_excess(self) -> float:
        """Share that the first key takes of what flat attention gives to the others: 0 if flat, 1 if it takes all."""
        if self.keys_share > FLAT:  # if many rows have only one key, that gets nearly all of flat attention, too
            return 0.0
        flat = math.exp(-self.flat_entropy)  # the first key's share if flat; a little low if rows differ in their keys
        return (self.sink - flat) / (1 - flat) if self.flat_entropy else math.nan


@dataclass(frozen=True)
class Rule:
    """A limit on one number, and the condition that begins beyond it.

    Attributes:
        condition: the condition of a layer or head whose number is beyond the limit.
        number: name of that number in `Numbers`; NaN is beyond no limit.
        limit: the limit.
        above: True if the condition holds above the limit, False if below.
    """

    condition: Condition
    number: str
    limit: float
    above: bool

    def holds(self, numbers: Numbers, before: Condition) -> bool:
        """Return whether the number is beyond the limit, which `SLACK` relaxes if this condition held before."""
        slack = SLACK if before is self.condition else 0.0
        value: float = getattr(numbers, self.number)
        return value > self.limit * (1 - slack) if self.above else value < self.limit * (1 + slack)


RULES = (
    Rule(Condition.NONFINITE, "nonfinite", 0.0, above=True),
    Rule(Condition.EXPLODING, "max_logit", 100.0, above=True),
    Rule(Condition.DEAD, "spread", 2.0**-9, above=False),
    Rule(Condition.SINK, "sink_excess", 0.5, above=True),
    Rule(Condition.ONE_KEY, "relative_entropy", 0.1, above=False),
    Rule(Condition.SHARP, "relative_entropy", 0.25, above=False),
    Rule(Condition.SHARP, "logit_std", 10.0, above=True),
    Rule(Condition.FLAT, "keys_share", FLAT, above=True),
)
"""Tried in this order: the first rule that holds gives the condition; if none holds, attention is healthy."""

_HOLD = "limit the logits with QK-norm, betahook.Clip or betahook.Cap; lower the threshold of one that is in use"
ADVICE = {
    Condition.UNMEASURED: "run forwards in training mode, then hook.step(); print(hook) names layers left alone",
    Condition.HEALTHY: "",
    Condition.FLAT: "usual in the first steps; if it persists, raise beta, as the default controller does",
    Condition.SHARP: "watch whether the largest logit grows",
    Condition.ONE_KEY: f"some tasks ask for it; else lower the learning rate or beta, or {_HOLD}",
    Condition.SINK: "usual in causal models; the entropy says little here",
    Condition.DEAD: "scores do not depend on q and k; if it persists, check that W_q and W_k are trained and not zero",
    Condition.EXPLODING: f"lower the learning rate, or {_HOLD}",
    Condition.NONFINITE: "look for the first NaN or infinity in inputs, loss and weights; beta stays where it was",
}
"""Advice on each condition, in a few words."""

WORRYING = (Condition.SHARP, Condition.ONE_KEY, Condition.EXPLODING, Condition.NONFINITE)
"""Conditions that are logged as a warning when they begin; others are logged as information."""


def advise(condition: Condition, gains: Iterable[float]) -> str:
    """Return advice on a condition, given the gain (beta over the model's own) of each layer in it."""
    sizes = {(gain > 1 + SLACK) - (gain < 1 - SLACK) for gain in gains}
    if condition in (Condition.FLAT, Condition.DEAD) and sizes == {-1}:
        return "beta is below the model's own, which makes attention flatter"
    if condition is Condition.FLAT and sizes == {1}:
        return "usual in the first steps; with beta above the model's own already, see if W_q and W_k learn"
    return ADVICE[condition]


def classify(numbers: Numbers, before: Condition = Condition.UNMEASURED) -> Condition:
    """Return the condition of a layer or a head, given the one that it was in before."""
    for rule in RULES:
        if rule.holds(numbers, before):
            return rule.condition
    return Condition.UNMEASURED if math.isnan(numbers.logit_std) else Condition.HEALTHY
