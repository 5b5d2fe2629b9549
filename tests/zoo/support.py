"""The table of what is verified for each model type, `docs/SUPPORT.md`: `python -m zoo.support` writes it.

The tests of `test_families` compare each row with what they find, so that the table cannot go stale unnoticed.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import transformers

from zoo import catalogue
from zoo.verify import Verdict, verify

PAGE = Path(__file__).parents[2] / "docs" / "SUPPORT.md"
BACKENDS = ("eager", "sdpa")
COLUMNS = ("model type", *BACKENDS, "W_q, W_k", "fold", "Clip", "not reached", "known difference")


def columns(family: str, verdicts: dict[str, Verdict | None]) -> dict[str, str]:
    """The row of a model type, from its verdict on each backend; None where transformers has no such backend."""
    eager = verdicts["eager"]
    assert eager is not None, "every model has eager attention"
    return {
        "model type": family,
        **{backend: cell(verdicts[backend]) for backend in BACKENDS},
        "W_q, W_k": _count(eager.located, eager.layers),
        "fold": _reason(eager.folds),
        "Clip": _reason(eager.clips),
        "not reached": ", ".join(f"`{name}`" for name in _patterns(eager.beside)),
        "known difference": catalogue.KNOWN.get(family, ""),
    }


def cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return "-"
    if verdict.refusal is not None:
        return "refused" if verdict.beside else "no attention"
    if verdict.layers == verdict.exact:
        return f"{verdict.layers} exact"
    return f"{verdict.exact} exact, {verdict.layers - verdict.exact} sampled"


def _count(part: int, whole: int) -> str:
    return "" if not whole else "yes" if part == whole else f"{part} of {whole}" if part else "no"


def _reason(said: str) -> str:
    """What a verdict says, of an error its reason alone."""
    refused = re.search(r"\): (.*?)\. ", said)
    return refused[1] if refused else said


def _patterns(names: tuple[str, ...]) -> list[str]:
    """Module names, with a star for the number of a layer."""
    return list(dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) or "the model" for name in names))


def read() -> dict[str, dict[str, str]]:
    """The rows of the table by model type."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = [dict(zip(COLUMNS, map(str.strip, line.strip("|").split("|")), strict=True)) for line in lines[2:]]
    return {row["model type"]: row for row in rows}


def write(rows: list[dict[str, str]], seconds: list[float]) -> None:
    """Write the page, its rows by the name of the model type."""
    rows = sorted(rows, key=lambda row: row["model type"].casefold())
    attached = [row for row in rows if "exact" in row["eager"] or "sampled" in row["eager"]]
    table = [COLUMNS, ["---"] * len(COLUMNS), *(row.values() for row in rows)]
    lines = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    without = "\n".join(f"* {name}: {reason}" for name, reason in catalogue.WITHOUT_MODEL.items())
    PAGE.parent.mkdir(exist_ok=True)
    torch_version = torch.__version__.split("+")[0]
    median = statistics.median(seconds)
    PAGE.write_text(f"""\
# What is verified, for each model type

Written by `make support` with transformers {transformers.__version__} and torch {torch_version}; `make test-families`
compares it with what it finds. A tiny model of each model type is made from its config, and betahook's view of it held
against what torch's own operations show of the model alone: which modules are attention; count, mean and standard
deviation of their raw scores, the largest one, and the entropy of their rows; the factor that the model puts on them;
the logits at half that factor; every bit of the outputs while monitoring, and after detaching.

{len(attached)} of {len(rows)} model types attach. Building, attaching and verifying one takes {median:.2f} s (median).

* *eager*, *sdpa*: how many attention modules are verified, and whether their score statistics cover every pair or a
  sample of the query rows; "-": transformers has no such backend for this model; "no attention": no softmax over a
  product of queries and keys; "refused": `attach` raises and names what it cannot reach.
* *W_q, W_k*: whether the std of their entries is measured.
* *fold*: whether the model with β in its weights computes what the hooked one did, or why `fold` refuses.
* *Clip*: whether no logit exceeds the threshold of `Clip`, half of the largest one, once all layers were clipped; in
  how many, where the outputs of the tiny model do not depend on the others, as behind a gate that is still zero; or
  why it refuses.
* *not reached*: attention that `attach` leaves alone.
* *known difference*: what still differs from the truth.

{lines}

## Not in the table

{without}
""")


def _verdicts(family: str) -> tuple[dict[str, str], list[str], float]:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    started = time.perf_counter()
    try:
        verdicts = {backend: verify(family, backend) for backend in BACKENDS}
    except Exception as error:  # whatever happens to one model must not lose the others
        return {"model type": family}, [f"{type(error).__name__}: {error}"], 0.0
    problems = [p for verdict in verdicts.values() if verdict for p in verdict.problems]
    return columns(family, verdicts), problems, (time.perf_counter() - started) / len(BACKENDS)


def main() -> int:
    with ProcessPoolExecutor(2) as pool:
        found = []
        for row in pool.map(_verdicts, catalogue.ZOO):
            found.append(row)
            print(f"{len(found)} of {len(catalogue.ZOO)}: {row[0]['model type']}", file=sys.stderr)
    whole = [(row, seconds) for row, _, seconds in found if len(row) == len(COLUMNS)]
    write([row for row, _ in whole], [seconds for _, seconds in whole])
    problems = [
        f"{row['model type']}: {problem}"
        for row, seen, _ in found
        for problem in seen
        if row["model type"] not in catalogue.KNOWN
    ]
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
