"""A check for attention modules whose forward is bypassed, by code that calls their query projection itself.

Such code may compute attention in which beta would not act. Examples are the blocks of Flux and Stable Diffusion 3, in
which an image and a text attend to each other, and a further method of the module, such as `forward_list` in DINOv3.
Such a layer is left alone.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from betahook import compat
from betahook.models.classifiers import FOLLOWED_FUNCTIONS, have_product_and_softmax
from betahook.models.code import names_in_method
from betahook.tap import copies
from betahook.tap.by_hand.sites import find_line
from betahook.tap.recorder import Recorder


@dataclass(frozen=True, eq=False)
class Watch:
    """All that the check of one layer needs, as one object: a compiled graph would depend on arguments of other types.

    Attributes:
        recorder: the layer's recorder.
        sharing: the recorders of all layers that contain the same query projection.
        around: the ids of the layer's module and of all modules that contain it.
    """

    recorder: Recorder
    sharing: Collection[Recorder]
    around: set[int]


@contextmanager
def note_running(recorder: Recorder) -> Iterator[None]:
    """Note that a forward of the layer's module is running, until the context ends."""
    recorder.modes_run.add(recorder.module.training)
    recorder.runs += 1
    try:
        yield
    finally:
        recorder.runs -= 1


def connect(model: nn.Module, recorders: Collection[Recorder], undo: ExitStack) -> None:
    """Watch for layers whose forward is bypassed, and leave them alone, until `undo` is closed."""
    around: dict[nn.Module, set[int]] = defaultdict(set)
    for module in model.modules() if recorders else ():
        for part in module.modules():
            around[part].add(id(module))
    for recorder in recorders:
        if recorder.attention.projections is None:
            continue
        projection = recorder.attention.projections[0].module
        if projection is not recorder.module and copies.takes_hooks(projection):
            sharing = [other for other in recorders if id(other.module) in around[projection]]
            check = functools.partial(_check, Watch(recorder, sharing, around[recorder.module]))
            copies.keep_hook(projection, projection.register_forward_pre_hook(check), undo)
            recorder.is_watched = True


def _check(watch: Watch, projection: nn.Module, args: Any) -> None:
    """Leave a layer alone if a method of it, or of a module around it, calls its query projection outside its forward.

    If its forward has run in the same mode, training or evaluation, that is the attention, and this call another use,
    unless it comes from a method of the module that computes attention, too.
    """
    if torch.compiler.is_compiling():
        return
    recorder = watch.recorder
    recorder.computed_queries |= recorder.runs > 0
    if recorder.runs or recorder.refusal is not None:
        return
    has_run = recorder.module.training in recorder.modes_run
    if has_run and not (recorder.is_recording or recorder.state.beta_acts):
        return
    if any(other.runs for other in watch.sharing) or compat.is_transformed():
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and id(frame.f_locals.get("self")) not in watch.around:
        frame = frame.f_back
    # Code that only inspects the projection calls it from elsewhere, or from a hook, which torch calls.
    if frame is None or frame.f_globals.get("__name__", "").startswith("torch."):
        return
    if recorder.module not in set(frame.f_locals["self"].modules()):  # replaced by another, which has its projection
        return
    if has_run and not _attends(recorder.module, frame):
        return
    recorder.leave_alone(
        f"its query projection is called at {find_line()} outside of its forward, and attention computed there is not "
        "followed",
        "Attention is followed in the forward of a module that contains no other attention. ",
    )


def _attends(module: nn.Module, frame: FrameType | None) -> bool:
    """Return True if a method of the module that runs in this frame, or around it, computes attention."""
    while frame is not None and frame.f_locals.get("self") is module:
        names = names_in_method(compat.class_of(module), frame.f_code)
        if have_product_and_softmax(names) or names & FOLLOWED_FUNCTIONS:
            return True
        frame = frame.f_back
    return False
