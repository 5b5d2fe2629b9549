"""Checks of the arguments of `attach`, which calls them: every message says what was given and what to give instead."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Literal

from torch import nn

from betahook import checkpoint, compat
from betahook.control.base import Controller, check_controller
from betahook.control.rules import Monitor
from betahook.control.search import Search
from betahook.models.discovery import Survey, survey
from betahook.report.alerts import Alerts
from betahook.report.names import merge_numbered
from betahook.tap.recorder import ATTRIBUTE

INTERVAL = 10
"""Default `interval`, as long as the default window of `Search`."""

NO_ATTENTION = (
    "it has no module that computes softmax attention over q . k, by F.scaled_dot_product_attention, "
    "nn.MultiheadAttention, the attention interface of transformers, or products and a softmax in its forward"
)

LayerChoice = str | Sequence[str] | Callable[[str, nn.Module], bool]
ControllerChoice = Literal["default", "monitor"] | Controller | Sequence[Controller]


class UnsupportedModelError(ValueError):
    """A model to which betahook cannot attach; the message says why."""


def check_model(model: nn.Module) -> None:
    """Refuse an object that is not a model, or a model that cannot be hooked as it is now."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach() takes a torch module, the model itself; got {_named(model)}")
    name = type(model).__name__
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ValueError(f"the model is wrapped in {name}: attach to the model inside, betahook.attach(model.module)")
    if compat.is_compiled(model):
        raise ValueError(f"{name} is compiled already: attach first, then compile")
    if checkpoint.is_marked(model):
        raise ValueError(
            f"{name} was saved with its beta beside the weights: betahook.restore(model, folder) attaches with that "
            "beta and returns the hook; BetaHookCallback(hook=...) trains on with it. If it is a new model, made from "
            f"the config of a saved one: del model.config.{checkpoint.MARK}"
        )
    _check_parts(model, name)
    hooked = [path or name for path, module in model.named_modules() if hasattr(module, ATTRIBUTE)]
    if hooked:
        raise RuntimeError(
            f"{name} is hooked already (at {hooked[0]}): betahook.detach(model) removes the hook and resets beta; "
            "BetaHookCallback(hook=hook) gives it to the next Trainer"
        )


def _check_parts(model: nn.Module, name: str) -> None:
    """Refuse a composite of saved models, each with its own config, if one of them still needs its beta restored."""
    for path, part in model.named_modules():
        if checkpoint.is_marked(part):
            is_code = all(map(str.isidentifier, path.split(".")))
            code = f"model.{path}" if is_code else f"model.get_submodule({path!r})"
            raise ValueError(
                f"{path} of {name}, a {type(part).__name__}, was saved with its beta beside the weights: hook = "
                f"betahook.restore({code}, folder) attaches to it with that beta, and betahook.fold(hook), after a "
                f"forward, makes it plain. If it is new, made from the config of a saved one: del {code}.config."
                f"{checkpoint.MARK}"
            )


@dataclass(frozen=True)
class Settings:
    """Options of `attach` that stay fixed during training, and are saved with the state of the hook.

    Raises:
        ValueError: an option has an invalid value.
        TypeError: an option has the wrong type.
    """

    per_head: bool = False
    interval: int = INTERVAL
    when: Literal["training", "always"] = "training"
    exact_max_logit: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.per_head, bool):
            raise TypeError(f"per_head must be True or False; got {self.per_head!r}")
        if not isinstance(self.exact_max_logit, bool):
            raise TypeError(f"exact_max_logit must be True or False; got {self.exact_max_logit!r}")
        if not isinstance(self.interval, Integral) or isinstance(self.interval, bool) or self.interval < 1:
            raise ValueError(f"interval must be a whole number of steps, 1 or more; got {self.interval!r}")
        object.__setattr__(self, "interval", int(self.interval))  # JSON cannot hold an integer of numpy
        if self.when not in ("training", "always"):
            raise ValueError(f'when must be "training" or "always"; got {self.when!r}')


def resolve(
    controller: ControllerChoice,
    per_head: bool,
    interval: int | None,
    when: Literal["training", "always"],
    exact_max_logit: bool,
    alerts: Alerts | None,
) -> tuple[list[Controller], Settings]:
    """Return the controllers and the settings of a hook, with the settings that controllers and alerts require."""
    chain = controllers(controller)
    if not isinstance(alerts, Alerts | None):
        raise TypeError(f"alerts must be betahook.Alerts or None; got {alerts!r}")
    limited = alerts is not None and alerts.max_logit is not None
    if interval is None:
        interval = 1 if limited or any(controller.needs_every_step for controller in chain) else INTERVAL
    settings = Settings(per_head, interval, when, exact_max_logit)
    needed = limited or any(controller.exact_max_logit for controller in chain)
    return chain, replace(settings, exact_max_logit=settings.exact_max_logit or needed)


def controllers(choice: ControllerChoice) -> list[Controller]:
    """Return the controllers of a hook, in order.

    Raises:
        ValueError: the choice is an unknown name or an empty list.
        TypeError: it is neither a controller nor a list of them, or a checkpoint could not record its options.
    """
    if choice == "default":
        return [Search()]
    if choice == "monitor":
        return [Monitor()]
    chain = [choice] if isinstance(choice, Controller) else choice
    if isinstance(chain, str) or not isinstance(chain, Sequence) or not all(isinstance(c, Controller) for c in chain):
        raise (ValueError if isinstance(choice, str) else TypeError)(
            'controller must be "default", "monitor", a controller (Search(), Variance(), Gradient(), Cap(), ...) or a '
            f"list of them; got {_named(choice) if isinstance(choice, type | nn.Module) else repr(choice)}"
        )
    if not chain:
        raise ValueError('controller is an empty list; use "monitor" to leave beta where it is')
    for controller in chain:
        check_controller(controller)
    return list(chain)


def _named(given: object) -> str:
    """Describe a wrong argument in a message: a string by its repr, anything else by its type."""
    if isinstance(given, type):
        return f"the class {given.__name__}, not an instance"
    return repr(given) if isinstance(given, str) else type(given).__name__


def find_layers(model: nn.Module, choice: LayerChoice | None) -> Survey:
    """Survey the attention modules of a model, keeping only the chosen ones of those that betahook can attach to."""
    name, is_chosen = type(model).__name__, predicate(choice)
    seen = survey(model)
    if not seen.found:
        reasons = "; ".join(f"{path}, {reason}" for path, reason in list(seen.not_reached.items())[:3])
        raise UnsupportedModelError(f"cannot attach to {name}: " + (reasons or NO_ATTENTION))
    chosen = {path: found for path, found in seen.found.items() if is_chosen(path, found.module)}
    globs = [] if callable(choice) else _globs(choice)
    unmatched = [each for each in globs if not any(fnmatch.fnmatchcase(path, each) for path in seen.found)]
    if unmatched or not chosen:
        wrong = ", ".join(map(repr, unmatched)) if chosen else repr(choice)
        there = ", ".join(merge_numbered(seen.found))
        raise ValueError(f"layers={wrong} matches none of the attention layers of {name}: {there}")
    if (getattr(model, "tp_size", None) or 1) > 1 and any(found.route != "interface" for found in chosen.values()):
        raise UnsupportedModelError(
            f"cannot attach to {name}: it is tensor-parallel, and outside of the attention interface of transformers "
            "betahook cannot tell which heads a rank computes; use data parallelism or FSDP (fully_shard)"
        )
    return replace(seen, found=chosen)


def predicate(choice: LayerChoice | None) -> Callable[[str, nn.Module], bool]:
    """Return a choice of layers as a function of name and module.

    Raises:
        TypeError: it is neither globs nor a function.
    """
    if callable(choice):
        return choice
    globs = _globs(choice)
    if not isinstance(globs, Sequence) or not all(isinstance(each, str) for each in globs):
        raise TypeError(f"layers must be a glob, a list of globs or a predicate (name, module) -> bool; got {choice!r}")
    return lambda path, module: any(fnmatch.fnmatchcase(path, each) for each in globs)


def _globs(choice: str | Sequence[str] | None) -> Sequence[str]:
    """Return a choice of layers that is not a predicate as a list of globs."""
    return ["*"] if choice is None else [choice] if isinstance(choice, str) else choice
