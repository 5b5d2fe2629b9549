"""Evaluation mode and random numbers, for a while: of a model that is run again, and of a weight that is looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module inside is in the mode that it was in."""
    with ExitStack() as stack:
        for part in module.modules():
            stack.callback(setattr, part, "training", part.training)
        module.eval()
        yield


@contextmanager
def random_state_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Let what runs draw the random numbers that come next on the CPU, and on the devices of some tensors."""
    devices = {tensor.device for tensor in tensors}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(device for device in devices if device.type == "cuda"))
        if any(device.type == "mps" for device in devices):  # has one state, which fork_rng cannot ask for
            stack.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
        yield
