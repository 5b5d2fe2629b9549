"""The std of the scores at the start of the flip task, against what its assumptions say.

    python examples/flip/start.py

The paper says that LayerNorm and Xavier initialisation give q and k components of unit variance, and so scores of
standard deviation sqrt(d_k). The flip model is post-norm, so no LayerNorm comes before its attention, and Xavier's
variance is 2 / (rows + columns) of the weight that is initialised: of q, k and v together, as in torch's
MultiheadAttention, half of that of W_q alone. Every std is that of the population.
"""

from __future__ import annotations

import statistics

import torch
from torch import nn

import betahook
from model import FlipConfig, FlipModel
from task import TABLE_1, Strings

SEEDS = range(10)
STRINGS = 256


def start_std(seed: int, *, layer_norm: bool, unfused: bool) -> float:
    """Standard deviation of the scores of a fresh model of the first row, over all pairs of `STRINGS` strings."""
    torch.manual_seed(seed)
    row = TABLE_1[0]
    model = FlipModel(FlipConfig(symbols=row.symbols, length=row.length, attn_implementation="eager"))
    qkv = model.attention.qkv
    if unfused:
        for part in qkv.weight.chunk(3):
            nn.init.xavier_uniform_(part)
    if layer_norm:
        norm = nn.LayerNorm(row.length)
        model.attention.register_forward_pre_hook(lambda module, args: (norm(args[0]),))
    with betahook.attach(model, controller="monitor", when="always") as hook, torch.no_grad():
        model(Strings(STRINGS, row, torch.Generator().manual_seed(seed)).ids)
        return float(hook.layers["attention"].statistics.std)


def main() -> None:
    print(f"std of the scores, mean of {len(SEEDS)} seeds; sqrt(d_k) = {TABLE_1[0].length ** 0.5:.2f}")
    for layer_norm in (False, True):
        for unfused in (False, True):
            mean = statistics.mean(start_std(seed, layer_norm=layer_norm, unfused=unfused) for seed in SEEDS)
            title = f"LayerNorm {'before the attention' if layer_norm else 'only behind it'}"
            print(f"{title:<30} Xavier on {'W_q and W_k each' if unfused else 'W_qkv at once':<17} {mean:6.2f}")


if __name__ == "__main__":
    main()
