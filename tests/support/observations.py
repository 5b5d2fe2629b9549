"""Observations that are made up, and the path of beta under controllers that see them."""

import math
from dataclasses import fields, replace

import pytest
import torch

from betahook import Observation, Statistics
from betahook.control.base import apply

NAN = math.nan


def observe(
    *, units=1, predicted_std=NAN, beta_default=1.0, overflow=88.0, step=0, spectral_ratio=NAN, loss=NAN, **measured
):
    """An observation of which only `measured` is known; a number stands for all units."""

    def tensor(value, dtype=torch.float64):
        return torch.as_tensor(value, dtype=dtype).expand(units).clone()

    values = {field.name: tensor(NAN) for field in fields(Statistics)}
    values["finite"] = values["exact"] = tensor(True, torch.bool)
    values["count"] = tensor(1)
    if "max_score" in measured:
        measured.setdefault("max_score_bound", measured["max_score"])  # of all pairs
    values |= {
        name: tensor(value, torch.bool if name == "finite" else torch.float64) for name, value in measured.items()
    }
    return Observation(
        beta_default=tensor(beta_default),
        statistics=Statistics(**values),
        predicted_std=lambda: tensor(predicted_std),
        overflow=overflow,
        step=step,
        spectral_ratio=lambda: torch.tensor(spectral_ratio),
        loss=lambda: torch.tensor(loss, dtype=torch.float64),
    )


def sensitivities(*values, **measured):
    return [observe(sensitivity=value, **measured) for value in values]


def as_list(rules):
    return rules if isinstance(rules, list) else [rules]


def run(rules, observations, beta=1.0):
    """Beta after each observation, one list a unit or a list of numbers for a single unit."""
    rules = as_list(rules)
    beta = torch.as_tensor(beta, dtype=torch.float64).reshape(-1)
    history, memories = [], [{} for _ in rules]
    for step, observation in enumerate(observations):
        beta, memories = apply(rules, beta, replace(observation, step=step), memories)
        history.append(beta.item() if len(beta) == 1 else beta.tolist())
    return history


def decades(history):
    """Beta as decades from 1."""
    return [math.log10(beta) for beta in history]


def approx(values):
    return pytest.approx(values, rel=1e-9, abs=1e-9)
