"""Measure what betahook adds to a training step on a GPU: eager, compiled, and with CUDA graphs.

    python examples/gpu.py                             # Llama of 1 B, bfloat16, 4,096 tokens: some minutes on an H200
    python examples/gpu.py --size gpt2 --modes eager   # GPT-2-small, 4 x 1,024 tokens
    python examples/gpu.py --size tiny --device cpu    # tries the script where there is no GPU

A fresh model for each mode and way, in turn, and the unhooked one twice: first and last, which shows how steady the
machine is. Without a compiler also what people do without betahook. Times are of blocks of ten steps after a warm-up,
so that a step that waits for the host shows, and spread measuring comes once to every layer. Prints a table and writes
`gpu.json`.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import betahook
from benchmark import TODAY
from timing import build, machine, seconds, summary

BLOCK = 10
"""Steps that are timed together."""

WARM_UP = 15
"""Steps before."""

SIZES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "1B": (
        "llama",
        dict(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=131072,
        ),
        1,
        4096,
    ),
    "gpt2": ("gpt2", dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0), 4, 1024),
    "tiny": (
        "llama",
        dict(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
        ),
        1,
        256,
    ),
}
"""Model type, config, batch and length."""

MODES: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "compiled": dict(fullgraph=True),
    "CUDA graphs": dict(fullgraph=True, mode="reduce-overhead"),
}
"""Options of `torch.compile` by name."""


AFTER = betahook.Search(warmup=0, plateau_batches=0, rise_batches=1)
"""The default controller, whose opening ends at once."""

OURS: dict[str, dict[str, Any]] = {
    "monitor": dict(controller="monitor"),
    "default, every layer": dict(controller=AFTER, interval=1),
    "default, spread": dict(controller=AFTER),
    "default, not measured": dict(controller=AFTER, interval=10**6),
}
"""Options of `betahook.attach` by name."""

Way = Callable[[nn.Module], AbstractContextManager[dict[str, Any]]]
"""Hooks a model for a while; gives further arguments of its forward, and the hook under that name."""


def unhooked(model: nn.Module) -> AbstractContextManager[dict[str, Any]]:
    return nullcontext({})


@contextmanager
def hooked(options: dict[str, Any], model: nn.Module) -> Iterator[dict[str, Any]]:
    with betahook.attach(model, **options) as hook:
        yield {"hook": hook}


def ways(mode: str) -> dict[str, Way]:
    """Everything that is compared, by name."""
    ours = {name: partial(hooked, options) for name, options in OURS.items()}
    return {"unhooked": unhooked, **ours, **(TODAY if mode == "eager" else {}), "unhooked again": unhooked}


def measure(
    model: nn.Module, way: Way, compiled: dict[str, Any] | None, batch: int, length: int, blocks: int
) -> dict[str, Any]:
    """Train a model, and return the seconds of a step and of the first one, and the peak memory in bytes."""
    device = next(model.parameters()).device
    model.loss_function = model.loss_function  # that of GPT-2 is found with a warning, which the compiler refuses
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(0, model.config.vocab_size, (batch, length), device=device)
    with way(model) as further:
        hook = further.pop("hook", None)
        forward: Callable[..., Any] = model if compiled is None else torch.compile(model, **compiled)

        def steps(number: int) -> None:
            for _ in range(number):
                forward(input_ids=ids, labels=ids, use_cache=False, **further).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if hook is not None:
                    hook.step()

        first = seconds(lambda: steps(1), device)
        steps(WARM_UP)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = [seconds(lambda: steps(BLOCK), device) / BLOCK for _ in range(blocks)]
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"seconds": summary(times), "first": first, "peak": peak}


def compare(
    mode: str, kind: str, config: dict[str, Any], batch: int, length: int, blocks: int, device: str
) -> dict[str, dict[str, Any]]:
    """Map each way to what `measure` returns, and the ratio to the mean of the unhooked ones."""
    rows = {}
    for name, way in ways(mode).items():
        torch.compiler.reset()
        gc.collect()
        model = build(kind, config, device, torch.bfloat16)
        rows[name] = measure(model, way, MODES[mode], batch, length, blocks)
        del model
    plain = [rows[name]["seconds"]["median"] for name in ("unhooked", "unhooked again")]
    for row in rows.values():
        row["ratio"] = 2 * row["seconds"]["median"] / sum(plain)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--size", choices=list(SIZES), default="1B")
    parser.add_argument("--layers", type=int, help="fewer of them, where compiling takes long")
    parser.add_argument("--blocks", type=int, default=7, help=f"of {BLOCK} steps each")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="folder of the results")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch finds no CUDA here; to try the script give --size tiny --device cpu")
    kind, config, batch, length = SIZES[options.size]
    if options.layers:
        config = {**config, "n_layer" if kind == "gpt2" else "num_hidden_layers": options.layers}
    torch.manual_seed(0)
    print(machine(options.device))
    start, result = time.perf_counter(), {}
    for mode in options.modes:
        result[mode] = compare(mode, kind, config, batch, length, options.blocks, options.device)
        print(f"{mode:24} {'ratio':>7} {'ms':>9} {'quartiles':>19} {'first, s':>9} {'peak MiB':>9}")
        for way, row in result[mode].items():
            low, median, high = (1e3 * row["seconds"][name] for name in ("low", "median", "high"))
            print(
                f"{way:24} {row['ratio']:>7.3f} {median:>9.2f} {low:>9.2f} {high:>9.2f} {row['first']:>9.1f} "
                f"{row['peak'] / 2**20:>9.0f}"
            )
    print(f"{time.perf_counter() - start:.0f} s in all")
    options.output.mkdir(parents=True, exist_ok=True)
    about = {"machine": machine(options.device), "model": kind, "config": config, "batch": batch, "length": length}
    (options.output / "gpu.json").write_text(json.dumps({**about, "result": result}, indent=1))


if __name__ == "__main__":
    main()
