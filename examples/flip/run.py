"""Reproduce the paper's Table 1 (the flip task), with betahook's controllers beside the paper's columns.

    python examples/flip/run.py                               # 100/20/15000, every column, one seed
    python examples/flip/run.py --rows all --seeds 7 1 2 3 4  # the whole table, five seeds

Every finished run is a line of `results.jsonl`; runs that are in it are not repeated.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import betahook
from report import draw, relevant_beta, table
from task import TABLE_1, Row, Run, train

Identity = tuple[str, str, float | None, int]
"""Column, row, the paper's beta where it matters, seed."""

COLUMNS: dict[str, tuple[str, Callable[[Row, int], Run] | None]] = {
    "default": ("1/sqrt(d_k)", lambda row, seed: Run(row, seed)),
    "paper": ("the paper's beta", lambda row, seed: Run(row, seed, beta=row.beta)),
    "scaled-init": (
        "1/sqrt(d_k), W_q and W_k scaled so that the first logits are those of the paper's beta",
        lambda row, seed: Run(row, seed, init_scale=(row.beta * row.length**0.5) ** 0.5),
    ),
    "procedure": ("BetaSearch, every trial a run of its own", None),
    "betahook": ("betahook's default, one run", lambda row, seed: Run(row, seed, controller=betahook.default)),
    "sweep": (
        "[Search(sweep=True), Cap()], one run",
        lambda row, seed: Run(row, seed, controller=lambda: [betahook.Search(sweep=True), betahook.Cap()]),
    ),
    "variance": ("Variance(), one run", lambda row, seed: Run(row, seed, controller=betahook.Variance)),
    "gradient": (
        "[Gradient(), Cap()], one run",
        lambda row, seed: Run(row, seed, controller=lambda: [betahook.Gradient(), betahook.Cap()]),
    ),
}


def measure(column: str, row: Row, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """The result of one column, row and seed."""
    torch.set_num_threads(1)
    make = COLUMNS[column][1]
    result = search(row, seed, options) if make is None else train(make(row, seed), **options)
    return {"column": column, **result}


def search(row: Row, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """The paper's search: decades, then bisection, on the validation accuracy; with what it cost."""
    trials = betahook.BetaSearch(start=1.0, decades=2, resolution=0.2)
    best: dict[str, Any] = {}
    while (beta := trials.ask()) is not None:
        result = train(Run(row, seed, beta=beta), **options)
        trials.tell(beta, result["validation_accuracy"])
        if trials.best == (beta, result["validation_accuracy"]):
            best = result
    return {**best, "trials": trials.trials, "runs": len(trials.trials)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(row.name for row in TABLE_1))
    parser.add_argument("--rows", nargs="+", default=["100/20/15000"], choices=[*names, "all"], metavar="ROW")
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), choices=list(COLUMNS), metavar="COLUMN")
    parser.add_argument("--seeds", nargs="+", type=int, default=[7])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--test-strings", type=int, default=100_000)
    parser.add_argument(
        "--output", type=Path, default=Path("runs/flip"), help="folder for results, plot and TensorBoard"
    )
    options = parser.parse_args(arguments)

    rows = [row for row in TABLE_1 if row.name in options.rows or "all" in options.rows]
    options.output.mkdir(parents=True, exist_ok=True)
    store = options.output / "results.jsonl"
    results = [json.loads(line) for line in store.read_text().splitlines()] if store.exists() else []
    known = {key(result) for result in results}
    todo = {
        (column, row.name, relevant_beta(row, column), seed): (column, row, seed)
        for row in rows
        for column in options.columns
        for seed in options.seeds
    }
    todo = {identity: run for identity, run in todo.items() if identity not in known}
    with store.open("a") as file:
        for identity, result in measured(todo, options):
            results.append({**result, "paper_beta": identity[2]})
            file.write(json.dumps(results[-1]) + "\n")
            file.flush()

    chosen = [result for result in results if result["column"] in options.columns and result["seed"] in options.seeds]
    print(table(rows, chosen, {name: COLUMNS[name][0] for name in options.columns}))
    plot = options.output / "flip.png"
    draw(rows[0], chosen, plot)
    print(f"\nresults: {store}\nplot:    {plot}")
    print(f"curves:  {sys.executable} -m tensorboard.main --logdir {options.output}")


def measured(
    todo: dict[Identity, tuple[str, Row, int]], options: argparse.Namespace
) -> Iterator[tuple[Identity, dict[str, Any]]]:
    """The results of the runs as they come in: one after another with a bar each, or several at a time."""

    def settings(column: str, row: Row, seed: int) -> dict[str, Any]:
        folder = options.output / row.name.replace("/", "-") / f"{column}-{row.beta:g}-seed{seed}"
        return {"test_strings": options.test_strings, "output": str(folder)}

    if options.jobs == 1:
        for identity, (column, row, seed) in todo.items():
            title = f"{column}, seed {seed}"
            yield identity, measure(column, row, seed, {**settings(column, row, seed), "title": title})
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        futures = {pool.submit(measure, *run, settings(*run)): identity for identity, run in todo.items()}
        for future in tqdm(concurrent.futures.as_completed(futures), total=len(futures), desc="runs"):
            yield futures[future], future.result()


def key(result: dict[str, Any]) -> Identity:
    """What makes a run unique."""
    return result["column"], result["row"], result["paper_beta"], result["seed"]


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    main()
