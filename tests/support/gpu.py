"""Models, batches and expected statistics for tests on a GPU."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

HEADS, HEAD_DIM, LENGTH = 4, 64, 200
WIDTH = HEADS * HEAD_DIM


def llama(dtype=torch.bfloat16, backend="sdpa", layers=2, key_heads=2):
    """A Llama in training mode whose heads fit every kernel, with weights that spread its scores, and its batch."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=key_heads,
        vocab_size=128,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation=backend, dtype=dtype).cuda().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.normal_(std=2 * WIDTH**-0.5)
    ids = torch.randint(0, 128, (2, LENGTH), device="cuda")
    return model, {"input_ids": ids, "labels": ids}


class Block(nn.Module):
    """Attention by hand; `mix` turns q, k and v `[batch, heads, length, d_k]` into values."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, HEAD_DIM
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def split(self, x):
        return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)

    def forward(self, x, padding=None):
        q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        return self.mix(q, k, v, padding).transpose(1, 2).flatten(2)


class ByHand(Block):
    """A product, a causal mask and a softmax, as in nanoGPT."""

    def mix(self, q, k, v, padding):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], device=q.device).triu(1).bool(), float("-inf"))
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None], float("-inf"))
        return torch.softmax(scores, -1) @ v


class Fused(Block):
    """By `F.scaled_dot_product_attention`."""

    def mix(self, q, k, v, padding):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def network(kind, dtype=torch.float32):
    """An attention of a kind behind a projection, with weights that spread its scores, and its input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind()).to("cuda", dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 2
    return model, torch.randn(2, LENGTH, WIDTH, device="cuda", dtype=dtype)


@torch.no_grad()
def components(model, x):
    """q and k of the attention of a network, `[batch, heads, tokens, d_k]` each."""
    hidden, block = model[0](x), model[1]
    return block.split(block.q_proj(hidden)), block.split(block.k_proj(hidden))


def expected(q, k, allowed, beta):
    """Statistics of each head by their names, from the whole score matrix in float64.

    Args:
        q, k: `[batch, heads, tokens, d_k]`.
        allowed: boolean, `[queries, keys]`.
        beta: of the logits.
    """
    scores = q.double() @ k.double().mT
    pairs = scores[:, :, allowed].transpose(0, 1).flatten(1)
    mean = scores.masked_fill(~allowed, 0).sum(-1) / allowed.sum(-1)
    from_row = (scores - mean[..., None]).masked_fill(~allowed, 0)
    weights = (scores * beta).masked_fill(~allowed, -torch.inf).softmax(-1)
    return {
        "mean": pairs.mean(-1),
        "std": pairs.std(-1, correction=0),
        "row_std": (from_row.square().sum((0, 2, 3)) / pairs.shape[1]).sqrt(),
        "max_logit": (pairs * beta).abs().amax(-1),
        "entropy": -torch.special.xlogy(weights, weights).sum(-1).mean((0, 2)),
    }
