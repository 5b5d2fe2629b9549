"""The turns in which layers are measured, the betas that a step writes, and steps that fail."""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import betahook
from betahook import Controller, Monitor, Search
from betahook.step.stages import layers_due
from support.attention import LENGTH, WIDTH, FusedAttention, ToOneKey
from support.models import build, inputs
from support.training import LAYER

MONITOR = Monitor()


def turns(layers, interval, steps, controllers=(MONITOR,), skipped=0):
    states = (SimpleNamespace(ranges=[None] * layers, batch=step - skipped) for step in steps)
    return [layers_due(state, controllers, interval) for state in states]


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


def test_code_that_breaks_a_graph_is_compiled_again_once(monkeypatch):
    model, resets = torch.nn.Sequential(FusedAttention()), []
    with betahook.attach(model, controller="monitor") as hook:
        monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(hook._state.steps))
        for broken in (False, True, False, False):
            model(torch.randn(2, LENGTH, WIDTH)).sum().backward()
            hook._state.has_broken_graphs |= broken
            hook.step()
        assert hook._state.resets == 1  # by which a graph that broke is known to be gone
        assert resets == [2]


@dataclass(frozen=True)
class First(Controller):
    """Doubles the beta of the first layer."""

    def start(self, beta):
        return {}

    def update(self, beta, observation, state):
        return torch.where(torch.arange(len(beta)) == 0, 2 * beta, beta), {}


def test_beta_of_a_layer_whose_rows_have_one_key_is_not_moved():
    """The sensitivity is 0; what is measured of it is rounding, whose sign a search would follow."""
    model = torch.nn.Sequential(ToOneKey())
    with betahook.attach(model, controller=[First(), Search(warmup=0, plateau_batches=0, rise_batches=3)]) as hook:
        for _ in range(5):
            model(torch.randn(2, LENGTH, WIDTH)).square().sum().backward()
            hook.step()
        assert hook.layers["0"].current_gain.eq(1).all()
        assert not hook.moving
        (finding,) = hook.findings()
        assert "without effect, since each row has but one key" in str(finding.note)


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


@dataclass(frozen=True)
class Fails(Controller):
    """Doubles every beta, and raises after the second batch."""

    method: str

    def is_due(self, step):
        return self._fail("is_due", step)

    def update(self, beta, observation, state):
        self._fail("update", observation.step)
        return 2 * beta, state

    def _fail(self, method, step):
        if (method, step) == (self.method, 1):
            raise ZeroDivisionError
        return True


@pytest.mark.parametrize("method", ["is_due", "update"])
def test_a_step_in_which_a_controller_raises_is_over(method):
    model, batch, seen = build("llama"), inputs("llama"), []
    with betahook.attach(model, controller=Fails(method)) as hook:
        for step in range(3):
            model(**batch).loss.backward()
            layer = hook.layers[LAYER]
            seen.append((layer.statistics.sensitivity, layer.beta))
            with pytest.raises(ZeroDivisionError) if step == 1 else nullcontext():
                hook.step()
        assert hook.steps == 3
        assert hook.metrics()[f"sensitivity/{layer.name}"] == pytest.approx(float(seen[2][0]))
    assert seen[1][0] == pytest.approx(float(seen[2][0]))  # the same beta and the same batch
    assert seen[2][1] == seen[1][1] == 2 * seen[0][1]


def test_scores_of_a_step_in_which_a_controller_raises_are_not_those_of_the_next():
    model, batch, counts = build("llama"), inputs("llama"), []
    with betahook.attach(model, controller=Fails("update"), interval=1) as hook:
        for step in range(3):
            model(**batch).loss.backward()
            counts.append(int(hook.layers[LAYER].statistics.count))
            with pytest.raises(ZeroDivisionError) if step == 1 else nullcontext():
                hook.step()
    assert len(set(counts)) == 1
