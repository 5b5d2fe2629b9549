"""Layers and recorders on a state of their own, without a hook."""

import torch
from torch import nn

from betahook.layer import AttentionLayer, size_of
from betahook.models.discovery import AttentionModule
from betahook.models.families import Facts
from betahook.state.state import State
from betahook.tap.recorder import Recorder

CPU = torch.device("cpu")


def attention(module, heads, head_dim, route="interface"):
    return AttentionModule(module, heads, head_dim, route, Facts())


def make(*attentions, when="training", per_head=False):
    """The state of attention modules called a, b, ..., with a layer and a recorder for each."""
    sizes = [size_of(each) for each in attentions]
    state = State(sizes, per_head=per_head, controllers=1, device=CPU)
    placed = [(name, each, state, place) for name, each, place in zip("abcdef", attentions, state.ranges, strict=False)]
    layers = [AttentionLayer(*each) for each in placed]
    return state, layers, [Recorder(*each, owner=None, when=when) for each in placed]


def projecting(heads, width):
    """An attention module with projections of a known form, keys of half as many heads."""
    module = nn.Module()
    module.q_proj, module.k_proj = nn.Linear(width, heads * 8), nn.Linear(width, heads * 4)
    return module
