"""Shared by the scripts that measure cost: models made from configs, times, bytes and their summaries."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM


def build(name: str, overrides: dict[str, Any], device: str, dtype: torch.dtype) -> nn.Module:
    """A fresh model of a model type of transformers, with a language modelling head."""
    if name not in CONFIG_MAPPING:
        raise SystemExit(f"--model {name}: transformers has no such model type; give one such as gpt2, llama or bert")
    config = AutoConfig.for_model(name, **overrides)
    for head in (AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM):
        if type(config) in head._model_mapping:
            with torch.device(device):  # which draws weights faster
                model = head.from_config(config, attn_implementation="sdpa", dtype=dtype)
            return model.train()
    raise SystemExit(f"--model {name}: transformers has no language model of this type")


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Time a call, in seconds: of the process on the CPU, else until the device has finished."""

    def clock() -> float:
        if device.type == "cpu":
            return time.process_time()
        torch.accelerator.synchronize()
        return time.perf_counter()

    start = clock()
    function()
    return clock() - start


def allocated(run: Callable[[], object]) -> int:
    """Peak number of bytes that `run` allocates on the CPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def summary(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else 3 * values
    return {"median": median, "low": low, "high": high}


def machine(device: str) -> str:
    """Describe the machine in words."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor() or platform.machine()
    return (
        f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, transformers {transformers.__version__}"
    )


def add_options(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Add the options that the scripts share."""
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--output", type=Path, default=folder, help="folder of the results")


def start(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the options, make the folder of the results, and print what machine this is."""
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch finds no CUDA here; give --device cpu")
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    options.output.mkdir(parents=True, exist_ok=True)
    print(machine(options.device))
    return options


def write(result: dict[str, Any], name: str, options: argparse.Namespace) -> None:
    """Write a result with the machine and the options that made it."""
    settings = {key: str(value) for key, value in vars(options).items()}
    text = json.dumps({"machine": machine(options.device), "settings": settings, "result": result}, indent=1)
    (options.output / f"{name}.json").write_text(text, encoding="utf-8")
