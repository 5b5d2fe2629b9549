"""`python -m generated --modules 2000 --seed 0`: verify as many random modules, and print what became of them."""

from __future__ import annotations

import argparse
import logging
import time
import warnings

from generated.verify import verify_all


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m generated", description=__doc__)
    parser.add_argument("--modules", type=int, default=2000, help="how many (default: 2000)")
    parser.add_argument("--seed", type=int, default=0, help="the first one's; each has a seed of its own (default: 0)")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # one for each layer that is left alone
    warnings.simplefilter("ignore")  # of reentrant checkpoints
    begin = time.perf_counter()
    summary = verify_all(range(options.seed, options.seed + options.modules))
    print(f"{options.modules} modules in {time.perf_counter() - begin:.0f} s, none silently wrong")
    print(*(f"{count:6} {kind}" for kind, count in summary.verdicts.most_common()), sep="\n")
    plain = summary.plain.total()
    print(f"{plain} are a softmax over beta * q . k plus terms, of which {summary.supported:.1%} are supported;")
    print("the others are left alone, because")
    print(*(f"{count:6} {reason}" for reason, count in summary.reasons.most_common()), sep="\n")
    print(f"{summary.folds} of {summary.verdicts['right']} can be folded; the others are refused, because")
    print(*(f"{count:6} {reason}" for reason, count in summary.unfolded.most_common()), sep="\n")


if __name__ == "__main__":
    main()
