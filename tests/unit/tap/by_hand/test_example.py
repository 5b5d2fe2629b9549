"""The example in the docstring of `betahook.tap.by_hand`, run line by line."""

import re

import torch
import torch.nn.functional as F
from torch import nn

import betahook
from betahook.tap import by_hand
from betahook.tap.by_hand import watching
from betahook.tap.by_hand.forward import FollowedForward
from betahook.tap.by_hand.traces import Operand, Scores
from support.attention import HEADS, WIDTH, make

LINES = [line.split("  # ") for line in by_hand.__doc__.splitlines() if "  # " in line]


def shown(trace):
    """A trace as the example shows it."""
    match trace:
        case Scores():
            return f"Scores(factor={trace.factor})"
        case Operand():
            return f"Operand(from_values={trace.from_values})"
    return "None" if trace is None else type(trace).__name__


class ExampleAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.made = []

    def split(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x):
        future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        names = {"F": F, "x": x, "future": future, "project": self.qkv, "split": self.split}
        for code, _ in LINES:
            exec(code.strip(), names)
            self.made.append(names[code.split(" = ")[0].split(",")[0].strip()])
        return names["output"]


def test_the_traces_are_as_shown(x, monkeypatch):
    forwards, model = [], make(ExampleAttention)

    def followed(*args, **kwargs):
        forwards.append(FollowedForward(*args, **kwargs))
        return forwards[-1]

    monkeypatch.setattr(watching, "FollowedForward", followed)
    with betahook.attach(model, controller="monitor"):
        model[1].made.clear()
        model(x)
    found = [shown(forwards[0].traces.get(tensor)) for tensor in model[1].made]
    assert len(found) == len(LINES) > 0
    for trace, (code, comment) in zip(found, LINES, strict=True):
        assert re.split(r"[,;]", comment)[0] == trace, code
