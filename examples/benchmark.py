"""Measure the cost of betahook: training steps with and without it, in turn, in one process.

    python examples/benchmark.py                               # GPT-2-small, batch 1, length 1,024: minutes on a CPU
    python examples/benchmark.py --config n_layer=3 vocab_size=8192 --rounds 9
    python examples/benchmark.py --model llama --config num_hidden_layers=4 --dtype bfloat16 --device cuda --length 4096
    python examples/benchmark.py --small --model llama --config num_hidden_layers=8 hidden_size=32 \
        intermediate_size=64 num_attention_heads=2 num_key_value_heads=2 vocab_size=64 --length 64 --threads 1
    python examples/benchmark.py --attention                        # one attention layer in turn: for a busy machine

Every round runs one step of each way, ten with "monitor". Ratios are to the unhooked step of the same round, since
other work on the machine slows both. On the CPU, seconds are those of the process. Prints a table and writes
`benchmark.json` and `benchmark.png`, or `small.json`, or `attention.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers.modeling_utils import AttentionInterface

import betahook
import timing
from timing import allocated, build, seconds, summary

INTERVAL = 10
PAIRS = 20
"""Pairs of runs of one attention layer for every whole step."""

OURS = {
    "monitor": dict(controller="monitor", interval=INTERVAL),
    "default, in its opening": dict(),
}
"""Options of `betahook.attach` by name; in the opening every layer is measured in every step."""

SMALL = {
    "default": {},
    "every layer in every step": dict(interval=1),
    "not measured": dict(interval=1_000_000),
    "monitor": dict(controller="monitor"),
}
"""Options of `betahook.attach` by name, for a step that waits for the host."""


@contextmanager
def attention_weights(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Return the N x N weights of eager attention, and take their largest entries, as a logger would."""
    model.set_attn_implementation("eager")
    kept: list[Tensor] = []
    handle = model.register_forward_hook(
        lambda module, args, output: kept.extend(weight.detach().amax() for weight in output.attentions)
    )
    yield {"output_attentions": True}
    handle.remove()
    model.set_attn_implementation("sdpa")


@contextmanager
def all_scores(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Compute the full QK^T in every attention call, and its std over the causal pairs."""
    original = AttentionInterface.get_interface
    kept: list[Tensor] = []

    def get_interface(interface: AttentionInterface, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(interface, name, default)

        def watched(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                product = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT
                past = torch.ones(product.shape[-2:], dtype=torch.bool, device=product.device).tril()
                kept.append(product.float()[..., past].std())
            return function(module, query, key, *args, **kwargs)

        return watched

    with mock.patch.object(AttentionInterface, "get_interface", get_interface):
        yield {}


@contextmanager
def activation_cache(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Keep the output of every module, attention weights included, in a dictionary, as TransformerLens does."""
    cache: dict[str, Any] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            cache[name] = [part.detach() for part in parts if isinstance(part, Tensor)]

        return hook

    model.set_attn_implementation("eager")
    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules()]
    yield {"output_attentions": True}
    for handle in handles:
        handle.remove()
    model.set_attn_implementation("sdpa")


TODAY: dict[str, Callable[[nn.Module], AbstractContextManager[dict[str, Any]]]] = {
    "output_attentions, eager": attention_weights,
    "full QK^T in a hook": all_scores,
    "cache of all activations": activation_cache,
}
"""Ways to look at attention without betahook: contexts that give the further arguments of the model."""


class Bench:
    """Timed training steps of one model.

    Args:
        model: the model.
        batch, length: of the random tokens that it is trained on.
    """

    def __init__(self, model: nn.Module, batch: int, length: int) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(0, model.config.vocab_size, (batch, length), device=self.device)
        self.inputs = {"input_ids": ids, "labels": ids}

    def step(self, hook: betahook.Hook | None = None, **further: Any) -> float:
        """Time one step, in seconds."""

        def train() -> None:
            self.model(**self.inputs, **further).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if hook is not None:
                hook.step()

        return seconds(train, self.device)

    def ways(self) -> dict[str, Callable[[], float]]:
        """Map each name to a function that runs a step, or `interval` of them, and returns seconds per step."""

        def ours(options: dict[str, Any]) -> float:
            with betahook.attach(self.model, **options) as hook:
                self.step(hook)  # the first step also checks if the model is fresh
                return statistics.mean(self.step(hook) for _ in range(options.get("interval", 1)))

        def today(context: Callable[[nn.Module], AbstractContextManager[dict[str, Any]]]) -> float:
            with context(self.model) as further:
                return self.step(**further)

        return {
            "unhooked": self.step,
            **{name: lambda options=options: ours(options) for name, options in OURS.items()},
            **{name: lambda context=context: today(context) for name, context in TODAY.items()},
        }

    def peak(self, way: Callable[[], float]) -> int:
        """Peak number of bytes of tensors during a step."""
        if self.device.type != "cpu":
            torch.cuda.reset_peak_memory_stats(self.device)
            way()
            return torch.cuda.max_memory_allocated(self.device)
        states = [x for state in self.optimizer.state.values() for x in state.values()]
        before = sum(x.nbytes for x in (*self.model.parameters(), *self.model.buffers(), *states))
        return before + allocated(way)


def capture(model: nn.Module, inputs: dict[str, Any], module: nn.Module) -> Callable[[], Any]:
    """Return a function that runs one module, forward and backward, on its input in a forward of the model."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    handle = module.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    model(**inputs, use_cache=False)
    handle.remove()
    args, kwargs = tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.is_floating_point()), calls[0])

    def run() -> None:
        output = module(*args, **kwargs)
        (output if isinstance(output, Tensor) else output[0]).sum().backward()

    return run


def compare_attention(bench: Bench, rounds: int) -> dict[str, Any]:
    """Estimate what the default controller adds to a whole step from the first attention layer, with and without it.

    On a busy machine, whole steps vary by more than betahook costs; its cost arises in the attention layers, which all
    count like the first one.
    """

    with betahook.attach(bench.model) as hook:
        layers, module = len(hook.layers), next(iter(hook.layers.values())).module
    run = capture(bench.model, bench.inputs, module)
    added: dict[str, list[float]] = {"unhooked": [], "measured": [], "not measured": []}
    steps = []
    for turn in range(rounds + 1):
        for _ in range(PAIRS):
            before = seconds(run, bench.device)
            # The rise looks at W_q and W_k in the first steps only.
            with betahook.attach(bench.model, interval=2, controller=betahook.Search(rise=False)) as hook:
                measured, stepping = seconds(run, bench.device), seconds(hook.step, bench.device)
                others = seconds(run, bench.device)
            after = seconds(run, bench.device)
            if turn:  # the first round costs more
                unhooked = (before + after) / 2
                added["unhooked"].append(layers * (after - before))
                added["measured"].append(layers * (measured - unhooked) + stepping)
                added["not measured"].append(layers * (others - unhooked) + stepping)
        bench.model.zero_grad()
        steps.append(bench.step())
    step = statistics.median(steps[1:])
    shares = {name: share(values, step) for name, values in added.items()}
    mixed = [(a + (INTERVAL - 1) * b) / INTERVAL for a, b in zip(added["measured"], added["not measured"], strict=True)]
    return {"step": step, "added": {**shares, f"interval={INTERVAL}": share(mixed, step)}}


def compare_small(bench: Bench, rounds: int) -> dict[str, dict[str, float]]:
    """Ratios of steps after the opening to the unhooked ones before and after them: where the host's time decides."""

    def steps(hook: betahook.Hook | None = None) -> float:
        bench.step(hook)  # the first one after something else costs more
        return sum(bench.step(hook) for _ in range(INTERVAL))

    found = {}
    for name, options in SMALL.items():
        with betahook.attach(bench.model, **options) as hook:
            for _ in range(2 * hook.controllers[0].opening_batches + 2):  # then the search is all that is left
                bench.step(hook)
            state = hook.state_dict()
        ratios, before = [], steps()
        for _ in range(rounds):
            with betahook.attach(bench.model, **options) as hook:
                hook.load_state_dict(state)
                ours = steps(hook)
            after = steps()
            ratios.append(2 * ours / (before + after))
            before = after
        found[name] = summary(ratios)
    return found


def share(added: list[float], step: float) -> dict[str, float]:
    """Median added time as a share of a step, and its standard error, assuming normal values."""
    error = 1.25 * statistics.stdev(added) / len(added) ** 0.5
    return {"median": statistics.median(added) / step, "error": error / step}


def compare(bench: Bench, rounds: int) -> dict[str, dict[str, Any]]:
    """Map each way to its ratios to the unhooked step, its seconds and its peak memory."""
    ways = bench.ways()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()  # the first step of each costs more
    names = list(ways)
    for turn in range(rounds):
        start = turn % len(names)  # so that the order changes
        for name in names[start:] + names[:start]:
            seconds[name].append(ways[name]())
    ratios = {name: [a / b for a, b in zip(seconds[name], seconds["unhooked"], strict=True)] for name in ways}
    return {
        name: {"ratio": summary(ratios[name]), "seconds": summary(seconds[name]), "peak": bench.peak(way)}
        for name, way in ways.items()
    }


def print_comparison(result: dict[str, dict[str, Any]]) -> None:
    print(f"{'':26} {'ratio':>7} {'quartiles':>15} {'seconds':>9} {'peak MiB':>9} {'added':>8}")
    for name, row in result.items():
        ratio, added = row["ratio"], row["peak"] / result["unhooked"]["peak"] - 1
        print(
            f"{name:26} {ratio['median']:>7.3f} {ratio['low']:>7.3f} {ratio['high']:>7.3f} "
            f"{row['seconds']['median']:>9.3f} {row['peak'] / 2**20:>9.0f} {100 * added:>+7.2f}%"
        )


def print_attention(result: dict[str, Any]) -> None:
    print(f"a step takes {result['step']:.3f} s; added to it by the attention layers and hook.step()")
    for name, row in result["added"].items():
        print(f"{name:26} {100 * row['median']:>+7.2f} % +- {100 * row['error']:.2f}")


def draw_comparison(result: dict[str, dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    names = [name for name in result if name != "unhooked"]
    ratios = [result[name]["ratio"] for name in names]
    medians = [ratio["median"] for ratio in ratios]
    spread = [[abs(ratio["median"] - ratio[end]) for ratio in ratios] for end in ("low", "high")]
    colors = ["tab:blue" if name in OURS else "tab:gray" for name in names]
    bars = axes.barh(names, medians, xerr=spread, color=colors)
    axes.bar_label(bars, [f"{median:.3f}" for median in medians], padding=12)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel("step time / unhooked step time")
    figure.savefig(path, dpi=150)


def override(text: str) -> tuple[str, Any]:
    """Parse `name=value`, the value as JSON if it is JSON."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, such as n_layer=3, not {text}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2", help="a model type of transformers")
    parser.add_argument("--config", nargs="*", type=override, default=[], metavar="NAME=VALUE", help="of its config")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=1024)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--attention", action="store_true", help="one attention layer, against a whole step")
    way.add_argument("--small", action="store_true", help="steps after the opening, against unhooked ones")
    timing.add_options(parser, Path("runs/benchmark"))
    options = timing.start(parser, arguments)
    model = build(options.model, dict(options.config), options.device, getattr(torch, options.dtype))
    bench = Bench(model, options.batch, options.length)
    if options.small:
        name, result = "small", compare_small(bench, options.rounds)
        for small, row in result.items():
            print(f"{small:26} {row['median']:>7.3f} {row['low']:>7.3f} {row['high']:>7.3f}")
    elif options.attention:
        name, result = "attention", compare_attention(bench, options.rounds)
        print_attention(result)
    else:
        name, result = "benchmark", compare(bench, options.rounds)
        print_comparison(result)
        draw_comparison(result, options.output / "benchmark.png")
    timing.write(result, name, options)


if __name__ == "__main__":
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # up to 5, torch's profiler logs its start and stop
    main()
