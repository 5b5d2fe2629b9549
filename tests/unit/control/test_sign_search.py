"""The sign search alone: what it counts, when it steps, and how far."""

import math

import pytest
import torch

from betahook.control.sign_search import SignSearch
from support.observations import approx

RULE = SignSearch(window=1, opening=0.4, growth=1.5, smallest=0.05, largest=1.0)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def steps(rule, *sums, searching=True):
    """The steps of one unit."""
    memory, taken = rule.start(tensor(1)), []
    for value in sums:
        step, memory = rule.advance(torch.tensor([searching]), tensor(value), memory)
        taken.append(step.item())
    return taken


def test_the_first_step_goes_against_the_sign_by_the_opening():
    assert steps(RULE, -1e-9) == approx([0.4])
    assert steps(RULE, 1e9) == approx([-0.4])


def test_steps_grow_while_the_sign_persists_and_halve_when_it_turns():
    assert steps(RULE, -1, -1, -1, 1, 1, -1) == approx([0.4, 0.6, 0.9, -0.45, -0.675, 0.3375])


def test_steps_stay_between_the_smallest_and_the_largest():
    assert steps(RULE, -1, -1, -1, -1) == approx([0.4, 0.6, 0.9, 1.0])
    assert steps(RULE, -1, 1, -1, 1, -1) == approx([0.4, -0.2, 0.1, -0.05, 0.05])


def test_a_sum_of_zero_takes_no_step_and_remembers_the_last_direction():
    assert steps(RULE, -1, 0, 1) == approx([0.4, 0, -0.2])


def test_a_window_is_summed_and_begins_again():
    rule = SignSearch(3, 0.4, 1.5, 0.05, 1.0)
    assert steps(rule, -1, -1, 3, 1, 1, -3) == approx([0, 0, -0.4, 0, 0, 0.2])


def test_nothing_is_counted_elsewhere():
    memory = RULE.start(tensor(1, 1))
    step, after = RULE.advance(torch.tensor([True, False]), tensor(-1, math.nan), memory)
    assert step.tolist() == [0.4, 0]
    assert {name: value[1].item() for name, value in after.items()} == {
        name: value[1].item() for name, value in memory.items()
    }
    assert {name: value[0].item() for name, value in after.items()} == pytest.approx(
        {"batches": 0, "total": 0, "direction": 1, "step": 0.4}
    )
