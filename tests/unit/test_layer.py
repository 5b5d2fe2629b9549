"""Beta as its owner reads and sets it, and what a layer says of itself."""

import math

import pytest
import torch
from torch import nn

from betahook.layer import Layers
from betahook.measure.masks import Band, Mask
from support.layers import attention, make, projecting


@pytest.fixture
def made():
    """Two layers of four and two heads on one state."""
    return make(attention(nn.Module(), 4, 8), attention(nn.Module(), 2, 16))


@pytest.fixture
def state(made):
    return made[0]


@pytest.fixture
def pair(made):
    return made[1]


def test_beta_is_the_model_s_own_until_it_is_set(made):
    _, (first, second), (recorder, _) = made
    assert math.isnan(first.beta)
    assert math.isnan(first.beta_default)
    assert first.head_beta.isnan().all()
    assert first.head_beta_default.isnan().all()
    assert first.current_gain.tolist() == [1.0] * 4
    recorder.note_default(0.25)
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


def test_a_gain_of_1_acts_as_the_model_s_own_beta(made):
    state, (first, _), (recorder, _) = made
    recorder.note_default(0.25)
    first.beta = 0.5
    with first.acting(torch.tensor([1.0, 2.0, 1.0, 4.0])):
        assert state.beta[:4].isnan().tolist() == [True, False, True, False]
        assert first.current_gain.tolist() == [1, 2, 1, 4]
    assert first.head_beta.tolist() == [0.5] * 4


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
        ("beta", float("nan"), r"must be .*; got nan, and the model's own is known only after a forward"),
        ("beta", 1e30, r"must be positive and finite; got 1e\+30, outside of 1e-10 to 1e\+10"),
        ("beta", 1e-20, r"must be positive and finite; got 1e-20, outside of"),
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


@pytest.mark.parametrize("name", ["beta", "head_beta"])
@pytest.mark.parametrize("value", ["a third", None, ["low", 0.5], True, [True, True], torch.tensor(True)], ids=str)
def test_a_beta_that_is_no_number_is_refused(pair, name, value):
    with pytest.raises(TypeError, match="beta of 'b' must be a number, or a tensor of one a head; got "):
        setattr(pair[1], name, value)


def test_a_name_that_a_layer_does_not_have_is_refused(pair):
    with pytest.raises(AttributeError, match="betas"):
        pair[0].betas = 1.0


def test_beta_is_set_whatever_the_default_device(pair, state):
    with torch.device("meta"):
        pair[0].beta = 0.5
        pair[1].head_beta = [0.5, 0.25]
    assert state.beta.tolist() == [0.5] * 5 + [0.25]


def test_layers_are_found_by_name(pair):
    mapping = Layers(pair)
    assert list(mapping) == ["a", "b"]
    assert len(mapping) == 2
    assert mapping["b"] is pair[1]
    assert "c" not in mapping
    with pytest.raises(KeyError, match="no hooked layer is called 'c'; there are a, b"):
        mapping["c"]


def test_an_error_names_the_first_layers_of_a_deep_model():
    _, layers, _ = make(*(attention(nn.Module(), 2, 16) for _ in range(6)))
    with pytest.raises(KeyError, match="there are a, b, c, d and 2 more"):
        Layers(layers)["x"]


def test_a_layer_shows_its_size_and_beta(pair):
    assert repr(pair[1]) == "AttentionLayer('b', heads=2, head_dim=16, beta=nan)"  # before the first forward
    pair[1].beta = 1 / 3
    assert repr(pair[1]) == "AttentionLayer('b', heads=2, head_dim=16, beta=0.3333)"
    assert repr(Layers(pair)).splitlines() == [repr(layer) for layer in pair]
    assert repr(Layers(pair).keys()) == "dict_keys(['a', 'b'])"


def test_statistics_are_of_one_layer_and_read_no_weight(monkeypatch):
    state, (first, _), (recorder, _) = make(attention(projecting(4, 24), 4, 8), attention(nn.Module(), 2, 16))
    recorder.note_default(0.5)
    recorder.record(torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8), Mask(Band()))
    monkeypatch.setattr(type(first), "read_weights", None)
    monkeypatch.setattr(state, "collect", lambda heads, collect=state.collect: collect(heads))
    assert first.statistics.count == 4 * 9
    assert first.head_statistics.count.tolist() == [9] * 4


def test_weight_std_is_that_of_the_weights_now():
    _, (first, second), _ = make(attention(projecting(4, 24), 4, 8), attention(nn.Module(), 2, 16))
    weights = first.module.q_proj.weight, first.module.k_proj.weight
    for _ in range(2):
        expected = [w.double().std(correction=0).item() for w in weights]
        assert [first.weight_std_q, first.weight_std_k] == pytest.approx(expected, rel=1e-5)
        weights[0].data.mul_(2)
    assert math.isnan(second.weight_std_q)
    first.module.q_proj.to("meta")  # out of reach
    assert math.isnan(first.weight_std_q)
    assert first.weight_std_k == pytest.approx(expected[1], rel=1e-5)


@pytest.mark.parametrize("mark", ["_fsdp_flattened", "ds_id"])
def test_weights_in_parts_have_no_form_outside_the_forward(mark):
    """As FSDP 1 with `use_orig_params` and ZeRO-3 leave them."""
    module = projecting(4, 24)
    _, (layer,), _ = make(attention(module, 4, 8))
    assert layer.remarks == []
    for projection in (module.q_proj, module.k_proj):
        projection.weight = nn.Parameter(torch.zeros(0))
    assert "have no known form" in layer.remarks[0]
    setattr(module.k_proj.weight, mark, 0)
    assert layer.remarks == ["W_q and W_k are sharded outside the forward, their std is not measured"]
