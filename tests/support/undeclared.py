"""Ten attentions that do not say how many heads they have, and a model of transformers around one of them."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

HEADS, HEAD_DIM, WIDTH, LENGTH = 4, 6, 24, 9
CAUSAL = torch.ones(LENGTH, LENGTH).triu(1).bool()


def attend(q, k, v):
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def eager(module, query, key, value, mask, scaling, **kwargs):
    return attend(query, key, value).transpose(1, 2), None


def split(x, heads=HEADS):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Fused(nn.Module):
    """One projection of q, k and v under a name that says nothing, and the number of heads in the code alone."""

    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = (split(part) for part in self.projection(x).chunk(3, -1))
        return self.mix(q, k, v).transpose(1, 2).flatten(2)


class InterfaceAttention(Fused):
    def __init__(self):
        super().__init__()
        self.config = PretrainedConfig(attn_implementation="sdpa")

    def mix(self, q, k, v):
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return function(self, q, k, v, None, scaling=HEAD_DIM**-0.5, is_causal=False)[0].transpose(1, 2)


class SdpaAttention(Fused):
    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class CausalByHandAttention(Fused):
    def mix(self, q, k, v):
        scores = (q @ k.mT / math.sqrt(HEAD_DIM)).masked_fill(CAUSAL[: q.shape[-2], : q.shape[-2]], -math.inf)
        return scores.softmax(-1) @ v


class Einsum(Fused):
    def mix(self, q, k, v):
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(HEAD_DIM)
        return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


class Mixer(Fused):
    def mix(self, q, k, v):
        return (q @ k.mT / math.sqrt(HEAD_DIM)).softmax(-1) @ v


class LogSoftmaxMixer(Fused):
    def mix(self, q, k, v):
        return F.log_softmax(q @ k.mT / math.sqrt(HEAD_DIM), -1).exp() @ v


class CallsAFunction(Fused):
    def mix(self, q, k, v):
        return attend(q, k, v)


class Attend(nn.Module):
    """As in x-transformers: the softmax in a part without parameters."""

    def forward(self, q, k, v):
        return (q @ k.mT / math.sqrt(HEAD_DIM)).softmax(-1) @ v


class OwnsAttend(Fused):
    def __init__(self):
        super().__init__()
        self.mix = Attend()


class OneHead(Fused):
    def forward(self, x):
        q, k, v = self.projection(x).chunk(3, -1)
        return attend(q, k, v)


class MultiQuery(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, HEAD_DIM), nn.Linear(WIDTH, HEAD_DIM)

    def forward(self, x):
        return attend(split(self.a(x)), split(self.b(x), 1), split(self.c(x), 1)).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """A block that holds no attention module: norms, attention and feed-forward in one forward."""

    def __init__(self):
        super().__init__()
        self.norm, self.projection = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.feed_forward = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))

    def forward(self, x, attention_mask):
        q, k, v = (split(part) for part in self.projection(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, attention_mask).transpose(1, 2).flatten(2)
        return x + self.feed_forward(x)


CLASSES = [
    InterfaceAttention,
    SdpaAttention,
    CausalByHandAttention,
    Einsum,
    Mixer,
    LogSoftmaxMixer,
    CallsAFunction,
    OwnsAttend,
    OneHead,
    MultiQuery,
    Block,
]


class Model(PreTrainedModel):
    config_class = PretrainedConfig
    _supports_sdpa = True

    def __init__(self, kind):
        super().__init__(PretrainedConfig(hidden_size=WIDTH))
        self.layer, self.readout = kind(), nn.Linear(WIDTH, 1)

    def forward(self, x, labels=None):
        extra = [None] if isinstance(self.layer, Block) else []
        output = self.readout(self.layer(x, *extra))
        return output if labels is None else {"loss": (output - labels).square().mean(), "logits": output}
