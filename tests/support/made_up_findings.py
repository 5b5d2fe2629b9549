"""Findings that are made up, for what shows them."""

import math

from betahook.control.notes import Note
from betahook.report.conditions import Numbers, classify
from betahook.report.findings import Finding, Findings

ALL_KEYS = math.log(100)


def numbers(ratio=0.6, max_logit=8.0, logit_std=2.0):
    """Numbers of attention with this share of the entropy of flat attention."""
    return Numbers(0.0, max_logit, logit_std, ratio * ALL_KEYS, ALL_KEYS)


def finding(layer, of_heads, gain=1.0, note=None):
    """A layer as its heads make it."""
    pooled = numbers(
        sum(each.relative_entropy for each in of_heads) / len(of_heads),
        max(each.max_logit for each in of_heads),
        sum(each.logit_std for each in of_heads) / len(of_heads),
    )
    name, gains = f"model.layers.{layer}.attn", (gain,) * len(of_heads)
    return Finding(name, classify(pooled), 1, pooled, {}, 0.25 * gain, 0.25, note or Note(), tuple(of_heads), gains)


def findings(step, layers=3, heads=2, **changes):
    """All layers alike, but for the changes to one: `layer_1=finding(...)`."""
    alike = {f"layer_{index}": finding(index, [numbers()] * heads) for index in range(layers)}
    return Findings.at(step, {**alike, **changes}.values())
