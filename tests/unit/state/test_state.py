"""The state: where a layer's heads are, and what follows the model or is forgotten."""

import pytest
import torch
from torch import nn

import betahook
from betahook.measure.groups import HeadGroups, LayerSize
from betahook.measure.statistics import ROW
from betahook.state.ranges import HeadRange, head_ranges
from betahook.state.state import is_beta
from betahook.tap import gain
from betahook.tap.recorder import ATTRIBUTE
from support.layers import attention, make
from support.models import build, inputs
from support.training import LAYER, train


def test_layers_lie_one_after_another():
    first, second = head_ranges([LayerSize(4, 8), LayerSize(2, 16)])
    assert first == HeadRange(0, slice(0, 4), slice(0, 32), 8)
    assert second == HeadRange(1, slice(4, 6), slice(32, 64), 16)
    assert second.part(1, 1) == HeadRange(1, slice(5, 6), slice(48, 64), 16)


def test_everything_follows_the_model():
    state, (first, _), (recorder, _) = make(attention(nn.Module(), 4, 8), attention(nn.Module(), 2, 16))
    first.beta = 0.5
    state.memories = [{"total": torch.zeros(2)}]
    (2 * recorder.probe.sum()).backward()
    state.to(torch.device("meta"))
    found = []
    for value in vars(state).values():
        parts = vars(value).values() if isinstance(value, HeadGroups) else [value]
        found += [part for part in parts if isinstance(part, torch.Tensor)]
    found += [state.gains.default, *state.gains.probes, state.gains.probes[0].grad, state.memories[0]["total"]]
    assert {x.device.type for x in found} == {"meta"}
    assert len(found) == 14 + 7 + 7 + 1 + 2 + 2
    assert all(probe.is_leaf and probe.requires_grad for probe in state.gains.probes)


def reachable(value, path, seen):
    """All tensors by the path of attributes, keys and indices that leads to them from an object of betahook."""
    if id(value) in seen:
        return
    seen[id(value)] = value  # kept, so that no other object gets its id
    if isinstance(value, torch.Tensor):
        yield path, value
        parts = {"grad": value.grad} if value.is_leaf else {}
    elif isinstance(value, dict | list | tuple):
        parts = value if isinstance(value, dict) else dict(enumerate(value))
    else:
        parts = vars(value) if type(value).__module__.startswith("betahook.") else {}
    for name, part in parts.items():
        yield from reachable(part, f"{path}.{name}", seen)


def test_no_tensor_is_left_on_the_other_device():
    """Nor one that is made again when it is asked for: it would hold memory there."""
    model = build("llama")
    with betahook.attach(model, betahook.Search(warmup=0, window=1, rise=False), interval=2) as hook:
        train(model, hook, 3)
        model(**inputs("llama")).loss.backward()
        before = dict(reachable(hook._state, "state", {}))
        assert {"state.gains._known", "state.gains.probes.1", "state.layers.of_head"} <= before.keys()
        hook._state.to(torch.device("meta"))
        after = dict(reachable(hook._state, "state", {}))
        assert [path for path, tensor in after.items() if not tensor.is_meta] == []


@pytest.mark.parametrize("small", [gain.SMALL, 0])
def test_layers_in_front_of_a_move_keep_their_sensitivity(small, monkeypatch):
    """As in a model whose first layers are on the CPU and the others on a GPU: its first forward moves the state."""
    monkeypatch.setattr(gain, "SMALL", small)
    sensitivities = []
    for moves in (False, True):
        model = build("llama")
        with betahook.attach(model) as hook:
            if moves:
                state, last = hook._state, list(hook.layers.values())[-1]
                last.module.register_forward_pre_hook(lambda *_, state=state: state.to(state.device))
            model(**inputs("llama")).loss.backward()
            sensitivities.append([layer.head_statistics.sensitivity.tolist() for layer in hook.layers.values()])
    assert sensitivities[0] == sensitivities[1]


@pytest.mark.parametrize("then", ["load", "refuse", "fold"])
def test_a_layer_has_its_tensors_for_good(then):
    """Views of those of the state, where a graph that was captured goes on reading and writing."""
    model = build("llama")
    with betahook.attach(model, betahook.Search(warmup=0, window=1, rise=False)) as hook:
        state = hook._state
        before = [tensor.data_ptr() for part in state.layer_tensors for tensor in vars(part).values()]
        train(model, hook, 2)
        if then == "load":
            hook.load_state_dict(hook.state_dict())
        elif then == "refuse":
            getattr(model.get_submodule(LAYER), ATTRIBUTE).leave_alone("a reason")
        else:
            betahook.fold(model)
        if hook.attached:
            train(model, hook, 2)
        assert [tensor.data_ptr() for part in state.layer_tensors for tensor in vars(part).values()] == before
        for part, of_layer in zip(state.layer_tensors, state.ranges, strict=True):
            assert part.table is state.table
            assert part.moments is state.moments
            assert part.beta_default is state.beta_default
            assert part.beta.data_ptr() == state.beta[of_layer.heads].data_ptr()
            assert part.probe is state.gains.probes[of_layer.layer]


def test_heads_without_scores_keep_what_was_last_measured():
    state, _, _ = make(attention(nn.Module(), 2, 8), attention(nn.Module(), 1, 4))
    new, old = (torch.rand(len(ROW), 3, dtype=torch.float64) + number for number in (1, 3))
    new[ROW["pairs"], 1] = 0
    state.recent, state.recent_moments, moments = old, torch.full((4, 20), 3.0), torch.ones(4, 20)
    copies = new.clone(), old.clone()
    kept, kept_moments, measured = state.latest(new, moments)
    expected = torch.stack([new[:, 0], old[:, 1], new[:, 2]], 1)
    for name in ("losses", "loss"):
        expected[ROW[name], 1] = new[ROW[name], 1]
    assert torch.equal(kept, expected)
    assert kept_moments.tolist() == 4 * [8 * [1] + 8 * [3] + 4 * [1]]
    assert measured.tolist() == [True, False, True]
    assert torch.equal(new, copies[0])
    assert torch.equal(old, copies[1])


def test_a_device_without_float64_gets_none(monkeypatch):
    state, _, _ = make(attention(nn.Module(), 4, 8))
    state.memories = [{"total": torch.zeros(1, dtype=torch.float64)}]
    monkeypatch.setattr("betahook.state.state.sum_dtype", lambda device: torch.float32)
    state.to(torch.device("meta"))
    tensors = [value for value in vars(state).values() if isinstance(value, torch.Tensor)]
    dtypes = {x.dtype for x in [*tensors, state.layer_tensors[0].table, state.memories[0]["total"]]}
    assert dtypes == {torch.float32, torch.int64, torch.bool}


def test_the_own_beta_is_that_of_the_last_call_where_numbers_and_tensors_take_turns():
    state, (layer,), (recorder,) = make(attention(nn.Module(), 2, 8))
    by_head = torch.tensor([0.25, 2.0])
    for default, expected in ((0.5, [0.5, 0.5]), (by_head, [0.25, 2.0]), (0.5, [0.5, 0.5]), (by_head, [0.25, 2.0])):
        recorder.note_default(default)
        assert layer.head_beta_default.tolist() == expected
        is_tensor = isinstance(default, torch.Tensor)
        assert state.gains.default.isnan().all() == is_tensor  # else another rank got the number


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1e-10, True), (1e10, True), (9e-11, False), (1.1e10, False), (0, False), (-1, False), (float("nan"), False)],
)
def test_what_can_be_a_beta(value, expected):
    assert is_beta(torch.tensor([value], dtype=torch.float64)).item() is expected
