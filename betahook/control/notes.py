"""Notes in which controllers explain themselves to people: phase, last move and reason, as values on the host.

`Controller.explain` writes them, and `stages.explain` combines those of a layer. Nothing in training depends on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum


@dataclass(frozen=True)
class Note:
    """The state of a controller for one beta, in words.

    Attributes:
        phase: phase of the controller; None if it has no phases.
        move: its last move of beta in decades, signed; 0 if there was none, or if it moves beta in every step.
        reason: the reason for that move, or for holding beta; empty if there is nothing to say.
    """

    phase: IntEnum | None = None
    move: float = 0.0
    reason: str = ""

    @property
    def phase_name(self) -> str:
        """The phase as a word, such as `warm-up`; empty if there is none."""
        return "" if self.phase is None else self.phase.name.lower().replace("_", "-")

    def __str__(self) -> str:
        return ": ".join(filter(None, [self.phase_name, self.reason]))


def checked(owner: object, notes: Sequence[Note], units: int) -> Sequence[Note]:
    """Return the notes of a controller on its betas, after checking them.

    Raises:
        TypeError: there is neither a note for each of the `units` nor none at all.
    """
    are_notes = isinstance(notes, Sequence) and all(isinstance(note, Note) for note in notes)
    if not are_notes or len(notes) not in (0, units):
        raise TypeError(f"explain() of {owner} must return {units} notes, one for each beta, or none; got {notes!r}")
    return notes


def combine_controller_notes(notes: Sequence[Note]) -> Note:
    """Combine the notes of several controllers on one beta, in their order."""
    return Note(
        next((note.phase for note in notes if note.phase is not None), None),
        next((note.move for note in notes if note.move), 0.0),
        "; ".join(note.reason for note in notes if note.reason),
    )


def combine_head_notes(notes: Sequence[Note]) -> Note:
    """Combine the notes on the heads of a layer: the most common phase and reason, and the mean move."""
    (common, count), *_ = Counter(replace(note, move=0.0) for note in notes).most_common(1)
    share = f" ({count} of {len(notes)} heads)" if count < len(notes) and common.reason else ""
    return Note(common.phase, sum(note.move for note in notes) / len(notes), common.reason + share)


def downhill(direction: float) -> str:
    """Explain why a descending controller moves beta in `direction`: up if positive, down if negative."""
    if direction == 0:
        return "the loss does not depend on beta"
    return f"a {'larger' if direction > 0 else 'smaller'} beta lowers the loss"
