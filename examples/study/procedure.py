"""The paper's procedure, steps 1 to 5, for one row of its Table 1; beside it, one adaptive run on the same data.

    python examples/study/procedure.py --row 100/20/15000 --seed 0

(1) Begin with little data and beta = 1; (2) double the data until accuracy passes 50 %; (3) search for beta; (4) shrink
the data with that beta; (5) train from the same initialisation with beta = 1/sqrt(d_k). The paper speaks of "small
amounts" of data in step 2; doubling takes fewer runs. It does not say how far to shrink in step 4: here by a fifth at a
time, as long as accuracy stays above 95 %, or above 50 % if the search found no more. Accuracy is measured on the 1,000
validation strings; the table at the end has the accuracy on test strings.

Every finished run is a line of `procedure.jsonl`; runs in it are not repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

import betahook
import neighbours  # noqa: F401
import task as flip
from language_model import positive
from runs import Result, Results, best_fixed

PASSES, KEEPS, SHRINK = 0.5, 0.95, 0.8
"""Accuracy that ends step 2, accuracy that step 4 keeps, and the share of the data that it tries next."""
DOUBLINGS = 8
"""Number of doublings after which step 2 gives up."""

Trial = Callable[[int, float | None], Result]
"""Trains on a number of strings with a fixed beta, or with the default controller if it is None."""


def procedure(trial: Trial, length: int, strings: int) -> dict[str, Result]:
    """Run steps 1 to 5, and the adaptive run on the data of step 5.

    Args:
        trial: trains once; its result has `strings`, `beta`, `validation_accuracy` and `seconds`.
        length: length of a string, which is d_k.
        strings: number of strings in the smallest data.

    Raises:
        RuntimeError: step 2 never passed.
    """

    def passing(counts: list[int]) -> Result:
        for count in counts:
            result = trial(count, 1.0)
            if result["validation_accuracy"] > PASSES:
                return result
        raise RuntimeError(
            f"beta = 1 does not pass {100 * PASSES:.0f} % with {counts[-1]} strings: begin with more than {strings}"
        )

    enough = passing([strings * 2**doubling for doubling in range(DOUBLINGS + 1)])
    found = best_fixed(lambda beta: trial(enough["strings"], beta), score="validation_accuracy", mode="max")
    least = KEEPS if found["validation_accuracy"] > KEEPS else PASSES
    smallest = found
    while (count := int(SHRINK * smallest["strings"])) >= flip.BATCH:
        smaller = trial(count, found["beta"])
        if smaller["validation_accuracy"] <= least:
            break
        smallest = smaller
    count = smallest["strings"]
    return {
        "enough data": enough,
        "best beta": found,
        "least data": smallest,
        "1/sqrt(d_k)": trial(count, length**-0.5),
        "adaptive": trial(count, None),
    }


class Trials:
    """Training runs of a row, each done once: runs in the file are not repeated.

    Attributes:
        used: the requested runs, by strings and beta.
    """

    def __init__(self, row: flip.Row, seed: int, test_strings: int, results: Results) -> None:
        self.row, self.seed, self.test_strings, self.results = row, seed, test_strings, results
        self.used: dict[tuple[int, float | None], Result] = {}

    def __call__(self, strings: int, beta: float | None) -> Result:
        row = replace(self.row, strings=strings)
        identity = {
            "row": row.name,
            "seed": self.seed,
            "fixed": beta,
            "rule": repr(betahook.Search()),
            "test_strings": self.test_strings,
        }
        told = {"test_strings": flip.TEST_STRINGS}
        known = (result for result in self.results if identity.items() <= {**told, **result}.items())
        result = next(known, None)
        if result is None:
            run = flip.Run(row, self.seed, beta=beta, controller=betahook.Search if beta is None else None)
            result = {**flip.train(run, test_strings=self.test_strings), **identity, "strings": strings}
            self.results.add(result)
            print(
                f"{strings} strings, {'adaptive' if beta is None else f'beta {beta:.4g}'}: {said(result)}", flush=True
            )
        self.used[strings, beta] = result
        return result


def said(result: Result) -> str:
    return f"validation accuracy {100 * result['validation_accuracy']:.2f} %, {result['seconds']:.0f} s"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows = {row.name: row for row in flip.TABLE_1}
    parser.add_argument("--row", default="100/20/15000", choices=list(rows), metavar="ROW", help="symbols and length")
    parser.add_argument("--strings", type=positive, help="the smallest data (default: a quarter of the row's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test-strings", type=positive, default=flip.TEST_STRINGS)
    parser.add_argument("--output", type=Path, default=Path("runs/study"))
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)
    row = rows[options.row]
    trials = Trials(row, options.seed, options.test_strings, Results(options.output / "procedure.jsonl"))
    steps = procedure(trials, row.length, options.strings or row.strings // 4)
    adaptive = steps["adaptive"]
    print("\n| | strings | beta | test accuracy |\n|---|---|---|---|")
    for name, result in steps.items():
        print(f"| {name} | {result['strings']} | {result['beta']:.4g} | {100 * result['accuracy']:.2f} % |")
    cost = [result["seconds"] for (_, beta), result in trials.used.items() if beta is not None]
    print(
        f"\nthe procedure: {len(cost)} training runs, {sum(cost):.0f} s; the adaptive one: {adaptive['seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
