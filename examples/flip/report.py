"""The tables and the plot of the flip results; run as a script, those of the READMEs from the published runs.

python examples/flip/report.py --picture examples/flip/flip.png
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path

from runs import Result, published
from task import TABLE_1, Row

PLOTTED = {"plain": "1/√d_k", "paper": "the paper's β, fixed", "betahook": "betahook's default"}
"""Columns of the README's picture, with their names in it; any other has the name of its column."""
SEEDS = (7, 1, 2, 3, 4)
"""Seeds of the README's table."""
COLOURS = {"plain": "C0", "betahook": "C1", "scaled-init": "C2", "paper": "C4"}
"""Of columns; those of rates-lm.png in examples/study are the same."""

HEADER = "column           mean      min      max  seeds  steps to 95 %  final beta  what"


def table(rows: Iterable[Row], results: Iterable[Result], titles: dict[str, str]) -> str:
    """The paper's table beside the measured accuracies, in percent over the seeds."""
    cells = defaultdict(list)
    for result in results:
        cells[result["row"], result["column"], result["paper_beta"]].append(result)
    lines = []
    for row in rows:
        lines += [
            "",
            f"{row.symbols} symbols, length {row.length}, {row.strings} strings; the paper: "
            f"{percent(row.paper_default)} with 1/sqrt(d_k), {percent(row.paper_beta)} with beta = {row.beta:g}",
            HEADER,
        ]
        for column, title in titles.items():
            found = cells[row.name, column, relevant_beta(row, column)]
            if not found:
                continue
            accuracies = [result["accuracy"] for result in found]
            mean = sum(accuracies) / len(accuracies)
            reached = sorted(result["steps_to_95"] for result in found if result["steps_to_95"] is not None)
            steps = f"{reached[len(reached) // 2]} ({len(reached)}/{len(found)})" if reached else "never"
            beta = sum(result["beta"] for result in found) / len(found)
            runs = (
                f", {sum(result['runs'] for result in found) / len(found):.1f} runs a seed"
                if "runs" in found[0]
                else ""
            )
            lines.append(
                f"{column:<12} {percent(mean):>8} {percent(min(accuracies)):>8} {percent(max(accuracies)):>8} "
                f"{len(found):>6} {steps:>14} {beta:>11.3g}  {title}{runs}"
            )
    return "\n".join(lines)


def relevant_beta(row: Row, column: str) -> float | None:
    """The paper's beta in the columns that depend on it, else None; rows may differ in nothing else."""
    return row.beta if column in ("paper", "scaled-init") else None


def markdown(results: Iterable[Result]) -> list[str]:
    """The table of the README: a line for each row, column and beta of the paper, with its seeds in order."""
    cells: dict[tuple[str, str, float | None], list[Result]] = defaultdict(list)
    for result in results:
        cells[result["row"], result["column"], result["paper_beta"]].append(result)
    papers = {(row.name, "plain", None): row.paper_default for row in TABLE_1}
    papers |= {(row.name, "paper", row.beta): row.paper_beta for row in TABLE_1}
    lines = [
        "| row | column | the paper | mean | each seed | seeds | reached 95 % | final β | runs per seed |",
        "|" + "---|" * 9,
    ]
    order = sorted(cells, key=lambda cell: (cell[0] != "100/20/15000", *map(int, cell[0].split("/"))))
    for row, column, beta in order:
        found = sorted(cells[row, column, beta], key=itemgetter("seed"))
        paper = papers.get((row, column, beta))
        accuracies = [100 * result["accuracy"] for result in found]
        name = f"`{column}`" + ("" if beta is None else f" (β = {beta:g})")
        reached = sum(result["steps_to_95"] is not None for result in found)
        fields = (
            row,
            name,
            "" if paper is None else percent(paper),
            f"{sum(accuracies) / len(found):.1f} %",
            " ".join(f"{accuracy:.1f}" for accuracy in accuracies),
            " ".join(str(result["seed"]) for result in found),
            f"{reached} of {len(found)}",
            f"{sum(result['beta'] for result in found) / len(found):.2g}",
            f"{sum(result.get('runs', 1) for result in found) / len(found):.2g}",
        )
        lines.append(f"| {' | '.join(fields)} |")
    return lines


def percent(share: float | None) -> str:
    return "no number" if share is None else f"{100 * share:.2f} %"


def draw(row: Row, results: Iterable[Result], path: Path) -> None:
    """Draw accuracy and beta by step, one colour per column, one line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chosen = [result for result in results if result["row"] == row.name]
    columns = list(dict.fromkeys(result["column"] for result in chosen))
    colours = {column: COLOURS.get(column, f"C{5 + index % 5}") for index, column in enumerate(columns)}
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    for result in chosen:
        colour = colours[result["column"]]
        top.plot(*zip(*result["accuracy_curve"], strict=True), color=colour, alpha=0.8)
        bottom.plot(*zip(*result["beta_curve"], strict=True), color=colour, alpha=0.8)
    for column, colour in colours.items():
        top.plot([], [], color=colour, label=PLOTTED.get(column, column))
    strings = f"{row.symbols} symbols, strings of {row.length}, {row.strings:,} of them: a line for each seed"
    top.set(ylabel="validation accuracy per symbol", ylim=(0, 1.02), title=strings)
    bottom.set(ylabel="β", yscale="log", xlabel="step")
    top.legend(loc="upper left")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, help="file for the picture of 100/20/15000, of the seeds of its table")
    options = parser.parse_args(arguments)
    results = published(Path(__file__).parent)
    print("\n".join(markdown(results)))
    if options.picture is not None:
        shown = [result for result in results if result["column"] in PLOTTED and result["seed"] in SEEDS]
        draw(TABLE_1[0], shown, options.picture)


if __name__ == "__main__":
    main()
