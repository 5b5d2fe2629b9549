"""History of the findings of a run, for pictures of layers by step; its size is bounded, however long the run.

A `Picture` keeps one and adds the findings of every log. No checkpoint holds it, so a resumed run begins a new one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from betahook.report.conditions import Numbers
from betahook.report.findings import Findings

COLUMNS = 64
"""Number of columns kept at most; beyond it, neighbours are merged."""

LARGER = ("nonfinite", "max_logit", "logit_std")
"""Numbers of which a merged column keeps the largest; the others are taken at the lowest entropy."""

TURN = 0.75
"""A move smaller than this share of the one before shows that beta turned back, perhaps twice, between two logs."""


@dataclass(frozen=True)
class Column:
    """One or several logs, merged.

    Attributes:
        first: step of its first log.
        last: step of its last log.
        logs: number of logs.
        numbers: numbers of each layer, from the sharpest of these logs.
        gains: beta over the model's own, of each layer, at the last log.
        phases: phase of the controller in each layer, as a word, at the last log.
        turns: for each layer, 1 or -1 if beta turned back, upwards or downwards, else 0.
    """

    first: int
    last: int
    logs: int
    numbers: tuple[Numbers, ...]
    gains: tuple[float, ...]
    phases: tuple[str, ...]
    turns: tuple[int, ...]

    def merge(self, later: Column) -> Column:
        """Merge a later column into this one."""
        return replace(
            later,
            first=self.first,
            logs=self.logs + later.logs,
            numbers=tuple(_sharper(*pair) for pair in zip(self.numbers, later.numbers, strict=True)),
            turns=tuple(new or old for old, new in zip(self.turns, later.turns, strict=True)),
        )


class History:
    """Columns that each merge the same number of logs, the last one perhaps fewer.

    Attributes:
        columns: the columns, from old to new.
        latest: the findings that were added last; None before any.
        added: number of logs since the history began, or began anew.
    """

    def __init__(self, limit: int = COLUMNS) -> None:
        self.columns: list[Column] = []
        self.latest: Findings | None = None
        self.added = 0
        self._limit = limit
        self._logs_per_column = 1
        self._moves: list[float] = []

    def add(self, findings: Findings, step: int) -> None:
        """Add the findings of a log at `step`, the step of the run that its other charts use.

        A second log of the same step is merged into the first. A log of an earlier step, or of other layers, begins the
        history anew.
        """
        last = self.columns[-1].last if self.columns else step
        if step < last or not self._has_the_layers_of(findings):
            self.columns, self.added, self._logs_per_column, self._moves = [], 0, 1, []
        self.added += 1
        column = Column(
            step,
            step,
            1,
            tuple(finding.numbers for finding in findings),
            tuple(finding.gain for finding in findings),
            tuple(finding.note.phase_name for finding in findings),
            self._turns(findings),
        )
        self.latest = findings
        if self.columns and step == last:
            self.columns[-1] = replace(self.columns[-1].merge(column), logs=self.columns[-1].logs)
            return
        if self.columns and self.columns[-1].logs < self._logs_per_column:
            self.columns[-1] = self.columns[-1].merge(column)
            return
        self.columns.append(column)
        if len(self.columns) > self._limit:
            pairs = [self.columns[index : index + 2] for index in range(0, len(self.columns), 2)]
            self.columns = [pair[0].merge(pair[1]) if len(pair) == 2 else pair[0] for pair in pairs]
            self._logs_per_column *= 2

    def _has_the_layers_of(self, findings: Findings) -> bool:
        return self.latest is None or [each.layer for each in findings] == [each.layer for each in self.latest]

    def _turns(self, findings: Findings) -> tuple[int, ...]:
        moves = [finding.note.move for finding in findings]
        before = self._moves or moves
        turns = [_turned(*pair) for pair in zip(before, moves, strict=True)]
        self._moves = [new or old for old, new in zip(before, moves, strict=True)]
        return tuple(turns)


def _turned(before: float, move: float) -> int:
    """Return the sign of the new move if a search turned back between two moves, else 0."""
    turned = before * move < 0 or (before * move > 0 and abs(move) < TURN * abs(before))
    return (1 if move > 0 else -1) if turned else 0


def _sharper(one: Numbers, other: Numbers) -> Numbers:
    """Return the numbers with the lower entropy, but the larger of those in `LARGER`; NaN yields to a number."""
    kept = one if one.relative_entropy < other.relative_entropy or math.isnan(other.entropy) else other
    larger = {name: _larger(getattr(one, name), getattr(other, name)) for name in LARGER}
    return replace(kept, **larger)


def _larger(one: float, other: float) -> float:
    return other if math.isnan(one) or other > one else one
