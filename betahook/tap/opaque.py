"""Calls of the recorder that are opaque to the compiler: in a compiled forward, each is one custom operation.

If the compiler could see the measurement, it would compile it into every layer, which takes many times as long as
compiling the model itself. Inside a graph, an operation calls the recorder when the graph runs; outside, the functions
of this file call it directly. Nothing here computes.
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

    The index of the layer would be a constant of the graph, so that each layer would need its own graph.
    """
    address = beta.data_ptr()
    found = _by_address.get(address)
    if found is None or found.tensors.beta.data_ptr() != address:  # new, or moved to another device
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
"""Function behind an operation. Its first argument is a recorder, which meanwhile writes to the graph's tables."""
TABLES = "Tensor(a!) table, Tensor(b!) moments, Tensor(c!) beta_default, Tensor beta"


def _operation(schema: str) -> Callable[[Implementation], Implementation]:
    """Register a function as an operation whose first arguments are a layer's tables and beta; it returns nothing."""

    def define(function: Implementation) -> Implementation:
        own = function.__name__
        name = own.removeprefix("_")
        if not hasattr(torch.ops.betahook, name):  # it outlives this module, which may be imported again
            # Accept any strides: to preserve them, the compiler would copy tensors that it has not computed yet.
            tags = torch.Tag.flexible_layout
            torch.library.define(f"betahook::{name}", f"({TABLES}, {schema}) -> ()", tags=tags)
            torch.library.impl(f"betahook::{name}", "default", lambda *args: sys.modules[__name__]._run(own, *args))
            torch.library.register_fake(f"betahook::{name}", lambda *args: None)
        return function

    return define


def _run(name: str, table: Tensor, moments: Tensor, beta_default: Tensor, beta: Tensor, *args: object) -> None:
    """Run an operation of a graph, on the tables of that graph."""
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
    """Note the model's own beta, and record one attention call, see `Recorder.record`."""
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
"""Masks of the graphs that are running, by the tensor that `name_mask` returned."""


def _name_mask(
    low: int | None, high: int | None, kind: Kind, mask: Tensor | None, queries: int, keys: int, device: torch.device
) -> Tensor:
    """Return an empty tensor that identifies a mask: the same one for all layers of a graph that receive that mask.

    It is the same because the compiler merges equal operations on equal tensors. The mask itself cannot be the key:
    within a run of the graph, its memory, and even the same tensor object, may be reused for another mask.
    """
    return torch.empty(0, device=device)


if not hasattr(torch.ops.betahook, "name_mask"):  # it outlives this module, as above
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
