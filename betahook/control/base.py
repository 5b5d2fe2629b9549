"""The interface of a controller, and `apply`, with which a hook runs its controllers.

A unit is whatever has a beta of its own: a layer, or a head with `per_head=True`. Tensors have the shape `[units]`
unless stated otherwise. Nothing here may read a tensor back to the host, and of a controller only `explain` and
`is_in_transition` may. Statistics arrive pooled over ranks, so all ranks compute the same beta.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from numbers import Real
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from betahook.control.memory import check_updated, checked_start
from betahook.control.notes import Note
from betahook.measure.statistics import Statistics

DECADES = 3.0
"""Controllers keep beta within this many decades of the model's own."""

Memory: TypeAlias = dict[str, Tensor]
"""The memory of a controller between steps: tensors `[units]` by name; empty before its first update."""


@dataclass(frozen=True)
class Observation:
    """Measurements of one step, as controllers receive them.

    Attributes:
        beta_default: the model's own inverse temperature, `[units]`, float32.
        statistics: statistics of the batches since the last update or, if none of these was measured, of the last
            measured ones. The sensitivity is the mean over the batches in which it was finite. The std of W_q and W_k
            is not included. If the heads of a unit have different betas, each head's query is first multiplied by the
            ratio of its beta to the unit's, so that the unit's beta times a score is the logit.
        predicted_std: returns the std of these scores as predicted from W_q and W_k, `[units]`; NaN where these were
            not found. It is a function because it has to read all these weights.
        overflow: the largest logit whose exponential is finite in the dtype of the softmax.
        step: number of batches before this one, not counting skipped optimizer steps.
        spectral_ratio: returns the largest `theory.spectral_ratio` of all W_q and W_k, a scalar; NaN if no rank found
            them all. Frozen layers count only if all layers are frozen. In the first batch, it describes the weights
            before the optimizer's update if a torch optimizer made it. It is a function because it takes some twenty
            matrix-vector products with each weight; every rank must call it.
        loss: returns the training loss of this step, a scalar: the mean over its forward passes and all ranks, or the
            sum over forward passes that receive `num_items_in_batch` and so return a share of it. NaN if there was no
            loss, and after the batches in which a controller wants it.
        has_loss: returns whether this step had a loss on any rank, a boolean scalar; the loss itself may be NaN.
        batches: number of batches since the last update, including this one, not counting skipped optimizer steps.
    """

    beta_default: Tensor
    statistics: Statistics
    predicted_std: Callable[[], Tensor]
    overflow: float
    step: int
    spectral_ratio: Callable[[], Tensor]
    loss: Callable[[], Tensor] = lambda: torch.tensor(torch.nan)
    batches: int = 1
    has_loss: Callable[[], Tensor] = lambda: torch.tensor(True)


class Controller(ABC):
    """A rule for beta: its options, and a function from an observation to the next beta.

    A subclass is a dataclass, plain or frozen, whose fields are its options: numbers, strings, booleans, None, or lists
    of these, so that a checkpoint can record them. Its memory is passed in and out of `update` and never kept on the
    object, since one object may serve several hooks.

    Attributes:
        uses_loss: True for a controller that judges beta by the training loss. The loss is then recorded, and `update`
            also runs if an observation is not finite, since a beta that breaks the training is a bad one.
        needs_every_step: True for a rule that needs the scores of every step, such as a limit on them: `attach`
            without an `interval` then measures every layer in every step.
        exact_max_logit: True for a rule that limits the largest score or logit, which is then taken over all pairs, see
            `attach`.
        moves_beta: False for a rule that never moves beta and has no memory. If no rule of a hook moves beta, the hook
            never calls `update`.
    """

    exact_max_logit: ClassVar[bool] = False
    moves_beta: ClassVar[bool] = True
    needs_every_step: ClassVar[bool] = False
    uses_loss: ClassVar[bool] = False

    def __repr__(self) -> str:
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]  # subclasses are dataclasses
        return format_controller(type(self).__name__, {name: getattr(self, name) for name in names}, type(self))

    def start(self, beta: Tensor) -> Memory:
        """Create the memory for the first update: a tensor `[units]` under every name that `update` returns.

        A checkpoint can hold float32, float64, int64 and bool tensors, under names without a `/`.

        Args:
            beta: `[units]`, with the dtype and device that `update` receives it in.
        """
        return {}

    @abstractmethod
    def update(self, beta: Tensor, observation: Observation, state: Memory) -> tuple[Tensor, Memory]:
        """Compute the next beta and memory, element-wise and without host synchronisation.

        A unit whose observation is not finite keeps its beta and its memory, whatever is returned for it, unless the
        controller has `uses_loss`.

        Args:
            beta: `[units]`, as left by the controllers before this one in the list. It must not be changed in place.
            observation: what was measured.
            state: the memory, as `start` or the last update returned it. Its tensors must not be changed in place.

        Returns:
            The new beta, `[units]`, and the new memory. Where the new beta is NaN, infinite or not positive, the old
            one stays.
        """

    def is_due(self, step: int) -> bool:
        """Return whether an update is needed after a batch.

        All controllers of a hook are updated together: when any of them is due, after the first batch, and after every
        `interval` batches. A rule with windows of its own must therefore count batches. All other steps do almost
        nothing, and ranks do not communicate. A rule with `uses_loss` is due after every batch.

        Args:
            step: number of batches before this one, the `step` of the observation that the update would receive.
        """
        return True

    @property
    def opening_batches(self) -> int:
        """Number of batches at the start in which every layer is measured, whatever the `interval`."""
        return 0

    @property
    def loss_batches(self) -> int:
        """Number of batches at the start in which the training loss is recorded, if there is one.

        For a controller that can do without the loss, unlike one with `uses_loss`.
        """
        return 0

    def is_in_transition(self, state: Memory) -> bool:
        """Return whether beta is still on its way, so that training should not end now. Synchronises with the device.

        Args:
            state: the memory that the last update returned; empty before the first.
        """
        return False

    def explain(self, beta: Tensor, observation: Observation, state: Memory) -> Sequence[Note]:
        """Explain what the last update did and why, in one note per beta. May synchronise with the device.

        Args:
            beta: `[units]`, the current beta.
            observation: the observation of the last update.
            state: the memory that the last update returned.

        Returns:
            A `Note` for each unit, or no notes at all if there is nothing to say.
        """
        return ()

    @classmethod
    def migrate(cls, state: Memory) -> Memory:
        """Convert a memory `state` that an older version wrote; return one of this version unchanged."""
        return state


def apply(
    controllers: Sequence[Controller], beta: Tensor, observation: Observation, memories: Sequence[Memory]
) -> tuple[Tensor, list[Memory]]:
    """Run the controllers in order, and return the new beta and the new memories.

    A unit keeps its beta and memory if anything in its observation is not finite, if it was never measured, or if each
    row has only one key. A controller that judges by the loss runs all the same, since to it a beta at which nothing is
    finite is a bad trial, but it too leaves beta alone if each row has only one key.

    Controllers compute in the dtype of the statistics, float64 if the device has it. Where they move beta, the result
    is clamped to within `DECADES` of the model's own, and returned in the dtype of `beta`. The memory of a controller
    is empty before its first update.

    Raises:
        TypeError: a controller did not return beta and memory, or returned a memory that a checkpoint cannot hold.
        ValueError: an update returned a memory with other names than `start`, or a checkpoint cannot hold a name.
    """
    # `logical_and` accepts numbers, which saves an operation. `flat_entropy` is 0 where each row has one key: beta has
    # no effect there, and the sensitivity is rounding noise.
    known = observation.beta_default < torch.inf  # False for NaN too; `isfinite` takes four operations
    matters = known.logical_and(observation.statistics.flat_entropy)
    healthy = matters & observation.statistics.finite.logical_and(observation.statistics.count)
    start = new = beta.to(observation.statistics.sensitivity.dtype)
    after: list[Memory] = []
    for controller, memory in zip(controllers, memories, strict=True):
        before = memory or checked_start(controller, start)
        proposed, made = _checked(controller, controller.update(new, observation, dict(before)), new, before)
        # Where a controller returns no usable beta, the one that it was given stands.
        if proposed is not new:
            usable = (proposed * 0 < proposed) & (matters if controller.uses_loss else healthy)  # finite and positive
            new = torch.where(usable, proposed, new)
        after.append(made if controller.uses_loss else _choose(healthy, made, before))
    if new is start:  # no controller moves beta, as in monitoring
        return beta, after
    limit = 10**DECADES
    bounded = new.clamp(observation.beta_default / limit, observation.beta_default * limit)
    return torch.where(new != start, bounded.to(beta), beta), after


def _checked(controller: Controller, answer: object, beta: Tensor, before: Memory) -> tuple[Tensor, Memory]:
    """Return the result of an update, after checking that it is a beta for each unit and a memory like `before`."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        got = f"a tuple of {len(answer)}" if isinstance(answer, tuple) else type(answer).__name__
        raise TypeError(f"update() of {controller} must return beta and the memory, (beta, state); got {got}")
    proposed, made = answer
    if not isinstance(made, dict):
        raise TypeError(
            f"update() of {controller} must return a dictionary of tensors for the memory, the second of (beta, "
            f"state), {{}} for no memory; got {type(made).__name__}"
        )
    if not isinstance(proposed, Tensor) or proposed.shape != beta.shape:
        got = f"a tensor of shape {list(proposed.shape)}" if isinstance(proposed, Tensor) else repr(proposed)
        raise TypeError(
            f"update() of {controller} must return a beta of shape {list(beta.shape)}, as it got; got {got}"
        )
    check_updated(controller, made, before)
    return proposed, made


def _choose(where: Tensor, new: Memory, old: Memory) -> Memory:
    """Return a memory with the values of `new` for the units in `where`, and of `old` for the others."""
    if len({value.dtype for value in (*new.values(), *old.values())}) != 1:
        return {name: torch.where(where, new[name], old[name]) for name in old}
    # All names at once: on an accelerator each operation costs the same, whatever its size.
    both = torch.stack([new[name] for name in old]), torch.stack(list(old.values()))
    return dict(zip(old, torch.where(where, *both).unbind(), strict=True))


def is_at_bound(beta: Tensor, beta_default: Tensor) -> Tensor:
    """Return where beta is as far from the model's own as `apply` allows, up to rounding; boolean, shaped as `beta`."""
    return (beta / beta_default).log10().abs() >= DECADES - 1e-4


def ceiling(logit: float | Tensor, score: Tensor) -> Tensor:
    """Return the beta at which the largest `score` gives `logit`; infinite where no score was measured."""
    return (logit / score).nan_to_num(nan=torch.inf)


def reaches_logit(logit: float | Tensor, beta: Tensor, score: Tensor) -> Tensor:
    """Return where the largest `score` gives at least `logit`, up to rounding; boolean, shaped as `beta`."""
    return beta * score >= logit * (1 - 1e-4)


def options(controller: Controller) -> dict[str, Any]:
    """Return the options of a controller by name, as they come back from JSON: tuples are lists."""
    every = fields(controller)  # type: ignore[arg-type]  # subclasses are dataclasses
    return {field.name: _as_list(getattr(controller, field.name)) for field in every}


def defaults(kind: type[Controller]) -> dict[str, Any]:
    """Return the defaults of a controller's options by name, as they come back from JSON: tuples are lists."""
    every = fields(kind)  # type: ignore[arg-type]  # subclasses are dataclasses
    return {field.name: _as_list(field.default) for field in every if field.default is not MISSING}


def format_controller(name: str, options: Mapping[str, object], kind: type[Controller] | None = None) -> str:
    """Format a controller as its constructor call, without options that have their default value.

    Its class is `kind`, by default the subclass of `Controller` with this name, if there is one. For example,
    `format_controller("Cap", {"threshold": 30.0})` returns `"Cap(threshold=30.0)"`.
    """
    kind = kind or next((each for each in Controller.__subclasses__() if each.__qualname__ == name), None)
    usual = {} if kind is None else defaults(kind)
    given = [f"{key}={x!r}" for key, x in options.items() if key not in usual or _as_list(x) != usual[key]]
    return f"{name}({', '.join(given)})"


def check_controller(controller: Controller) -> None:
    """Refuse a controller whose options could not be saved in a checkpoint, or hide a method.

    Raises:
        TypeError: its class is not decorated with `@dataclass`, or JSON cannot hold an option, or an option has the
            name of a method of `Controller`.
    """
    name = type(controller).__name__
    if "__dataclass_fields__" not in vars(type(controller)):
        raise TypeError(
            f"class {name} is not decorated with @dataclass; expected a dataclass whose fields are the options, which "
            f"checkpoints name. Write @dataclass above `class {name}`"
        )
    for option, value in options(controller).items():
        if option in vars(Controller) and callable(getattr(Controller, option)):
            raise TypeError(
                f"{name} has an option {option}, which hides the method {option}() of Controller; expected another "
                "name. Rename the option"
            )
        if not is_json(value):
            raise TypeError(
                f"{name}({option}=...) is {value!r}, which JSON cannot hold; expected a finite number, a "
                "string, True, False, None or a list of them. Put what changes in training into the memory that "
                "update() returns"
            )


def require(owner: object, option: str, accepts: Callable[[Any], bool], expected: str) -> None:
    """Raise a ValueError unless `accepts` returns True for the value of an option, e.g. of a controller.

    A TypeError in `accepts` counts as a refusal. A numpy number is replaced by a plain one, which JSON can hold.
    """
    value: Any = getattr(owner, option)
    if isinstance(value, Real) and hasattr(value, "item"):
        object.__setattr__(owner, option, value := value.item())
    try:
        accepted = accepts(value)
    except TypeError:
        accepted = False
    if not accepted:
        raise ValueError(f"{type(owner).__name__}({option}=...) must be {expected}; got {value!r}")


def is_positive(value: object) -> bool:
    """Return whether a value is a positive number; True does not count as one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def at_least(least: int) -> Callable[[Any], bool]:
    """Return a predicate for whole numbers of at least `least`."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _as_list(value: object) -> object:
    return [_as_list(item) for item in value] if isinstance(value, list | tuple) else value


def is_json(value: object) -> bool:
    """Return whether JSON can hold an option: a finite number, a string, True, False, None or a list of these."""
    if isinstance(value, list):
        return all(map(is_json, value))
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
