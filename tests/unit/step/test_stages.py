"""The turns in which layers are measured, and the betas that a step writes."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import betahook
from betahook import Controller, Search
from betahook.control import Monitor
from betahook.step.stages import turn
from support.models import build, inputs

MONITOR = Monitor()


def turns(layers, interval, steps, controllers=(MONITOR,), skipped=0):
    states = (SimpleNamespace(ranges=[None] * layers, batch=step - skipped) for step in steps)
    return [turn(state, controllers, interval) for state in states]


@pytest.mark.parametrize("layers", [1, 3, 10, 12, 32, 61])
@pytest.mark.parametrize("interval", [2, 7, 10])
def test_each_layer_has_one_turn_in_groups_of_one_size(layers, interval):
    found = turns(layers, interval, range(interval, 2 * interval))
    assert [index for each in found for index in each] == list(range(layers))
    sizes = [len(each) for each in found if each]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == min(layers, max(2, math.ceil(layers / interval)))
    assert turns(layers, interval, range(2 * interval, 3 * interval)) == found


def test_all_layers_have_the_first_step_an_opening_and_an_interval_of_1():
    assert turns(4, 10, [0, 10, 11, 15]) == [range(4), range(2), range(2, 2), range(2, 4)]
    assert turns(4, 1, [0, 1, 7]) == [range(4)] * 3
    search = Search()
    assert search.opening_batches == 200
    assert [len(each) for each in turns(40, 10, [199, 200], [MONITOR, search])] == [40, 4]
    assert [len(each) for each in turns(40, 10, [200], [search], skipped=1)] == [40]


@dataclass(frozen=True)
class First(Controller):
    """Doubles the beta of the first layer."""

    def start(self, beta):
        return {}

    def update(self, beta, observation, state):
        return torch.where(torch.arange(len(beta)) == 0, 2 * beta, beta), {}


def test_a_layer_that_does_not_move_keeps_the_models_own_beta():
    """Not a number that equals it: the model's own may change from call to call."""
    model = build("llama")
    with betahook.attach(model, controller=First()) as hook:
        model(**inputs("llama")).loss.backward()
        hook.step()
        moved, kept = hook.layers.values()
        assert moved.beta == pytest.approx(2 * moved.beta_default)
        written = hook.state_dict()["beta"].isnan().split([moved.heads, kept.heads])
    assert not written[0].any()
    assert written[1].all()
