"""Measure the cost of betahook: training steps with and without it, in turn, in one process.

    python examples/benchmark.py                               # GPT-2-small, batch 1, length 1,024: minutes on a CPU
    python examples/benchmark.py --config n_layer=3 vocab_size=8192 --rounds 9
    python examples/benchmark.py --model llama --config num_hidden_layers=4 --dtype bfloat16 --device cuda --length 4096
    python examples/benchmark.py --scaling 1024 2048 4096 8192      # the statistics alone, against the sdpa forward
    python examples/benchmark.py --small --model llama --config num_hidden_layers=8 hidden_size=32 \
        intermediate_size=64 num_attention_heads=2 num_key_value_heads=2 vocab_size=64 --length 64 --threads 1
    python examples/benchmark.py --attention                        # one attention layer in turn: for a busy machine

Every round runs one step of each way, ten with `interval=10`. Ratios are to the unhooked step of the same round, since
other work on the machine slows both. On the CPU, seconds are those of the process. Prints a table and writes
`benchmark.json` and `benchmark.png`, or `scaling.json` and `scaling.png`, or `attention.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from transformers.modeling_utils import AttentionInterface

import betahook
from betahook.measure import scores
from betahook.measure.largest import extreme_scores, norm_bound
from betahook.measure.masks import Band, Mask
from betahook.measure.rows import row_sums

INTERVAL = 10
PAIRS = 20
"""Pairs of runs of one attention layer for every whole step."""

OURS = {
    "monitor": dict(controller="monitor"),
    "default": dict(),
    f"default, interval={INTERVAL}": dict(interval=INTERVAL),
}
"""Options of `betahook.attach` by name."""

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


def build(name: str, overrides: dict[str, Any], device: str, dtype: torch.dtype) -> nn.Module:
    """A fresh model of a model type of transformers, with a language modelling head."""
    if name not in CONFIG_MAPPING:
        raise SystemExit(f"--model {name}: transformers has no such model type; give one such as gpt2, llama or bert")
    config = AutoConfig.for_model(name, **overrides)
    for head in (AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM):
        if type(config) in head._model_mapping:
            model = head.from_config(config, attn_implementation="sdpa", dtype=dtype)
            return model.to(device).train()
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
    """Ratios of steps after the opening to unhooked ones, ten of each in turn: where the host's time decides."""
    found = {}
    for name, options in SMALL.items():
        with betahook.attach(bench.model, **options) as hook:
            for _ in range(2 * hook.controllers[0].opening_batches + 2):  # then the search is all that is left
                bench.step(hook)
            state, ratios = hook.state_dict(), []
        for _ in range(rounds):
            plain = sum(bench.step() for _ in range(INTERVAL))
            with betahook.attach(bench.model, **options) as hook:
                hook.load_state_dict(state)
                bench.step(hook)
                ratios.append(sum(bench.step(hook) for _ in range(INTERVAL)) / plain)
        found[name] = summary(ratios)
    return found


def share(added: list[float], step: float) -> dict[str, float]:
    """Median added time as a share of a step, and its standard error, assuming normal values."""
    error = 1.25 * statistics.stdev(added) / len(added) ** 0.5
    return {"median": statistics.median(added) / step, "error": error / step}


def summary(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else 3 * values
    return {"median": median, "low": low, "high": high}


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


def statistics_alone(heads: int, head_dim: int, length: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Functions that compute each statistic of one causal layer, by name, and its attention forward."""
    # Laid out as the projections of a model leave them: head beside head for every token.
    query, key, value = torch.randn(3, 1, length, heads, head_dim, device=device, dtype=dtype).transpose(2, 3)
    mask, beta = Mask(Band(None, 0)), torch.tensor(head_dim**-0.5, device=device)
    query_mean = scores.components(query, None).mean
    return {
        "attention": lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True),
        "exact std": lambda: scores.score_sums(query, key, mask, query_mean),
        "sampled rows": lambda: row_sums(query, key, mask, beta),
        "moments of q": lambda: scores.components(query, None),
        "bound on max logit": lambda: norm_bound(query, key, mask),
        "exact max logit": lambda: extreme_scores(query, key, mask),
    }


@torch.no_grad()
def scale(
    heads: int, head_dim: int, lengths: list[int], rounds: int, device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Seconds and ratios by length and statistic, and the exponents of their growth."""
    table: dict[int, dict[str, list[float]]] = {}
    for length in lengths:
        functions = statistics_alone(heads, head_dim, length, device, dtype)
        for function in functions.values():
            function()
        rows = [
            {name: seconds(function, torch.device(device)) for name, function in functions.items()}
            for _ in range(rounds)
        ]
        for row in rows:
            row["all statistics"] = sum(row.values()) - row["attention"] - row["exact max logit"]  # not by default
        table[length] = {name: [row[name] for row in rows] for name in rows[0]}
    return {
        "lengths": {
            length: {
                name: {
                    "seconds": summary(values),
                    "ratio": summary([a / b for a, b in zip(values, columns["attention"], strict=True)]),
                }
                for name, values in columns.items()
            }
            for length, columns in table.items()
        },
        "exponents": {
            name: exponent(lengths, [statistics.median(table[length][name]) for length in lengths])
            for name in table[lengths[0]]
        },
    }


def exponent(lengths: list[int], seconds: list[float]) -> float:
    """Fit `a` of `seconds = c * length^a` by least squares in the logarithms."""
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (lengths, seconds))
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x @ x))


def machine(device: str) -> str:
    """Describe the machine in words."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor() or platform.machine()
    return (
        f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, transformers {transformers.__version__}"
    )


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


def print_scaling(result: dict[str, Any]) -> None:
    names = list(result["exponents"])
    print(f"{'ratio to the attention':>22} " + " ".join(f"{name:>18}" for name in names))
    for length, columns in result["lengths"].items():
        print(f"{length:>22} " + " ".join(f"{columns[name]['ratio']['median']:>18.3f}" for name in names))
    print(f"{'growth exponent':>22} " + " ".join(f"{result['exponents'][name]:>18.2f}" for name in names))


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


def draw_scaling(result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    for name, power in result["exponents"].items():
        medians = [columns[name]["seconds"]["median"] for columns in result["lengths"].values()]
        axes.loglog(list(result["lengths"]), medians, marker="o", label=f"{name}: N^{power:.2f}")
    axes.set_xlabel("length N")
    axes.set_ylabel("seconds a layer")
    axes.legend()
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
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--scaling", nargs="+", type=int, metavar="LENGTH", help="the statistics alone, at these lengths"
    )
    parser.add_argument("--attention", action="store_true", help="one attention layer, against a whole step")
    parser.add_argument("--small", action="store_true", help="steps after the opening, against unhooked ones")
    parser.add_argument("--heads", type=int, default=12, help="with --scaling")
    parser.add_argument("--head-dim", type=int, default=64, help="with --scaling")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark"), help="folder of the results")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch finds no CUDA here; give --device cpu")

    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    options.output.mkdir(parents=True, exist_ok=True)
    print(machine(options.device))
    if options.scaling:
        result = scale(options.heads, options.head_dim, options.scaling, options.rounds, options.device, dtype)
        name = "scaling"
        print_scaling(result)
        draw_scaling(result, options.output / "scaling.png")
    else:
        model = build(options.model, dict(options.config), options.device, dtype)
        bench = Bench(model, options.batch, options.length)
        if options.small:
            name, result = "small", compare_small(bench, options.rounds)
            for way, row in result.items():
                print(f"{way:26} {row['median']:>7.3f} {row['low']:>7.3f} {row['high']:>7.3f}")
        elif options.attention:
            name, result = "attention", compare_attention(bench, options.rounds)
            print_attention(result)
        else:
            name, result = "benchmark", compare(bench, options.rounds)
            print_comparison(result)
            draw_comparison(result, options.output / "benchmark.png")
    settings = {key: str(value) for key, value in vars(options).items()}
    text = json.dumps({"machine": machine(options.device), "settings": settings, "result": result}, indent=1)
    (options.output / f"{name}.json").write_text(text)


if __name__ == "__main__":
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # up to 5, torch's profiler logs its start and stop
    main()
