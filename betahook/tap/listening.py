"""Pass q and k from the tap to a listener instead of recording them.

The audit uses this in a forward of its own, see `betahook.report.audit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

from torch import Tensor

from betahook.measure.calls import valid_tokens
from betahook.measure.masks import GivenMask, Mask
from betahook.tap.override import Override
from betahook.tap.recorder import Recorder, of_one_batch

Listener: TypeAlias = Callable[[Tensor, Tensor, tuple[Tensor | None, Tensor | None]], None]
"""Called with q `[batch, heads, queries, d_k]`, k, and the valid tokens of each, `[batch or 1, tokens]` or None."""


@contextmanager
def listening(recorder: Recorder, listener: Listener) -> Iterator[None]:
    """Pass every attention call to a listener, in any mode of the module; nothing is recorded meanwhile."""

    def record(query: Tensor, key: Tensor, mask: Mask | GivenMask, *_: Any) -> None:
        if isinstance(mask, GivenMask):
            mask = mask.describe(query.shape[2], key.shape[2])
        listener(*of_one_batch(query, key), (mask.queries, mask.keys))

    def record_pairs(raw: Tensor, logits: Tensor, allowed: Tensor, operands: tuple[Tensor, Tensor], *_: Any) -> None:
        query, key = (tokens.detach() for tokens in operands)
        listener(query, key, valid_tokens(allowed, query, key))

    def record_input(inputs: Tensor, sides: list[str]) -> None:
        """Ignore the inputs of W_q and W_k."""

    replaced = {"record": record, "record_pairs": record_pairs, "record_input": record_input, "always": True}
    with ExitStack() as undo:
        for name, value in replaced.items():
            Override(recorder, name, value, undo)
        yield
