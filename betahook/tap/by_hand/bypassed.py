"""Attention modules whose forward is passed by: what calls their query projection instead may compute an attention.

So do the blocks of Flux and Stable Diffusion 3, in which an image and a text attend to each other, and a further method
of the module itself, as `forward_list` in DINOv3. Beta would act in none of them.
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
from betahook.tap import copies
from betahook.tap.by_hand.sites import find_line
from betahook.tap.recorder import Recorder


@dataclass(frozen=True, eq=False)
class Watch:
    """A layer with all that its check needs: an object, since a graph of the compiler depends on other arguments.

    Attributes:
        recorder: of the layer.
        sharing: those of the layers that hold the same query projection.
        around: the layer's module and those that hold it, by id.
    """

    recorder: Recorder
    sharing: Collection[Recorder]
    around: set[int]


@contextmanager
def running(recorder: Recorder) -> Iterator[None]:
    """Note that a forward of a layer's module runs."""
    recorder.ran_in.add(recorder.module.training)
    recorder.runs += 1
    try:
        yield
    finally:
        recorder.runs -= 1


def connect(model: nn.Module, recorders: Collection[Recorder], undo: ExitStack) -> None:
    """Leave layers alone whose forward is passed by, until `undo` is closed."""
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
    """Leave a layer alone if a method of it, or of a module around it, calls its query projection past its forward.

    Where its forward runs too, in training or in evaluation alike, that is the attention, and this another use.
    """
    if torch.compiler.is_compiling():
        return
    recorder = watch.recorder
    recorder.projected |= recorder.runs > 0
    if recorder.refusal is not None or recorder.module.training in recorder.ran_in:
        return
    if any(other.runs for other in watch.sharing) or compat.is_transformed():
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and id(frame.f_locals.get("self")) not in watch.around:
        frame = frame.f_back
    # Those who look at the projection alone call it from elsewhere, or from a hook, which torch calls.
    if frame is None or frame.f_globals.get("__name__", "").startswith("torch."):
        return
    if recorder.module not in set(frame.f_locals["self"].modules()):  # another one took its place, and its projection
        return
    recorder.leave_alone(
        f"its query projection is called at {find_line()} past its forward, and what that computes is not followed",
        "Attention is followed in the forward of a module that holds no other. ",
    )
