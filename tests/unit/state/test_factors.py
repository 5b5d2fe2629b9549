"""The gains and probes of all layers: made when something changed, and only then."""

from unittest import mock

import pytest
import torch

from betahook.state.factors import Factors
from support.operations import Operations

FIRST, SECOND = slice(0, 2), slice(2, 5)


@pytest.fixture
def factors():
    made = Factors([2, 3], torch.ones(5))
    made.note(0, FIRST, 0.5)
    made.note(1, SECOND, 0.25)
    return made


def test_a_gain_is_beta_over_the_own_one_and_1_where_beta_is_not_set(factors):
    factors.beta.copy_(torch.tensor([1.0, torch.nan, 0.5, 0.25, 0.125]))
    assert factors.gain(0).tolist() == [[[2.0]], [[1.0]]]
    assert factors.gain(1).flatten().tolist() == [2.0, 1.0, 0.5]


def test_the_beta_that_acts_is_the_own_one_where_none_is_set(factors):
    factors.beta.copy_(torch.tensor([1.0, torch.nan, 0.5, torch.nan, 0.125]))
    assert factors.scales().tolist() == [[1.0] * 5, [1.0, 0.5, 0.5, 0.25, 0.125]]
    factors.beta[1] = 2.0
    assert factors.scales()[1, 1] == 2.0


def test_gains_are_made_for_all_layers_at_once_and_kept(factors):
    first = factors.gain(0)
    with Operations() as operations:
        assert factors.gain(0) is first
        factors.gain(1)
    assert not operations.calls


@pytest.mark.parametrize("change", ["beta", "a head", "own"])
def test_gains_are_made_anew_after_a_change_and_the_old_ones_stay(factors, change):
    old = factors.gain(0)
    if change == "own":
        factors.note(0, FIRST, 0.25)
    else:
        (factors.beta[:1] if change == "a head" else factors.beta).fill_(2.0)
    assert factors.gain(0).flatten().tolist() == ([4.0, 2.0] if change == "a head" else [4.0, 4.0])
    assert old.flatten().tolist() == [2.0, 2.0]


def test_gains_that_could_not_be_made_are_made_by_the_next_who_asks(factors):
    factors.gain(0)
    factors.beta.fill_(2.0)
    broken = mock.patch("torch.stack", side_effect=RuntimeError("no memory"))
    with broken, pytest.raises(RuntimeError, match="no memory"):
        factors.gain(0)
    assert factors.gain(0).flatten().tolist() == [4.0, 4.0]


def test_gains_made_in_inference_serve_training(factors):
    with torch.inference_mode():
        gain = factors.gain(0)
        factors.beta.fill_(2.0)
        assert factors.gain(0).flatten().tolist() == [4.0, 4.0]
    assert not gain.is_inference()
    assert not gain.requires_grad


def test_a_number_is_written_when_it_is_another_one(factors):
    with Operations() as operations:
        assert not factors.note(0, FIRST, 0.5)
    assert not operations.calls
    assert factors.note(0, FIRST, 2.0)
    assert factors.own.tolist() == [2.0, 2.0, 0.25, 0.25, 0.25]


def test_a_resume_knows_the_numbers_in_single_precision(factors):
    factors.recall(torch.tensor([0.1, 0.1, 0.3, 0.4, 0.4]))
    assert factors.own[:2].tolist() == [torch.tensor(0.1).item()] * 2
    assert factors.own[2:].isnan().all()  # no single number
    with Operations() as operations:
        assert not factors.note(0, FIRST, 0.1)
        assert not factors.note(0, FIRST, 0.1)
    assert "fill_" not in str(operations.calls)
    assert factors.note(0, FIRST, 0.1 + 1e-7)


def test_the_sensitivity_is_that_of_all_probes(factors):
    assert factors.sensitivity().tolist() == [0] * 5
    (3 * factors.probes[1]).sum().backward()
    assert factors.sensitivity().tolist() == [0, 0, 3, 3, 3]
    assert not factors.sensitivity().requires_grad


def test_a_sensitivity_that_was_loaded_is_added_to(factors):
    factors.set_sensitivity(torch.arange(5, dtype=torch.float64))
    factors.probes[1].sum().backward()
    assert factors.sensitivity().tolist() == [0, 1, 3, 4, 5]
    factors.set_sensitivity(None)
    assert all(probe.grad is None for probe in factors.probes)


def test_the_sensitivity_of_a_gain_is_its_gradient_times_itself(factors):
    factors.beta.copy_(torch.tensor([1.0, torch.nan, torch.nan, 0.25, 0.125]))
    (3 * factors.leaf(0)).sum().backward()
    assert factors.sensitivity().tolist() == [6, 3, 0, 0, 0]
    factors.probes[1].sum().backward()
    (2 * factors.leaf(0)).sum().backward()
    assert factors.sensitivity().tolist() == [10, 5, 1, 1, 1]
    factors.set_sensitivity(None)
    assert factors.sensitivity().tolist() == [0] * 5


def test_a_layer_that_is_dropped_leaves_the_others_theirs(factors):
    for layer in range(2):
        factors.leaf(layer).sum().backward()
        factors.probes[layer].sum().backward()
    factors.drop(0)
    assert factors.sensitivity().tolist() == [0, 0, 5, 5, 5]
    factors.drop(1)
    assert factors.sensitivity().tolist() == [0] * 5


def test_a_layer_whose_own_beta_is_unknown_has_no_sensitivity():
    factors = Factors([1, 1], torch.ones(2))
    factors.note(0, slice(0, 1), 0.5)
    factors.leaf(0).sum().backward()
    assert factors.sensitivity().tolist() == [2, 0]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_beta_that_changes_before_or_after_the_backward_loses_no_sensitivity(factors, when):
    first = factors.leaf(0)
    (3 * first).sum().backward()
    output = (5 * first).sum()
    if when == "after":
        output.backward()
    factors.beta.fill_(2.0)
    second = factors.leaf(0)
    second.sum().backward()
    if when == "before":
        output.backward()
    assert factors.sensitivity().tolist() == [8 * 2 + 4] * 2 + [0] * 3


def test_a_model_on_another_device_has_other_gains(factors):
    factors.leaf(0).sum().backward()
    factors.probes[0].sum().backward()
    factors.follow(factors.beta.to("meta"))
    assert factors.gain(0).is_meta
    assert factors.leaf(0).is_meta
    assert {x.device.type for x in (factors.own, *factors.probes, factors.probes[0].grad)} == {"meta"}
