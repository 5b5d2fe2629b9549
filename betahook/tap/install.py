"""Put the tap on the attention modules of a model, and take it off again.

Attention computed by transformers goes through `betahook.tap.interface`, any other through `betahook.tap.by_hand`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn

from betahook import compat
from betahook.measure.inputs import SIDES
from betahook.measure.masks import forget_bands
from betahook.models import guards, selective
from betahook.models.code import argument_names
from betahook.models.discovery import shown_name
from betahook.tap import copies, kernels, opaque
from betahook.tap.by_hand import bypassed, watching
from betahook.tap.override import Override
from betahook.tap.recorder import ATTRIBUTE, Recorder


def acquire(recorders: Collection[Recorder]) -> Callable[[], None]:
    """Prepare what all hooked models of a process share, and return the function that releases it.

    Releasing also drops cached facts about masks, which may occupy GPU memory; other hooks compute theirs again.

    Raises:
        ImportError: this version of transformers lacks the attention interface that the tap wraps.
        RuntimeError: its models do not look up their attention functions there.
    """
    if compat.has_compiled():
        # Code compiled earlier bypasses the tap, and is shared by all models of the same class.
        torch.compiler.reset()
    if all(recorder.route != "interface" for recorder in recorders):
        return forget_bands
    from betahook.tap import interface

    interface.acquire()
    return _release_interface


def _release_interface() -> None:
    from betahook.tap import interface

    interface.release()
    forget_bands()


def connect(model: nn.Module, recorders: Collection[Recorder], undo: ExitStack) -> None:
    """Put the tap on the attention modules, and on the inputs of W_q and W_k, until `undo` is closed."""
    for recorder in recorders:
        Override(recorder.module, ATTRIBUTE, recorder, undo)
        copies.keep_out(recorder.module, functools.partial(_refuse_copy, recorder), undo)
        opaque.register(recorder)
        _watch_inputs(recorder, undo)
        if recorder.route != "interface":
            Override(recorder.module, compat.REPLICATE, functools.partial(_refuse_replica, recorder.name), undo)
            undo.enter_context(guards.blinded(recorder.module))
            watching.connect(recorder, undo)
    watched = [each for each in recorders if each.route != "interface"]
    kernels.connect(watched, undo)
    bypassed.connect(model, watched, undo)
    _keep_padding(model, recorders, undo)


def _refuse_copy(recorder: Recorder, attributes: copies.Attributes) -> None:
    """Refuse to copy a module if a beta other than the model's own may act, which the copy would lack.

    Raises:
        TypeError: a controller moves beta, or it was set.
    """
    if recorder.state.beta_acts:
        copies.refuse_adapted("lack that beta")


def _refuse_replica(name: str) -> NoReturn:
    """Refuse to replicate a module, since the replica would run the forward of the module on the first GPU.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"{shown_name(name)} is attention by hand, which cannot run in nn.DataParallel while it is hooked. Use one "
        "process for each GPU, as torchrun and accelerate launch do, or one GPU alone (CUDA_VISIBLE_DEVICES=0)"
    )


def _keep_padding(model: nn.Module, recorders: Collection[Recorder], undo: ExitStack) -> None:
    """Keep torch's encoders around the modules from packing padded batches, until `undo` is closed.

    In evaluation they pack a padded batch into a nested tensor, which `nn.MultiheadAttention` accepts only on its fast
    path, where no hook sees it. At padded positions they now return the same as in training, instead of zeros.
    """
    attention = {recorder.module for recorder in recorders}
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and not attention.isdisjoint(encoder.modules()):
            Override(encoder, compat.NESTED_TENSORS, False, undo)


def _watch_inputs(recorder: Recorder, undo: ExitStack) -> None:
    """Record the inputs of the projections of q and k, only once if both share a module and its argument."""
    sides: dict[tuple[nn.Module, int], list[str]] = {}
    for side, projection in zip(SIDES, recorder.attention.projections or (), strict=False):
        if projection.module in recorder.attention.shared:  # a hook would record the inputs of other layers too
            continue
        if projection.argument is not None and copies.takes_hooks(projection.module):
            sides.setdefault((projection.module, projection.argument), []).append(side)
    for (module, argument), names in sides.items():
        _watch_input(recorder, module, argument, names, undo)


def _watch_input(recorder: Recorder, module: nn.Module, argument: int, sides: list[str], undo: ExitStack) -> None:
    """Record a positional argument of a module, which may also be passed by name."""
    names = argument_names(module)
    name = names[argument] if argument < len(names) else ""

    # In-place quantisation moves this hook to another module, which calls it without `kwargs` and never removes it.
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})) -> None:
        if recorder.state.is_detached or not recorder.is_recording:
            return
        given = args[argument] if len(args) > argument else kwargs.get(name)
        if given is None:
            return
        if given.is_nested:
            given = torch.cat(given.detach().unbind())
        with selective.uncounted():
            if recorder.route == "interface" or torch.compiler.is_compiling():
                opaque.record_input(recorder, given, sides)
            else:  # a function mode watches this module's operations, but need not see ours
                with compat.unwatched():
                    recorder.record_input(given, sides)

    copies.keep_hook(module, module.register_forward_pre_hook(record, with_kwargs=True), undo)
