"""The few numbers that summarise a whole model, from its findings: trackers and histories show them first."""

from __future__ import annotations

import math

from betahook.report.conditions import Condition
from betahook.report.findings import Finding, Findings

GROUP = "attention"
"""Prefix of all names that concern the whole model; it sorts before the names of the trainers."""

ALWAYS = (Condition.HEALTHY, Condition.FLAT, Condition.SHARP, Condition.ONE_KEY)
"""Conditions whose share is reported in every log; the others are flags, reported when they fire."""

STDS = ("logit_std", "weight_std_q", "weight_std_k")
"""Numbers whose highest value over all layers is reported: logits grow with W_q and W_k."""


class Summary:
    """Summaries of the logs of a run, in order: a condition that occurred once is reported from then on."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def __call__(self, findings: Findings) -> dict[str, float]:
        """Return the numbers of `summarise`, and 0 for conditions that have ended."""
        found = {**self._seen, **summarise(findings)}
        self._seen = {name: 0.0 for name in found if name.startswith(f"{GROUP}/layers_")}
        return found


def summarise(findings: Findings) -> dict[str, float]:
    """Return names to numbers, without what was not measured; each name begins with `attention/`.

    `layers_flat` and the like are the share of the layers in a condition; `max_logit` is the largest logit of all
    layers, and `max_logit_layer` and `max_logit_head` are its place; `lowest_entropy` is the entropy of the sharpest
    layer, in nats; `highest_logit_std`, `highest_weight_std_q` and `highest_weight_std_k` are the largest of any layer;
    `log10_beta_over_own_lowest` and `_highest` are the range of beta over the model's own, in decades.
    """
    counts, measured = findings.counts, [each for each in findings if each.condition is not Condition.UNMEASURED]
    shares = {
        f"layers_{condition.name.lower()}": counts.get(condition, 0) / len(findings)
        for condition in Condition
        if condition in ALWAYS or condition in counts
    }
    entropies = [each.numbers.entropy for each in measured if each.numbers.entropy >= 0]
    stds = {name: [std for each in measured if (std := getattr(each.numbers, name)) >= 0] for name in STDS}
    gains = [math.log10(gain) for each in findings for gain in each.head_gains if gain > 0]
    numbers = {
        **shares,
        **_largest(findings, [each for each in measured if each.numbers.max_logit >= 0]),
        **({"lowest_entropy": min(entropies)} if entropies else {}),
        **{f"highest_{name}": max(values) for name, values in stds.items() if values},
        **({"log10_beta_over_own_lowest": min(gains), "log10_beta_over_own_highest": max(gains)} if gains else {}),
    }
    return {f"{GROUP}/{name}": value for name, value in numbers.items()}


def _largest(findings: Findings, measured: list[Finding]) -> dict[str, float]:
    """Return the largest logit, and its layer and head, both counted from 0."""
    if not measured:
        return {}
    largest = max(measured, key=lambda each: each.numbers.max_logit)
    return {
        "max_logit": largest.numbers.max_logit,
        "max_logit_layer": float(findings.index(largest)),
        "max_logit_head": float(largest.max_logit_head),
    }
