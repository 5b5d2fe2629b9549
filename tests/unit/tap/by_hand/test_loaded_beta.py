"""A loaded beta acts in the first forward, whose products nobody has seen yet."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import betahook
from support.attention import HEADS, LENGTH, WIDTH, Block
from support.mixing import ROOT, make, raw_scores


def test_a_loaded_beta_acts_in_the_first_forward_already(x):
    """Whose products nobody has seen yet."""

    def mix(module, q, k, v):
        values = (q @ k.mT * (ROOT * module.temperature.exp())).softmax(-1) @ v
        return F.dropout(values + 0.01 * (values @ v.mT) @ v, 0.1)

    model = make(mix)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(x)
        hook.layers["1"].beta = 0.7
        hook.step()
        state = hook.state_dict()
        torch.manual_seed(3)
        expected = model(x)
        inputs = hook.layers["1"].statistics.input_std_q
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        hook.load_state_dict(state)
        torch.manual_seed(3)
        assert torch.equal(model(x), expected)
        assert hook.layers["1"].statistics.count == raw_scores(model, x).numel()
        assert hook.layers["1"].statistics.input_std_q == inputs


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_loaded_beta_acts_in_a_checkpointed_forward(x, reentrant):
    """Whose recomputation saves what the forward did."""
    model = make(lambda module, q, k, v: (q @ k.mT * ROOT).softmax(-1) @ v)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        hook.layers["1"].beta = 0.7
        state = hook.state_dict()
        model(x).square().sum().backward()
        expected = model[1].q_proj.weight.grad.clone()
        model.zero_grad()
    with betahook.attach(model, controller="monitor") as hook:
        hook.load_state_dict(state)
        hidden = model[0](x)
        torch.utils.checkpoint.checkpoint(model[1], hidden, use_reentrant=reentrant).square().sum().backward()
        assert torch.equal(model[1].q_proj.weight.grad, expected)


def test_the_first_forward_with_a_loaded_beta_leaves_the_module_as_one_forward_does(x):
    class MemoryAttention(Block):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.register_buffer("seen", torch.zeros(1, HEADS, 0, WIDTH // HEADS))
            self.register_buffer("total", torch.zeros(()))

        def mix(self, q, k, v):
            self.calls += 1
            self.seen = torch.cat([self.seen, k[:1].detach()], 2)
            self.total += k.detach().sum()
            self.last = k.detach()
            return (q @ k.mT * ROOT).softmax(-1) @ v

    model = nn.Sequential(MemoryAttention())
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        hook.layers["0"].beta = 0.7
        state = hook.state_dict()
    model = nn.Sequential(MemoryAttention())
    with betahook.attach(model, controller="monitor") as hook:
        hook.load_state_dict(state)
        assert torch.equal(model(x), model(x))
        attention = model[0]
        assert attention.calls == 2
        assert attention.seen.shape[2] == 2 * LENGTH
        assert attention.total == 2 * attention.last.sum()
