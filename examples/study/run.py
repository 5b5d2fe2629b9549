"""Run tasks x controllers x learning rates x seeds, one training run each; report.py then draws the results.

    python examples/study/run.py --tasks lm --controllers plain betahook --rates 1e-3 1e-2 3e-2 --seeds 0 1 2 --jobs 2
    python examples/study/report.py

Every finished run is a line of `results.jsonl`; runs in it are not repeated.
"""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import neighbours  # noqa: F401
from controllers import BEST_FIXED, Treatment, treatment, written
from language_model import positive
from runs import Result, Results, best_fixed, execute
from tasks import TASKS, Settings

OUTPUT = Path("runs/study")
IDENTITY = ("task", "controller", "rule", "rate", "seed", "steps")
"""Identity of a run. The rule tells apart controllers with one name and different options."""


def measure(identity: dict[str, Any], settings: Settings) -> Result:
    """Run once, or search over runs, and return the line of results."""
    task, rate, seed = TASKS[identity["task"]], identity["rate"], identity["seed"]
    if identity["controller"] == BEST_FIXED:
        result = best_fixed(
            lambda factor: task.train(Treatment(beta=factor), rate, seed, settings), score="loss", mode="min"
        )
    else:
        result = task.train(treatment(identity["controller"], task.controllers), rate, seed, settings)
    return {**result, **identity}


def plan(options: argparse.Namespace) -> Iterable[tuple[dict[str, Any], Settings]]:
    """All requested runs that their tasks offer."""
    for name in matching(options.tasks, TASKS):
        task = TASKS[name]
        steps = task.steps if task.own_steps else options.steps or task.steps
        offered = {**{name: str(treatment) for name, treatment in task.controllers.items()}, BEST_FIXED: "BetaSearch"}
        for rate in options.rates or task.rates:
            for seed in options.seeds:
                for controller in [*matching(options.controllers, offered), *options.rules]:
                    rule = offered.get(controller) or str(treatment(controller, task.controllers))
                    values = (name, controller, rule, rate, seed, steps)
                    yield dict(zip(IDENTITY, values, strict=True)), Settings(steps, options.output)


def matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The names that match any of the patterns, in their own order."""
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def prepare(task: str, seed: int, settings: Settings) -> None:
    """Prepare what the runs of a task with this seed share."""
    make = TASKS[task].prepare
    if make is not None:
        make(seed, settings)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["lm"], metavar="GLOB", help=", ".join(TASKS))
    controllers = list(dict.fromkeys(name for task in TASKS.values() for name in task.controllers))
    parser.add_argument(
        "--controllers",
        nargs="+",
        default=["plain", "betahook"],
        metavar="GLOB",
        help=f"{', '.join([*controllers, BEST_FIXED])}; where a task offers them",
    )
    parser.add_argument(
        "--rules", nargs="+", default=[], metavar="CODE", help='controllers as they are written: "Search(rise=False)"'
    )
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates (default: the task's)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--steps", type=positive, help="optimizer steps (default: the task's); flip always takes its own"
    )
    parser.add_argument("--jobs", type=positive, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)

    offered = {"tasks": list(TASKS), "controllers": [*controllers, BEST_FIXED]}
    for option, names in offered.items():
        for pattern in getattr(options, option):
            if not matching([pattern], names):
                parser.error(f"--{option}: {pattern} matches none of {', '.join(names)}")
    for rule in options.rules:
        try:
            written(rule)
        except ValueError as error:
            parser.error(f"--rules: {error}")
    runs = {tuple(identity.values()): (identity, settings) for identity, settings in plan(options)}
    if not runs:
        parser.error("no run has such a task and such a controller")
    results = Results(options.output / "results.jsonl")
    known = {tuple(result[key] for key in IDENTITY) for result in results}
    todo = {key: run for key, run in runs.items() if key not in known}
    print(f"{len(runs) - len(todo)} of {len(runs)} runs are in {options.output / 'results.jsonl'}")

    # Runs of one seed share what is prepared; prepared in parallel, each would make its own.
    shared = {
        (TASKS[identity["task"]].prepare, identity["seed"]): (identity["task"], identity["seed"], settings)
        for identity, settings in todo.values()
    }
    list(execute(prepare, shared, options.jobs))
    for number, (_, result) in enumerate(execute(measure, todo, options.jobs), 1):
        results.add(result)
        print(
            f"{number}/{len(todo)}  {result['task']} {result['controller']} rate {result['rate']:g} "
            f"seed {result['seed']}: loss {result['loss']:.4f}, {result['seconds']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
