"""The paper's search for beta inside one training run: powers of ten, then bisection, judged by the loss.

`betahook.control.base.apply` runs it. All units share one search, or search one after another, so most numbers of the
search are the same for all of them. They are tensors `[units]` nevertheless, like every controller's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import IntEnum
from typing import ClassVar

import torch
from torch import Tensor

from betahook.control.base import DECADES, Controller, Memory, Observation, at_least, is_positive, require
from betahook.control.notes import Note
from betahook.control.search import limit_increase


class Phase(IntEnum):
    """Phases of the search. Checkpoints store these numbers: never change one."""

    UNSEEN = 0  # before the first batch
    CENTRE = 1  # trial of the beta in the middle of a stage
    SIDES = 2  # trials above and below it
    HOLD = 3  # the search is over; the best beta stands


@dataclass(frozen=True)
class SearchState:
    """The state of the search before the next batch, `[units]` each; beta is given as its log10.

    It is the memory of `Decades`, and checkpoints store it by these names: never change one.

    A stage consists of the trials with one step size: first its centre, then trials `reach` steps above and below it.

    Attributes:
        phase: the `Phase`, as a number.
        turn: index of the unit that searches, 0 if all search together; the number of turns when the search is over.
        batches: number of batches of this trial so far.
        total: sum of the losses of these batches.
        step: step size of this stage, in decades.
        reach: number of steps from the centre to this trial.
        side: 1 for a trial above the centre, -1 for one below.
        open_above, open_below: 1 while trials go on above (below) the centre, 0 once one was worse than the one before.
        score_above, score_below: loss of the outermost trial above (below).
        best_score: loss of the best trial of this stage; in `HOLD`, loss of the first window, NaN before its end.
        centre: log10 of the beta in the middle of the stage; NaN before the first turn of a unit.
        best: log10 of the beta of the best trial, after the bounds; NaN for a unit that is not in use yet.
    """

    phase: Tensor
    turn: Tensor
    batches: Tensor
    total: Tensor
    step: Tensor
    reach: Tensor
    side: Tensor
    open_above: Tensor
    open_below: Tensor
    score_above: Tensor
    score_below: Tensor
    best_score: Tensor
    centre: Tensor
    best: Tensor

    def having(self, where: Tensor, **changes: Tensor | float) -> SearchState:
        """Return a copy with new values of some attributes in the units where `where` is true."""
        return replace(
            self, **{name: torch.where(where, value, getattr(self, name)) for name, value in changes.items()}
        )


@dataclass(frozen=True, repr=False)
class Decades(Controller):
    """Try `beta = 10^N` and `10^-N` for N = 0, 1, 2, ..., for a window of batches each; then bisect log beta.

    The paper's second algorithm inside one training run. A side ends when a trial has a higher loss than the one before
    it. Then half a decade above and below the best beta is tried, then a quarter, and so on. Each of these stages tries
    its middle again, since training has gone on meanwhile. A loss that is NaN or infinite is worse than any number. A
    step that float16 training skipped counts as a batch only if its loss is not finite; a step without a loss never
    counts. At the end the best beta stays until the loss drifts; then the search begins again around it.

    The paper trains anew for every trial. Here one training run goes through all trials, with two consequences: trials
    at bad betas leave their mark on the weights, and while the loss falls anyway, later trials have the lower loss.

    It needs a loss, from the model's output or from `Hook.step(loss=...)`.

    Args:
        window: batches per trial.
        relative: try multiples of the model's own beta, instead of 10^N itself.
        together: search one factor for all layers at once; if False, search layers (or heads) in use one after another.
        decades: largest N.
        resolution: the search ends when the next step, in decades, would be smaller than this.
        drift: the search begins again when the loss of a window differs by this share from that of the first window
            after the search.

    Raises:
        ValueError: an option has an invalid value.
    """

    uses_loss: ClassVar[bool] = True

    window: int = 10
    relative: bool = False
    together: bool = True
    decades: int = 3
    resolution: float = 0.1
    drift: float = 0.5

    def __post_init__(self) -> None:
        require(self, "window", at_least(1), "a whole number, 1 or more")
        for name in ("relative", "together"):
            require(self, name, lambda value: isinstance(value, bool), "True or False")
        whole = f"a whole number from 1 to {DECADES:g}"
        require(self, "decades", lambda decades: at_least(1)(decades) and decades <= DECADES, whole)
        require(self, "resolution", lambda decades: 0 < decades <= 1, "above 0, at most 1")
        require(self, "drift", is_positive, "a positive number")

    def start(self, beta: Tensor) -> Memory:
        zero, unknown = torch.zeros_like(beta), torch.full_like(beta, torch.nan)
        values = {field.name: zero for field in fields(SearchState)}
        return {**values, "step": zero + 1, "reach": zero + 1, "side": zero + 1, "centre": unknown, "best": unknown}

    def update(self, beta: Tensor, observation: Observation, state: Memory) -> tuple[Tensor, Memory]:
        search = SearchState(**state)
        own = observation.beta_default.to(beta).log10()
        search = search.having(search.best.isnan(), best=own)  # layers that are used later join then
        due, score, search = self._count(search, observation.loss().to(beta), observation.has_loss())
        judged = self._judge(search, due, score, beta.log10())
        after = self._drifted(search, due, score, self._go_on(search, judged, due))
        begins = (search.phase == Phase.UNSEEN) & ~search.best.isnan().all()
        after = after.having(begins, phase=Phase.CENTRE, turn=self._turn_from(0, search))
        middle = own if self.relative else torch.zeros_like(own)
        after = after.having(after.centre.isnan() & self._searches(after), centre=middle)
        offset = torch.where(after.phase == Phase.SIDES, after.side * after.reach * after.step, 0)
        wanted = torch.where(self._searches(after), after.centre + offset, after.best)
        moved, memory = limit_increase(10**wanted, beta, observation.overflow, observation), asdict(after)
        if observation.batches > 0:
            return moved, memory
        # A skipped step is not a batch unless the loss itself is not finite: such a beta would never get a batch.
        failed = ~observation.loss().isfinite()
        return torch.where(failed, moved, beta), {x: torch.where(failed, memory[x], state[x]) for x in memory}

    def is_in_transition(self, state: Memory) -> bool:
        return bool(state) and bool((state["phase"] != Phase.HOLD).any())

    def explain(self, beta: Tensor, observation: Observation, state: Memory) -> Sequence[Note]:
        searches, was_tried = self._searches(SearchState(**state)), ~state["centre"].isnan()
        columns = [searches, was_tried, state["phase"], beta, 10 ** state["best"], state["best_score"]]
        return [_note(*values) for values in torch.stack([column.to(beta) for column in columns]).T.tolist()]

    def _searches(self, search: SearchState) -> Tensor:
        """Return which units take part in this trial, boolean."""
        turn = search.turn
        return turn == (torch.zeros_like(turn) if self.together else torch.arange(len(turn), device=turn.device))

    def _turn_from(self, turn: Tensor | float, search: SearchState) -> Tensor | float:
        """Return the first turn from `turn` on whose unit is in use, or the number of turns if there is none."""
        if self.together:
            return turn
        units = torch.arange(len(search.turn), device=search.turn.device)
        left = (units >= turn) & ~search.best.isnan()
        return torch.where(left, units, len(units)).amin().expand_as(units)

    def _count(self, search: SearchState, loss: Tensor, has_loss: Tensor) -> tuple[Tensor, Tensor, SearchState]:
        """Count a batch with a loss; return where the window is full, and its mean loss, infinite if it failed."""
        seen = (search.phase != Phase.UNSEEN) & has_loss
        batches, total = search.batches + seen, search.total + torch.where(seen, loss, 0)
        due = batches >= self.window
        score = (total / self.window).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
        return due, score, replace(search, batches=torch.where(due, 0, batches), total=torch.where(due, 0, total))

    def _judge(self, search: SearchState, due: Tensor, score: Tensor, log_beta: Tensor) -> SearchState:
        """Compare a finished trial with the best of its stage and with its neighbour, and close sides that worsen."""
        first, beside = due & (search.phase == Phase.CENTRE), due & (search.phase == Phase.SIDES)
        above, below = beside & (search.side > 0), beside & (search.side < 0)
        last = search.reach >= torch.where(search.step < 1, 1, self.decades)
        better = first | beside & (score < search.best_score)
        after = search.having(better, best_score=score)
        after = after.having(better & self._searches(search), best=log_beta)
        after = after.having(first, open_above=1.0, open_below=1.0, score_above=score, score_below=score)
        after = after.having(above & (last | (score > search.score_above)), open_above=0.0)
        after = after.having(below & (last | (score > search.score_below)), open_below=0.0)
        return after.having(above, score_above=score).having(below, score_below=score)

    def _go_on(self, search: SearchState, judged: SearchState, due: Tensor) -> SearchState:
        """Choose the next trial, stage or turn."""
        first, beside = due & (search.phase == Phase.CENTRE), due & (search.phase == Phase.SIDES)
        downward = beside & (search.side > 0) & (judged.open_below > 0)
        further = beside & ~downward & (judged.open_above + judged.open_below > 0)
        ended = beside & ~downward & ~further
        after = judged.having(first, phase=Phase.SIDES, reach=1.0, side=1.0).having(downward, side=-1.0)
        after = after.having(further, reach=search.reach + 1, side=2 * judged.open_above - 1)
        after = after.having(ended, phase=Phase.CENTRE, step=search.step / 2)
        after = after.having(ended & self._searches(search), centre=judged.best)
        over = ended & (after.step < self.resolution)
        after = after.having(over, turn=self._turn_from(search.turn + 1, search), step=1.0)
        turns = 1 if self.together else len(search.turn)
        return after.having(over & (after.turn >= turns), phase=Phase.HOLD, best_score=torch.nan)

    def _drifted(self, search: SearchState, due: Tensor, score: Tensor, after: SearchState) -> SearchState:
        """Begin again around the best beta if the loss in `HOLD` has drifted from that of its first window."""
        holds = due & (search.phase == Phase.HOLD)
        near = (score - search.best_score).abs() <= self.drift * search.best_score.abs()
        near = torch.where(search.best_score.isinf(), score.isinf(), near)
        again = holds & ~search.best_score.isnan() & ~near
        after = after.having(holds & search.best_score.isnan(), best_score=score)
        return after.having(again, phase=Phase.CENTRE, turn=self._turn_from(0, search), centre=search.best)


def _note(searches: float, was_tried: float, phase: float, beta: float, best: float, score: float) -> Note:
    """Explain what the search did with one unit."""
    stage = Phase(int(phase))
    if stage is Phase.HOLD and not was_tried:
        return Note(stage, reason="was not in use when its turn came")
    if stage is Phase.HOLD:
        return Note(stage, reason=f"the best beta of its search was {best:.3g}")
    if not searches:
        return Note(stage, reason="waits while another layer searches")
    found = f"; the best was {best:.3g}, with a loss of {score:.4g}" if stage is Phase.SIDES else ""
    return Note(stage, reason=f"tries a beta of {beta:.3g}{found}")
