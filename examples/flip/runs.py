"""Training runs in several processes, with results as lines of a file, and the search over whole runs."""

from __future__ import annotations

import concurrent.futures
import gzip
import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

import betahook

Result = dict[str, Any]


class Results(list[Result]):
    """The results in a file of JSON lines, which need not exist yet.

    A last line that an interruption left incomplete is ignored, and removed by the next `add`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        super().__init__(json.loads(line) for line in lines if line.endswith(b"\n"))

    def add(self, result: Result) -> None:
        """Append a result to the file, then to the list."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab+", buffering=0) as file:
            file.seek(0)
            whole = file.read().rfind(b"\n") + 1
            file.truncate(whole)
            file.write(json.dumps(result).encode() + b"\n")
        self.append(result)


def published(folder: Path) -> list[Result]:
    """Read the runs behind the tables of an example's README, one a line, as its `run.py` writes them."""
    with gzip.open(folder / "results.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def execute(function: Callable[..., Any], todo: Mapping[Any, tuple[Any, ...]], jobs: int) -> Iterator[tuple[Any, Any]]:
    """Call `function` with each tuple of arguments; yield key and what it returned as they come in.

    With one job in this process, else in `jobs` others; on one thread each.
    """
    if jobs == 1:
        torch.set_num_threads(1)
        for key, arguments in todo.items():
            yield key, function(*arguments)
        return
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(
        jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        futures = {pool.submit(function, *arguments): key for key, arguments in todo.items()}
        for future in concurrent.futures.as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)  # after an error, wait for running jobs and start no others


def remembered(
    trial: Callable[[float], Result], path: Path, is_like: Callable[[Result], bool]
) -> Callable[[float], Result]:
    """`trial` with its results in a file of their own, so that an interrupted search repeats no run of hours.

    Args:
        trial: trains with a beta.
        path: the file.
        is_like: tells if a result in the file is of a run with the options of `trial`.
    """
    results = Results(path)

    def run(beta: float) -> Result:
        line = next((line for line in results if line["trial"] == beta and is_like(line)), None)
        if line is None:
            line = {"trial": beta, **trial(beta)}
            results.add(line)
        return {name: value for name, value in line.items() if name != "trial"}

    return run


def best_fixed(
    trial: Callable[[float], Result],
    *,
    score: str,
    mode: Literal["max", "min"],
    start: float = 1.0,
    decades: int = 2,
    resolution: float = 0.2,
    noise: float = 0.0,
) -> Result:
    """Run the paper's search (decades, then bisection, a training run per trial); the best result, with the total cost.

    Args:
        trial: trains with a beta; its result has the entry `score`, and `seconds` to add up the cost.
        score: name of the entry that judges a run.
        mode, start, decades, resolution, noise: as for `betahook.BetaSearch`.
    """
    search = betahook.BetaSearch(start, mode=mode, decades=decades, resolution=resolution, noise=noise)
    best: Result = {}
    seconds = 0.0
    while (beta := search.ask()) is not None:
        result = trial(beta)
        seconds += result["seconds"]
        search.tell(beta, result[score])
        if search.best is not None and search.best[0] == beta:
            best = result
    return {**best, "trials": search.trials, "runs": len(search.trials), "seconds": seconds}
