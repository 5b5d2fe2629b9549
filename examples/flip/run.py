"""Reproduce the paper's Table 1 (the flip task), with betahook's controllers beside the paper's columns.

    python examples/flip/run.py                               # 100/20/15000, every column, one seed
    python examples/flip/run.py --rows all --seeds 7 1 2 3 4  # the whole table, five seeds

Every finished run is a line of `results.jsonl`, each trial of a `procedure` one of `trials.jsonl` in its own folder;
none is repeated.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

import betahook
from report import draw, relevant_beta, table
from runs import Results, best_fixed, execute, remembered
from task import MORE_DATA, TABLE_1, TEST_STRINGS, Row, Run, train

Identity = tuple[str, str, float | None, int, int]
"""Column, row, the paper's beta where it matters, seed, test strings."""

NOISE = 1e-3
"""Accuracies that tie in a search for beta: four times the std of chance on 1,000 strings of 200 out of 100 symbols."""
NEVER = 10**9
"""Batches in a window that no run completes."""

COLUMNS: dict[str, tuple[str, Callable[[Row, int], Run] | None]] = {
    "plain": ("1/sqrt(d_k)", lambda row, seed: Run(row, seed)),
    "paper": ("the paper's beta", lambda row, seed: Run(row, seed, beta=row.beta)),
    "scaled-init": (
        "1/sqrt(d_k), W_q and W_k scaled so that the first logits are those of the paper's beta",
        lambda row, seed: Run(row, seed, init_scale=(row.beta * row.length**0.5) ** 0.5),
    ),
    "procedure": ("BetaSearch, every trial a run of its own", None),
    "betahook": ("betahook's default, one run", lambda row, seed: Run(row, seed, controller=betahook.Search)),
    "no-rise": (
        "[Search(rise=False)], one run",
        lambda row, seed: Run(row, seed, controller=lambda: [betahook.Search(rise=False)]),
    ),
    "rise-only": (
        "the default without its search, one run",
        lambda row, seed: Run(row, seed, controller=lambda: [betahook.Search(window=NEVER)]),
    ),
    "variance": ("Variance(), one run", lambda row, seed: Run(row, seed, controller=betahook.Variance)),
    "variance-weights": (
        "the paper's first algorithm: 1/std from sigma_Wq and sigma_Wk, one run",
        lambda row, seed: Run(row, seed, controller=lambda: [betahook.Variance(source="weights", smoothing=0)]),
    ),
    "decades": (
        "the paper's second algorithm: Decades(), one run",
        lambda row, seed: Run(row, seed, controller=betahook.Decades),
    ),
    "gradient": (
        "[Gradient(), Cap(30.0)], one run",
        lambda row, seed: Run(row, seed, controller=lambda: [betahook.Gradient(), betahook.Cap(30.0)]),
    ),
}


def measure(column: str, row: Row, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """Run one column, row and seed."""
    make = COLUMNS[column][1]
    if make is not None:
        result = train(make(row, seed), **options)
    else:
        trial = remembered(
            lambda beta: train(Run(row, seed, beta=beta), **options),
            Path(options["output"]) / "trials.jsonl",
            lambda result: tested_on(result) == options["test_strings"],
        )
        result = best_fixed(trial, score="validation_accuracy", mode="max", noise=NOISE)
    return {"column": column, **result}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(row.name for row in (*TABLE_1, *MORE_DATA)))
    parser.add_argument("--rows", nargs="+", default=["100/20/15000"], choices=[*names, "all"], metavar="ROW")
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), choices=list(COLUMNS), metavar="COLUMN")
    parser.add_argument("--seeds", nargs="+", type=int, default=[7])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--test-strings", type=int, default=TEST_STRINGS)
    parser.add_argument(
        "--output", type=Path, default=Path("runs/flip"), help="folder for results, plot and TensorBoard"
    )
    options = parser.parse_args(arguments)
    for option, number in (("--jobs", options.jobs), ("--test-strings", options.test_strings)):
        if number < 1:
            parser.error(f"{option} must be at least 1, not {number}")

    rows = [
        row for row in (*TABLE_1, *MORE_DATA) if row.name in options.rows or ("all" in options.rows and row in TABLE_1)
    ]
    store = options.output / "results.jsonl"
    results = Results(store)
    known = {key(result) for result in results}
    todo = {
        identity: (column, row, seed, settings(column, row, seed, options))
        for row in rows
        for column in options.columns
        for seed in options.seeds
        if (identity := (column, row.name, relevant_beta(row, column), seed, options.test_strings)) not in known
    }
    # With one job at a time, every run shows a bar of its own.
    for identity, result in tqdm(execute(measure, todo, options.jobs), "runs", len(todo), disable=options.jobs == 1):
        results.add({**result, "paper_beta": identity[2]})

    chosen = [
        result
        for result in results
        if result["column"] in options.columns
        and result["seed"] in options.seeds
        and tested_on(result) == options.test_strings
    ]
    print(table(rows, chosen, {name: COLUMNS[name][0] for name in options.columns}))
    plot = options.output / "flip.png"
    draw(rows[0], chosen, plot)
    print(f"\nresults: {store}\nplot:    {plot}")
    print(f"curves:  {sys.executable} -m tensorboard.main --logdir {options.output}")


def settings(column: str, row: Row, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `train` besides the run."""
    folder = options.output / row.name.replace("/", "-") / f"{column}-{row.beta:g}-seed{seed}"
    title = f"{column}, seed {seed}" if options.jobs == 1 else None
    return {"test_strings": options.test_strings, "output": str(folder), "title": title}


def key(result: dict[str, Any]) -> Identity:
    """Identity of a run."""
    return result["column"], result["row"], result["paper_beta"], result["seed"], tested_on(result)


def tested_on(result: dict[str, Any]) -> int:
    """Number of test strings of a run."""
    strings: int = result.get("test_strings", TEST_STRINGS)
    return strings


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    main()
