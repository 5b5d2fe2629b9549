"""Beta as its owner reads and sets it, and what a layer records."""

import math

import pytest
import torch
from torch import nn

from betahook.groups import HeadGroups
from betahook.layers import AttentionLayer, Layers, State
from betahook.measure.masks import Band, Mask
from betahook.models.discovery import Found

CPU = torch.device("cpu")


def layer(name, module, heads, head_dim, state, start):
    return AttentionLayer(name, Found(module, heads, head_dim, "interface"), state, start, 8 * start)


@pytest.fixture
def state():
    return State.create([8] * 4 + [16] * 2, CPU, in_evaluation=False)


@pytest.fixture
def pair(state):
    """Two layers of four and two heads on one state."""
    return [layer("a", nn.Module(), 4, 8, state, 0), layer("b", nn.Module(), 2, 16, state, 4)]


def test_beta_is_the_model_s_own_until_it_is_set(pair):
    first, second = pair
    assert math.isnan(first.beta)
    assert math.isnan(first.beta_default)
    assert first.head_beta.isnan().all()
    assert first.head_beta_default.isnan().all()
    assert first.current_gain.tolist() == [1.0] * 4
    first.note_default(0.25)
    assert first.current_gain.tolist() == [1.0] * 4
    assert first.beta == first.beta_default == 0.25
    assert first.head_beta_default.tolist() == [0.25] * 4
    first.head_beta_default[0] = 9  # what was read is a copy
    assert first.head_beta_default.tolist() == [0.25] * 4
    assert math.isnan(second.beta)
    first.beta = 0.5
    assert (first.beta, first.beta_default) == (0.5, 0.25)
    assert first.current_gain.tolist() == [2.0] * 4
    assert second.current_gain.tolist() == [1.0] * 2


def test_a_beta_set_before_the_first_forward_stands(pair):
    first, _ = pair
    first.beta = 2
    assert first.beta == 2
    assert math.isnan(first.beta_default)


@pytest.mark.parametrize("value", [0.5, 3, torch.tensor(0.5), torch.tensor([0.5])], ids=str)
def test_one_number_sets_all_heads_of_its_layer_and_no_others(pair, state, value):
    pair[1].beta = value
    assert state.beta[:4].isnan().all()
    assert state.beta[4:].tolist() == [float(value)] * 2
    assert pair[1].beta == float(value)


def test_heads_may_differ(pair):
    pair[1].head_beta = torch.tensor([0.5, 8.0], dtype=torch.float64, requires_grad=True)
    assert pair[1].head_beta.tolist() == [0.5, 8.0]
    assert pair[1].beta == pytest.approx(2.0)  # the geometric mean
    assert not pair[1].head_beta.requires_grad
    pair[1].head_beta[0] = 9  # what was read is a copy
    assert pair[1].head_beta.tolist() == [0.5, 8.0]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *[("beta", x, rf"must be positive and finite; got {x}") for x in (0, -1.0, float("nan"), float("inf"))],
        ("beta", torch.ones(2), r"must be one number, got a tensor of shape \[2\]; .* each head to head_beta"),
        ("head_beta", torch.tensor([1.0, 0.0]), r"must be positive and finite; got tensor\(\[1\., 0\.\]\)"),
        ("head_beta", torch.ones(3), r"must be 2 numbers, one a head; got a tensor of shape \[3\]"),
        ("head_beta", torch.ones(2, 1), r".* shape \[2, 1\]"),
        ("head_beta", 0.5, r".* shape \[\]"),
    ],
)
def test_a_beta_that_makes_no_sense_is_refused(pair, state, name, value, message):
    with pytest.raises(ValueError, match=rf"beta of 'b' {message}"):
        setattr(pair[1], name, value)
    assert state.beta.isnan().all()


def test_layers_are_found_by_name(pair):
    mapping = Layers(pair)
    assert list(mapping) == ["a", "b"]
    assert len(mapping) == 2
    assert mapping["b"] is pair[1]
    assert "c" not in mapping
    with pytest.raises(KeyError, match="no hooked layer is called 'c'; there are a, b"):
        mapping["c"]


def test_a_layer_shows_its_size(pair):
    assert repr(pair[1]) == "AttentionLayer('b', heads=2, head_dim=16)"
    assert repr(Layers(pair)).splitlines() == [repr(layer) for layer in pair]


@pytest.mark.parametrize(
    ("measuring", "in_evaluation", "training", "expected"),
    [(True, False, True, True), (True, False, False, False), (True, True, False, True), (False, True, True, False)],
)
def test_when_a_forward_is_measured(pair, state, measuring, in_evaluation, training, expected):
    state.measuring, state.in_evaluation = measuring, in_evaluation
    pair[0].module.train(training)
    assert pair[0].measuring is expected


def projecting(heads, width):
    """An attention module with projections that `weights.locate` knows, keys of half as many heads."""
    module = nn.Module()
    module.q_proj, module.k_proj = nn.Linear(width, heads * 8), nn.Linear(width, heads * 4)
    return module


@pytest.fixture
def measured(state):
    """A layer with grouped keys, one call of it recorded, and the raw query and key; a layer without projections."""
    first = layer("a", projecting(4, 24), 4, 8, state, 0)
    second = layer("b", nn.Module(), 2, 16, state, 4)
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 4, 9, 8, generator=generator), torch.randn(2, 2, 9, 8, generator=generator) * 3
    first.note_default(0.5)
    first.record(query, key, Mask(Band()), position_bias=None, softcap=None)
    return first, second, query, key


def test_a_recorded_call_shows_in_the_statistics_of_its_layer(measured):
    first, second, query, key = measured
    scores = query.double() @ key.double().repeat_interleave(2, 1).mT
    assert first.statistics.std.item() == pytest.approx(scores.std(correction=0).item(), rel=1e-5)
    assert first.statistics.count == scores.numel()
    heads = scores.transpose(0, 1).flatten(1)
    torch.testing.assert_close(first.head_statistics.mean, heads.mean(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(first.head_statistics.max_score, heads.abs().amax(1), rtol=1e-5, atol=0)
    assert second.statistics.count == 0


def test_independent_prediction_uses_the_moments_of_each_head(measured):
    first, _, query, key = measured

    def moments(x):
        x = x.double().transpose(0, 1).flatten(1, 2)
        return x.mean(1), x.var(1, correction=0)

    (query_mean, query_variance), (key_mean, key_variance) = moments(query), moments(key.repeat_interleave(2, 1))
    expected = (query_variance + query_mean**2) * (key_variance + key_mean**2) - query_mean**2 * key_mean**2
    torch.testing.assert_close(first.head_statistics.independent_std, expected.sum(1).sqrt(), rtol=1e-5, atol=0)
    torch.testing.assert_close(first.head_statistics.component_variance_k, key_variance.mean(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        first.head_statistics.component_mean_square_q, query_mean.square().mean(1), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(
        first.head_statistics.component_mean_square_k, key_mean.square().mean(1), rtol=1e-5, atol=0
    )


def test_a_call_with_another_d_k_than_the_module_says_has_no_part_in_that_prediction(measured):
    first, _, query, key = measured
    before = first.statistics
    first.record(query[..., :6], key[..., :6], Mask(Band()), position_bias=None, softcap=None)
    assert first.statistics.count == 2 * before.count
    assert first.statistics.independent_std == before.independent_std


def test_weights_and_inputs_show_in_the_statistics(measured):
    first, second, _, _ = measured
    inputs = torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(2)) * 2 + 1
    for part in inputs.split(1):
        first.record_input(part, "query")
        first.record_input(3 * part, "key")
    seen = first.statistics
    weights = first.module.q_proj.weight, first.module.k_proj.weight
    assert [seen.weight_std_q.item(), seen.weight_std_k.item()] == pytest.approx(
        [w.double().std(correction=0).item() for w in weights], rel=1e-5
    )
    std = inputs.double().std(correction=0).item()
    assert [seen.input_std_q.item(), seen.input_std_k.item()] == pytest.approx([std, 3 * std], rel=1e-5)
    assert second.statistics.weight_std_q.isnan()


def test_units_are_layers_or_heads(measured, state):
    first, second, query, key = measured
    values = torch.tensor([1.0, 2, 3, 4, 5, 6])
    by_layer, by_head = (HeadGroups.of(Layers([first, second]), per_head=x, device=CPU) for x in (False, True))
    assert by_layer.first(values).tolist() == [1, 5]
    assert by_layer.spread(torch.tensor([7.0, 8.0])).tolist() == [7, 7, 7, 7, 8, 8]
    assert by_layer.head_dim.tolist() == [8, 16]
    assert by_head.first(values).tolist() == by_head.spread(values).tolist() == values.tolist()
    assert by_head.head_dim.tolist() == [8] * 4 + [16] * 2
    for units in (by_layer, by_head):
        assert units.query_width[0] == units.key_width[0] == 24
        assert units.query_width[-1].isnan()
    scores = query.double() @ key.double().repeat_interleave(2, 1).mT
    observed = by_layer.observe(state.table)
    assert observed.std[0].item() == pytest.approx(scores.std(correction=0).item(), rel=1e-5)
    assert by_head.observe(state.table).std.shape == (6,)


def test_units_predict_from_weights_and_inputs(measured, state):
    first, second, _, _ = measured
    first.record_input(torch.tensor([1.0, -1.0]), "query")
    first.record_input(torch.tensor([3.0, -3.0]), "key")
    units = HeadGroups.of(Layers([first, second]), per_head=False, device=CPU)
    table = state.collect()
    first.write_weight_sums(table)
    query, key = (w.double().var(correction=0) for w in (first.module.q_proj.weight, first.module.k_proj.weight))
    expected = (8 * (24 * query) * (24 * 9 * key)).sqrt()
    predicted = units.predicted_std(units.observe(table))
    assert predicted[0].item() == pytest.approx(expected.item(), rel=1e-5)
    assert predicted[1].isnan()


def test_the_sensitivity_is_the_gradient_of_the_probe(pair, state):
    (3 * pair[1].probe.sum() + pair[0].probe[2]).backward()
    assert [layer.statistics.sensitivity.item() for layer in pair] == [1, 6]
    state.reset()
    assert [layer.statistics.sensitivity.item() for layer in pair] == [0, 0]


def test_a_new_step_starts_empty(measured, state):
    state.reset()
    assert measured[0].statistics.count == 0
    assert not state.table.any()
    assert not state.moments.any()


def test_a_state_moves_with_everything_in_it(pair, state):
    pair[0].beta = 0.5
    (2 * pair[0].probe.sum()).backward()
    state.to(torch.device("meta"))
    tensors = [x for x in vars(state).values() if isinstance(x, torch.Tensor)]
    assert len(tensors) == 6
    assert {x.device.type for x in [*tensors, state.probe.grad]} == {"meta"}
    assert state.probe.is_leaf
    assert state.probe.requires_grad
