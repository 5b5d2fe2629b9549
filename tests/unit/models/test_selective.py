"""Selective activation checkpointing: a hooked model gets the outputs that were saved for it, and no others."""

import functools

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import betahook
from betahook.models import selective
from support.attention import LENGTH, WIDTH, ByHandAttention, FusedAttention, OfTorch, make
from support.models import build, inputs
from support.operations import Operations

ATEN = torch.ops.aten
SAVED = [ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default, ATEN._softmax.default, ATEN.sum.dim_IntList]
SAVED += [ATEN.mul.Tensor, ATEN.div.Tensor, ATEN.add.Tensor, ATEN.where.self, ATEN.stack.default]
"""Operations of models, and of betahook, whose outputs are saved."""


def checkpointed(function):
    contexts = functools.partial(create_selective_checkpoint_contexts, SAVED)
    return functools.partial(checkpoint, function, use_reentrant=False, context_fn=contexts)


def train(kind, controller, wrap, state=None):
    """Three steps; returns the gradients of each, beta after each, and the state of the hook at the end."""
    if isinstance(kind, str):
        model = build("llama", kind, use_cache=False)
        batches = [{name: x[:, : 12 + 2 * step] for name, x in inputs("llama").items()} for step in range(3)]
    else:
        model = make(kind)
        generator = torch.Generator().manual_seed(3)
        batches = [{"input": torch.randn(3, LENGTH, WIDTH, generator=generator)} for _ in range(3)]
    hook = None if controller is None else betahook.attach(model, controller=controller)
    if state is not None:
        hook.load_state_dict(state)
    gradients, betas = [], []
    for batch in batches:
        with set_checkpoint_early_stop(False):
            output = wrap(model)(**batch)
        loss = output.loss if isinstance(kind, str) else output.square().mean()
        loss.backward()
        gradients += [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        if hook is not None:
            hook.step()
            betas.append(hook.state_dict()["beta"])
    return gradients, betas, hook and hook.state_dict()


def equal(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


KINDS = ["eager", "sdpa", ByHandAttention, FusedAttention, OfTorch]


@pytest.mark.parametrize("kind", KINDS)
def test_monitoring_changes_no_bit(kind):
    alone, monitored = (train(kind, controller, checkpointed)[0] for controller in (None, "monitor"))
    assert equal(alone, monitored)


@pytest.mark.parametrize("controller", [betahook.Gradient(0.2), betahook.Decades(window=1)])
@pytest.mark.parametrize("kind", KINDS)
def test_beta_and_gradients_are_those_without_it(kind, controller):
    if controller.uses_loss and not isinstance(kind, str):
        pytest.skip("the model returns no loss")
    state = None
    for _ in range(2):  # the second time with a beta that was loaded
        expected = train(kind, controller, lambda model: model, state)
        found = train(kind, controller, checkpointed, state)
        assert equal(expected[0] + expected[1], found[0] + found[1])
        state = found[2]


def test_what_is_uncounted_has_no_number_but_for_what_is_counted():
    """Another mode sees all of it; and where nothing counts, nothing changes."""
    one, numbered = torch.ones(2), []

    def policy(context, operation, *args, **kwargs):
        numbered.append(operation)
        return CheckpointPolicy.PREFER_RECOMPUTE

    with selective.uncounted(), selective.counted(), selective.apart():
        assert not selective.is_counted()
    numbering, _ = create_selective_checkpoint_contexts(policy)
    with numbering, Operations() as operations:
        assert selective.is_counted()
        with selective.uncounted():
            assert not selective.is_counted()
            one.add(one)
            with selective.counted():
                one.add(one)
                with selective.uncounted():
                    one.add(one)
            with selective.apart(), selective.counted():
                one.add(one)
            with pytest.raises(RuntimeError), selective.counted():
                one.mul(torch.ones(3))
            assert not selective.is_counted()
        assert selective.is_counted()
    assert numbered.count(ATEN.add.Tensor) == 1
    assert operations.calls.total() > 5
