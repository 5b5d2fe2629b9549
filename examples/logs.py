"""Measure the cost of logging: to read the numbers, to put findings into words, to write to TensorBoard.

    python examples/logs.py
    python examples/logs.py --config num_hidden_layers=32 num_attention_heads=32 hidden_size=256 --logs 500

Trains a small model and logs after every step. Prints the median of each part of a log, how many pictures were drawn,
and what all of it comes to for each log; on the CPU, in milliseconds of the process. Writes `logs.json`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch

import betahook
import timing
from benchmark import Bench, override
from betahook.integrations.tensorboard import TensorBoardWriter
from betahook.report import pictures

SIZES = dict(num_hidden_layers=12, hidden_size=96, intermediate_size=96, num_attention_heads=12, vocab_size=64)


def compare(bench: Bench, logs: int) -> dict[str, float]:
    """Milliseconds of the parts of a log, the number of pictures, and the milliseconds of all for each log."""
    parts: dict[str, list[float]] = {"hook.metrics()": [], "hook.findings()": [], "write, the picture apart": []}
    drawn: list[float] = []

    def draw(*args: Any) -> bytes:
        made: list[bytes] = []
        drawn.append(timing.seconds(lambda: made.append(picture(*args)), bench.device))
        return made[0]

    picture = pictures.draw
    with (
        TemporaryDirectory() as folder,
        mock.patch.object(pictures, "draw", draw),
        betahook.attach(bench.model) as hook,
        TensorBoardWriter(folder) as writer,
    ):
        for step in range(logs):
            bench.step(hook)
            parts["hook.metrics()"].append(timing.seconds(hook.metrics, bench.device))
            parts["hook.findings()"].append(timing.seconds(hook.findings, bench.device))
            before = sum(drawn)
            whole = timing.seconds(lambda step=step: writer.write(hook, step), bench.device)
            parts["write, the picture apart"].append(whole - (sum(drawn) - before))
        written = parts["write, the picture apart"]
        return {
            **{name: 1e3 * statistics.median(times) for name, times in parts.items()},
            "a picture": 1e3 * statistics.median(drawn),
            "pictures": len(drawn),
            "write, with its share of pictures": 1e3 * (sum(written) + sum(drawn)) / logs,
        }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", nargs="*", type=override, default=[], metavar="NAME=VALUE", help="of the Llama")
    parser.add_argument("--logs", type=int, default=200)
    timing.add_options(parser, Path("runs/logs"))
    options = timing.start(parser, arguments)
    model = timing.build("llama", {**SIZES, **dict(options.config)}, options.device, getattr(torch, options.dtype))
    result = compare(Bench(model, batch=1, length=32), options.logs)
    for name, value in result.items():
        print(f"{name:34} {value:>8.0f}" if name == "pictures" else f"{name:34} {value:>8.2f} ms")
    timing.write(result, "logs", options)


if __name__ == "__main__":
    main()
