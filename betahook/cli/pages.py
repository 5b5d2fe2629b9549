"""Documents about measurements: those of an examination, and those of a run. `betahook.cli.commands` calls this."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import betahook
from betahook import checkpoint
from betahook.cli.runs import Points, Run
from betahook.control.base import Controller
from betahook.examination import Examination
from betahook.measure.statistics import geometric_mean
from betahook.report import glance
from betahook.report.audit import Audit
from betahook.report.charts import steps_of
from betahook.report.conditions import Condition
from betahook.report.document import Block, Chart, Document, Image, Table, Text
from betahook.report.findings import Findings, read_markdown
from betahook.report.names import listed, short_names
from betahook.report.precision import Precision
from betahook.report.summary import GROUP

COLOURS = {
    "flat": "#4a92c8",
    "healthy": "#56a372",
    "sharp": "#e3761b",
    "one key": "#cd0018",
    "exploding": "#8d4aef",
    "sink": "#b88b44",
    "dead": "#8a5a45",
    "nonfinite": "#62656c",
    "unmeasured": "#8c9595",
}
"""Colours of conditions in charts: blue is flat and orange sharp, as in the picture.

They are distinguishable for the colour-blind, and legible on the white and on the dark page.
"""


def examination(title: str, source: str, found: Examination, *, pictured: bool) -> Document:
    """Return the document of an examination, with a picture if one is asked for and matplotlib is installed."""
    summary = found.findings.summary.removeprefix(f"Step {found.findings.step}: ")
    blocks: list[Block] = [
        Text(summary[0].upper() + summary[1:], strong=True),
        *advice(found.findings.remarks()),
        Text(source),
        *(at_a_glance(found.findings) if pictured else []),
        found.findings.table().compact(without=["since step", "beta / own"]),
        formats(found.precision, found.findings.labels),
        *found.audit.tables(short=True),
        footer(),
    ]
    return Document(title, blocks)


def at_a_glance(findings: Findings) -> list[Image]:
    """Return the picture of these findings alone; empty without matplotlib."""
    picture = glance.Picture()
    picture.add(findings)
    try:
        png = picture.png()
    except ImportError:
        return []
    return [Image(png, "layer by head", "At a glance", "Blue is flat, orange sharp, dark red looks at one key.")]


def run(folder: str, found: Run, judged: tuple[Findings, Audit] | None) -> Document:
    """Return the document of a run, from what its files contain."""
    summary, remarks, tables = "", {}, list[Table]()
    if found.checkpoints:
        last = max(found.checkpoints)
        tables = [replace(betas(found.checkpoints[last].state), title=f"Beta at step {last}")]
    if judged is not None:
        findings, audited = judged
        summary, remarks = findings.summary, findings.remarks()
        tables = [
            findings.table(),
            *(table.compact(without=["beta / own", "attention"]) for table in tables),
            *audited.tables(short=True),
        ]
    elif found.words:
        summary, remarks, table = read_markdown(found.words)
        tables = [table, *tables]
    blocks: list[Block] = [Text(summary, strong=True), *advice(remarks)] if summary else []
    if found.picture is not None:
        note = "Blue is flat, orange sharp, dark red looks at one key; beta over the model's own at the lower right."
        blocks.append(Image(found.picture, "layer by step, and layer by head", "At a glance", note))
    blocks += [Text("\n".join(found.remarks))] if found.remarks else []
    blocks += [*charts(found), *tables, footer(*sources(found))]
    return Document(f"Attention in {Path(folder).resolve().name}", blocks)


def charts(found: Run) -> list[Chart]:
    """Return those charts of a run for which anything was logged, over the same steps."""
    loss = {"training": found.curve("train/loss", f"{GROUP}/loss"), "evaluation": found.curve("eval/loss")}
    shares = {
        tag.removeprefix(f"{GROUP}/layers_").replace("_", " "): points
        for tag, points in found.scalars.items()
        if tag.startswith(f"{GROUP}/layers_") and any(value for _, value in points)
    }
    ends = {end: found.curve(f"{GROUP}/log10_beta_over_own_{end}") for end in ("lowest", "highest")}
    stds = {
        words: found.curve(f"{GROUP}/highest_{name}")
        for words, name in (("logits", "logit_std"), ("W_q", "weight_std_q"), ("W_k", "weight_std_k"))
    }
    spread = {end: [(step, 10.0**value) for step, value in points] for end, points in ends.items()}
    made = [
        Chart("Loss", loss),
        Chart("Largest logit", {"largest logit": found.curve(f"{GROUP}/max_logit")}, logarithmic=True),
        Chart("Share of the layers in each condition", shares, colours=COLOURS, ends=(-0.05, 1.05)),
        Chart("Lowest entropy of a layer (nats)", {"entropy": found.curve(f"{GROUP}/lowest_entropy")}),
        Chart("Highest std of a layer", stds, logarithmic=True),
        Chart("Beta over the model's own: range", spread, logarithmic=True),
        Chart("Beta over the model's own, by layer, at checkpoints", _gains(found), logarithmic=True),
    ]
    logged = [chart for chart in made if any(chart.lines.values())]
    steps = steps_of(logged) if logged else None
    return [replace(chart, steps=steps) for chart in logged]


def betas(state: dict[str, Any]) -> Table:
    """Return a table of the beta and the condition of each layer, from the state of a hook."""
    own, beta = _betas(state)
    by_head = (state["beta"] / state["beta_default"]).split(list(state["layers"].values()))
    rows = []
    for index, label in enumerate(short_names(state["layers"])):
        condition, since = Condition(int(state["condition"][index])), int(state["condition_since"][index])
        gains = by_head[index]
        differ = bool((gains != gains[0]).any()) and not bool(gains.isnan().any())
        rows.append(
            [
                label,
                number(own[index]),
                number(beta[index]),
                "" if math.isnan(beta[index]) else f"{beta[index] / own[index]:.3g} x",
                f"{float(gains.min()):.3g} to {float(gains.max()):.3g} x" if differ else "",
                "" if condition is Condition.UNMEASURED else f"{condition} since step {since}",
            ]
        )
    return Table(["layer", "own beta", "beta", "beta / own", "heads", "attention"], rows)


def sources(found: Run) -> list[str]:
    """Return a line on what the page was made from; empty if everything was left out."""
    parts = [*found.logs]
    if found.checkpoints:
        newest = found.checkpoints[max(found.checkpoints)].state
        after = f"{', '.join(map(str, found.checkpoints))} step{'s' * ([*found.checkpoints] != [1])}"
        options = ", ".join(f"{name}={value!r}" for name, value in newest["options"].items())
        kind = "checkpoints" if len(found.checkpoints) > 1 else "a checkpoint"
        parts.append(f"{kind} after {after}; {', '.join(checkpoint.makers(newest))}; {options}")
    return [f"From {listed(parts)}"] if parts else []


def advice(remarks: Mapping[str, str]) -> list[Block]:
    """Return remarks as a paragraph with a line for each; empty without any."""
    return [Text("\n".join(f"{subject}: {words}" for subject, words in remarks.items()))] if remarks else []


def number(value: float) -> str:
    """Format a number; empty for NaN."""
    return "" if math.isnan(value) else f"{value:.4g}"


def _betas(state: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return each layer's own beta, and its beta in force; NaN in the state stands for the model's own."""
    lengths = torch.tensor(list(state["layers"].values()))
    acting = torch.where(state["beta"].isnan(), state["beta_default"], state["beta"])
    layers = torch.arange(len(lengths)).repeat_interleave(lengths)
    own, now = (geometric_mean(beta, lengths, layers) for beta in (state["beta_default"], acting))
    return own.tolist(), now.tolist()


def _gains(found: Run) -> dict[str, Points]:
    """Return beta over the model's own for each layer, over the checkpoints; empty if there is only one."""
    lines: dict[str, Points] = {}
    for step, saved in found.checkpoints.items():
        for label, own, beta in zip(short_names(saved.state["layers"]), *_betas(saved.state), strict=True):
            if not math.isnan(beta):
                lines.setdefault(f"layer {label}", []).append((step, beta / own))
    return lines if len(found.checkpoints) > 1 else {}


def formats(precision: Sequence[Precision], labels: Sequence[str]) -> Table:
    """Return a table of what number formats would do to the scores, with a row for each layer."""
    names = list(dict.fromkeys(each.name for each in precision))
    layers = list(dict.fromkeys(each.layer for each in precision))
    verdicts = {(each.layer, each.name): _with_heads(each) for each in precision}
    rows = [[label, *(verdicts[layer, name] for name in names)] for label, layer in zip(labels, layers, strict=True)]
    note = (
        "If scores or softmax were computed in the format: the range that the largest score uses, before beta, and the "
        "error of an attention weight if the largest logit is rounded. Flash attention keeps its scores in float32."
    )
    return Table(["layer", *names], rows, "Number formats", note)


def footer(*lines: str) -> Text:
    """Return a footer: these lines, and the versions of packages."""
    packages = " · ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return Text("\n".join([*lines, f"betahook {betahook.__version__} · {packages}"]))


def is_on_its_way(state: dict[str, Any]) -> bool:
    """Return True if one of betahook's own controllers was still moving beta to its target when a state was saved."""
    own = {getattr(betahook, name) for name in betahook.__all__}.intersection(Controller.__subclasses__())
    kinds = {kind.__qualname__: kind for kind in own}
    # With default options: another version may have written the saved ones.
    return any(
        kind().is_in_transition(kind.migrate(entry["state"]))
        for entry in state["controllers"]
        if (kind := kinds.get(entry["class"]))
    )


def _with_heads(each: Precision) -> str:
    heads = each.overflowing or each.near_overflow or each.coarse or each.unmeasured
    if not heads or len(heads) == len(each.weight_error):
        return each.verdict
    return f"{each.verdict}: {len(heads)} of {len(each.weight_error)} heads"
