"""Measure what betahook adds to a training step of a Llama on a GPU: eager, compiled, and with CUDA graphs.

    python examples/gpu.py                             # 1 B, bfloat16, 4,096 tokens: some minutes on an H100
    python examples/gpu.py --tiny --device cpu         # tries the script where there is no GPU

A fresh model for each mode and way, in turn, and the unhooked one twice: first and last, which shows how steady the
machine is. Times are of blocks of ten steps after a warm-up, so that a step that waits for the host shows, and spread
measuring comes once to every layer. Prints a table and writes `gpu.json`.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import betahook
from timing import build, machine, seconds, summary

BLOCK = 10
"""Steps that are timed together."""

WARM_UP = 15
"""Steps before; in the first ten or so of a fresh model the default controller looks at the weights."""

SIZES: dict[str, dict[str, Any]] = {
    "1 B": dict(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
    "tiny": dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    ),
}

MODES: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "compiled": dict(fullgraph=True),
    "CUDA graphs": dict(fullgraph=True, mode="reduce-overhead"),
}
"""Options of `torch.compile` by name."""


def ways() -> dict[str, dict[str, Any] | None]:
    """Options of `betahook.attach` by name; None for no hook."""
    after = betahook.Search(warmup=0, plateau_batches=0, rise_batches=1)  # its opening ends at once
    return {
        "unhooked": None,
        "monitor": dict(controller="monitor"),
        "default, every layer": dict(interval=1),
        "default, spread": dict(controller=after),
        "default, not measured": dict(controller=after, interval=10**6),
        "unhooked again": None,
    }


def measure(
    model: nn.Module, options: dict[str, Any] | None, compiled: dict[str, Any] | None, length: int, blocks: int
) -> dict[str, Any]:
    """Train a model, and return the seconds of a step and of the first one, and the peak memory in bytes."""
    device = next(model.parameters()).device
    hook = None if options is None else betahook.attach(model, **options)
    forward: Callable[..., Any] = model if compiled is None else torch.compile(model, **compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(0, model.config.vocab_size, (1, length), device=device)

    def steps(number: int) -> None:
        for _ in range(number):
            forward(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if hook is not None:
                hook.step()

    first = seconds(lambda: steps(1), device)
    steps(WARM_UP)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [seconds(lambda: steps(BLOCK), device) / BLOCK for _ in range(blocks)]
    if hook is not None:
        hook.detach()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"seconds": summary(times), "first": first, "peak": peak}


def compare(mode: str, size: str, length: int, blocks: int, device: str) -> dict[str, dict[str, Any]]:
    """Map each way to what `measure` returns, and the ratio to the mean of the unhooked ones."""
    rows = {}
    for way, options in ways().items():
        torch.compiler.reset()
        gc.collect()
        model = build("llama", SIZES[size], device, torch.bfloat16)
        rows[way] = measure(model, options, MODES[mode], length, blocks)
        del model
    plain = [rows[way]["seconds"]["median"] for way in ("unhooked", "unhooked again")]
    for row in rows.values():
        row["ratio"] = 2 * row["seconds"]["median"] / sum(plain)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--tiny", action="store_true", help="a model that takes no time")
    parser.add_argument("--length", type=int, help="of the sequence, by default 4,096, or 256 of a tiny model")
    parser.add_argument("--blocks", type=int, default=7, help=f"of {BLOCK} steps each")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="folder of the results")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch finds no CUDA here; to try the script give --tiny --device cpu")
    size, length = ("tiny", 256) if options.tiny else ("1 B", 4096)
    length = options.length or length
    torch.manual_seed(0)
    print(machine(options.device))
    start, result = time.perf_counter(), {}
    for mode in options.modes:
        result[mode] = compare(mode, size, length, options.blocks, options.device)
        print(f"{mode:24} {'ratio':>7} {'ms':>9} {'quartiles':>19} {'first, s':>9} {'peak MiB':>9}")
        for way, row in result[mode].items():
            low, median, high = (1e3 * row["seconds"][name] for name in ("low", "median", "high"))
            print(
                f"{way:24} {row['ratio']:>7.3f} {median:>9.2f} {low:>9.2f} {high:>9.2f} {row['first']:>9.1f} "
                f"{row['peak'] / 2**20:>9.0f}"
            )
    print(f"{time.perf_counter() - start:.0f} s in all")
    options.output.mkdir(parents=True, exist_ok=True)
    about = {"machine": machine(options.device), "model": size, "length": length, "dtype": "bfloat16"}
    (options.output / "gpu.json").write_text(json.dumps({**about, "result": result}, indent=1))


if __name__ == "__main__":
    main()
