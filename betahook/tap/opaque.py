"""Calls of the recorder that a compiler does not look into: in a compiled forward, each is one operation.

A compiler that saw what is measured would compile it into every layer, which takes many times as long as the model
itself. Such an operation calls the recorder when the graph runs; outside of a graph the functions of this file call it
at once. Nothing here computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
from typing import TypeAlias
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from betahook import compat
from betahook.measure.masks import Band, GivenMask, Kind, Mask
from betahook.measure.rows import PLAIN, ScoreMod
from betahook.models import materialise
from betahook.state.state import writing_to
from betahook.tap.recorder import Recorder, is_repeated

_recorders: WeakSet[Recorder] = WeakSet()
_by_address: WeakValueDictionary[int, Recorder] = WeakValueDictionary()


def register(recorder: Recorder) -> None:
    """Let graphs find a recorder."""
    _recorders.add(recorder)


def _find(beta: Tensor) -> Recorder:
    """Find a recorder by the address of its layer's beta.

    A number would be a constant of the graph, and each layer in need of a graph of its own.
    """
    address = beta.data_ptr()
    found = _by_address.get(address)
    if found is None or found.tensors.beta.data_ptr() != address:  # a new one, or one that moved to another device
        _by_address.clear()
        _by_address.update({each.tensors.beta.data_ptr(): each for each in _recorders})
        found = _by_address.get(address)
    if found is None:
        raise RuntimeError(
            "a compiled graph measures a layer whose hook is gone: expected the hook under which it was compiled. Call "
            "torch.compiler.reset(), and compile the model again"
        )
    return found


Implementation: TypeAlias = Callable[..., None]
"""Gets the recorder of a layer first, which writes to the tables that the graph has."""
TABLES = "Tensor(a!) table, Tensor(b!) moments, Tensor(c!) beta_default, Tensor beta"


def _operation(schema: str) -> Callable[[Implementation], Implementation]:
    """Make an operation that gets the tables of a layer and its beta first, and returns nothing."""

    def define(function: Implementation) -> Implementation:
        own = function.__name__
        name = own.removeprefix("_")
        if not hasattr(torch.ops.betahook, name):  # it outlives this module, which may be imported again
            # Tensors may have any strides: a compiler that had to keep them would copy what it has not computed yet.
            tags = torch.Tag.flexible_layout
            torch.library.define(f"betahook::{name}", f"({TABLES}, {schema}) -> ()", tags=tags)
            torch.library.impl(f"betahook::{name}", "default", lambda *args: sys.modules[__name__]._run(own, *args))
            torch.library.register_fake(f"betahook::{name}", lambda *args: None)
        return function

    return define


def _run(name: str, table: Tensor, moments: Tensor, beta_default: Tensor, beta: Tensor, *args: object) -> None:
    """Run an operation of the graph."""
    recorder = _find(beta)
    recorder.state.gains.outlive_graphs()
    with writing_to(recorder.state, table, moments, beta_default):
        globals()[name](recorder, *args)


def _tables(recorder: Recorder) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors = recorder.tensors
    return tensors.table, tensors.moments, tensors.beta_default, tensors.beta


def note_default(recorder: Recorder, default: float | Tensor) -> None:
    """See `Recorder.note_default`."""
    if torch.compiler.is_compiling() and not compat.is_exporting():
        torch.ops.betahook.note_default(*_tables(recorder), *_number_or_tensor(default))
    else:
        recorder.note_default(default)


@_operation("float? number, Tensor? numbers")
def _note_default(recorder: Recorder, number: float | None, numbers: Tensor | None) -> None:
    default = number if numbers is None else numbers
    assert default is not None  # `_number_or_tensor` gives one of the two
    recorder.note_default(default)


@torch.no_grad()
def record_call(
    recorder: Recorder,
    query: Tensor,
    key: Tensor,
    given: GivenMask,
    default: float | Tensor,
    score_mod: ScoreMod = PLAIN,
) -> None:
    """Note the model's own beta, and record one attention call: see `Recorder.record`."""
    if torch.compiler.is_compiling():
        operands = *_number_or_tensor(default), query.detach(), key.detach()
        pairs = given.band.low, given.band.high, given.kind, given.tensor
        name = torch.ops.betahook.name_mask(*pairs, query.shape[2], key.shape[2], query.device)
        torch.ops.betahook.record_call(*_tables(recorder), *operands, name, *pairs, *score_mod)
    else:
        recorder.note_default(default)
        recorder.record(query, key, given, score_mod)


@_operation(
    "float? number, Tensor? numbers, Tensor query, Tensor key, Tensor name, SymInt? low, SymInt? high, str kind, "
    "Tensor? mask, Tensor? position_bias, float? softcap, Tensor? sinks"
)
def _record_call(
    recorder: Recorder,
    number: float | None,
    numbers: Tensor | None,
    query: Tensor,
    key: Tensor,
    name: Tensor,
    low: int | None,
    high: int | None,
    kind: Kind,
    given: Tensor | None,
    position_bias: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    _note_default(recorder, number, numbers)
    if recorder.is_due() and not is_repeated(recorder):
        mask = _masks.get(name)
        if mask is None:
            mask = GivenMask(kind, given, Band(low, high)).describe(query.shape[2], key.shape[2], of_graph=True)
            _masks[name] = mask
        recorder.record(query, key, mask, ScoreMod(position_bias, softcap, sinks))


_masks: MutableMapping[Tensor, Mask] = compat.WeakTensorKeyDictionary()
"""Masks of the graphs that run now, by the tensor that `name_mask` returned."""


def _name_mask(
    low: int | None, high: int | None, kind: Kind, mask: Tensor | None, queries: int, keys: int, device: torch.device
) -> Tensor:
    """Return an empty tensor that stands for a mask: the same one for all layers of a graph that are given it.

    The compiler sees to that, since equal operations on equal tensors are one for it. The mask itself would not do:
    another one may come to lie in its memory, and in the same tensor, within a run of the graph.
    """
    return torch.empty(0, device=device)


if not hasattr(torch.ops.betahook, "name_mask"):  # as above
    torch.library.define(
        "betahook::name_mask",
        "(SymInt? low, SymInt? high, str kind, Tensor? mask, SymInt queries, SymInt keys, Device device) -> Tensor",
    )
    torch.library.impl("betahook::name_mask", "default", _name_mask)
    torch.library.register_fake("betahook::name_mask", _name_mask)


@torch.no_grad()
def record_input(recorder: Recorder, inputs: Tensor, sides: list[str]) -> None:
    """See `Recorder.record_input`."""
    if torch.compiler.is_compiling():
        torch.ops.betahook.record_input(*_tables(recorder), materialise.local(inputs).detach(), sides)
    else:
        recorder.record_input(inputs, sides)


@_operation("Tensor inputs, str[] sides")
def _record_input(recorder: Recorder, inputs: Tensor, sides: list[str]) -> None:
    if recorder.is_due() and not is_repeated(recorder):
        recorder.record_input(inputs, sides, may_wait=False)


def _number_or_tensor(default: float | Tensor) -> tuple[float | None, Tensor | None]:
    return (None, default.detach()) if isinstance(default, Tensor) else (default, None)
