"""The tables and the picture of README.md, from the published runs in results.jsonl.gz.

python examples/study/published.py --picture examples/study/rates-lm.png
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import neighbours  # noqa: F401
from report import Cells, by_task, changes, draw_rates, standard_error, table
from runs import Result, published
from tasks import TASKS

OTHERS = ("no-rise", "scaled-init", "variance-weights", "qk-norm")
"""Columns of the second table, beside `betahook`."""
CONSTANTS = ("x0.3", "x0.7", "x1.4", "x3", "x10", "Search(plateau_fall=1.0, plateau_growth=1000)")
"""Columns of the third one: constants, and the default that waits on a plateau whatever the loss."""
DRAWN = ("plain", "betahook", "scaled-init")
"""Lines of the picture."""


@dataclass(frozen=True)
class Comparison:
    """Runs of a task at one learning rate: losses, or accuracies in percent where the task has them."""

    task: str
    rate: float
    cells: Cells

    @property
    def accuracies(self) -> bool:
        """True where the numbers are accuracies."""
        return all("accuracy" in result for result in self.cells["plain", self.rate].values())

    def values(self, controller: str) -> dict[int, float]:
        """Seed to number."""
        results = self.cells.get((controller, self.rate), {})
        return {seed: 100 * r["accuracy"] if self.accuracies else r["loss"] for seed, r in sorted(results.items())}

    def mean(self, controller: str) -> str:
        mean = statistics.mean(self.values(controller).values())
        return f"{mean:.1f} %" if self.accuracies else f"{mean:.4f}"

    def change(self, controller: str) -> tuple[float, float]:
        """Difference to plain, paired by seed, and its standard error: percent of a loss, points of an accuracy."""
        found = changes(self.values(controller), self.values("plain"), relative=not self.accuracies)
        return (statistics.mean(found), standard_error(found)) if found else (math.nan, math.nan)


def comparisons(results: Iterable[Result]) -> Iterator[Comparison]:
    """Every task and rate with runs of the usual length, in the order of `TASKS`."""
    found = by_task(results)
    for name, task in TASKS.items():
        cells = found.get(f"{name}, {task.steps} steps", {})
        for rate in sorted({rate for controller, rate in cells if controller == "betahook"}):
            yield Comparison(name, rate, cells)


def power(rate: float) -> str:
    """Write a learning rate as in 3e-4."""
    return f"{rate:.0e}".replace("e-0", "e-")


def signed(number: float, digits: int) -> str:
    """Write a number with its sign, and a minus where that is what it is."""
    return f"{number:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


def default_table(every: Iterable[Comparison]) -> list[str]:
    """The default controller beside plain."""
    rows = []
    for each in every:
        change, error = each.change("betahook")
        unit, seeds = "points" if each.accuracies else "%", len(each.values("betahook"))
        title = f"`{each.task}`, {TASKS[each.task].steps} steps"
        numbers = (each.mean("plain"), each.mean("betahook"), f"{signed(change, 2)} {unit}", f"{error:.2f} {unit}")
        rows.append((title, power(each.rate), *numbers, str(seeds)))
    return table("task | rate | `plain` | `betahook` | difference | its standard error | seeds", rows)


def others_table(every: Iterable[Comparison], names: Sequence[str]) -> list[str]:
    """Differences to plain of other controllers beside the default, with their standard errors."""
    rows = []
    for each in every:
        changes = [each.change(name) for name in ("betahook", *names)]
        if any(not math.isnan(change) for change, _ in changes[1:]):
            cells = [_cell(each, *change) for change in changes]
            rows.append((f"`{each.task}`", power(each.rate), *cells))
    return table(" | ".join(["task", "rate", *(f"`{name}`" for name in ("betahook", *names))]), rows)


def _cell(comparison: Comparison, change: float, error: float) -> str:
    """Write a difference with as many digits as its error leaves; empty if there is none."""
    if math.isnan(change):
        return ""
    digits, unit = 2 if comparison.accuracies or error < 0.1 else 1, "points" if comparison.accuracies else "%"
    return f"{signed(change, digits)} ± {error:.{digits}f} {unit}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, help="file for the picture of lm: final loss against learning rate")
    options = parser.parse_args(arguments)
    results = published(Path(__file__).parent)
    every = list(comparisons(results))
    print("\n".join(default_table(every) + others_table(every, OTHERS) + others_table(every, CONSTANTS)))
    if options.picture is not None:
        lm = by_task(results)[f"lm, {TASKS['lm'].steps} steps"]
        lines = {cell: lm[cell] for name in DRAWN for cell in lm if cell[0] == name}
        draw_rates("lm", lines, options.picture)


if __name__ == "__main__":
    main()
