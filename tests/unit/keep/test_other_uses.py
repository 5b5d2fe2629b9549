"""Folding refused where a query weight has a use beside the scores, which only the output of the model shows."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import betahook
from support.attention import HEADS, LENGTH, WIDTH, FusedAttention
from support.training import check_fold, move


class Around(nn.Module):
    """A module around an attention, which uses what is the attention's own in one more way."""

    def __init__(self, use):
        super().__init__()
        self.attention, self.use = FusedAttention(), use

    def forward(self, x):
        return self.attention(x) + self.use(self, x)


ELSEWHERE = {
    "called by the parent": lambda around, x: around.attention.q_proj(x),
    "called by the parent, in passing": lambda around, x: 1e-3 * around.attention.q_proj(x),
    "used by a function": lambda around, x: nn.functional.linear(x, around.attention.q_proj.weight).tanh(),
    "used for its norm": lambda around, x: x * around.attention.q_proj.weight.norm(),
}


@pytest.mark.parametrize("use", ELSEWHERE)
def test_a_query_weight_with_a_use_that_no_layer_shows_is_refused_and_nothing_changed(use):
    torch.manual_seed(0)
    model, x = nn.Sequential(Around(ELSEWHERE[use]), nn.Linear(WIDTH, WIDTH)), torch.randn(3, LENGTH, WIDTH)
    with betahook.attach(model, controller="monitor") as hook:
        model(x).sum().backward()
        move(hook, per_head=True)
        before = Snapshot(model, hook)
        with pytest.raises(betahook.FoldError, match=r"the output of Sequential would be off by .* Or keep the hook"):
            betahook.fold(model)
        before.compare(model, hook)


class Snapshot:
    """All that a refused fold leaves as it was."""

    def __init__(self, model, hook):
        self.weights = copy.deepcopy(model.state_dict())
        self.gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        self.others = self.read(model, hook)

    def read(self, model, hook):
        beta = [layer.head_beta.tolist() for layer in hook.layers.values()]
        modes = [module.training for module in model.modules()]
        arguments, options = hook.last_call.input
        return beta, modes, torch.get_rng_state().tolist(), list(map(id, arguments)), list(options), hook.attached

    def compare(self, model, hook):
        assert all(torch.equal(value, self.weights[name]) for name, value in model.state_dict().items())
        for parameter, gradient in zip(model.parameters(), self.gradients, strict=True):
            assert gradient is None or torch.equal(parameter.grad, gradient)
        assert self.read(model, hook) == self.others


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_tensor_of_the_output_shows_another_use(dtype):
    @dataclass
    class Output:
        hidden: torch.Tensor
        penalty: torch.Tensor

    class Regularised(nn.Module):
        """Returns the norm of its query weight, beside an output that is far larger."""

        def __init__(self):
            super().__init__()
            self.attention = FusedAttention()

        def forward(self, x):
            return Output(1e3 * self.attention(x), self.attention.q_proj.weight.norm())

    model = Regularised().to(dtype)
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(3, LENGTH, WIDTH, dtype=dtype))
        move(hook, per_head=False)
        with pytest.raises(betahook.FoldError, match="the output of Regularised would be off by"):
            betahook.fold(model)


def test_another_use_in_half_precision_is_more_than_rounding():
    torch.manual_seed(0)
    model = nn.Sequential(Around(ELSEWHERE["called by the parent"])).bfloat16()
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(3, LENGTH, WIDTH, dtype=torch.bfloat16))
        move(hook, per_head=False)
        with pytest.raises(betahook.FoldError, match="the output of Sequential would be off by"):
            betahook.fold(model)


def test_two_modules_that_call_one_attention_are_no_other_use_of_its_weights():
    """It has one beta, whoever calls it."""

    class Calling(nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.attention = attention

        def forward(self, x):
            return x + self.attention(x, x, x)[0]

    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), torch.randn(3, LENGTH, WIDTH)
    model = nn.Sequential(Calling(attention), Calling(attention))
    check_fold(model, x)
