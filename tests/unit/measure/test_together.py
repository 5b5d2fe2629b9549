"""Calls of several layers that are measured as one, against the same calls one at a time."""

from unittest import mock

import pytest
import torch
from torch import nn

import betahook
from betahook import compat
from betahook.measure import devices, together
from betahook.measure.masks import Band, GivenMask
from betahook.measure.rows import ScoreMod
from betahook.measure.statistics import ROW
from betahook.tap import recorder as recording
from support.layers import attention, make, projecting
from support.models import build, inputs

CAUSAL = GivenMask("none", band=Band(None, 0))
PADDED = GivenMask("padding", torch.tensor([[0] * 4 + [1] * 36, [1] * 40]), Band(None, 0))


def three_layers():
    state, layers, recorders = make(*(attention(projecting(4, 24), 4, 8) for _ in range(3)))
    for index, recorder in enumerate(recorders):
        recorder.note_default(0.5 + index)
    return state, layers, recorders


def operands(length=40, heads=4):
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(2, each, length, 8, generator=generator, requires_grad=True) for each in (heads, heads // 2)]


def recorded(given, *, waiting=True, length=40, softcap=None, cpu=True):
    """Table and moments of three layers, and how many calls were measured."""
    state, _, recorders = three_layers()
    measured = mock.Mock(wraps=together.calls.add_scores)
    with (
        mock.patch.object(together.calls, "add_scores", measured),
        mock.patch.object(devices, "is_cpu", return_value=cpu),
        mock.patch.object(recording, "calls_at_once", together.calls_at_once if waiting else lambda query, key: 1),
    ):
        for index, recorder in enumerate(recorders):
            query, key = (x * (index + 1) + index for x in operands(length))
            entered = torch.randn(2, length, 24, generator=torch.Generator().manual_seed(index))
            recorder.record_input(entered, ["query", "key"])
            recorder.record(query, key, given, ScoreMod(softcap=softcap))
        state.waiting.add(state.table, state.moments)
    return state.table, state.moments, measured.call_count


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    ("given", "length", "cpu"),
    [(CAUSAL, 40, True), (PADDED, 40, True), (CAUSAL, 200, False)],
    ids=["causal", "padded", "accelerator"],
)
def test_sums_are_those_of_single_calls(given, length, cpu, softcap):
    *alone, calls = recorded(given, waiting=False, length=length, softcap=softcap, cpu=cpu)
    *found, fewer = recorded(given, length=length, softcap=softcap, cpu=cpu)
    assert (calls, fewer) == (3, 1)
    for a, b in zip(alone, found, strict=True):
        torch.testing.assert_close(b, a, rtol=2e-5, atol=2e-3)
    assert (found[0][ROW["query_inputs"]] == 2 * length * 24).all()


def test_large_calls_and_those_with_a_mask_of_each_head_do_not_wait():
    by_head = GivenMask("pairs", torch.ones(1, 4, 40, 40, dtype=torch.bool), Band(None, 0))
    assert recorded(by_head)[2] == 3
    assert recorded(CAUSAL, length=200)[2] == 3
    assert together.calls_at_once(*operands(128)) == 1
    assert together.calls_at_once(*operands(64)) == 4


@pytest.mark.parametrize("side", [0, 1])
def test_a_call_whose_q_or_k_is_not_kept_for_a_backward_does_not_wait(side):
    """It may be written over before the last layer is measured."""
    state, _, recorders = three_layers()
    given = operands()
    given[side] = given[side].detach()
    recorders[0].record(*given, CAUSAL)
    assert state.table[ROW["pairs"], :4].all()


def test_calls_that_differ_are_measured_apart():
    state, layers, recorders = three_layers()
    for index, (recorder, length) in enumerate(zip(recorders, (40, 40, 20), strict=True)):
        recorder.record(*operands(length), CAUSAL)
        assert bool(state.table[ROW["pairs"]].any()) == (index == 2)
    assert [int(layer.statistics.count) for layer in layers] == [2 * 4 * n * (n + 1) // 2 for n in (40, 40, 20)]


def test_calls_with_masks_of_their_own_are_measured_by_those():
    _, layers, recorders = three_layers()
    for tokens, recorder in zip((10, 20, 30), recorders, strict=True):
        given = GivenMask("padding", (torch.arange(40) < tokens)[None].expand(2, -1), Band(None, 0))
        recorder.record(*operands(), given)
    assert [int(layer.statistics.count) for layer in layers] == [2 * 4 * n * (n + 1) // 2 for n in (10, 20, 30)]


def test_calls_with_masks_of_each_head_are_measured_by_those():
    _, layers, recorders = three_layers()
    allowed = torch.ones(40, 40, dtype=torch.bool).tril().repeat(2, 4, 1, 1)
    for head in range(4):
        allowed[:, head, :, :head] = False
    for recorder in recorders:
        recorder.record(*operands(), GivenMask("pairs", allowed, Band(None, 0)))
    for layer in layers:
        assert layer.head_statistics.count.tolist() == allowed.sum((0, 2, 3)).tolist()


def test_a_layer_that_is_not_reached_is_left_out():
    _, layers, recorders = three_layers()
    for recorder in recorders[::2]:
        recorder.record(*operands(), CAUSAL)
    assert [bool(layer.statistics.count) for layer in layers] == [True, False, True]


def test_what_waits_is_there_for_whoever_asks():
    _, layers, recorders = three_layers()
    recorders[0].record(*operands(), CAUSAL)
    assert layers[0].statistics.count == 2 * 4 * 40 * 41 // 2
    assert layers[1].statistics.count == 0


@pytest.mark.parametrize("changed", [0, 1])
def test_a_layer_that_changes_its_operands_afterwards_is_not_measured_wrongly(changed):
    """The measurement in which that shows is lost; from the next one on, the layer does not wait."""
    state, layers, recorders = three_layers()
    for index in range(2):
        given = [x * 1 for x in operands()]
        recorders[index].record(*given, CAUSAL)
        if index == 0:
            with torch.no_grad():
                given[changed].mul_(100)
    recorders[2].record(*operands(), CAUSAL)
    assert [bool(layer.statistics.count) for layer in layers] == [False, True, True]
    assert layers[1].statistics.std == layers[2].statistics.std
    recorders[0].record(*operands(), CAUSAL)
    assert state.table[ROW["pairs"], :4].all()


@pytest.mark.parametrize("at_once", [True, False], ids=["before the next call", "after it"])
def test_a_mask_that_is_changed_afterwards_is_that_of_later_calls_alone(at_once):
    _, layers, recorders = three_layers()
    tokens = torch.ones(2, 40, dtype=torch.bool)
    given = GivenMask("padding", tokens, Band(None, 0))
    recorders[0].record(*operands(), given)
    if not at_once:
        recorders[1].record(*operands(), given)
    tokens[:, 30:] = False
    recorders[2 - at_once].record(*operands(), given)
    pairs = 2 * 4 * 30 * 31 // 2
    assert [int(layer.statistics.count) for layer in layers] == [0, pairs if at_once else 0, 0 if at_once else pairs]


def test_a_graph_that_is_captured_measures_at_once(monkeypatch):
    state, _, recorders = three_layers()
    monkeypatch.setattr(compat, "is_captured", lambda device: True)
    recorders[0].record(*operands(), CAUSAL)
    assert state.table[ROW["pairs"], :4].all()


def test_a_mask_of_inference_mode_does_not_wait():
    state, _, recorders = three_layers()
    with torch.inference_mode():
        given = GivenMask("padding", torch.ones(2, 40, dtype=torch.bool), Band(None, 0))
    recorders[0].record(*operands(), given)
    assert state.table[ROW["pairs"], :4].all()


def test_a_hook_that_loads_its_state_measures_with_the_same_bits():
    """Though it takes the beta of each layer for new."""
    model, batch, found = build("llama"), inputs("llama"), []
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        for _ in range(2):
            model(**batch)
            hook.step()
        state = hook.state_dict()
        for loads in (False, True):
            if loads:
                hook.load_state_dict(state)
            model(**batch)
            found.append(hook.state_dict())
    for name in ("table", "moments"):
        assert torch.equal(found[0][name], found[1][name])


def test_what_waits_is_saved_whole():
    model = build("llama")
    last = model.model.layers[1]
    last.forward = lambda hidden_states, *args, **kwargs: hidden_states
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama"))
        state = hook.state_dict()
        assert torch.equal(state["moments"], hook.state_dict()["moments"])


def test_a_refused_layer_leaves_nothing_that_waits():
    _, layers, recorders = three_layers()
    recorders[0].record(*operands(), CAUSAL)
    recorders[0].leave_alone("for a test")
    recorders[1].record(*operands(), CAUSAL)
    assert [bool(layer.statistics.count) for layer in layers] == [False, True, False]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_a_model_is_measured_as_layer_by_layer(family):
    model, batch = build(family), inputs(family)
    found = []
    for limit in (together.calls_at_once, lambda query, key: 1):
        with mock.patch.object(recording, "calls_at_once", limit), betahook.attach(model, controller="monitor") as hook:
            for _ in range(2):  # the model's own beta is known from the second forward on
                model(**batch).loss.backward()
                model.zero_grad()
            hook.step()
            found.append(hook.metrics())
    assert found[0].keys() == found[1].keys()
    assert list(found[0].values()) == pytest.approx(list(found[1].values()), rel=1e-4, abs=1e-5)


def test_a_call_without_gradients_does_not_wait():
    """Nothing keeps its query and key as they are."""
    state, _, (recorder, _) = make(attention(nn.Module(), 4, 8), attention(nn.Module(), 4, 8), when="always")
    recorder.note_default(0.5)
    recorder.record(*(x.detach() for x in operands()), CAUSAL)
    assert state.table[ROW["pairs"], :4].all()
