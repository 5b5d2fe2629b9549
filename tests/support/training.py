"""Steps of plain training, and what to compare before and after."""

from contextlib import contextmanager

import torch

import betahook
from support.models import inputs

LAYER = "model.layers.0.self_attn"
"""The first layer of the tiny Llama."""

CONTROLLERS = {
    "monitor": lambda: "monitor",
    "default": lambda: "default",
    "all": lambda: [betahook.Variance(), betahook.Search(warmup=1), betahook.Gradient(), betahook.Cap(30.0)],
}
"""Map a name to a function that makes what `attach` gets."""


@contextmanager
def float32_precision(precision):
    """Let torch multiply float32 tensors in a precision: "high" is TF32 on a GPU."""
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def train(model, hook, steps, batch=None):
    """A few steps of plain SGD; returns beta of every layer after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = batch or inputs("llama")
    path = []
    for _ in range(steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hook.step()
        path.append([layer.beta for layer in hook.layers.values()])
    return path


def enable_checkpointing(model, reentrant):
    """Under its name of today, or of older releases."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def fingerprint(model):
    return [(name, sorted(vars(module)), len(module._forward_pre_hooks)) for name, module in model.named_modules()]


def bits(state):
    """A state to compare bit by bit; the text of a tensor shows four digits."""
    match state:
        case torch.Tensor():
            return state.dtype, state.shape, state.contiguous().view(torch.uint8).tolist()
        case dict():
            return {name: bits(value) for name, value in state.items()}
        case list() | tuple():
            return [bits(value) for value in state]
        case _:
            return state


def move(hook, per_head):
    """Give every layer, or every head, a beta of its own."""
    for index, layer in enumerate(hook.layers.values()):
        factor = torch.linspace(0.5, 1.5, layer.heads) if per_head else 1.3 + 0.1 * index
        layer.head_beta = factor * layer.head_beta


def check_fold(model, x):
    """Fold a beta that differs by layer, and compare the output of the model before and after."""
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        move(hook, per_head=False)
        expected = model(x)
        betahook.fold(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
