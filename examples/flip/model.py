"""The transformer of the flip task: one layer, one head, post-norm, width = string length = d_k.

8,000 parameters for 100 symbols and length 20.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class FlipConfig(PreTrainedConfig):
    """Configuration: `symbols` in the alphabet, and `length` of a string, which is also the model's width and d_k."""

    model_type = "flip"

    def __init__(self, symbols: int = 100, length: int = 20, **kwargs: object) -> None:
        self.symbols = symbols
        self.length = length
        self.num_attention_heads = 1
        super().__init__(**kwargs)


class XavierLinear(nn.Linear):
    """Xavier-uniform weight, zero bias."""

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)


class FlipAttention(nn.Module):
    """Self-attention without a mask; the scale is the model's own, `1/sqrt(d_k)`."""

    is_causal = False

    def __init__(self, config: FlipConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = 1
        self.head_dim = config.length
        self.qkv = XavierLinear(config.length, 3 * config.length)
        self.out = XavierLinear(config.length, config.length)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, dim=-1))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        mixed, _ = attend(self, query, key, value, None, scaling=self.head_dim**-0.5)
        return self.out(mixed.flatten(2))


def eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float
) -> tuple[Tensor, Tensor]:
    weights = (query @ key.mT * scaling).softmax(-1)
    return (weights @ value).transpose(1, 2), weights


class FlipModel(PreTrainedModel):
    """Predict, at each position, the symbol of the reversed string: `input_ids [batch, length]` to logits."""

    config_class = FlipConfig
    _supports_sdpa = True

    def __init__(self, config: FlipConfig) -> None:
        super().__init__(config)
        d = config.length
        self.embed = nn.Linear(config.symbols, d)
        self.register_buffer("one_hot", torch.eye(config.symbols), persistent=False)
        self.register_buffer("positions", sinusoids(d, d), persistent=False)
        self.attention = FlipAttention(config)
        self.attention_norm = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))
        self.mlp_norm = nn.LayerNorm(d)
        self.head = nn.Sequential(nn.Linear(d, d), nn.LayerNorm(d), nn.ReLU(), nn.Linear(d, config.symbols))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: PyTorch initialised the modules when they were made."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> TokenClassifierOutput:
        x = self.embed(self.one_hot[input_ids]) + self.positions
        x = self.attention_norm(x + self.attention(x))
        x = self.mlp_norm(x + self.mlp(x))
        logits = self.head(x)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return TokenClassifierOutput(loss=loss, logits=logits)


def sinusoids(length: int, width: int) -> Tensor:
    """Sinusoidal position encoding `[length, width]` (Vaswani et al. 2017, section 3.5)."""
    position = torch.arange(length)[:, None]
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
    table = torch.zeros(length, width)
    table[:, 0::2] = torch.sin(position * frequency)
    table[:, 1::2] = torch.cos(position * frequency)
    return table
