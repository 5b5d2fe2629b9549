"""Memories that no checkpoint could hold: each message, in the first step."""

from dataclasses import dataclass

import pytest
import torch

from betahook.control.base import Controller
from support.observations import observe, run


@pytest.mark.parametrize(
    ("name", "made", "updated", "kind", "said"),
    [
        ("a/b", None, None, ValueError, r"made a memory called 'a/b'; expected a name without a /.* Rename it"),
        ("", None, None, ValueError, r"made a memory called ''; expected a name"),
        (3, None, None, ValueError, r"made a memory called 3; expected a name"),
        ("n", lambda beta: beta.sum(), None, TypeError, r"'n' a torch.float64 tensor of shape \[\]; expected .*\[2\]"),
        ("n", torch.Tensor.half, None, TypeError, r"a torch.float16 tensor of shape \[2\]; expected .* or torch.bool"),
        ("n", None, lambda value: value[:1], TypeError, r"'n' a torch.float64 tensor of shape \[1\]; expected a"),
        ("n", None, lambda value: value > 0, TypeError, r"torch.bool .*; expected a torch.float64 tensor of shape \[2"),
        ("n", None, lambda value: 0, TypeError, r"Remembering\(\) made the memory 'n' 0; expected a"),
    ],
)
def test_a_memory_that_no_checkpoint_holds(name, made, updated, kind, said):
    @dataclass
    class Remembering(Controller):
        def start(self, beta):
            return {name: (made or torch.zeros_like)(beta)}

        def update(self, beta, observation, state):
            return beta, {name: updated(value) if updated else value for name, value in state.items()}

    with pytest.raises(kind, match=said):
        run(Remembering(), [observe(units=2)], beta=[1.0, 1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_a_memory_that_a_checkpoint_holds(dtype):
    @dataclass
    class Remembering(Controller):
        def start(self, beta):
            return {"n": torch.zeros_like(beta, dtype=dtype)}

        def update(self, beta, observation, state):
            return beta, {"n": (state["n"] + 1).to(torch.float64 if dtype == torch.float32 else dtype)}

    run(Remembering(), [observe(units=2)] * 2, beta=[1.0, 1.0])
