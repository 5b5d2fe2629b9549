"""The gains and probes of all layers: made when something changed, and only then."""

from unittest import mock

import pytest
import torch

from betahook.state.gains import Gains
from support.operations import Operations

FIRST, SECOND = slice(0, 2), slice(2, 5)


@pytest.fixture
def gains():
    made = Gains([2, 3], torch.ones(5))
    made.note(0, FIRST, 0.5)
    made.note(1, SECOND, 0.25)
    return made


def test_a_gain_is_beta_over_the_default_and_1_where_beta_is_not_set(gains):
    gains.beta.copy_(torch.tensor([1.0, torch.nan, 0.5, 0.25, 0.125]))
    assert gains.gain(0).tolist() == [[[2.0]], [[1.0]]]
    assert gains.gain(1).flatten().tolist() == [2.0, 1.0, 0.5]


def test_the_beta_that_acts_is_the_default_where_none_is_set(gains):
    gains.beta.copy_(torch.tensor([1.0, torch.nan, 0.5, torch.nan, 0.125]))
    assert gains.scales().tolist() == [[1.0] * 5, [1.0, 0.5, 0.5, 0.25, 0.125]]
    gains.beta[1] = 2.0
    assert gains.scales()[1, 1] == 2.0


def test_gains_are_made_for_all_layers_at_once_and_kept(gains):
    first = gains.gain(0)
    with Operations() as operations:
        assert gains.gain(0) is first
        gains.gain(1)
    assert not operations.calls


@pytest.mark.parametrize("change", ["beta", "a head", "default"])
def test_gains_are_made_anew_after_a_change_and_the_old_ones_stay(gains, change):
    old = gains.gain(0)
    if change == "default":
        gains.note(0, FIRST, 0.25)
    else:
        (gains.beta[:1] if change == "a head" else gains.beta).fill_(2.0)
    assert gains.gain(0).flatten().tolist() == ([4.0, 2.0] if change == "a head" else [4.0, 4.0])
    assert old.flatten().tolist() == [2.0, 2.0]


def test_gains_that_could_not_be_made_are_made_by_the_next_who_asks(gains):
    gains.gain(0)
    gains.beta.fill_(2.0)
    broken = mock.patch("torch.stack", side_effect=RuntimeError("no memory"))
    with broken, pytest.raises(RuntimeError, match="no memory"):
        gains.gain(0)
    assert gains.gain(0).flatten().tolist() == [4.0, 4.0]


def test_gains_made_in_inference_serve_training(gains):
    with torch.inference_mode():
        gain = gains.gain(0)
        gains.beta.fill_(2.0)
        assert gains.gain(0).flatten().tolist() == [4.0, 4.0]
    assert not gain.is_inference()
    assert not gain.requires_grad


def test_a_number_is_written_when_it_is_another_one(gains):
    with Operations() as operations:
        assert not gains.note(0, FIRST, 0.5)
    assert not operations.calls
    assert gains.note(0, FIRST, 2.0)
    assert gains.default.tolist() == [2.0, 2.0, 0.25, 0.25, 0.25]


def test_a_resume_knows_the_numbers_in_single_precision(gains):
    gains.recall(torch.tensor([0.1, 0.1, 0.3, 0.4, 0.4]))
    assert gains.default[:2].tolist() == [torch.tensor(0.1).item()] * 2
    assert gains.default[2:].isnan().all()  # no single number
    with Operations() as operations:
        assert not gains.note(0, FIRST, 0.1)
        assert not gains.note(0, FIRST, 0.1)
    assert "fill_" not in str(operations.calls)
    assert gains.note(0, FIRST, 0.1 + 1e-7)


def test_the_sensitivity_is_that_of_all_probes(gains):
    assert gains.sensitivity().tolist() == [0] * 5
    (3 * gains.probes[1]).sum().backward()
    assert gains.sensitivity().tolist() == [0, 0, 3, 3, 3]
    assert not gains.sensitivity().requires_grad


def test_a_sensitivity_that_was_loaded_is_added_to(gains):
    gains.set_sensitivity(torch.arange(5, dtype=torch.float64))
    gains.probes[1].sum().backward()
    assert gains.sensitivity().tolist() == [0, 1, 3, 4, 5]
    gains.set_sensitivity(None)
    assert all(probe.grad is None for probe in gains.probes)


def test_the_sensitivity_of_a_gain_is_its_gradient_times_itself(gains):
    gains.beta.copy_(torch.tensor([1.0, torch.nan, torch.nan, 0.25, 0.125]))
    (3 * gains.leaf(0)).sum().backward()
    assert gains.sensitivity().tolist() == [6, 3, 0, 0, 0]
    gains.probes[1].sum().backward()
    (2 * gains.leaf(0)).sum().backward()
    assert gains.sensitivity().tolist() == [10, 5, 1, 1, 1]
    gains.set_sensitivity(None)
    assert gains.sensitivity().tolist() == [0] * 5


def test_a_layer_that_is_dropped_leaves_the_others_theirs(gains):
    for layer in range(2):
        gains.leaf(layer).sum().backward()
        gains.probes[layer].sum().backward()
    gains.drop(0)
    assert gains.sensitivity().tolist() == [0, 0, 5, 5, 5]
    gains.drop(1)
    assert gains.sensitivity().tolist() == [0] * 5


def test_a_layer_whose_default_is_unknown_has_no_sensitivity():
    gains = Gains([1, 1], torch.ones(2))
    gains.note(0, slice(0, 1), 0.5)
    gains.leaf(0).sum().backward()
    assert gains.sensitivity().tolist() == [2, 0]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_beta_that_changes_before_or_after_the_backward_loses_no_sensitivity(gains, when):
    first = gains.leaf(0)
    (3 * first).sum().backward()
    output = (5 * first).sum()
    if when == "after":
        output.backward()
    gains.beta.fill_(2.0)
    second = gains.leaf(0)
    second.sum().backward()
    if when == "before":
        output.backward()
    assert gains.sensitivity().tolist() == [8 * 2 + 4] * 2 + [0] * 3


@pytest.mark.parametrize("tensor", ["leaf", "earlier leaf", "probe"])
def test_a_backward_that_is_still_to_come_when_the_model_moves_loses_no_sensitivity(gains, tensor):
    held = gains.probes[0] if tensor == "probe" else gains.leaf(0)
    (3 * held).sum().backward()
    output = (5 * held).sum()
    if tensor == "earlier leaf":
        gains.beta.fill_(2.0)
        gains.gain(0)
    for _ in range(2):
        gains.follow(gains.beta.clone())
    gains.probes[0].sum().backward()
    output.backward()
    factor = 1 if tensor == "probe" else 2
    assert gains.sensitivity().tolist() == [8 * factor + 1] * 2 + [0] * 3


def test_a_model_on_another_device_has_other_gains(gains):
    gains.leaf(0).sum().backward()
    gains.probes[0].sum().backward()
    gains.follow(gains.beta.to("meta"))
    assert gains.gain(0).is_meta
    assert gains.leaf(0).is_meta
    assert {x.device.type for x in (gains.default, *gains.probes, gains.probes[0].grad)} == {"meta"}
