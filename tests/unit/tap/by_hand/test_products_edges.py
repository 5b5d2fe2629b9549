"""Attention written by hand at its edges: errors, what is left behind, nested and empty input, no keys."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn

import betahook
from support.attention import (
    HEADS,
    LENGTH,
    WIDTH,
    Block,
    ByHandAttention,
    FusedAttention,
    causal_scores,
    make,
)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_mode_ends_with_the_forward_whatever_is_raised(x, error):
    class FailingAttention(ByHandAttention):
        fails = True

        def values(self, logits, v):
            if self.fails:
                raise error("out of order")
            return torch.softmax(logits, -1) @ v

    model = make(FailingAttention)
    expected = make(ByHandAttention)(x)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        with pytest.raises(error, match="out of order"):
            model(x)
        assert torch.overrides._get_current_function_mode_stack() == []
        FailingAttention.fails = False
        assert torch.equal(model(x), expected)
        assert hook.layers["1"].statistics.count == causal_scores(make(ByHandAttention), x).numel()


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_forward_that_accelerate_wraps_is_followed_and_left_alone(x, order):
    model = make(ByHandAttention)
    expected = model(x)
    if order == "before":
        add_hook_to_module(model[1], ModelHook())
    own = dict(vars(model[1]))
    hook = betahook.attach(model, controller="monitor")
    if order == "after":
        add_hook_to_module(model[1], ModelHook())
    model(x)
    hook.layers["1"].beta = 2 * hook.layers["1"].beta_default
    doubled = model(x)
    assert hook.layers["1"].statistics.count == 2 * causal_scores(make(ByHandAttention), x).numel()
    hook.detach()
    assert torch.equal(model(x), expected)
    if order == "before":
        assert vars(model[1]) == own
    remove_hook_from_module(model[1])
    assert torch.equal(model(x), expected)
    for parameter in model[1].q_proj.parameters():
        parameter.data *= 2
    torch.testing.assert_close(doubled, model(x), rtol=1e-5, atol=1e-5)


def test_a_beta_before_the_first_forward_is_refused():
    with (
        betahook.attach(make(ByHandAttention)) as hook,
        pytest.raises(RuntimeError, match=r"beta of '1' cannot be set before the first forward.*Run one first"),
    ):
        hook.layers["1"].beta = 1.0


@pytest.mark.parametrize("package", [__name__, "transformers.models.made_up"], ids=["of the user", "of transformers"])
def test_scores_of_other_heads_than_a_module_states_are_left_alone(x, package):
    """It may be right all the same, as where there are two score matrices for each head."""

    class SomeAttention(ByHandAttention):
        __module__ = package

    model = make(SomeAttention)
    model[1].num_heads = 3
    expected = model(x[:2])
    with betahook.attach(model) as hook:
        assert torch.equal(model(x[:2]), expected)
        assert "of 4 heads, where the module states 3" in hook.layers["1"].refusal


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("in_batch", [True, False])
def test_twice_as_many_heads_as_a_module_states_are_counted(batch, in_batch):
    """As in differential attention, where a trial does not run."""

    class PairedAttention(ByHandAttention):
        def forward(self, x, *, positions):
            return super().forward(x + positions)

        def mix(self, q, k, v):
            if in_batch:
                q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            return super().mix(q, k, v).unflatten(0, (-1, HEADS)) if in_batch else super().mix(q, k, v)

    attention = PairedAttention()
    attention.num_heads = HEADS // 2
    with betahook.attach(attention, controller="monitor") as hook:
        attention(torch.randn(batch, LENGTH, WIDTH), positions=0)
        assert f"of {HEADS} heads, where the module states {HEADS // 2}, which is not followed" in str(hook)


def test_nothing_of_it_stays_behind():
    model = make(ByHandAttention)
    before = [dict(vars(module)) for module in model.modules()]
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    betahook.attach(model).detach()
    assert [vars(module) for module in model.modules()] == before
    assert [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()] == hooks


def test_keys_that_nobody_sees_have_no_part_in_the_moments():
    class PaddedAttention(ByHandAttention):
        def mix(self, q, k, v):
            scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
            return self.values(scores.masked_fill(torch.arange(LENGTH) >= LENGTH - 4, float("-inf")), v)

    model, x = make(PaddedAttention), torch.randn(3, LENGTH, WIDTH)
    x[:, -4:] *= 100
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        measured = hook.layers["1"].head_statistics
    keys = model[1].split(model[1].k_proj(model[0](x[:, :-4])))
    expected = keys.double().transpose(0, 1).flatten(1, 2).var(1, correction=0).mean(-1)
    torch.testing.assert_close(measured.component_variance_k, expected, rtol=1e-4, atol=0)


class PlainEinsumAttention(ByHandAttention):
    def mix(self, q, k, v):
        return torch.einsum("bhnm,bhmd->bhnd", torch.einsum("bhnd,bhmd->bhnm", q, k).softmax(-1), v)


def test_an_einsum_of_other_dimensions_gets_the_error_of_torch(x):
    model = make(PlainEinsumAttention)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        count = hook.layers["1"].statistics.count
        with pytest.raises(
            RuntimeError, match=r"subscripts in the equation \(4\) does not match the number of dimensions"
        ):
            model(x[0])
        assert hook.layers["1"].statistics.count == count > 0
        assert hook.layers["1"].refusal is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_in_attention_written_by_hand_leave_it_alone(caplog):
    class NestedAttention(Block):
        mix = None

        def forward(self, x):
            q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)

    model = make(NestedAttention)
    nested = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(5, WIDTH)], layout=torch.jagged)
    expected = model(nested)
    with betahook.attach(model, controller="monitor") as hook:
        got = model(nested)
        assert hook.layers["1"].refusal == "its input is a nested tensor, whose scores are not followed: pad it"
        assert "1 is left alone: its input is a nested tensor" in caplog.text
    assert torch.equal(got.values(), expected.values())


class PackedAttention(Block):
    """Packs sequences of several lengths into a nested tensor, and pads its result."""

    def __init__(self, layout, is_padded):
        super().__init__()
        self.layout, self.is_padded = layout, is_padded

    def forward(self, x):
        packed = torch.nested.as_nested_tensor([each[: 9 - n] for n, each in enumerate(x)], layout=self.layout)
        projected = (projection(packed) for projection in (self.q_proj, self.k_proj, self.v_proj))
        if self.is_padded:
            projected = (torch.nested.to_padded_tensor(each, 0.0) for each in projected)
        mixed = self.mix(*map(self.split, projected)).transpose(1, 2)
        return mixed.flatten(2) if self.is_padded else torch.nested.to_padded_tensor(mixed, 0.0)

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_that_a_forward_makes_leave_it_alone(x):
    attention = PackedAttention(torch.jagged, is_padded=False)
    expected = attention(x)
    with betahook.attach(attention, controller="monitor") as hook:
        assert torch.equal(attention(x), expected)
        refusal = hook.layers[""].refusal
    assert re.fullmatch(r"scaled_dot.* at .* gets a nested tensor, .* not followed: pad it", refusal)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_that_a_forward_pads_before_its_attention_are_followed(x, layout):
    attention = PackedAttention(layout, is_padded=True)
    expected = attention(x)
    with betahook.attach(attention, controller="monitor") as hook:
        assert torch.equal(attention(x), expected)
        assert hook.layers[""].statistics.count == len(x) * HEADS * 9 * 9


def test_without_keys_nothing_is_added(x):
    """As in a memory that is still empty."""

    class MemoryAttention(ByHandAttention):
        def mix(self, q, k, v):
            return F.scaled_dot_product_attention(q, k[:, :, :0], v[:, :, :0])

    model = make(MemoryAttention)
    with betahook.attach(model, controller="monitor") as hook:
        assert model(x).shape == (3, LENGTH, WIDTH)
        assert hook.layers["1"].statistics.count == 0


@pytest.mark.parametrize("kind", [ByHandAttention, FusedAttention])
def test_an_empty_batch_adds_nothing(kind, x):
    model = make(kind)
    with betahook.attach(model, controller="monitor") as hook:
        assert model(x[:0]).shape == (0, LENGTH, WIDTH)
        assert hook.layers["1"].statistics.count == 0


@pytest.mark.parametrize("kind", [ByHandAttention, FusedAttention])
def test_an_empty_batch_that_comes_first_shows_nothing(kind, x):
    """Such as that of a rank without samples: heads and scales are seen in the first forward that has entries."""
    measured = []
    for batches in ([x], [x[:0], x]):
        hook = betahook.attach(make(kind), controller="monitor")
        for batch in batches:
            hook.model(batch).sum().backward()
        hook.step()
        assert hook.layers["1"].refusal is None
        measured.append(hook.metrics())
    assert measured[1] == measured[0]


@pytest.mark.parametrize("kind", [ByHandAttention, FusedAttention])
def test_a_step_may_come_after_an_empty_batch_alone(kind, x, caplog):
    with betahook.attach(make(kind), controller="monitor", interval=1) as hook:
        hook.model(x[:0]).sum().backward()
        hook.step()
        hook.model(x).sum().backward()
        hook.step()
        assert hook.metrics()["score_std/1"] > 0
    assert caplog.records == []


def test_projections_that_get_their_shape_in_the_first_forward(x):
    model = make(FusedAttention)
    model[1].q_proj, model[1].k_proj = (nn.LazyLinear(WIDTH) for _ in range(2))
    with betahook.attach(model, controller="monitor") as hook:
        assert hook.layers["1"].weight_std_q != hook.layers["1"].weight_std_q
        model(x).sum().backward()
        hook.step()
        expected = model[1].q_proj.weight.std(correction=0).item()
        assert hook.layers["1"].weight_std_q == pytest.approx(expected, rel=1e-5)
        hook.layers["1"].beta = 0.5
        output = model(x)
        betahook.fold(model)
    torch.testing.assert_close(model(x), output, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["masked_fill_", "__iadd__", "part by part"])
def test_changes_in_place_under_inference_mode(change, x):
    """Tensors made there count no changes."""

    class InPlace(ByHandAttention):
        def values(self, logits, v):
            if change == "masked_fill_":
                logits.masked_fill_(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf)
            elif change == "__iadd__":
                logits += torch.full((LENGTH, LENGTH), -math.inf).triu(1)
            else:
                logits[..., LENGTH // 2 :] = -math.inf
            return torch.softmax(logits, -1) @ v

    model = make(InPlace)
    expected = model(x)
    with betahook.attach(model, controller="monitor", when="always") as hook, torch.inference_mode():
        assert torch.equal(model(x), expected)
        assert hook.layers["1"].refusal is None


class ChannelsFirstAttention(nn.Module):
    """One convolution makes q, k and v, so that gaps part the samples of each in memory, and components lie apart."""

    def __init__(self, scores):
        super().__init__()
        self.num_heads, self.head_dim, self.scores = 3, 5, scores
        self.qkv = nn.Conv1d(15, 45, 1)

    def forward(self, x):
        q, k, v = (part.unflatten(1, (3, 5)).mT for part in self.qkv(x.mT).chunk(3, 1))
        return (self.scores(q, k) * 5**-0.5).softmax(-1) @ v


class SingleHeadAttention(nn.Module):
    """A head that needs no axis; its gradient comes transposed."""

    def __init__(self, scores):
        super().__init__()
        self.num_heads, self.head_dim, self.scores = 1, 15, scores
        self.q, self.k, self.layouts = nn.Linear(15, 15), nn.Linear(15, 15), []

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        for part in (q, k):
            part.register_hook(lambda gradient: self.layouts.append(gradient.stride()))
        return (self.scores(q[:, None], k[:, None]) * 0.3).softmax(-1) @ x[:, None]


KEYS_FIRST = {
    "matmul": lambda q, k: (k @ q.mT).mT,
    "einsum": lambda q, k: torch.einsum("bhjd,bhid->bhij", k, q),
    "einsum, heads in the middle": lambda q, k: torch.einsum("bjhd,bihd->bhij", k.transpose(1, 2), q.transpose(1, 2)),
}


@pytest.mark.oldest_skips("torch's einsum goes by the order of its operands", kind="*Channels*", scores="einsum*")
@pytest.mark.parametrize("kind", [ChannelsFirstAttention, SingleHeadAttention])
@pytest.mark.parametrize("scores", KEYS_FIRST)
def test_operands_and_gradients_keep_their_layout_in_memory(kind, scores):
    """By which products round."""
    torch.manual_seed(0)
    module, x = kind(KEYS_FIRST[scores]).double(), torch.randn(2, 16, 15, dtype=torch.float64)

    def outcome():
        module.zero_grad()
        output = module(x)
        output.square().sum().backward()
        return [output, *(parameter.grad for parameter in module.parameters())]

    alone, layouts = outcome(), getattr(module, "layouts", [])
    unhooked = list(layouts)
    with betahook.attach(module, controller="monitor", interval=1) as hook:
        for _ in range(3):
            for hooked, plain in zip(outcome(), alone, strict=True):
                assert torch.equal(hooked, plain)
            hook.step()
        assert layouts == 4 * unhooked
        assert hook.layers[""].refusal is None
