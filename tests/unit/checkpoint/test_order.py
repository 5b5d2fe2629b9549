"""A state goes to layers by their names, whatever the order of the modules in the model that saved it."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn

import betahook
from betahook import checkpoint
from betahook.checkpoint import schema

SIZES = {"self_attn": (4, 4), "cross_attn": (2, 16), "message_attn": (2, 8)}
"""Heads and d_k, others in each layer."""
ORDERS = [["self_attn", "cross_attn", "message_attn"], ["message_attn", "self_attn", "cross_attn"]]


class Attention(nn.Module):
    def __init__(self, heads, head_dim):
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, heads * head_dim) for _ in range(3))
        self.o_proj = nn.Linear(heads * head_dim, 16)

    def forward(self, x):
        parts = (projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layered(nn.Module):
    """Calls its layers in the same order, whatever that of its modules."""

    def __init__(self, order):
        super().__init__()
        for name in order:
            setattr(self, name, Attention(*SIZES[name]))

    def forward(self, x):
        for name in SIZES:
            x = x + getattr(self, name)(x)
        return x


def attached(order, weights=None, **options):
    torch.manual_seed(0)
    model = Layered(order)
    if weights is not None:
        model.load_state_dict(weights)
    rules = [betahook.Search(window=2, warmup=0, rise=False), betahook.Gradient(), betahook.Clip(0.5)]
    return betahook.attach(model, controller=rules, **options)


def go_on(hook, steps):
    """What steps show of each layer, by name; the weights stay, but for those that are clipped."""
    generator, shown = torch.Generator().manual_seed(4), []
    for _ in range(steps):
        hook.model(torch.randn(2, 6, 16, generator=generator)).square().mean().backward()
        hook.step()
        shown += [{name: layer.head_beta.tolist() for name, layer in hook.layers.items()}, hook.metrics()]
    return shown


def told(hook):
    """All that a hook says of its layers."""
    findings = {finding.layer: finding for finding in hook.findings()}
    heads = {key: values.tolist() for key, values in hook.head_metrics().items()}
    return hook.metrics(), heads, findings


@pytest.mark.parametrize("per_head", [False, True])
def test_a_state_of_another_order_goes_on_with_the_same_bits(per_head):
    options = dict(per_head=per_head, interval=1)  # of longer ones, layers have their turns in their order
    with attached(ORDERS[0], **options) as hook:
        go_on(hook, 5)
        hook.model(torch.ones(2, 6, 16))  # in the middle of a step
        weights, state = copy.deepcopy((hook.model.state_dict(), hook.state_dict()))
        expected = go_on(hook, 5)
    with attached(ORDERS[1], weights, **options) as other:
        other.load_state_dict(state)
        assert other.state_dict()["order"] == list(other.state_dict()["layers"]) == ORDERS[1]
        assert go_on(other, 5) == expected


def test_what_is_told_of_layers_follows_their_names():
    with attached(ORDERS[0], interval=3) as hook:
        go_on(hook, 5)
        weights, state = copy.deepcopy((hook.model.state_dict(), hook.state_dict()))
        expected = told(hook)
    with attached(ORDERS[1], weights, interval=3) as other:
        other.load_state_dict(state)
        assert told(other) == expected


def betas(hook):
    return {name: layer.beta for name, layer in hook.layers.items()}


def adapted():
    hook = attached(ORDERS[0])
    go_on(hook, 1)
    for beta, layer in enumerate(hook.layers.values(), start=1):
        layer.beta = beta
    return hook


def test_a_folder_of_another_order_is_restored(tmp_path):
    with adapted() as hook:
        checkpoint.save(hook, tmp_path)
        weights, expected = hook.model.state_dict(), betas(hook)
    (model := Layered(ORDERS[1])).load_state_dict(weights)
    with betahook.restore(model, tmp_path) as hook:
        assert betas(hook) == expected


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_the_order_outlives_a_distributed_checkpoint(tmp_path):
    """It writes into the dictionaries of the fresh hook, whose layers are in its own order."""
    with adapted() as hook:
        dcp.save({"model": hook.model, "betahook": hook}, checkpoint_id=tmp_path)
        expected = betas(hook)
    with attached(ORDERS[1]) as other:
        dcp.load({"model": other.model, "betahook": other}, checkpoint_id=tmp_path)
        assert betas(other) == expected


def test_a_state_of_before_there_was_an_order_has_that_of_its_layers():
    with adapted() as hook:
        state, expected = hook.state_dict(), betas(hook)
    del state["order"]
    with attached(ORDERS[1]) as other:
        other.load_state_dict(state)
        assert betas(other) == expected


@pytest.mark.parametrize("order", [["a"], ["a", "a"], ["a", "b", "c"], ["a", 3]])
def test_an_order_that_is_not_one_of_the_layers_is_damage(order):
    with adapted() as hook:
        state = hook.state_dict()
    layers = {"a": 4, "b": 4}
    with pytest.raises(ValueError, match="damaged: order should have the name of each layer once, got"):
        schema.parse({**state, "layers": layers, "order": order})
