"""Variance of attention scores: why `q . k` is divided by `sqrt(d_k)`, and when that is the wrong number.

    python examples/variance.py [--output runs/variance.png] [--seed 0] [--draws 400]

The first table has the mean and variance of the scores of random queries and keys of several sizes, before and after
the division, and how much that sample variance changes between draws. The second reads one puzzling 2x2 draw in every
way. The third compares components with non-zero means and unequal variances with the product formula and with `d_k`.
Prints the three tables and writes a plot.

Variances are sample variances, as in `torch.var`: the sum of squared deviations is divided by n - 1. The 2x2 draw is
also read with population variances, as in `numpy.var`: divided by n, and so too small by (n - 1) / n on average.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Generator, Tensor

from betahook.theory import classic_std, independent_variance

SIZES = ((2, 2), (2, 64), (64, 64), (512, 64), (512, 128))  # (tokens, d_k)
HEAD_DIMS = (2, 4, 8, 16, 32, 64, 128, 256, 512)  # of the plot, at PLOT_TOKENS tokens
PLOT_TOKENS = 64
CASE_HEAD_DIM = 64
CASE_PAIRS = 100_000
LARGE = (1111, 111)  # of one draw whose own moments go into the formula
PUZZLE = 1.6  # the sample variance of scaled 2x2 scores that looks like a mistake
QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class Case:
    """Independent components of q and k with these moments, each `[d_k]`."""

    name: str
    query_mean: Tensor
    query_variance: Tensor
    key_mean: Tensor
    key_variance: Tensor

    @property
    def formula(self) -> Tensor:
        """Variance of `q . k` by the product formula: `[]`."""
        return independent_variance(self.query_mean, self.query_variance, self.key_mean, self.key_variance)

    @property
    def naive(self) -> Tensor:
        """Variance of `q . k` if every mean were 0 and every variance 1, `d_k`: `[]`."""
        return classic_std(torch.tensor(float(self.query_mean.numel()))).square()


@dataclass(frozen=True)
class Measured:
    """Sample variance of `q . k` in a case, and the standard error of that number."""

    variance: float
    error: float


def normal_pair(tokens: int, head_dim: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Standard normal queries and keys, each `[tokens, d_k]`."""
    return torch.randn(tokens, head_dim, generator=generator), torch.randn(tokens, head_dim, generator=generator)


def score_moments(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sample variance of all scores of `[..., queries, d_k]` and `[..., keys, d_k]`, each `[...]`."""
    variance, mean = torch.var_mean(query @ key.mT, dim=(-2, -1))
    return mean, variance


def draw_moments(tokens: int, head_dim: int, draws: int, seed: int) -> tuple[Tensor, Tensor]:
    """`score_moments` of `draws` random Q and K: two tensors `[draws]`."""
    generator = Generator().manual_seed(seed)
    # One draw at a time: all score matrices together would need gigabytes.
    moments = [score_moments(*normal_pair(tokens, head_dim, generator)) for _ in range(draws)]
    means, variances = zip(*moments, strict=True)
    return torch.stack(means), torch.stack(variances)


def spread(tokens: int, head_dim: int) -> float:
    """Exact standard deviation, over draws, of the sample variance after scaling.

    For standard normal Q and K. The centred sum of squares is `tr(AB) + u'Au + v'Bv`, with A and B Wishart of
    `tokens - 1` degrees of freedom, u and v standard normal, all independent; the terms below are the variances of the
    three and their covariances. For many tokens it is about `2 / sqrt(tokens d_k)`, where as many scores without
    shared vectors would give about `sqrt(2) / tokens`.
    """
    m, d = tokens - 1, head_dim
    wishart = 4 * m**3 * d + 2 * m**2 * d**2 + 2 * m**2 * d
    forms = 2 * (2 * m * d + 2 * m * d * (m + d + 1))
    covariances = 4 * (2 * m**2 * d)
    return math.sqrt(wishart + forms + covariances) / ((tokens**2 - 1) * d)


def find_draw(tokens: int, head_dim: int, variance: float, seed: int) -> int:
    """Find the first seed, from the given one on, whose draw has this variance after scaling, to two decimals."""
    while abs(float(draw_moments(tokens, head_dim, 1, seed)[1]) / head_dim - variance) > 0.005:
        seed += 1
    return seed


def make_cases(head_dim: int) -> list[Case]:
    """The textbook's assumptions, then each of them broken in turn."""
    zero, one = torch.zeros(head_dim), torch.ones(head_dim)
    rising = torch.linspace(0.1, 1.9, head_dim)  # averages 1, so the usual argument still says d_k
    return [
        Case("means 0, variances 1", zero, one, zero, one),
        Case("q means 1", one, one, zero, one),
        Case("q and k means 1", one, one, one, one),
        Case("variances 0.1 to 1.9, same order", zero, rising, zero, rising),
        Case("variances 0.1 to 1.9, opposite order", zero, rising, zero, rising.flip(0)),
        Case("variances 0.25", zero, one / 4, zero, one / 4),
        Case("means 1, variances 0.1 to 1.9", one, rising, one, rising),
    ]


def draw_scores(case: Case, pairs: int, generator: Generator) -> Tensor:
    """Independent scores `[pairs]`, each from a fresh pair of q and k."""
    shape = (pairs, case.query_mean.numel())
    query = case.query_mean + case.query_variance.sqrt() * torch.randn(shape, generator=generator)
    key = case.key_mean + case.key_variance.sqrt() * torch.randn(shape, generator=generator)
    return (query * key).sum(-1)


def measure(scores: Tensor) -> Measured:
    """Sample variance of independent scores `[pairs]`, with its standard error."""
    squares = (scores - scores.mean()).square()
    return Measured(scores.var().item(), squares.std().item() / math.sqrt(len(scores)))


def size_table(moments: dict[tuple[int, int], tuple[Tensor, Tensor]]) -> str:
    """One row per `(tokens, d_k)`, from the `draw_moments` of that size."""
    lines = [
        f"{'':>8} | {'one draw, before':^25} | {'one draw, after':^25} | {'variance after, over the draws':^46}",
        f"{'size':>8} | {'mean':>7} {'variance':>9} {'theory':>7} | {'mean':>7} {'variance':>9} {'theory':>7}"
        f" | {'average':>7} {'5 %':>6} {'50 %':>6} {'95 %':>6} {'std':>6} {'theory':>10}",
    ]
    lines.append("".join("+" if c == "|" else "-" for c in lines[-1]))
    for (tokens, head_dim), (means, variances) in moments.items():
        mean, variance, after = means[0].item(), variances[0].item(), variances / head_dim
        low, median, high = after.quantile(torch.tensor(QUANTILES)).tolist()
        lines.append(
            f"{f'{tokens}x{head_dim}':>8} | {mean:7.3f} {variance:9.3f} {head_dim:7d}"
            f" | {mean / math.sqrt(head_dim):7.3f} {variance / head_dim:9.3f} {1:7d}"
            f" | {after.mean():7.3f} {low:6.3f} {median:6.3f} {high:6.3f} {after.std():6.3f}"
            f" {spread(tokens, head_dim):10.3f}"
        )
    return "\n".join(lines)


def puzzle_text(variances: Tensor, seed: int) -> str:
    """Explain how one 2x2 draw can show a variance of 1.6: such a draw, and its place among `[draws]`."""
    generator = Generator().manual_seed(seed)
    query, key = normal_pair(2, 2, generator)
    scores = query @ key.mT / math.sqrt(2)
    after = variances / 2
    low, _, high = after.quantile(torch.tensor(QUANTILES)).tolist()
    above = (after > PUZZLE).float().mean().item()
    numbers = ", ".join(f"{score:.2f}" for score in scores.flatten().tolist())
    return (
        f"Why would 2x2 give {PUZZLE} and not 1? After torch.manual_seed({seed}), q = torch.randn(2, 2) and\n"
        f"k = torch.randn(2, 2) give the scaled scores {numbers}: variance {scores.var():.2f}.\n"
        "These 4 scores are made of only 2 queries and 2 keys, and one long or short vector changes two of them at\n"
        "once: a tiny sample, which tells even less than 4 scores of 4 separate pairs would.\n"
        f"It is noise, no wrong scale: draws average {after.mean():.2f}, 90 % lie between {low:.2f} and {high:.2f},\n"
        f"and {100 * above:.0f} % are above {PUZZLE}; more tokens, not another divisor, bring the number to 1."
    )


def readings_table(variances: Tensor) -> str:
    """The puzzling number in all its readings, from the sample variances of unscaled 2x2 scores `[draws]`."""
    lines = [
        f"{'variance of the 4 scores':<39} | {'theory':>6} {'average':>7} {'5 %':>6} {'95 %':>6} {f'> {PUZZLE}':>6}"
    ]
    lines.append("".join("+" if c == "|" else "-" for c in lines[0]))
    for scale, scaled in ((2, "before"), (1, "after")):
        for ddof, divisor in ((1, "n - 1"), (0, "n")):
            bias = 1 if ddof else 3 / 4  # (n - 1) / n
            drawn = variances * bias * scale / 2
            low, _, high = drawn.quantile(torch.tensor(QUANTILES)).tolist()
            above = 100 * (drawn > PUZZLE).float().mean().item()
            name = f"{scaled} / sqrt(d_k), over {divisor} (ddof {ddof})"
            lines.append(f"{name:<39} | {scale * bias:6.2f} {drawn.mean():7.2f} {low:6.2f} {high:6.2f} {above:4.0f} %")
    return "\n".join(lines)


def case_table(cases: Sequence[Case], results: Sequence[Measured]) -> str:
    """One row per case: measured variance, both predictions, and the beta that each of the three suggests."""
    lines = [
        f"{'':<36} | {'variance of q.k':^31} | {'beta = 1/std':^26} | {'var. of beta q.k':^18}",
        f"{'components of q and k':<36} | {'measured':>8} {'+-':>5} {'formula':>8} {'d_k':>7}"
        f" | {'measured':>8} {'formula':>8} {'d_k':>8} | {'formula':>8} {'d_k':>9}",
    ]
    lines.append("".join("+" if c == "|" else "-" for c in lines[-1]))
    for case, result in zip(cases, results, strict=True):
        formula, naive = case.formula.item(), case.naive.item()
        betas = " ".join(f"{variance**-0.5:8.4f}" for variance in (result.variance, formula, naive))
        lines.append(
            f"{case.name:<36} | {result.variance:8.2f} {result.error:5.2f} {formula:8.2f} {naive:7.0f}"
            f" | {betas} | {result.variance / formula:8.3f} {result.variance / naive:9.3f}"
        )
    return "\n".join(lines)


def large_text(tokens: int, head_dim: int, seed: int) -> str:
    """One large draw: its variance, that of the product formula from its own moments, and `d_k`."""
    query, key = normal_pair(tokens, head_dim, Generator().manual_seed(seed))
    own = Case("the draw itself", query.mean(0), query.var(0), key.mean(0), key.var(0))
    variance = score_moments(query, key)[1].item()
    return (
        f"One draw of {tokens}x{head_dim}: variance {variance:.2f}, by the formula from the draw's own means and\n"
        f"variances {own.formula.item():.2f}, by the textbook {own.naive.item():.0f}."
    )


def plot(
    path: Path, growth: dict[int, Tensor], puzzle: Tensor, cases: Sequence[Case], results: Sequence[Measured]
) -> None:
    """Write a PNG: `growth` maps d_k to variances before scaling `[draws]`; `puzzle` are those of 2x2, scaled."""
    from matplotlib.figure import Figure  # a Figure of its own draws with Agg and needs no display

    figure = Figure(figsize=(16, 4.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)

    dims = list(growth)
    for label, values, colour in (
        ("before: $q \\cdot k$", list(growth.values()), "tab:red"),
        ("after: $q \\cdot k / \\sqrt{d_k}$", [v / d for d, v in growth.items()], "tab:blue"),
    ):
        low, median, high = torch.stack([v.quantile(torch.tensor(QUANTILES)) for v in values], dim=1).tolist()
        left.fill_between(dims, low, high, color=colour, alpha=0.25, linewidth=0)
        left.plot(dims, median, "o", color=colour, label=label)
    left.plot(dims, dims, "k--", linewidth=1, label="theory: $d_k$ and 1")
    left.plot(dims, [1] * len(dims), "k--", linewidth=1)
    left.set_xscale("log", base=2)
    left.set_yscale("log", base=2)
    left.set(xlabel="$d_k$", ylabel="variance of the scores")
    left.set_title(f"Scaling undoes the growth with $d_k$\n({PLOT_TOKENS} tokens; median, 5 % to 95 % of the draws)")
    left.legend()

    top = puzzle.quantile(0.98).item()  # the long tail would squeeze the rest into one bar
    middle.hist(puzzle.tolist(), bins=40, range=(0, top), color="tab:blue", alpha=0.6)
    middle.axvline(1, color="k", linestyle="--", linewidth=1, label="theory, the average: 1")
    middle.axvline(PUZZLE, color="tab:red", linewidth=2, label=f"the puzzling {PUZZLE}")
    middle.set(xlabel="sample variance of the 4 scaled scores", ylabel="draws", xlim=(0, top))
    middle.set_title(f"2 tokens, $d_k$ = 2: {PUZZLE} is sampling noise\n(top 2 % of the draws not shown)")
    middle.legend()

    rows = range(len(cases))
    right.barh(rows, [r.variance for r in results], color="tab:blue", alpha=0.4, label="measured")
    right.plot([c.formula.item() for c in cases], rows, "o", color="tab:green", label="product formula")
    right.plot([c.naive.item() for c in cases], rows, "x", color="tab:red", label="$d_k$")
    right.set_yticks(rows, [c.name.replace(", ", ",\n") for c in cases])
    right.invert_yaxis()
    right.set(xlabel="variance of $q \\cdot k$", title=f"Other means and variances, $d_k$ = {CASE_HEAD_DIM}")
    right.legend()

    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Mean and variance of random attention scores: two tables and a plot.")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/variance.png"), help="PNG to write (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=400, help="of Q and K for each size (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.draws < 20:
        parser.error(f"--draws must be at least 20, for quantiles of 5 % and 95 %, not {options.draws}")
    if not 0 <= options.seed < 2**32:
        parser.error(f"--seed must be between 0 and 2**32 - 1, not {options.seed}")
    if options.output.suffix.lower() != ".png":
        parser.error(f"--output must end in .png, not {options.output}")
    if options.output.is_dir():
        parser.error(f"--output must be a file, not the folder {options.output}")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)

    print(f"Q and K [tokens, d_k] standard normal, scores QK^T before and after / sqrt(d_k), {options.draws} draws:\n")
    moments = {size: draw_moments(*size, options.draws, options.seed) for size in SIZES}
    print(size_table(moments))
    print("The std of the small sizes rests on a few extreme draws and settles slowly; the quantiles do not.\n")
    print(puzzle_text(moments[2, 2][1], find_draw(2, 2, PUZZLE, options.seed)), end="\n\n")
    print(f"The nearest reading of {PUZZLE} is without the division and with n as the divisor: 2 (n - 1) / n = 1.5.\n")
    print(readings_table(moments[2, 2][1]), end="\n\n")

    print("Formula: sum_i (var q_i + mean q_i^2)(var k_i + mean k_i^2) - mean q_i^2 mean k_i^2.")
    print(f"d_k = {CASE_HEAD_DIM}, {CASE_PAIRS:,} independent pairs of q and k; +- is one standard error:\n")
    cases, generator = make_cases(CASE_HEAD_DIM), Generator().manual_seed(options.seed)
    results = [measure(draw_scores(case, CASE_PAIRS, generator)) for case in cases]
    print(case_table(cases, results), end="\n\n")
    print(large_text(*LARGE, options.seed), end="\n\n")

    options.output.parent.mkdir(parents=True, exist_ok=True)
    growth = {d: draw_moments(PLOT_TOKENS, d, options.draws, options.seed)[1] for d in HEAD_DIMS}
    plot(options.output, growth, moments[2, 2][1] / 2, cases, results)
    print(f"Plot: {options.output}")


if __name__ == "__main__":
    main()
