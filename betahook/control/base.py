"""The interface of a controller, and `apply`, with which a hook runs its controllers.

A unit is a layer, or a head with `per_head=True`; tensors have the shape `[units]` unless said otherwise. Nothing here
or in a controller may read a tensor back to the host. Statistics arrive pooled over ranks, so that all ranks compute
the same beta.
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

from betahook.control.memory import check_updated, started
from betahook.control.notes import Note
from betahook.measure.statistics import Statistics

DECADES = 3.0
"""Beta stays within so many decades of the model's own."""

Memory: TypeAlias = dict[str, Tensor]
"""Memory of a controller between steps: tensors `[units]` by name; empty before its first update."""


@dataclass(frozen=True)
class Observation:
    """Measurements of one step, for controllers.

    Attributes:
        beta_default: the model's own inverse temperature, `[units]`, float32.
        statistics: of the batches since the last update, or of the last measured ones if none of these was measured.
            The sensitivity is the mean over the batches in which it was finite. The std of W_q and W_k is not in it.
            Where the heads of a unit have different betas, those of a query times the beta of its head over that of the
            unit, so that the beta of the unit times a score is the logit.
        predicted_std: returns the standard deviation of these scores that W_q and W_k predict, `[units]`, NaN where
            they were not found. A function, since it reads them all.
        overflow: the largest logit whose exponential is finite in the dtype of the softmax.
        step: number of batches before this one, skipped optimizer steps not counted.
        spectral_ratio: returns, as a scalar, the largest `theory.spectral_ratio` of all W_q and W_k, NaN where one was
            not found, by no rank; frozen layers count only if all are. In the first batch as they were before its
            update, where an optimizer of torch made it. A function, since it takes a score of products with each of
            them; every rank must call it.
        loss: returns, as a scalar, the training loss of this step, the mean over its forwards and all ranks; the sum
            over forwards that are told `num_items_in_batch`, each of which returns a share of it. NaN where there was
            none, and after the batches for which a controller wants it.
        has_loss: returns, as a scalar, if this step had a loss, on any rank; it may be NaN itself.
        batches: number of batches since the last update, this one included, skipped optimizer steps not counted.
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
    """A rule for beta: options, and a function from what was observed to the next beta.

    A subclass is a dataclass, plain or frozen, whose fields are its options: numbers, strings, booleans, None, or lists
    of them, so that a checkpoint can name them. What it remembers is passed in and out of `update`, never kept on the
    object: one object may serve several hooks.

    Attributes:
        uses_loss: True for a controller that is judged by the training loss. The loss is then recorded, and `update`
            runs also where an observation is not finite: a beta that breaks the training is a bad one.
        needs_every_step: True for a rule that goes by the scores of every step, such as a limit on them: `attach`
            without an `interval` then measures every layer in every step.
        exact_max_logit: True for a rule that limits the largest score or logit: it is then that of all pairs, see
            `attach`.
        moves_beta: False for a rule that leaves beta where it is and has no memory. A hook none of whose rules moves
            beta calls no `update`.
    """

    exact_max_logit: ClassVar[bool] = False
    moves_beta: ClassVar[bool] = True
    needs_every_step: ClassVar[bool] = False
    uses_loss: ClassVar[bool] = False

    def __repr__(self) -> str:
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]  # subclasses are dataclasses
        return written(type(self).__name__, {name: getattr(self, name) for name in names}, type(self))

    def start(self, beta: Tensor) -> Memory:
        """Make the memory for the first update, tensors `[units]` under every name that `update` returns.

        A checkpoint holds float32, float64, int64 and bool, under names without a `/`.

        Args:
            beta: `[units]`, in the dtype and on the device that `update` gets it.
        """
        return {}

    @abstractmethod
    def update(self, beta: Tensor, observation: Observation, state: Memory) -> tuple[Tensor, Memory]:
        """Compute the next beta and memory, element-wise and without host synchronisation.

        A unit whose observation is not finite keeps its beta and its memory, whatever is returned for it, unless the
        controller has `uses_loss`.

        Args:
            beta: `[units]`, as the controllers before this one in the list left it. Not to be changed in place.
            observation: what was measured.
            state: the memory, as `start` or the last update returned it. Its tensors must not be changed in place.

        Returns:
            Beta, `[units]`, which stays where this is NaN, infinite or not positive; and the memory.
        """

    def is_due(self, step: int) -> bool:
        """Tell if an update is needed after a batch.

        All controllers of a hook are updated where one is due, after the first batch, and after every `interval`
        batches: a rule with windows of its own counts the batches. In between a step does next to nothing, and several
        processes exchange nothing. A rule with `uses_loss` is due after every batch.

        Args:
            step: number of batches before this one, the `step` of the observation that the update would get.
        """
        return True

    @property
    def opening_batches(self) -> int:
        """Number of batches from the first one in which every layer is measured, whatever the `interval`."""
        return 0

    @property
    def loss_batches(self) -> int:
        """Number of batches from the first one in which the training loss is recorded where there is one.

        For a controller that gets along without it, unlike one with `uses_loss`.
        """
        return 0

    def is_in_transition(self, state: Memory) -> bool:
        """Tell if beta is on its way somewhere, so that training that ends now ends too early; reads the device.

        Args:
            state: the memory that the last update returned; empty before the first.
        """
        return False

    def explain(self, beta: Tensor, observation: Observation, state: Memory) -> Sequence[Note]:
        """Say what the last update did and why, one note for each beta; it may read the device.

        Args:
            beta: `[units]`, as it is now.
            observation: that of the last update.
            state: the memory that it returned.

        Returns:
            A `Note` for each unit; none at all from a controller that has nothing to say.
        """
        return ()

    @classmethod
    def migrate(cls, state: Memory) -> Memory:
        """Convert a memory `state` that an older version wrote; one of this version is returned as it is."""
        return state


def apply(
    controllers: Sequence[Controller], beta: Tensor, observation: Observation, memories: Sequence[Memory]
) -> tuple[Tensor, list[Memory]]:
    """Run controllers in order; a unit keeps beta and memory where anything is not finite, or was never measured.

    It also keeps them where each row has but one key.

    Controllers judged by the loss run all the same, since to them a beta at which nothing is finite is a bad trial;
    but they, too, keep beta where each row has one key.

    They compute in the precision of the statistics, float64 where the device has it. Wherever they move beta, it stays
    within `DECADES` of the model's own, and is returned in its dtype. The memory of a controller is empty before its
    first update.

    Raises:
        TypeError: a controller returned something else than beta and memory, or a memory that no checkpoint holds.
        ValueError: an update returned a memory with other names than `start`, or a name is none for a checkpoint.
    """
    # `logical_and` takes numbers, in one operation. Where rows have one key `flat_entropy` is 0: beta does
    # nothing there, and the sensitivity is rounding.
    known = observation.beta_default < torch.inf  # not NaN either; `isfinite` is four operations
    matters = known.logical_and(observation.statistics.flat_entropy)
    healthy = matters & observation.statistics.finite.logical_and(observation.statistics.count)
    start = new = beta.to(observation.statistics.sensitivity.dtype)
    after: list[Memory] = []
    for controller, memory in zip(controllers, memories, strict=True):
        before = memory or started(controller, start)
        proposed, made = _checked(controller, controller.update(new, observation, dict(before)), new, before)
        # Where a controller returns no usable beta, that of the one before stands.
        if proposed is not new:
            usable = (proposed * 0 < proposed) & (matters if controller.uses_loss else healthy)  # finite and positive
            new = torch.where(usable, proposed, new)
        after.append(made if controller.uses_loss else _choose(healthy, made, before))
    if new is start:  # nothing moves beta, as in monitoring
        return beta, after
    limit = 10**DECADES
    bounded = new.clamp(observation.beta_default / limit, observation.beta_default * limit)
    return torch.where(new != start, bounded.to(beta), beta), after


def _checked(controller: Controller, answer: object, beta: Tensor, before: Memory) -> tuple[Tensor, Memory]:
    """Return what an update returned, if it is a beta for each unit and a memory as before."""
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
    """Return a memory that is `new` in some units, and `old` in the others."""
    if len({value.dtype for value in (*new.values(), *old.values())}) != 1:
        return {name: torch.where(where, new[name], old[name]) for name in old}
    # All names at once: on an accelerator each operation costs the same, whatever its size.
    both = torch.stack([new[name] for name in old]), torch.stack(list(old.values()))
    return dict(zip(old, torch.where(where, *both).unbind(), strict=True))


def at_bound(beta: Tensor, beta_default: Tensor) -> Tensor:
    """Tell where beta is as far from the model's own as `apply` lets it go, up to rounding; boolean, as `beta`."""
    return (beta / beta_default).log10().abs() >= DECADES - 1e-4


def ceiling(logit: float | Tensor, score: Tensor) -> Tensor:
    """Beta at which the largest `score` makes `logit`; infinite where no score was measured."""
    return (logit / score).nan_to_num(nan=torch.inf)


def is_at(logit: float | Tensor, beta: Tensor, score: Tensor) -> Tensor:
    """Tell where the largest `score` makes `logit`, or more, up to rounding; boolean, as `beta`."""
    return beta * score >= logit * (1 - 1e-4)


def options(controller: Controller) -> dict[str, Any]:
    """The options of a controller by name, as JSON returns them: tuples are lists."""
    every = fields(controller)  # type: ignore[arg-type]  # subclasses are dataclasses
    return {field.name: _as_list(getattr(controller, field.name)) for field in every}


def defaults(kind: type[Controller]) -> dict[str, Any]:
    """The defaults of the options of a controller by name, as JSON returns them: tuples are lists."""
    every = fields(kind)  # type: ignore[arg-type]  # subclasses are dataclasses
    return {field.name: _as_list(field.default) for field in every if field.default is not MISSING}


def written(name: str, options: Mapping[str, object], kind: type[Controller] | None = None) -> str:
    """Write a controller as it is made, without the options that are its defaults.

    Its class is `kind`; by default the one of this name, if there is one.
    """
    kind = kind or next((each for each in Controller.__subclasses__() if each.__qualname__ == name), None)
    usual = {} if kind is None else defaults(kind)
    given = [f"{key}={x!r}" for key, x in options.items() if key not in usual or _as_list(x) != usual[key]]
    return f"{name}({', '.join(given)})"


def check_controller(controller: Controller) -> None:
    """Refuse a controller whose options a checkpoint could not name, or hide a method.

    Raises:
        TypeError: its class is not decorated with `@dataclass`, or an option is nothing that JSON can hold, or is
            called as a method of `Controller`.
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
    """Refuse the value of an option, of a controller say, that is not accepted, or of a type that cannot be judged.

    A number of numpy becomes plain, for JSON to hold it.
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
    """Accept positive numbers; True is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def at_least(least: int) -> Callable[[Any], bool]:
    """Accept whole numbers from `least` on."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _as_list(value: object) -> object:
    return [_as_list(item) for item in value] if isinstance(value, list | tuple) else value


def is_json(value: object) -> bool:
    """Tell if JSON can hold the value of an option: a finite number, a string, True, False, None or a list of them."""
    if isinstance(value, list):
        return all(map(is_json, value))
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
