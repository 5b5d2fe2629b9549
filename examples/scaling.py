"""Measure how the cost of the statistics grows with the length: each alone, against an attention forward.

    python examples/scaling.py 1024 2048 4096 8192      # lengths

One causal layer; every round runs each statistic and `scaled_dot_product_attention` once. On the CPU, seconds are those
of the process. Prints a table and writes `scaling.json` and `scaling.png`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import timing
from betahook.measure import scores
from betahook.measure.largest import extreme_scores, norm_bound
from betahook.measure.masks import Band, Mask
from betahook.measure.rows import PLAIN, row_sums
from timing import seconds, summary


def functions_of(heads: int, head_dim: int, length: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Functions that compute each statistic of one causal layer, by name, and its attention forward."""
    # Laid out as the projections of a model leave them: head beside head for every token.
    query, key, value = torch.randn(3, 1, length, heads, head_dim, device=device, dtype=dtype).transpose(2, 3)
    mask, beta = Mask(Band(None, 0)), torch.tensor(head_dim**-0.5, device=device)
    query_mean = scores.components(query, None).mean
    return {
        "attention": lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True),
        "exact std": lambda: scores.score_sums(query, key, mask, query_mean),
        "sampled rows": lambda: row_sums(query, key, mask, beta, PLAIN, moments=True),
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
        functions = functions_of(heads, head_dim, length, device, dtype)
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


def print_table(result: dict[str, Any]) -> None:
    names = list(result["exponents"])
    print(f"{'ratio to the attention':>22} " + " ".join(f"{name:>18}" for name in names))
    for length, columns in result["lengths"].items():
        print(f"{length:>22} " + " ".join(f"{columns[name]['ratio']['median']:>18.3f}" for name in names))
    print(f"{'growth exponent':>22} " + " ".join(f"{result['exponents'][name]:>18.2f}" for name in names))


def draw(result: dict[str, Any], path: Path) -> None:
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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", nargs="+", type=int, metavar="LENGTH", help="tokens of a sequence")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    timing.add_options(parser, Path("runs/scaling"))
    options = timing.start(parser, arguments)
    dtype = getattr(torch, options.dtype)
    result = scale(options.heads, options.head_dim, options.lengths, options.rounds, options.device, dtype)
    print_table(result)
    draw(result, options.output / "scaling.png")
    timing.write(result, "scaling", options)


if __name__ == "__main__":
    main()
