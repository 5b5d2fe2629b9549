"""Attention modules that are written by hand, or ask torch for their attention."""

import math

import torch
import torch.nn.functional as F
from torch import nn

HEADS, WIDTH, LENGTH = 4, 32, 12


class Block(nn.Module):
    """An attention with separate projections; `mix` turns q, k and v `[batch, heads, length, d]` into values."""

    def __init__(self, mix=None):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mix = mix or self.mix

    def split(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x):
        q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        return self.mix(q, k, v).transpose(1, 2).flatten(2)


class FusedAttention(Block):
    """As in nanoGPT."""

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class ByHandAttention(Block):
    def mix(self, q, k, v):
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
        return self.values(scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), float("-inf")), v)

    def values(self, logits, v):
        return torch.softmax(logits, -1) @ v


class ToOneKey(FusedAttention):
    """Each query sees the first token alone, as cross-attention to the embedding of one picture does."""

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x[:, :1]), self.v_proj(x[:, :1])
        return self.mix(*map(self.split, (q, k, v))).transpose(1, 2).flatten(2)


class OfTorch(nn.MultiheadAttention):
    """torch's own, by one argument."""

    def __init__(self):
        super().__init__(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


class LengthDependent(Block):
    """Sorts the scores of more than 6 tokens, which is not followed."""

    def mix(self, q, k, v):
        scores = q @ k.mT / math.sqrt(self.head_dim)
        return (torch.sort(scores, -1).values if scores.shape[-1] > 6 else scores).softmax(-1) @ v


def make(kind):
    """An attention of a kind behind a projection, with weights that make its scores spread."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind())
    for parameter in model.parameters():
        parameter.data *= 3
    return model


@torch.no_grad()
def components(model, x):
    """q and k in float64, `[batch, heads, tokens, d_k]` each."""
    model = model.double()
    hidden = model[0](x.double())
    q, k = (
        projection(hidden).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for projection in (model[1].q_proj, model[1].k_proj)
    )
    model.float()
    return q, k


def causal_scores(model, x):
    """Raw scores over the causal pairs, in float64, `[heads, pairs]`."""
    q, k = components(model, x)
    return (q @ k.mT)[:, :, torch.ones(LENGTH, LENGTH).tril().bool()].transpose(0, 1).flatten(1)


PADDING = torch.arange(LENGTH) >= torch.tensor([[12], [9], [7]])
"""Where each of three sequences is padded."""


def padded_encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)
