"""Tables (Markdown) and plots of the results of run.py in results.jsonl.

python examples/study/report.py
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import neighbours  # noqa: F401
from runs import Result, Results

Cells = dict[tuple[str, float], dict[int, Result]]
"""Controller and learning rate to seed to result, of one task."""

WITHIN = 0.10
"""A learning rate is good if its loss is at most this share above the best."""
SMOOTH = 10
"""Steps over which training losses are averaged."""


def by_task(results: Iterable[Result]) -> dict[str, Cells]:
    """Sort results by task and number of steps; if a controller has changed its rule, keep the newest."""
    results = list(results)
    rules = {(r["task"], r["steps"], r["controller"]): r["rule"] for r in results}
    tasks: dict[str, Cells] = defaultdict(lambda: defaultdict(dict))
    for r in results:
        if r["rule"] == rules[r["task"], r["steps"], r["controller"]]:
            tasks[f"{r['task']}, {r['steps']} steps"][r["controller"], r["rate"]][r["seed"]] = r
    return tasks


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; NaN for a single value, or if one is not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values) / math.sqrt(len(values))


def changes(values: Mapping[int, float], plain: Mapping[int, float], *, relative: bool) -> list[float]:
    """Differences to plain with the same seed, for the seeds that both have; if `relative`, in percent of its mean."""
    seeds = sorted(values.keys() & plain.keys())
    base = statistics.mean(plain[seed] for seed in seeds) / 100 if seeds and relative else 1
    return [(values[seed] - plain[seed]) / base for seed in seeds]


def worst(values: Iterable[float], lower_is_better: bool) -> float:
    """Largest value; NaN is worse than any number."""
    return max(values, key=lambda value: (math.isnan(value), value if lower_is_better else -value))


def span(losses: Mapping[float, float], limit: float) -> tuple[float, float, bool] | None:
    """Learning rates around the best one whose loss is at most `limit`: lowest, highest, and if both were seen.

    Between two rates, the loss is interpolated linearly in the logarithm of the rate. None if no loss is low enough; an
    end that was not seen is the last measured rate.
    """
    rates = sorted(losses)
    heights = [math.inf if math.isnan(losses[rate]) else losses[rate] for rate in rates]
    best = heights.index(min(heights))
    if heights[best] > limit:
        return None

    def edge(indices: range) -> tuple[float, bool]:
        inside = best
        for outside in indices:
            if heights[outside] > limit:
                share = (limit - heights[inside]) / (heights[outside] - heights[inside])
                return rates[inside] * (rates[outside] / rates[inside]) ** share, True
            inside = outside
        return rates[inside], False

    (low, low_seen), (high, high_seen) = edge(range(best - 1, -1, -1)), edge(range(best + 1, len(rates)))
    return low, high, low_seen and high_seen


def smoothed(values: Sequence[float], width: int = SMOOTH) -> list[float]:
    """Means over `width` neighbours, wherever there are that many."""
    return [statistics.mean(values[i : i + width]) for i in range(len(values) - width + 1)]


def excess(losses: Sequence[float], plain: Sequence[float]) -> list[float]:
    """Relative excess of each loss over that of the unhooked run at the same place."""
    return [loss / base - 1 for loss, base in zip(losses, plain, strict=True)]


def table(header: str, rows: Iterable[Sequence[str]]) -> list[str]:
    columns = header.split(" | ")
    return [f"| {header} |", "|" + "---|" * len(columns), *(f"| {' | '.join(row)} |" for row in rows), ""]


def values_table(cells: Cells, quantity: str) -> list[str]:
    """Loss or accuracy at the end of the runs; differences to plain in percent, those of accuracies in points."""
    is_loss = quantity == "loss"
    scale, style = (1, ".4f") if is_loss else (100, ".2f")
    rows = []
    for (controller, rate), seeds in ordered(cells):
        values = {seed: scale * result[quantity] for seed, result in seeds.items()}
        plain = {seed: scale * result[quantity] for seed, result in cells.get(("plain", rate), {}).items()}
        to_plain = [] if controller == "plain" else changes(values, plain, relative=is_loss)
        runs = sum(result.get("runs", 1) for result in seeds.values()) / len(seeds)
        rows.append(
            (
                f"{rate:g}",
                controller,
                f"{statistics.mean(values.values()):{style}}",
                known(standard_error(list(values.values())), style),
                f"{worst(values.values(), lower_is_better=is_loss):{style}}",
                f"{statistics.mean(to_plain):+.2f}" if to_plain else "",
                known(standard_error(to_plain), ".2f"),
                str(len(seeds)),
                f"{runs:g}",
                f"{statistics.mean(result['seconds'] for result in seeds.values()):.0f}",
            )
        )
    unit = ("", "%") if is_loss else (", %", "points")
    return table(
        f"rate | controller | {quantity}{unit[0]} | s.e. | worst | to plain, {unit[1]} | s.e. | seeds | runs a seed "
        "| CPU seconds a seed",
        rows,
    )


def ordered(cells: Cells) -> list[tuple[tuple[str, float], dict[int, Result]]]:
    """Sort by rate, then by controller, plain first."""
    return sorted(cells.items(), key=lambda item: (item[0][1], item[0][0] != "plain", item[0][0]))


def known(value: float, style: str) -> str:
    """Format a number, or nothing if it is NaN."""
    return "" if math.isnan(value) else f"{value:{style}}"


def mean_losses(cells: Cells) -> dict[str, dict[float, float]]:
    """Controller to learning rate to mean final loss, where there is more than one rate."""
    means: dict[str, dict[float, float]] = defaultdict(dict)
    for (controller, rate), seeds in ordered(cells):
        means[controller][rate] = statistics.mean(result["loss"] for result in seeds.values())
    return {controller: losses for controller, losses in means.items() if len(losses) > 1}


def ranges_table(cells: Cells) -> list[str]:
    """Width of the range of learning rates, judged by each controller's own best loss and by the best of all."""
    means = mean_losses(cells)
    if not means:
        return []
    lowest = {controller: min(losses.values()) for controller, losses in means.items()}
    rows = []
    for controller, losses in means.items():
        row = [controller, f"{lowest[controller]:.4f}"]
        for best in (lowest[controller], min(lowest.values())):
            found = span(losses, (1 + WITHIN) * best)
            if found is None:
                row += ["", "none"]
            else:
                low, high, seen = found
                row += [f"{low:.2g} to {high:.2g}", f"{'' if seen else '≥ '}{high / low:.1f}"]
        rows.append(row)
    title = f"within {100 * WITHIN:.0f} % of"
    return table(f"controller | best loss | {title} its own best | factor | {title} the best of all | factor", rows)


def excess_table(cells: Cells) -> list[str]:
    """Largest excess over plain during training, over all seeds; the training losses are of the same batches."""
    rows = []
    for (controller, rate), seeds in ordered(cells):
        plain = cells.get(("plain", rate), {})
        common = sorted(seeds.keys() & plain.keys())
        if controller == "plain" or not common:
            continue
        pairs = [(seeds[seed], plain[seed]) for seed in common]
        steps = [excess(a["training_losses"], b["training_losses"]) for a, b in pairs]
        smooth = [excess(smoothed(a["training_losses"]), smoothed(b["training_losses"])) for a, b in pairs]
        points = [excess(validation(a), validation(b)) for a, b in pairs]
        ends = [seed[-1] for seed in points]
        worst = [max(map(max, kind)) for kind in (steps, smooth, points)]
        cost = [f"{100 * value:+.2f} %" for value in (*worst, statistics.mean(ends), max(ends))]
        rows.append((f"{rate:g}", controller, *cost, str(len(common))))
    header = (
        f"rate | controller | worst training step | {SMOOTH} steps | worst validation | validation at the end, mean "
        "| worst | seeds"
    )
    return table(header, rows) if rows else []


def validation(result: Result) -> list[float]:
    return [loss for _, loss in result["loss_curve"]]


def draw_rates(title: str, cells: Cells, path: Path) -> None:
    """Draw the final loss by learning rate, one line per controller."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    for controller, losses in mean_losses(cells).items():
        rates = sorted(losses)
        errors = [standard_error([r["loss"] for r in cells[controller, rate].values()]) for rate in rates]
        axes.errorbar(rates, [losses[rate] for rate in rates], errors, marker="o", capsize=3, label=controller)
    axes.set(xscale="log", xlabel="learning rate", ylabel="final validation loss", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_excess(title: str, cells: Cells, path: Path) -> None:
    """Draw the excess of training and validation loss over plain, one column per learning rate, one line per seed."""
    import matplotlib.pyplot as plt

    rates = sorted({rate for _, rate in cells})
    names = sorted({controller for controller, _ in cells} - {"plain"})
    figure, grid = plt.subplots(
        2, len(rates), figsize=(6 * len(rates), 7), sharex=True, squeeze=False, layout="constrained"
    )
    for column, rate in enumerate(rates):
        top, bottom = grid[:, column]
        for index, controller in enumerate(names):
            for seed, result in cells.get((controller, rate), {}).items():
                plain = cells.get(("plain", rate), {}).get(seed)
                if plain is None:
                    continue
                training = excess(smoothed(result["training_losses"]), smoothed(plain["training_losses"]))
                steps = range(SMOOTH, SMOOTH + len(training))
                top.plot(steps, [100 * value for value in training], color=f"C{index}")
                steps = [step for step, _ in result["loss_curve"]]
                held_out = excess(validation(result), validation(plain))
                bottom.plot(steps, [100 * value for value in held_out], color=f"C{index}", marker=".")
            top.plot([], [], color=f"C{index}", label=controller)
        top.set(title=f"{title}, learning rate {rate:g}", ylabel=f"training loss above plain, {SMOOTH} steps, %")
        bottom.set(xlabel="step", ylabel="validation loss above plain, %")
        top.legend()
        for axes in (top, bottom):
            axes.axhline(0, color="black", linewidth=0.8)
            axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def report(results: Iterable[Result], folder: Path) -> str:
    """Draw the plots into `folder`, and return the tables."""
    lines = []
    for title, cells in by_task(results).items():
        name = title.removesuffix(" steps").replace(", ", "-")
        lines += [f"## {title}", ""]
        for quantity in ("accuracy", "loss"):
            if all(quantity in result for seeds in cells.values() for result in seeds.values()):
                lines += values_table(cells, quantity)
        ranges = ranges_table(cells)
        if ranges:
            draw_rates(title, cells, folder / f"rates-{name}.png")
            lines += [*ranges, f"![learning rates](rates-{name}.png)", ""]
        if name.startswith("finetune") and (rows := excess_table(cells)):
            draw_excess(title, cells, folder / f"curves-{name}.png")
            lines += [*rows, f"![on the way](curves-{name}.png)", ""]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    import matplotlib

    matplotlib.use("Agg")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/study"), help="folder of the study")
    options = parser.parse_args(arguments)
    store = options.output / "results.jsonl"
    results = Results(store)
    if not results:
        parser.error(f"--output: there is no result in {store}; give the folder into which run.py has put some")
    text = report(results, options.output)
    (options.output / "report.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
