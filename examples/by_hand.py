"""Measure the cost of betahook where the attention is written by hand: training steps of a small GPT, in turn.

    python examples/by_hand.py --threads 1                             # 8 layers, 32 wide, 64 tokens
    python examples/by_hand.py --threads 1 --width 128 --length 128
    python examples/by_hand.py --threads 1 --compile               # by inductor: what of it goes into one graph

The model is written as nanoGPT is, its attention once with a product and a softmax and once with
`F.scaled_dot_product_attention`. Prints a table and writes `by_hand.json`. For models of transformers there is
`benchmark.py --small`.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import betahook
import timing
from benchmark import INTERVAL, SMALL, Bench, compare_small, summary

SYMBOLS, HEAD_DIM, LAYERS = 64, 8, 8


class CausalSelfAttention(nn.Module):
    """Attention of nanoGPT; `fused` chooses its form."""

    def __init__(self, width: int, length: int, fused: bool) -> None:
        super().__init__()
        self.n_head, self.n_embd, self.fused = width // HEAD_DIM, width, fused
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (part.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for part in (q, k, v))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
            y = F.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, length: int, fused: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, length, fused)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A language model that returns its loss as those of transformers do."""

    def __init__(self, width: int, length: int, fused: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=SYMBOLS)
        self.wte, self.wpe = nn.Embedding(SYMBOLS, width), nn.Embedding(length, width)
        self.h = nn.Sequential(*(Block(width, length, fused) for _ in range(LAYERS)))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, SYMBOLS, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        logits = self.lm_head(self.ln_f(self.h(self.wte(input_ids) + self.wpe(positions))))
        return SimpleNamespace(loss=F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


def compare_compiled(ours: Bench, unhooked: Bench, rounds: int) -> dict[str, dict[str, float]]:
    """Ratios of compiled steps after the opening to those of a model of its own without a hook, in turn."""
    unhooked.model.compile()
    found = {}
    for name, options in SMALL.items():
        with betahook.attach(ours.model, **options) as hook:
            for _ in range(2 * hook.controllers[0].opening_batches + 2):
                ours.step(hook)
            ours.model.compile()
            ratios = []
            for turn in range(rounds + 1):
                seconds = [sum(each.step(of) for _ in range(INTERVAL)) for each, of in ((ours, hook), (unhooked, None))]
                ratios += [seconds[0] / seconds[1]] if turn else []  # the first one compiles
        ours.model._compiled_call_impl = None  # else betahook refuses to attach to it
        found[name] = summary(ratios)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=32, help=f"of the model, a multiple of {HEAD_DIM}")
    parser.add_argument("--length", type=int, default=64, help="tokens")
    parser.add_argument("--compile", action="store_true", help="compile the models, by inductor")
    timing.add_options(parser, Path("runs/benchmark"))
    options = timing.start(parser, arguments)
    if options.width < HEAD_DIM or options.width % HEAD_DIM:
        parser.error(f"--width {options.width}: give a multiple of {HEAD_DIM}, the width of a head")
    result = {}
    for form, fused in (("product and softmax", False), ("F.scaled_dot_product_attention", True)):

        def bench(fused: bool = fused) -> Bench:
            model = GPT(options.width, options.length, fused).to(options.device, getattr(torch, options.dtype))
            return Bench(model, 1, options.length)

        compiles, rounds = options.compile, options.rounds
        result[form] = compare_compiled(bench(), bench(), rounds) if compiles else compare_small(bench(), rounds)
        print(form)
        for name, row in result[form].items():
            print(f"  {name:26} {row['median']:>7.3f} {row['low']:>7.3f} {row['high']:>7.3f}")
    timing.write(result, "by_hand", options)


if __name__ == "__main__":
    main()
