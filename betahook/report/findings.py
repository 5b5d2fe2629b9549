"""Findings in words: the condition of each layer's attention, since when it holds, and what to do about it.

`Hook.findings` calls `observe`, the only function here that reads or writes the state; the rest turns numbers into
words.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch

from betahook.control.notes import Note
from betahook.layer import Layers
from betahook.report import metrics
from betahook.report.conditions import HELP, WORRYING, Condition, Numbers, advise, classify
from betahook.report.document import Table, on_one_line
from betahook.report.names import format_factor, format_number, listed, ranges, short_names
from betahook.state.state import State

logger = logging.getLogger("betahook")

NEARLY_FLAT = 0.75
"""Share of its keys beyond which a head looks at so many that its logits can differ only little, however large."""

OFFSET = "flat or nearly so, since the logits of a row share a large offset, which cancels"
"""Remark on the softmax of layers that explode only by such an offset."""

TITLE = "Attention, layer by layer"
NOTE = f"Keys looked at: effective number of keys, exp(mean entropy), of the number under flat attention. {HELP}"
"""Title above and note below the table on a page."""

REMARK = re.compile(r"^\* \*\*(.+?)\*\*: (.+)$", re.MULTILINE)
"""A remark in findings written as Markdown: its subject and its text."""

NAMED = 4
"""Number of layers, or runs of heads, that a sentence or a cell names at most; it counts the others."""


@dataclass(frozen=True)
class Finding:
    """The condition of one layer, and the numbers behind it.

    Attributes:
        layer: module name.
        condition: condition of the layer, all heads pooled.
        since: the hook's step at which this condition was first seen; for `NONFINITE`, the step of the first NaN or
            infinity.
        numbers: numbers of the layer; `max_logit` is the largest over all its heads.
        heads: heads in another condition than the layer, by condition; counted from 0.
        beta: the beta in force, or its geometric mean if heads differ; NaN while nothing was measured.
        beta_default: the model's own beta.
        note: the controllers' note on what they did to beta, and why.
        head_numbers: numbers of each head.
        head_gains: beta over the model's own, for each head.
        is_new: True if this condition was first seen in this step.
    """

    layer: str
    condition: Condition
    since: int
    numbers: Numbers
    heads: Mapping[Condition, tuple[int, ...]]
    beta: float
    beta_default: float
    note: Note
    head_numbers: tuple[Numbers, ...] = field(repr=False)
    head_gains: tuple[float, ...] = field(repr=False)
    is_new: bool = False

    @property
    def max_logit_head(self) -> int:
        """The head with the largest logit; NaN counts as the smallest."""
        logits = [numbers.max_logit for numbers in self.head_numbers]
        return max(range(len(logits)), key=lambda head: (not math.isnan(logits[head]), logits[head]))

    @property
    def shares_offset(self) -> bool:
        """True if the layer explodes only by an offset that all keys of a row share: softmax then is nearly flat."""
        return self.condition is Condition.EXPLODING and self.head_numbers[self.max_logit_head].keys_share > NEARLY_FLAT

    @property
    def gain(self) -> float:
        """Beta over the model's own."""
        return self.beta / self.beta_default


class Findings(tuple[Finding, ...]):
    """One `Finding` per layer, in the order of the layers; prints as a summary and a table.

    Attributes:
        step: the hook's step that the findings describe.
    """

    step: int

    @classmethod
    def at(cls, step: int, findings: Iterable[Finding]) -> Findings:
        """Collect the findings of a step."""
        found = cls(findings)
        found.step = step
        return found

    @property
    def labels(self) -> list[str]:
        """Short names of the layers, see `report.names`."""
        return short_names(finding.layer for finding in self)

    @property
    def counts(self) -> dict[Condition, int]:
        """Number of layers in each condition, the gravest first; conditions without a layer are left out."""
        counted = Counter(finding.condition for finding in self)
        return {condition: counted[condition] for condition in sorted(counted, reverse=True)}

    @property
    def summary(self) -> str:
        """The findings in a few sentences."""
        sentences = [f"Step {self.step}: {self._share()}."]
        measured = [pair for pair in zip(self, self.labels, strict=True) if pair[0].numbers.max_logit >= 0]
        if measured:
            largest, label = max(measured, key=lambda pair: pair[0].numbers.max_logit)
            sentences.append(
                f"The largest logit is {format_number(largest.numbers.max_logit)} "
                f"(layer {label}, head {largest.max_logit_head})."
            )
            gains = [gain for finding, _ in measured for gain in finding.head_gains if gain > 0]
            if gains:
                low, high = format_factor(min(gains)), format_factor(max(gains))
                times = "" if low == high == "1" else f"{low if low == high else f'{low} to {high}'} times "
                sentences.append(f"Beta is {times}the model's own.")
        return " ".join(sentences)

    def _share(self) -> str:
        """Say in words how many layers are in each condition."""
        total, counts = len(self), self.counts
        if len(counts) == 1:
            return f"{_layers(self.labels, total)} {next(iter(counts)).predicate}"
        shares = [f"{number} {condition.predicate}" for condition, number in counts.items()]
        return f"of {total} layers, {listed(shares)}"

    @property
    def news(self) -> str:
        """One line on the conditions that began in this step; empty if none did."""
        began: dict[Condition, list[str]] = {}
        for finding, label in zip(self, self.labels, strict=True):
            if finding.is_new and finding.condition is not Condition.UNMEASURED:
                began.setdefault(finding.condition, []).append(label)
        if not began:
            return ""
        conditions = sorted(began, reverse=True)
        parts = [f"{each.predicate} in {_layers(began[each], len(self))}" for each in conditions]
        if advice := self._advice(conditions[0]):  # beside the gravest condition, which it is about
            parts[0] += f" ({advice})"
        return f"step {self.step}: attention is now {listed(parts)}"

    @property
    def is_worrying(self) -> bool:
        """True if one of the `WORRYING` conditions began in this step."""
        return any(finding.is_new and finding.condition in WORRYING for finding in self)

    def table(self) -> Table:
        """Return a table with one row per layer, without empty columns."""
        header = ["layer", "attention", "since step", "logit std", "max logit", "keys looked at", "beta / own"]
        rows = [_cells(finding, label) for finding, label in zip(self, self.labels, strict=True)]
        return Table([*header, "last move", "heads"], rows, TITLE, NOTE).compact()

    def remarks(self) -> dict[str, str]:
        """Return advice on conditions and explanations of controllers, by subject: the lines below the table."""
        notes: dict[str, list[str]] = {}
        for finding, label in zip(self, self.labels, strict=True):
            notes.setdefault(str(finding.note), []).append(label)
        notes.pop("", None)
        advice = {str(condition): words for condition in self.counts if (words := self._advice(condition))}
        if shared := [label for finding, label in zip(self, self.labels, strict=True) if finding.shares_offset]:
            advice[f"softmax of {_layers(shared, len(self))}"] = OFFSET
        return {**advice, **{f"beta of {_layers(labels, len(self))}": note for note, labels in notes.items()}}

    def _advice(self, condition: Condition) -> str:
        return advise(condition, [finding.gain for finding in self if finding.condition is condition])

    def markdown(self) -> str:
        """Return the findings as a page in Markdown."""
        remarks = [f"* **{on_one_line(subject)}**: {words}" for subject, words in self.remarks().items()]
        return "\n".join([f"**{on_one_line(self.summary)}**", "", *remarks, "", self.table().markdown(), "", HELP])

    def __str__(self) -> str:
        remarks = [f"{subject}: {words}" for subject, words in self.remarks().items()]
        return "\n".join([self.summary, "", str(self.table()), "", *remarks, HELP])

    __repr__ = __str__
    _repr_markdown_ = markdown  # shown in notebooks


def read_markdown(words: str) -> tuple[str, dict[str, str], Table]:
    """Parse findings that were written as Markdown into summary, remarks and table."""
    table = replace(Table.from_markdown(words), title=TITLE, note=NOTE)
    return words.partition("\n")[0].strip("*"), dict(REMARK.findall(words)), table


def observe(state: State, layers: Layers, notes: Sequence[Note], unreached: Mapping[str, str]) -> Findings:
    """Judge what the last step measured, and record in the state since when each layer is in its condition.

    `notes` are the controllers' notes, one per layer, which go into the findings. For the layers in `unreached` (name
    to reason), nothing but the reason is reported. The first call after a step logs its news, one line at most.
    Synchronises with the device.
    """
    is_first_look = state.reported.findings_step < state.steps
    state.reported.changed = set() if is_first_look else state.reported.changed
    by_layer = metrics.numbers(state, state.layers)
    by_head = _numbers(metrics.numbers(state, state.layers.by_head()))
    own = state.layers.geometric_mean(state.beta_default).tolist()
    gains = (state.current_beta / state.beta_default).tolist()
    before, since, broken = (x.tolist() for x in (state.condition, state.condition_since, state.nonfinite_since))
    findings = []
    of_each = zip(layers, state.ranges, notes, _numbers(by_layer), by_layer["beta"], own, strict=True)
    for index, (name, head_range, note, numbers, beta, beta_default) in enumerate(of_each):
        of_heads, of_gains = tuple(by_head[head_range.heads]), tuple(gains[head_range.heads])
        if name in unreached:  # earlier measurements do not describe the model as it is now
            numbers, of_heads = Numbers(), (Numbers(),) * len(of_heads)
            note, beta, of_gains = Note(reason=f"not reached, {unreached[name]}"), math.nan, (math.nan,) * len(of_gains)
        was = Condition(before[index])
        condition = classify(numbers, was)
        if condition != before[index]:
            state.reported.changed.add(index)
            before[index], since[index] = int(condition), _beginning(state, condition, broken[head_range.heads])
        findings.append(
            Finding(
                layer=name,
                condition=condition,
                since=since[index],
                numbers=numbers,
                heads=_differing([classify(each, was) for each in of_heads], condition),
                beta=beta,
                beta_default=beta_default,
                note=note,
                head_numbers=of_heads,
                head_gains=of_gains,
                is_new=index in state.reported.changed,
            )
        )
    state.condition.copy_(torch.tensor(before, device="cpu"))
    state.condition_since.copy_(torch.tensor(since, device="cpu"))
    state.reported.findings_step = state.steps
    found = Findings.at(state.steps, findings)
    if is_first_look and found.news:
        logger.log(logging.WARNING if found.is_worrying else logging.INFO, "%s", found.news)
    return found


def _beginning(state: State, condition: Condition, broken: Sequence[int]) -> int:
    """Return the step at which a new condition began; `broken` holds each head's first non-finite step, or 0."""
    later = [step for step in broken if step > state.reported.findings_step]
    return min(later) if condition is Condition.NONFINITE and later else state.steps


def _numbers(quantities: Mapping[str, Sequence[float]]) -> list[Numbers]:
    """Collect the `Numbers` of every layer, or of every head, from metrics by quantity."""
    return [Numbers(*row) for row in zip(*(quantities[field.name] for field in fields(Numbers)), strict=True)]


def _differing(conditions: Sequence[Condition], of_layer: Condition) -> dict[Condition, tuple[int, ...]]:
    others = sorted({condition for condition in conditions if condition is not of_layer}, reverse=True)
    return {other: tuple(head for head, found in enumerate(conditions) if found is other) for other in others}


def _cells(finding: Finding, label: str) -> list[str]:
    numbers = finding.numbers
    flat = math.exp(numbers.flat_entropy)
    heads = [f"{condition}: {ranges(which, NAMED)}" for condition, which in finding.heads.items()]
    cells = [
        _cell(format_number(numbers.logit_std, 2), numbers.logit_std),
        _cell(format_number(numbers.max_logit), numbers.max_logit),
        _cell(f"{format_number(numbers.keys)} of {format_number(flat)}", numbers.keys, flat),
        _cell(f"{format_factor(finding.gain)} x", finding.gain),
    ]
    move = 100 * (10**finding.note.move - 1)
    moved = f"{'+' * (move > 0)}{format_number(move, 2)} %" if move else ""
    return [label, str(finding.condition), str(finding.since), *cells, moved, "; ".join(heads)]


def _cell(text: str, *numbers: float) -> str:
    """Return `text`, or an empty cell if one of the numbers in it was not measured."""
    return "" if any(map(math.isnan, numbers)) else text


def _layers(labels: Sequence[str], total: int) -> str:
    if len(labels) == total and total > 1:
        return "both layers" if total == 2 else f"all {total} layers"
    return f"layer{'s' * (len(labels) > 1)} {listed(labels, NAMED)}"
