"""Measure what betahook adds to the time that torch.compile takes for a model.

    python examples/compile_time.py                     # a Llama of 8 layers, inductor on this machine
    python examples/compile_time.py --model gpt2 --config n_layer=4 n_embd=64 n_head=4 --rounds 1

Every round starts two processes, one for an unhooked model and one for a model with the default controller. Each
compiles its model into one graph, with a cold cache, and runs the first training step. Seconds are those of the process
and of the compilers that it starts, without the imports. Prints the medians, their ratio in each round from the least
to the largest, and writes `compile_time.json`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import betahook
import timing
from benchmark import override
from timing import build

LLAMA = [
    *("num_hidden_layers=8", "hidden_size=64", "intermediate_size=128", "num_attention_heads=4"),
    *("num_key_value_heads=2", "vocab_size=128"),
]
"""Config of a model whose compile time is that of its layers, whatever their width."""


def used() -> float:
    """Seconds of the processor that this process and those that it waited for have used."""
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


def first_step(options: argparse.Namespace, hooked: bool) -> float:
    """Compile a model and train it for one step; return the seconds of that alone."""
    torch.manual_seed(0)
    model = build(options.model, dict(options.config), options.device, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, model.config.vocab_size, (1, options.length), device=options.device)
    hook = betahook.attach(model) if hooked else None
    start = used()
    torch.compile(model, fullgraph=True)(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    if hook is not None:
        hook.step()
    return used() - start


def alone(arguments: list[str], way: str) -> float:
    """Run `first_step` in a process of its own, whose compilers find nothing in their caches."""
    with tempfile.TemporaryDirectory() as cache:
        # One thread: the time of compilers that outlive the measurement would not be counted.
        cold = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        environment = {**os.environ, **cold, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, __file__, *arguments, "--way", way]
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return float(output.split()[-1])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama", help="a model type of transformers")
    parser.add_argument("--config", nargs="*", type=override, default=[override(each) for each in LLAMA])
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--way", choices=["unhooked", "default"], help=argparse.SUPPRESS)  # of a process of its own
    timing.add_options(parser, Path("runs/compile_time"))
    options = timing.start(parser, arguments)
    if options.way:
        print(first_step(options, options.way == "default"))
        return
    given = sys.argv[1:] if arguments is None else arguments
    seconds: dict[str, list[float]] = {"unhooked": [], "default": []}
    for _ in range(options.rounds):
        for way, values in seconds.items():
            values.append(alone(given, way))
    ratios = [ours / plain for plain, ours in zip(*seconds.values(), strict=True)]
    for way, values in seconds.items():
        print(f"{way:10} {statistics.median(values):7.1f} s")
    print(f"{'ratio':10} {statistics.median(ratios):7.3f}  ({min(ratios):.3f} to {max(ratios):.3f})")
    timing.write({"seconds": seconds, "ratios": ratios}, "compile_time", options)


if __name__ == "__main__":
    main()
