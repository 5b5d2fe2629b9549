"""The second tap: for attention that is written by hand or calls torch's own functions, not those of transformers.

While such a module runs, every torch function that it calls passes through `ScoreProducts`. A product of activations
may be a score product: its left operand is multiplied by `beta / beta_default`. From there the scores are followed to
the softmax, through operations that move, scale, mask or bias them. The factors on the way multiply to the model's own
beta. A module whose scores reach an unrecognised operation is left alone, with a warning that names the operation.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.proxy import Attribute, Proxy
from torch.overrides import TorchFunctionMode

from betahook import compat
from betahook.measure.masks import Band
from betahook.models import modes, selective, side_effects
from betahook.models.code import PRODUCTS, SOFTMAXES
from betahook.models.discovery import shown_name
from betahook.models.guards import is_handed_over
from betahook.models.modes import RandomState
from betahook.models.torch_calls import DIVIDING, PLAIN, Call, copied, is_in_place, name_of, tensors_in
from betahook.tap import kernels
from betahook.tap.by_hand import bypassed, exponentials, following, handlers, matrices, nested, softmaxes
from betahook.tap.by_hand.arithmetic import divide, multiply
from betahook.tap.by_hand.forward import FollowedForward
from betahook.tap.by_hand.original import Original
from betahook.tap.by_hand.plan import Plan, choices_in
from betahook.tap.by_hand.sites import find_line, run_forward
from betahook.tap.by_hand.situation import other
from betahook.tap.by_hand.traces import Traces
from betahook.tap.compiled import FusedAttention
from betahook.tap.override import Override
from betahook.tap.recorder import Recorder, follow_again

ACTIONS: dict[str, Callable[[FollowedForward, Call], Any]] = {
    **dict.fromkeys(PRODUCTS, matrices.multiply),
    **dict.fromkeys(SOFTMAXES, softmaxes.softmax),
    **dict.fromkeys(kernels.KERNELS, softmaxes.fused),
    **dict.fromkeys(DIVIDING.split(), exponentials.divide),
    "exp": exponentials.exponentiate,
    "sum": exponentials.add_up,
    "__setitem__": following.assign,
    "__get__": following.read_property,
    "__set__": following.write_property,
}
"""Functions that are run by an action of their own; `following.follow` runs all others, by `handlers.HANDLERS`."""

UNLABELLED = {"__get__", "__set__"}
"""Functions whose results get no labels."""

OUTSIDE = (
    "betahook follows attention by hand outside of graphs. F.scaled_dot_product_attention goes into a graph once a "
    "forward has shown that it can: run the model on a batch before you compile it"
)
"""The reason for a graph break, as the compiler shows it."""

HANDED_OVER = (
    "{} hands itself over to function modes at {}, which hides it: take that line out, or call has_torch_function by "
    "that name alone"
)
"""The reason to leave a module alone that calls `has_torch_function` in a way that `models.guards` cannot replace."""

PROXIES = {Proxy, Attribute}
"""Stand-ins for a tensor in `torch.fx.symbolic_trace`."""
SYMBOLIC = (
    "{}: the result of torch.fx.symbolic_trace would lack its beta, which acts outside of the traced code: fold() or "
    "detach() first"
)


def connect(recorder: Recorder, undo: ExitStack) -> None:
    """Watch every forward of the layer's module until `undo` is closed."""
    original, plan = Original(recorder.module), Plan()
    forward = recorder.module.forward
    # A separately compiled function would be traced together with the mode, whose notes would then be wrong, so it runs
    # eagerly. Flex attention is compiled too, but seen as one call, and must stay compiled.
    uncompiled = nullcontext if kernels.are_called(recorder) else modes.eagerly

    # Not by forward hooks: torch skips them after a KeyboardInterrupt, and the mode would act on all that follows.
    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        forward, is_new = original.current()
        if not override.active:  # wrappers that were added later, e.g. by Accelerate, still call this
            return forward(*args, **kwargs)
        if is_new:
            plan.forget()
            follow_again(recorder)
            recorder.attention.has_changed = True
        with bypassed.note_running(recorder):
            return _run_watched(recorder, plan, forward, uncompiled, args, kwargs)

    outside = compat.outside_of_graphs(watched, OUTSIDE)

    @functools.wraps(forward)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not compat.is_exporting() and override.active:
            choices = choices_in((args, kwargs))
            if plan.fits_graph(choices, recorder.state.resets) and not nested.has_nested(args, kwargs):
                unfollowed: list[str] = []
                with FusedAttention(recorder, plan.band or Band(), unfollowed):
                    output = forward(*args, **kwargs)
                if not unfollowed:
                    return output
            plan.broken_since[choices] = recorder.state.resets
        return outside(*args, **kwargs)

    override = Override(recorder.module, "forward", tapped, undo)


def _run_watched(
    recorder: Recorder,
    plan: Plan,
    forward: Callable[..., Any],
    uncompiled: Callable[[], AbstractContextManager[None]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a forward with the tap."""
    unknown = not plan.axes and recorder.refusal is None
    if (recorder.is_idle and not unknown) or _is_symbolic(recorder, args, kwargs):
        return forward(*args, **kwargs)
    if nested.has_nested(args, kwargs):
        if isinstance(recorder.module, nn.MultiheadAttention):
            each = functools.partial(_run_watched, recorder, plan, forward, uncompiled)
            return nested.run_each(forward, lambda *args, **kwargs: each(args, kwargs), args, kwargs)
        _refuse_nested(recorder, plan)
        return forward(*args, **kwargs)
    with selective.uncounted():
        if unknown and not (compat.is_exporting() or compat.is_without_data()) and bool(recorder.is_set.any()):
            with uncompiled(), selective.apart():
                _rehearse(recorder, plan, forward, args, kwargs)
        followed = FollowedForward(recorder, plan, (args, kwargs))
    with uncompiled(), ScoreProducts(followed):
        output = run_forward(forward, args, kwargs)
    with selective.uncounted():
        followed.finish()
    return output


def _is_symbolic(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True in `torch.fx.symbolic_trace`, which passes proxies in place of tensors.

    Raises:
        RuntimeError: a beta is set, which the traced module would lack.
    """
    if PROXIES.isdisjoint(map(type, (*args, *kwargs.values()))):
        return False
    if bool(recorder.is_set.any()):
        raise RuntimeError(SYMBOLIC.format(shown_name(recorder.name)))
    return True


def _refuse_nested(recorder: Recorder, plan: Plan) -> None:
    followed = FollowedForward(recorder, plan, ())
    followed.refuse("its input is a nested tensor, whose scores are not followed: pad it")
    followed.finish()


def _rehearse(
    recorder: Recorder, plan: Plan, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Run a forward dry, to learn about its products before a beta that was set or loaded acts on them."""
    module = recorder.module
    if not side_effects.is_repeatable(module, (args, kwargs)):
        return  # e.g. a cache would be filled twice
    args, kwargs = copied((args, kwargs))
    followed = FollowedForward(recorder, plan, (args, kwargs), is_rehearsal=True)
    given = tensors_in((args, kwargs))
    # Non-reentrant checkpointing counts saved tensors, and its recomputation does not rehearse: hide those saved here.
    unsaved = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with (
        RandomState(module).preserved(given),
        recorder.state.pause(),
        side_effects.undone(module, forward),
        unsaved,
        ScoreProducts(followed),
    ):
        run_forward(forward, args, kwargs)
    followed.finish()


class ScoreProducts(TorchFunctionMode):
    """Scales and follows the score products in one forward of one attention module."""

    def __init__(self, forward: FollowedForward) -> None:
        super().__init__()
        self._forward = forward

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        forward, kwargs = self._forward, kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # a separately compiled function is seen as one call, or not at all
            return func(*args, **kwargs)
        if forward.is_settled:
            given = name_of(func) if type(func) is FunctionType else func.__name__  # most functions are built-in
            if not _concerns(forward, given, args, kwargs):
                return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return compat.multi_head_attention_forward()(*args, **kwargs)
        with selective.uncounted():
            return self._run(Call(func, args, kwargs))

    def _run(self, call: Call) -> Any:
        """Run a call, and update what is known of the tensors in it."""
        forward, name, func = self._forward, call.name, call.function
        if name == "multi_head_attention_forward" or (type(func) is FunctionType and is_handed_over(func)):
            forward.refuse(HANDED_OVER.format(name, find_line()))
        if any([tensor.is_nested for tensor in call.tensors]):
            if name in SOFTMAXES or name in kernels.KERNELS:
                forward.refuse(f"{name} at {find_line()} gets a nested tensor, whose scores are not followed: pad it")
            return call.run()
        handler, shadows = handlers.HANDLERS.get(name), forward.shadows
        if shadows is not None:
            shadows.prepare(call)
        if (action := ACTIONS.get(name)) is not None:
            output = action(forward, call)
        elif forward.labels is not None and name in matrices.UNREAD:
            output = matrices.follow_other(forward, call)
        else:
            output = following.follow(forward, call, handler or other)
        # Functions that only use a shape may be random, such as `rand_like`, and must not run twice.
        if shadows is not None and handler is not handlers.ignore and (handler is not None or name == "__setitem__"):
            shadows.follow(call, output)
        if forward.activations is not None and handler is not handlers.ignore:
            forward.activations.note(call, output)
        if forward.labels is not None and name not in UNLABELLED:
            forward.labels.note(call, output)
            if forward.of_inputs is not None:
                forward.of_inputs.note(call, output)
        return output


STARTING = {*PRODUCTS, *SOFTMAXES, *kernels.KERNELS, "multi_head_attention_forward"} | {
    name for name, handler in handlers.HANDLERS.items() if handler in (multiply, divide) or is_in_place(name)
}
"""Functions that may begin a trace even if none of their arguments is followed."""


COMMON = PLAIN | {Tensor}
"""Types of arguments that are followed if they have a trace, and hold none that are."""


def _concerns(forward: FollowedForward, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return False for a call that can be run without further checks, as most calls can."""
    if name in STARTING:
        return True
    traces, or_learned, learned = forward.traces, True, name in handlers.HANDLERS
    for argument in itertools.chain(args, kwargs.values()) if kwargs else args:
        kind = type(argument)
        if id(argument) in traces.ids or (kind not in COMMON and _is_followed(traces, argument, or_learned)):
            return True
        or_learned = learned
    return False


def _is_followed(traces: Traces, argument: Any, or_learned: bool) -> bool:
    """Return True if a nested argument holds a followed tensor or, with `or_learned`, a parameter or other subclass."""
    if isinstance(argument, (tuple, list, dict)):
        each = argument.values() if isinstance(argument, dict) else argument
        return any(_is_followed(traces, part, or_learned) for part in each)
    return isinstance(argument, Tensor) and (or_learned or argument in traces)
