"""Where a factor on the scores of a head goes, read off a module."""

import pytest
import torch
import transformers
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from betahook.models import families, materialise, projections
from betahook.models.scaling import NoScalingError, Rows, Scaling, Weight, find_scalings, of_linear
from support.attention import HEADS, WIDTH, ByHandAttention
from support.models import build
from support.operations import Operations

D = WIDTH // HEADS


def scalings_of(module, heads=HEADS, head_dim=D):
    return find_scalings(module, projections.locate(module, heads, head_dim), heads, head_dim)


def test_rows_of_no_head_and_of_a_head_with_1_keep_every_bit():
    rows = Rows.of(torch.tensor([[0, 4], [2, 3]]), torch.tensor([0.5, 1.0]), total=6)
    factors = rows.spread(torch.tensor([4.0, 1.0]))
    assert factors.tolist() == [2, 1, 1, 1, 4, 1]
    weight = nn.Linear(3, 6, bias=False)
    before = weight.weight.detach().clone()
    Weight(weight, "weight", rows).scale(torch.tensor([4.0, 1.0]))
    assert torch.equal(weight.weight, before * torch.tensor([2.0, 1, 1, 1, 4, 1])[:, None])


def test_rows_go_to_a_device_once():
    rows = Rows.of(torch.tensor([[0, 4], [2, 3]]), 0.5, total=6)
    with Operations() as first:
        rows.spread(torch.ones(2, device="meta"))
    with Operations() as later:
        rows.spread(torch.ones(2, device="meta"))
    assert (first.calls["_to_copy"], later.calls["_to_copy"]) == (2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_that_adds_1_is_scaled_with_it(dtype):
    norm = Gemma3RMSNorm(4).to(dtype)
    norm.weight.data.uniform_(-0.5, 0.5)
    before = norm.weight.detach().clone()
    weight = Weight(norm, "weight", Rows.of(torch.arange(4).view(2, 2), 1.0, 4), offset=1.0)
    weight.scale(torch.tensor([1.0, 0.25]))
    assert torch.equal(norm.weight[:2], before[:2])
    torch.testing.assert_close(1 + norm.weight[2:].float(), (1 + before[2:].float()) / 4, rtol=0.03, atol=0)


@pytest.mark.parametrize(("shape", "is_bias"), [((WIDTH,), True), ((1, 1, WIDTH), True), ((2, WIDTH), False)])
def test_a_bias_of_the_query_has_one_entry_for_each_of_its_features(shape, is_bias):
    module = ByHandAttention()
    module.q_bias = nn.Parameter(torch.zeros(shape))
    names = {weight.name for scaling in scalings_of(module) for weight in scaling.weights}
    assert ("q_bias" in names) is is_bias


class Normed(ByHandAttention):
    def __init__(self, norm, key_norm=None):
        super().__init__()
        self.q_norm = norm
        if key_norm is not None:
            self.k_norm = key_norm


@pytest.mark.parametrize(
    ("norm", "offset"),
    [(nn.RMSNorm(D), 0.0), (nn.LayerNorm(D), 0.0), (Gemma3RMSNorm(D), 1.0), (nn.RMSNorm(WIDTH), 0.0)],
)
@pytest.mark.parametrize("both", [False, True])
def test_a_norm_takes_the_factor_instead_of_the_projection(norm, offset, both):
    module = Normed(norm, type(norm)(norm.weight.numel()) if both else None)
    scaling = next(scalings_of(module))
    assert {weight.module for weight in scaling.weights} == {norm, *([module.k_norm] if both else [])}
    assert {weight.offset for weight in scaling.weights if weight.name == "weight"} == {offset}
    assert scaling.as_one is (norm.weight.numel() == D)
    assert {float(weight.rows.exponent[0]) for weight in scaling.weights} == {0.5 if both else 1.0}


@pytest.mark.parametrize("names", [*zip(families.QUERY_NORMS, families.KEY_NORMS, strict=True)], ids=", ".join)
def test_norms_are_found_under_any_of_their_names(names):
    module = ByHandAttention()
    for name in names:
        module.add_module(name, nn.RMSNorm(D))
    weights = next(scalings_of(module)).weights
    assert [weight.module for weight in weights] == [module.get_submodule(name) for name in names]


class Scale(nn.Module):
    """A norm whose weight has another name, as in torchtune."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return nn.functional.rms_norm(x, self.scale.shape) * self.scale


class Shift(Scale):
    """One that learns no factor."""

    def __init__(self, width):
        super().__init__(width)
        self.bias = nn.Parameter(torch.zeros(width))
        del self.scale


def test_the_weight_of_a_norm_may_have_any_name():
    (weight,) = next(scalings_of(Normed(Scale(D)))).weights
    assert (weight.name, weight.offset) == ("scale", 0.0)
    assert not any(weight.module is module.q_norm for module in [Normed(Shift(D))] for weight in first_weights(module))


def first_weights(module):
    return next(scalings_of(module)).weights


class Squared(nn.RMSNorm):
    def forward(self, x):
        return super().forward(x) * self.weight


class Gated(nn.RMSNorm):
    def forward(self, x, gate):
        return super().forward(x) * gate


@pytest.mark.parametrize(
    ("norm", "reason"), [(Squared(D), "is not proportional to its weight"), (Gated(D), "Gated does not run alone")]
)
def test_other_norms_are_refused(norm, reason):
    with pytest.raises(NoScalingError, match=reason):
        next(scalings_of(Normed(norm)))


def test_a_key_that_passes_a_norm_takes_no_factor():
    module = ByHandAttention()
    module.k_norm = nn.RMSNorm(D)
    assert {weight.module for weight in next(scalings_of(module)).weights} == {module.q_proj}


def test_quantised_weights_are_refused():
    module = ByHandAttention()
    module.q_proj.weight = nn.Parameter(module.q_proj.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(NoScalingError, match="quantised"):
        next(scalings_of(module))


@pytest.mark.parametrize("side", ["q_proj", "k_proj"])
def test_weights_that_are_packed_are_refused(side, monkeypatch):
    """Which can be read, but have other rows, as those of four bits."""

    class Packed(nn.Parameter):
        pass

    module = ByHandAttention()
    linear, whole = module.get_submodule(side), torch.ones(WIDTH, WIDTH)
    monkeypatch.setitem(materialise.DEQUANTISERS, "Packed", lambda weight, module: whole)
    linear.weight = Packed(torch.zeros(HEADS // 2, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(NoScalingError, match="its weight is quantised, packed in a Packed"):
        next(scalings_of(module))


def test_the_key_of_a_fused_projection_that_heads_share():
    """q alone, and nothing of k and v in the same weight."""
    config = transformers.FalconConfig(hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=1, vocab_size=8)
    module = transformers.FalconModel(config).h[0].self_attention
    (weight,) = next(scalings_of(module)).weights
    assert weight.module is module.query_key_value
    assert (weight.rows.head == HEADS).tolist() == [False] * WIDTH + [True] * 2 * D


def test_transposed_weights_are_scaled_along_their_columns():
    module = build("gpt2").transformer.h[0].attn
    axes = {weight.name: weight.axes for weight in next(scalings_of(module, 4, 8)).weights}
    assert axes == {"weight": (1,), "bias": (0,)}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rows_of_a_projection_take_the_factors_of_their_heads_and_no_others_change(family, dtype):
    model = build(family).to(dtype)
    module = next(module for name, module in model.named_modules() if name.endswith(("self_attn", "attn", "attention")))
    for parameter in module.parameters():
        parameter.data.uniform_(0.5, 1.5)
    query, _ = projections.locate(module, 4, 8)
    before, factors = query.entries.double(), torch.tensor([2.0, 1.0, 0.3, 1.0], dtype=torch.float64)
    kept = {name: value.clone() for name, value in module.state_dict().items()}
    place = Scaling(list(of_linear(query, 1.0)))
    with place.scaled(factors):
        assert torch.equal(query.entries, (before * factors[:, None, None]).to(dtype))
        changed = sum(int((value != kept[name]).sum()) for name, value in module.state_dict().items())
        biases = sum(weight.name == "bias" for weight in place.weights)
        assert changed == sum(2 * 8 for _ in range(biases)) + 2 * 8 * 32
    assert all(torch.equal(value, kept[name]) for name, value in module.state_dict().items())


def make_weight(entries, heads, **options):
    module = nn.Module()
    module.weight = nn.Parameter(torch.tensor(entries))
    rows = Rows.of(torch.arange(len(entries)).view(heads, -1), 1.0, len(entries))
    return Weight(module, "weight", rows, **options)


def test_an_error_moves_each_entry_of_the_heads_up_or_down_and_differs_from_seed_to_seed():
    weight, values = make_weight([1.0] * 64, 1), []
    for seed in (0, 0, 1):
        with Scaling([weight]).scaled(torch.tensor([2.0]), 0.5, seed):
            values.append(weight.parameter.detach().clone())
    assert set(values[0].tolist()) == {1.0, 3.0}
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    assert weight.parameter.eq(1).all()


def test_an_error_leaves_rows_of_no_head_and_is_relative_to_what_acts():
    weight = make_weight([0.0] * 8, 1, offset=1.0)
    weight.rows.head[4:] = 1
    weight.blur(0.5, torch.Generator().manual_seed(0))
    assert set(weight.parameter[:4].tolist()) <= {-0.5, 0.5}
    assert weight.parameter[4:].eq(0).all()


@pytest.mark.parametrize(
    ("entries", "factor", "expected"), [([3e38], 2, False), ([3e38], 1, True), ([0.0], torch.inf, False)]
)
def test_a_weight_that_would_overflow_is_seen_before(entries, factor, expected):
    weight = make_weight(entries, 1)
    assert weight.stays_finite(torch.tensor([factor], dtype=torch.float64)).item() is expected
    assert weight.parameter.tolist() == pytest.approx(entries)


@pytest.mark.filterwarnings("ignore:.*CPU Autocast")
def test_autocast_does_not_go_on_with_the_old_values():
    linear, x = nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    place = Scaling([Weight(linear, "weight", Rows.of(torch.arange(4)[None], 1.0, 4))])
    with torch.autocast("cpu", torch.bfloat16):
        before = linear(x)
        with place.scaled(torch.tensor([2.0])):
            torch.testing.assert_close(linear(x), 2 * before)
        torch.testing.assert_close(linear(x), before)
        place.scale(torch.tensor([2.0]))
        torch.testing.assert_close(linear(x), 2 * before)
