"""Attention calls of several small layers, held back to be measured as one call with many heads.

Measuring a small layer costs the time in which the host launches the operations, so each is launched once for several
layers. The recorder of a layer asks `calls_at_once` if its call is small enough, passes it to `note`, and calls
`add_calls` at the last layer of the forward. Code that reads the tables calls `add` first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from betahook import compat
from betahook.measure import calls, devices
from betahook.measure.inputs import Entries, WaitingInputs, joined
from betahook.measure.masks import GivenMask
from betahook.measure.pairs import is_short
from betahook.measure.rows import CACHED, ScoreMod

AT_ONCE = 2**22
"""Maximum number of query entries that an accelerator measures at once, so that copies of them need little memory.

With 2**24, a step of GPT-2-small in which every layer is measured took a quarter less time on an H200; with a small
vocabulary it took 11 % more memory.
"""


def calls_at_once(query: Tensor, key: Tensor) -> int:
    """Return how many calls like this one may be measured at once; 1 for a call that gains nothing from waiting."""
    queries, keys = query.shape[2], key.shape[2]
    if not devices.is_cpu(query.device):
        return AT_ONCE // max(1, query.numel())
    return CACHED // max(1, query.shape[:3].numel() * keys) if is_short(queries, keys) else 1


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one attention call for `calls.add_scores`.

    Attributes:
        heads, components: columns of the layer in the table and in the moments.
        query, key: detached. Autograd saves them for the backward pass anyway, so holding them takes no extra memory.
        given: its mask, the same for all heads.
        scales: `[2, all heads]`, 1 and the acting inverse temperature; mostly one tensor for all layers of a forward.
        score_mod: the same for all heads.
        exact_max_logit: as in `calls.add_scores`.
        inputs: entries of the inputs of W_q and W_k; empty if they were not seen.
    """

    heads: slice
    components: slice
    query: Tensor
    key: Tensor
    given: GivenMask
    scales: Tensor
    score_mod: ScoreMod
    exact_max_logit: bool
    inputs: list[Entries]

    def versions(self) -> tuple[int | None, ...]:
        """Return the versions of q, k and the tensor of the mask, which in-place changes increment."""
        tensors = self.query, self.key, self.given.tensor
        return tuple(compat.inplace_version(tensor) for tensor in tensors if tensor is not None)

    def is_like(self, other: AttentionCall) -> bool:
        """Return True if both can be measured as one, with this call's heads after those of the other."""
        follows = self.given.tensor is other.given.tensor and self.heads.start == other.heads.stop
        return follows and self._form() == other._form()

    def _form(self) -> tuple[object, ...]:
        query, key, entries = self.query, self.key, tuple(number for number, *_ in self.inputs)
        tensors = query.shape, key.shape, query.dtype, key.dtype, query.device, key.device
        return *tensors, self.given.kind, self.given.band, self.score_mod, self.exact_max_logit, entries


class WaitingCalls:
    """Calls and inputs that were seen but are not in the table of all layers yet.

    The calls that wait are alike, and belong to neighbouring layers.

    Attributes:
        inputs: inputs of W_q and W_k whose attention call is yet to come.
    """

    def __init__(self) -> None:
        self.inputs = WaitingInputs()
        self._calls: list[tuple[AttentionCall, tuple[int | None, ...]]] = []  # each with its `versions()`
        self._never_wait: set[int] = set()

    def may_wait(self, heads: slice) -> bool:
        """Return False for a layer that once changed q, k or the mask while its call waited: it may not wait again."""
        return heads.start not in self._never_wait

    def note(self, table: Tensor, moments: Tensor, call: AttentionCall) -> None:
        """Let a call wait; `table` and `moments` cover all heads, as in `add`."""
        if self._calls:
            last, _ = self._calls[-1]
            if not call.is_like(last) or len(self._calls) >= calls_at_once(call.query, call.key):
                self.add_calls(table, moments)
        self._calls.append((call, call.versions()))

    def add(self, table: Tensor, moments: Tensor) -> None:
        """Add everything to the `table [quantities, heads]` and `moments [4, components]`, in place."""
        self.add_calls(table, moments)
        self.inputs.add_all(table)

    @torch.no_grad()
    def add_calls(self, table: Tensor, moments: Tensor) -> None:
        """Measure the calls that wait, and add them."""
        for run in self._unchanged():
            heads = slice(run[0].heads.start, run[-1].heads.stop)
            components = slice(run[0].components.start, run[-1].components.stop)
            query, key = _side_by_side([call.query for call in run]), _side_by_side([call.key for call in run])
            calls.add_scores(
                table[:, heads],
                moments[:, components],
                query,
                key,
                run[0].given.describe(query.shape[2], key.shape[2]),
                _scales(run, heads).to(query.device),
                run[0].score_mod,
                exact_max_logit=run[0].exact_max_logit,
                inputs=joined([call.inputs for call in run]),
            )
        self._calls = []

    def _unchanged(self) -> Iterator[list[AttentionCall]]:
        """Yield runs of neighbours; drop calls whose q, k or mask has changed, and let their layers wait no more."""
        for unchanged, noted in groupby(self._calls, lambda each: each[0].versions() == each[1]):
            run = [call for call, _ in noted]
            if unchanged:
                yield run
            else:
                self._never_wait.update(call.heads.start for call in run)


def _scales(run: list[AttentionCall], heads: slice) -> Tensor:
    """The scales of all heads of a run: mostly one shared tensor, but in the first forward each call has its own."""
    if all(call.scales is run[0].scales for call in run):
        return run[0].scales[:, heads]
    return torch.cat([call.scales[:, call.heads] for call in run], 1)


def _side_by_side(tensors: list[Tensor]) -> Tensor:
    """Concatenate the heads of several layers, `[batch, heads, tokens, d_k]` each."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, 1)
