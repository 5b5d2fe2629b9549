"""Attention that is not understood is left alone, with the place in its code."""

import warnings

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import betahook
from betahook.tap.by_hand import sites
from support import foreach
from support.attention import HEADS, LENGTH, Block
from support.mixing import ROOT, make

MASKED = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def through_numpy(module, q, k, v):
    scores = torch.from_numpy((q @ k.mT * ROOT).detach().numpy().copy())
    return scores.softmax(-1) @ v


def by_exponential(module, q, k, v):
    weights = torch.exp(q @ k.mT * ROOT)
    return weights @ v / weights.sum(-1, keepdim=True)


def over_edges(module, q, k, v):
    """A score for each edge of a graph, a loop at each node here, and a softmax by hand over those of one node."""
    weights = torch.exp(torch.einsum("bhid,bhid->bhi", q, k) * ROOT)
    return (weights / weights.sum(-1, keepdim=True))[..., None] * v


def in_a_checkpoint(module, q, k, v):
    return torch.utils.checkpoint.checkpoint(lambda *t: attend(*t), q, k, v, use_reentrant=False)


def cap(scores: torch.Tensor):
    return scores.clamp(max=0.5)


with warnings.catch_warnings(action="ignore"):  # torch would rather see it compiled
    scripted_cap = torch.jit.script(cap)


class WithItsOwnBackward(torch.autograd.Function):
    """Computes its argument again in the backward, as the checkpoint of guided-diffusion does."""

    @staticmethod
    def forward(ctx, run, *operands):
        ctx.run = run
        ctx.save_for_backward(*operands)
        with torch.no_grad():
            return run(*operands)

    @staticmethod
    def backward(ctx, gradient):
        operands = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.run(*operands)
        return None, *torch.autograd.grad(output, operands, gradient)


class InMixedPrecision(WithItsOwnBackward):
    forward = staticmethod(torch.amp.custom_fwd(WithItsOwnBackward.forward, device_type="cpu"))


class WithSetup(WithItsOwnBackward):
    """As functions are written for `torch.func`: the forward gets no context."""

    @staticmethod
    def forward(q, k, v):
        return attend(q, k, v)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        operands = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            return torch.autograd.grad(attend(*operands), operands, gradient)


def attend(q, k, v):
    return (q @ k.mT * ROOT).softmax(-1) @ v


def behind_a_view(module, q, k, v):
    scores = q @ k.mT * ROOT
    scores[:, 0].square_()
    return scores.softmax(-1) @ v


def put_elsewhere(module, q, k, v):
    scores = q @ k.mT * ROOT
    scores[:, 1] = scores[:, 0].add_(torch.arange(LENGTH))
    return scores.softmax(-1) @ v


def behind_two_views(module, q, k, v):
    scores = q @ k.mT * ROOT
    scores[:, 0].square_()
    scores[:, 1] += 1.0
    return scores.softmax(-1) @ v


def through_a_flat_view(module, q, k, v):
    scores = (q @ k.mT).clone()
    scores.view(-1).mul_(ROOT)
    return scores.softmax(-1) @ v


def in_a_product_of_lists(module, q, k, v):
    scores = torch.stack(foreach.mm(list(q.flatten(0, 1)), list(k.mT.flatten(0, 1))))
    return (scores * ROOT).softmax(-1).unflatten(0, (-1, HEADS)) @ v


def scaled_in_a_list(module, q, k, v):
    scores = q @ k.mT
    foreach.mul_([scores], ROOT)
    return scores.softmax(-1) @ v


def scaled_into_a_target(module, q, k, v):
    target = torch.empty(*q.shape[:3], LENGTH)
    with torch.no_grad():
        torch.mul(q @ k.mT, ROOT, out=target)
    return target.softmax(-1) @ v


def scaled_into_themselves(module, q, k, v):
    with torch.no_grad():
        scores = q @ k.mT
        torch.mul(scores, ROOT, out=scores)
    return scores.softmax(-1) @ v


def one_lost_of_two(module, q, k, v):
    return (q @ k.mT * ROOT).softmax(-1) @ (by_exponential(module, k, q, v))


def values_in_disguise(module, q, k, v):
    values = ((q @ k.mT * ROOT).softmax(-1)[..., None] * v[:, :, None]).sum(-2)
    return ((values * 2) @ k.mT).softmax(-1) @ v


def twice_in_disguise(module, q, k, v):
    values = ((q @ k.mT * ROOT).softmax(-1)[..., None] * v[:, :, None]).sum(-2)
    return (values @ (values + 1).mT).softmax(-1) @ v


REFUSED = {
    "a second attention, to values by hand": (values_in_disguise, "may be another attention"),
    "a second attention, of values by hand": (twice_in_disguise, "may be another attention"),
    "weights that are scores": (lambda module, q, k, v: q @ k.mT * ROOT @ v, "reaches no softmax"),
    "negative": (lambda module, q, k, v: (-(q @ k.mT)).softmax(-1) @ v, "a negative factor before test_left_alone.py:"),
    "shifted along another axis": (
        lambda module, q, k, v: ((s := q @ k.mT * ROOT) - s.amax(-1, keepdim=True)).softmax(-2) @ v,
        "along another axis than their rows were shifted",
    ),
    "over heads": (lambda module, q, k, v: (q @ k.mT * ROOT).softmax(1) @ v, "runs over its heads, too"),
    "over heads and keys": (
        lambda module, q, k, v: (
            (q @ k.mT * ROOT).transpose(1, 2).flatten(2).softmax(-1).unflatten(2, (HEADS, -1)).transpose(1, 2) @ v
        ),
        "runs over its heads, too",
    ),
    "softplus": (lambda module, q, k, v: F.softplus(q @ k.mT).softmax(-1) @ v, "softplus at test_left_alone.py:"),
    "square": (lambda module, q, k, v: (q @ k.mT).square().softmax(-1) @ v, "square at test_left_alone.py:"),
    "gated by itself": (
        lambda module, q, k, v: ((s := q @ k.mT) * s.sigmoid()).softmax(-1) @ v,
        "test_left_alone.py:",
    ),
    "mixed before": (
        lambda module, q, k, v: module.conv(q @ k.mT * ROOT).softmax(-1) @ v,
        "conv2d at test_left_alone.py:",
    ),
    "the larger of two": (
        lambda module, q, k, v: torch.maximum(q @ k.mT, q @ v.mT).mul(ROOT).softmax(-1) @ v,
        "its scores reach maximum at test_left_alone.py:",
    ),
    "normalised scores": (
        lambda module, q, k, v: ((s := q @ k.mT) / s.std()).softmax(-1) @ v,
        "test_left_alone.py:",
    ),
    "through numpy": (through_numpy, "numpy at test_left_alone.py:"),
    "scripted": (
        lambda module, q, k, v: scripted_cap(q @ k.mT * ROOT).softmax(-1) @ v,
        "through a function that torch hides",
    ),
    "scripted beside another product": (
        lambda module, q, k, v: (scripted_cap(q @ k.mT * ROOT) + q @ v.mT * ROOT).softmax(-1) @ v,
        "through a function that torch hides",
    ),
    "exponential": (by_exponential, "exp at test_left_alone.py:"),
    "over the edges of a graph": (over_edges, "reaches no softmax"),
    "checkpoint inside": (in_a_checkpoint, "a checkpoint that begins inside the forward, at test_left_alone.py:"),
    "fused checkpoint inside": (
        lambda module, q, k, v: torch.utils.checkpoint.checkpoint(
            F.scaled_dot_product_attention, q, k, v, use_reentrant=False
        ),
        "a checkpoint that begins inside the forward, at test_left_alone.py:",
    ),
    "reentrant checkpoint inside": (
        lambda module, q, k, v: torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=True),
        "a checkpoint that begins inside the forward, at test_left_alone.py:",
    ),
    "function with a backward of its own": (
        lambda module, q, k, v: WithItsOwnBackward.apply(attend, q, k, v),
        "a torch.autograd.Function, whose backward is not seen, at test_left_alone.py:",
    ),
    "fused in a function with a backward of its own": (
        lambda module, q, k, v: WithItsOwnBackward.apply(F.scaled_dot_product_attention, q, k, v),
        "a torch.autograd.Function, whose backward is not seen, at test_left_alone.py:",
    ),
    "function for mixed precision": (
        lambda module, q, k, v: InMixedPrecision.apply(attend, q, k, v),
        "a torch.autograd.Function, whose backward is not seen, at test_left_alone.py:",
    ),
    "function without a context": (
        lambda module, q, k, v: WithSetup.apply(q, k, v),
        "a torch.autograd.Function, whose backward is not seen, at test_left_alone.py:",
    ),
    "changed through a view": (behind_a_view, "test_left_alone.py:"),
    "changed through two views": (behind_two_views, "test_left_alone.py:"),
    "scaled through a flat view": (through_a_flat_view, "an in-place operation on a view of them at test_left"),
    "put elsewhere": (put_elsewhere, "test_left_alone.py:"),
    "a product of lists": (in_a_product_of_lists, "no product of q and k was seen to reach its softmax"),
    "scaled in a list": (
        lambda module, q, k, v: foreach.mul([q @ k.mT], ROOT)[0].softmax(-1) @ v,
        "reach foreach.mul at ",
    ),
    "scaled in place, in a list": (scaled_in_a_list, "reach foreach.mul_ at "),
    "scaled into a target": (scaled_into_a_target, "reach mul with out= at test_left_alone.py:"),
    "scaled into themselves": (scaled_into_themselves, "reach mul with out= at test_left_alone.py:"),
    "one of two": (one_lost_of_two, "exp at test_left_alone.py:"),
    "mean of two along a last axis": (
        lambda module, q, k, v: torch.stack([q @ k.mT, q @ v.mT], -1).mean(-1).mul(ROOT).softmax(-1) @ v,
        "reduced along its last axis",
    ),
    "added in the product": (
        lambda module, q, k, v: (
            torch.baddbmm((q @ v.mT).flatten(0, 1), q.flatten(0, 1), k.flatten(0, 1).mT)
            .softmax(-1)
            .unflatten(0, (-1, HEADS))
            @ v
        ),
        "baddbmm at test_left_alone.py:",
    ),
    "summed along an axis of products": (
        lambda module, q, k, v: attend(q, k, v) + torch.stack([q @ k.mT, q @ v.mT]).sum(0).softmax(-1) @ v,
        "sum over another axis than that of the rows at test_left_alone.py:",
    ),
    "between channels": (
        lambda module, q, k, v: v @ (q.mT @ k * ROOT).softmax(-1).mT,
        "sums over tokens, as between channels or in linear attention, which",
    ),
    "linear": (
        lambda module, q, k, v: F.relu(q) @ (F.relu(k).mT @ v),
        "sums over tokens, as between channels or in linear attention, which",
    ),
    "no softmax": (lambda module, q, k, v: F.relu(q @ k.mT) @ v, "relu at test_left_alone.py:"),
}


def test_a_decorator_that_the_forward_of_a_function_has_too_is_no_obstacle(x):
    class Function(torch.autograd.Function):
        forward = staticmethod(torch.no_grad()(lambda ctx, x: x))

    sites._is_of_function.cache_clear()
    decorated = torch.enable_grad()(attend)
    model = make(lambda module, q, k, v: decorated(q, k, v))
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        assert hook.layers["1"].refusal is None
    assert issubclass(Function, torch.autograd.Function)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_left_alone_by_name(x, caplog, case):
    mix, words = REFUSED[case]
    model = make(mix)
    expected = model(x)
    expected.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    with betahook.attach(model, controller=betahook.Search(warmup=1, window=1)) as hook:
        for _ in range(3):
            model.zero_grad()
            output = model(x)
            output.square().sum().backward()
            assert torch.equal(output, expected)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                assert (gradient is None and parameter.grad is None) or torch.equal(parameter.grad, gradient)
            hook.step()
        layer = hook.layers["1"]
        assert words in layer.refusal
        assert layer.refusal in repr(hook)
        assert int(layer.statistics.count) == 0
        with pytest.raises(RuntimeError, match=r"beta of '1' cannot be set, the layer is left alone"):
            layer.beta = 2 * layer.beta_default  # NaN, if nothing of it was seen
        with pytest.raises(RuntimeError, match=r"audit\(\) of layers that are all left alone"):
            hook.audit()
        assert not [name for name in hook.metrics() if name.startswith(("score_", "max_logit", "nonfinite"))]
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 1
    assert words in warned[0]


def test_products_that_make_a_query_step_by_step_are_not_missing_at_the_softmax(x):
    def mix(module, q, k, v):
        return (q @ k.mT @ k @ k.mT).softmax(-1) @ v

    model = make(mix)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        assert hook.layers["1"].refusal is None


def test_a_branch_that_is_taken_later_is_refused_then(x, caplog):
    class BranchedAttention(Block):
        def mix(self, q, k, v):
            scores = q @ k.mT * ROOT
            return (scores if self.training else F.softplus(scores)).softmax(-1) @ v

    model = nn.Sequential(BranchedAttention())
    with betahook.attach(model) as hook:
        model(x)
        assert hook.layers["0"].refusal is None
        hook.layers["0"].beta = 1.0
        model.eval()(x)
        assert "softplus at test_left_alone.py" in hook.layers["0"].refusal
    expected = model(x)
    assert "left alone" in caplog.text
    with betahook.attach(model) as hook:
        model.train()(x)
        model.eval()(x)
        assert torch.equal(model(x), expected)


def beside(product):
    """Attention that adds what a product of q and k makes to their scores."""
    return lambda module, q, k, v: ((q @ k.mT + product(module, q, k)) * ROOT).softmax(-1) @ v


def test_a_product_that_makes_scores_at_times_is_left_alone(x):
    def mix(module, q, k, v):
        scores = q @ k.mT * ROOT
        return (scores.softmax(-1) if module.training else (q * ROOT @ v.mT).softmax(-1) + 0 * scores) @ v

    model = make(mix)
    with betahook.attach(model) as hook:
        model(x)
        model.eval()(x)
        assert "reaches a softmax in some forwards and not in others" in hook.layers["1"].refusal


UNREAD = {
    "two summed axes": lambda module, q, k: torch.einsum(
        "bhixd,bhjxd->bhij", *(x.unflatten(-1, (2, -1)) for x in (q, k))
    ),
    "three operands": lambda module, q, k: torch.einsum("bhid,bhjd,bhi->bhij", q, k, q.mean(-1)),
    "tensordot": lambda module, q, k: torch.tensordot(q, k[0, 0], ([3], [1])),
    "inner": lambda module, q, k: torch.inner(q, k[0, 0]),
    "linear": lambda module, q, k: F.linear(q, k[0, 0]),
    "rmatmul": lambda module, q, k: k.mT.__rmatmul__(q),
    "multi_dot": lambda module, q, k: torch.linalg.multi_dot([q.flatten(0, 2), k[0, 0].T]).view(*q.shape[:3], -1),
    "addmm": lambda module, q, k: torch.addmm(torch.zeros(()), q.flatten(0, 2), k[0, 0].T).view(*q.shape[:3], -1),
    "mv": lambda module, q, k: torch.mv(q.flatten(0, 2), k[0, 0, 0]).view(*q.shape[:3], 1),
    "cosine similarity": lambda module, q, k: F.cosine_similarity(q[:, :, :, None], k[:, :, None], -1),
    "matrix": lambda module, q, k: q @ k[0, 0].T,
    "vecdot": lambda module, q, k: torch.linalg.vecdot(q[:, :, :, None], k[:, :, None]),
    "behind a bias": lambda module, q, k: F.dropout(module.temperature + torch.inner(q, k[0, 0]), 0.0).masked_fill(
        MASKED, 0
    ),
    "stacked": lambda module, q, k: torch.stack([F.linear(a, k[0, 0]) for a in q]),
}


@pytest.mark.parametrize("way", UNREAD)
def test_a_product_that_is_not_understood_is_no_bias(x, way):
    model = make(beside(UNREAD[way]))
    expected = model(x)
    with betahook.attach(model, controller="monitor") as hook:
        assert torch.equal(model(x), expected)
        assert "its scores reach add with what " in hook.layers["1"].refusal


def test_scores_put_beside_a_product_that_is_not_understood_are_left_alone(x):
    def mix(module, q, k, v):
        scores = torch.cat([q @ k.mT, torch.inner(q, k[0, 0])], -1)
        return (scores * ROOT).softmax(-1) @ torch.cat([v, v], 2)

    with betahook.attach(make(mix), controller="monitor") as hook:
        hook.model(x)
        assert "its scores reach cat with what inner at " in hook.layers["1"].refusal


def test_only_a_product_that_is_not_understood(x):
    with betahook.attach(make(lambda module, q, k, v: torch.inner(q, k[0, 0]).softmax(-1) @ v)) as hook:
        hook.model(x)
        assert hook.layers["1"].refusal.startswith("its softmax takes the result of inner at ")
