"""Tiny models made from configs, deterministic inputs with padding, and an independent view of their attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SIZE = dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=32, vocab_size=64)
GROUPED = dict(num_key_value_heads=2)

CONFIGS = {
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig, {**SIZE, **GROUPED}),
    "gpt2": ("GPT2LMHeadModel", transformers.GPT2Config, dict(n_embd=32, n_head=4, n_layer=2, vocab_size=64)),
    "bert": ("BertForMaskedLM", transformers.BertConfig, SIZE),
    "t5": (
        "T5ForConditionalGeneration",
        transformers.T5Config,
        dict(d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=32, vocab_size=64, decoder_start_token_id=0),
    ),
    "qwen3": ("Qwen3ForCausalLM", transformers.Qwen3Config, {**SIZE, **GROUPED, "head_dim": 8}),
    "gemma2": (
        "Gemma2ForCausalLM",
        transformers.Gemma2Config,
        {**SIZE, **GROUPED, "head_dim": 8, "sliding_window": 8, "attn_logit_softcapping": 2.0},
    ),
    "mistral": ("MistralForCausalLM", transformers.MistralConfig, {**SIZE, **GROUPED, "sliding_window": 8}),
    "gpt_neox": ("GPTNeoXForCausalLM", transformers.GPTNeoXConfig, SIZE),
    "phi3": ("Phi3ForCausalLM", transformers.Phi3Config, {**SIZE, **GROUPED, "pad_token_id": 0, "eos_token_id": 2}),
    "opt": (
        "OPTForCausalLM",
        transformers.OPTConfig,
        dict(
            hidden_size=32,
            num_attention_heads=4,
            num_hidden_layers=2,
            ffn_dim=32,
            vocab_size=64,
            word_embed_proj_dim=32,
        ),
    ),
    "vit": (
        "ViTForImageClassification",
        transformers.ViTConfig,
        dict(
            hidden_size=32,
            num_attention_heads=4,
            num_hidden_layers=2,
            intermediate_size=32,
            image_size=16,
            patch_size=4,
        ),
    ),
}
"""Family to model class, config class and sizes."""

NORMED = {
    "gemma3": (
        "Gemma3ForCausalLM",
        transformers.Gemma3TextConfig,
        {**SIZE, **GROUPED, "head_dim": 8, "sliding_window": 8},
    ),
    "olmo2": ("Olmo2ForCausalLM", transformers.Olmo2Config, {**SIZE, **GROUPED}),
    "persimmon": ("PersimmonForCausalLM", transformers.PersimmonConfig, SIZE),
    "stablelm": ("StableLmForCausalLM", transformers.StableLmConfig, {**SIZE, **GROUPED, "qk_layernorm": True}),
}
"""More families, whose query passes a norm of its own kind."""

EAGER_ONLY = {"gemma2"}
"""Families that transformers refuses to run with sdpa; 5.1 runs them, without their soft cap."""

FAMILIES = [
    (family, backend)
    for family in CONFIGS
    for backend in ("eager", "sdpa")
    if not (backend == "sdpa" and family in EAGER_ONLY)
]


def build(family: str, backend: str = "eager", dtype: torch.dtype = torch.float32, **config: object) -> nn.Module:
    """The tiny model of a family in training mode, without dropout, with weights that spread the scores."""
    name, config_class, sizes = {**CONFIGS, **NORMED}[family]
    torch.manual_seed(0)
    model = getattr(transformers, name)._from_config(
        config_class(**{**sizes, **config}), attn_implementation=backend, dtype=dtype
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "dropout_prob", "dropout_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.train()


def inputs(family: str, length: int = 24, *, padded: bool = True) -> dict[str, Tensor]:
    """A batch of two with labels; the second row is padded."""
    generator = torch.Generator().manual_seed(2)
    if family == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    ids = torch.randint(3, 64, (2, length), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, -5:] = 0
    return batch


@dataclass
class Traced:
    """One attention as eager computes it: operands of its score product and what the softmax received."""

    query: Tensor
    key: Tensor
    softmax_input: Tensor

    def scores(self) -> tuple[Tensor, Tensor]:
        """Raw scores in float64 and the pairs that the mask leaves, both `[batch, heads, queries, keys]`."""
        scores = self.query.double() @ self.key.double()
        return scores, self.softmax_input > torch.finfo(self.softmax_input.dtype).min / 2


@contextmanager
def trace() -> Iterator[list[Traced]]:
    """Record every eager attention, by watching `torch.matmul` and softmax and nothing of betahook."""
    calls: list[Traced] = []
    products: list[tuple[Tensor, Tensor]] = []
    matmul, softmax = torch.matmul, nn.functional.softmax

    def watched_matmul(a: Tensor, b: Tensor, **kwargs: object) -> Tensor:
        if a.dim() == 4:
            products.append((a.detach(), b.detach()))
        return matmul(a, b, **kwargs)

    def watched_softmax(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        calls.append(Traced(*products[-1], x.detach()))
        return softmax(x, *args, **kwargs)

    with mock.patch("torch.matmul", watched_matmul), mock.patch("torch.nn.functional.softmax", watched_softmax):
        yield calls


@contextmanager
def delegating(before: Callable[[nn.Module], None] = lambda module: None) -> Iterator[str]:
    """The name of an attention function that looks torch's up as the documentation of transformers has it.

    It calls `before` first, with the module.
    """

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any):
        before(module)
        function = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", sdpa_attention_forward)
        return function(module, query, key, value, mask, **options)

    AttentionInterface.register("delegating", attention)
    AttentionMaskInterface.register("delegating", sdpa_mask)
    yield "delegating"
    del AttentionInterface._global_mapping["delegating"]
    del AttentionMaskInterface._global_mapping["delegating"]


def derivative(layer, loss, shift=5e-3):
    """dL / d log beta of a layer by a central difference; `loss()` is a tensor."""
    own, losses = layer.head_beta, []
    for factor in (math.exp(-shift), math.exp(shift)):
        layer.head_beta = factor * own
        losses.append(float(loss().detach()))
    layer.head_beta = own
    return (losses[1] - losses[0]) / (2 * shift)
