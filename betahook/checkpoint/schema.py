"""The schema of a hook's state: what `Hook.state_dict` returns, and whether a hook can continue from it.

Rows of tensors are identified by their names, and controllers by class and options. An old state thus stays readable
when a row, or an option with a default, is added, and their order does not matter. `dump` makes a state; `parse` checks
one by itself, `match` checks it against the hook that is to continue from it, and `restore` loads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import __version__ as transformers_version

from betahook.checkpoint import handover
from betahook.checkpoint.migrations import MIGRATIONS
from betahook.checkpoint.order import BY_COMPONENT, BY_LAYER, of_layers
from betahook.control.base import Controller, format_controller, is_json, options
from betahook.control.memory import DTYPES, checked_start, is_of_kind
from betahook.measure import components, statistics, weights
from betahook.state.left_alone import forget_refused
from betahook.state.ranges import HeadRange
from betahook.state.state import LARGEST_BETA, SMALLEST_BETA, State, is_beta

VERSION = 3
ROWS = {
    "table": tuple(statistics.ROW),
    "recent": tuple(statistics.ROW),
    "moments": components.ROWS,
    "recent_moments": components.ROWS,
    "window": ("sensitivity", "batches"),
    "weights": weights.ROWS,
}
"""Tensors with named rows, and the names in order."""
COUNTERS = {"batches": int, "steps": int, "skipped_steps": int, "loss_scale": float}
REPORTED = {
    "alerts_step": int,
    "findings_step": int,
    "warned_of_nonfinite": bool,
    "warned_of_unreached": bool,
}
"""Entries of `State.reported`."""
NEWER = "damaged, or of a newer betahook than this"
"""Complaint about unknown entries: newer versions of betahook add entries and rows without a new `VERSION`."""
CONDITIONS = 9
"""Number of values of `report.conditions.Condition`; those of `condition` count from 0."""
_FLOATS, _WHOLE = (torch.float32, torch.float64), (torch.int64,)
TENSORS = {
    **dict.fromkeys(("beta", "beta_default"), _FLOATS),
    **dict.fromkeys(("nonfinite_since", "clips", *BY_LAYER), _WHOLE),
    **dict.fromkeys(ROWS, _FLOATS),
}
"""Tensors with the dtypes that are allowed."""
TYPES: dict[str, type] = {
    "layers": dict,
    "order": list,
    "options": dict,
    "controllers": list,
    "trained_by": list,
    "transformers": str,
    "rows": dict,
    **COUNTERS,
    **REPORTED,
    **dict.fromkeys(TENSORS, Tensor),
}
"""Types of all entries of a state except its version."""
LATER: dict[str, Callable[[dict[str, Any]], Any]] = {
    **dict.fromkeys(("findings_step", "batches"), lambda state: 0),
    "order": lambda state: list(state["layers"]),
    "trained_by": lambda state: [],
    "transformers": lambda state: "",
    "clips": lambda state: torch.zeros_like(state["nonfinite_since"]),
    **dict.fromkeys(BY_LAYER, lambda state: torch.zeros(len(state["layers"]), dtype=torch.int64, device="cpu")),
    "recent_moments": lambda state: torch.zeros_like(state["moments"]),
    "window": lambda state: torch.zeros_like(torch.atleast_2d(state["table"])[: len(ROWS["window"])]),
}
"""Entries that older files of this version lack, with defaults, computed from earlier entries of `TYPES`."""


def dump(
    state: State,
    layers: Mapping[str, int],
    settings: Mapping[str, Any],
    controllers: Sequence[Controller],
    trained_by: Sequence[str],
) -> dict[str, Any]:
    """Return the state of a hook as tensors, numbers and strings.

    Args:
        state: the state of the hook.
        layers: module name to number of heads.
        settings: `per_head`, `interval`, `when` and `exact_max_logit`, as given to `attach`.
        controllers: the controllers, whose memories are in the state.
        trained_by: descriptions of the controllers that trained a restored beta.
    """
    table = state.collect()  # first: it adds pending sums to the other tensors
    beta = state.units.geometric_mean(state.current_beta).to(table.dtype)
    # Even before the first update: torch.distributed.checkpoint loads only what is in the state of a fresh hook.
    memories = (memory or checked_start(each, beta) for each, memory in zip(controllers, state.memories, strict=True))
    return {
        "version": VERSION,
        "layers": dict(layers),
        "order": list(layers),  # a list: torch.distributed.checkpoint does not keep the order of dictionaries
        "options": dict(settings),
        "trained_by": list(trained_by),
        "transformers": transformers_version,  # another version may name layers differently
        **{name: getattr(state, name) for name in COUNTERS},
        **{name: getattr(state.reported, name) for name in REPORTED},
        **{name: getattr(state, name).clone() for name in TENSORS},
        # A lost beta trained the weights too.
        "beta": torch.where(state.lost_beta.isnan(), state.beta, state.lost_beta),
        "table": table,
        "rows": {name: list(rows) for name, rows in ROWS.items()},
        "controllers": [
            {
                "class": type(controller).__qualname__,
                "options": options(controller),
                "state": {name: value.clone() for name, value in memory.items()},
            }
            for controller, memory in zip(controllers, memories, strict=True)
        ],
    }


def parse(given: object) -> dict[str, Any]:
    """Return a state in the present format, with its rows in the present order; `given` is not changed.

    Raises:
        ValueError: it is not a state, has an unknown version, or is damaged; the message says where.
    """
    version = given.get("version") if isinstance(given, dict) else type(given).__name__
    if type(version) is int and version > VERSION:
        raise ValueError(
            f"the state is of version {version}, and this betahook reads versions up to {VERSION}: update it"
        )
    if not isinstance(given, dict) or type(version) is not int or version not in (*MIGRATIONS, VERSION):
        found = "a dictionary without a version" if version is None else repr(version)
        raise ValueError(
            f"expected a betahook state of version {VERSION}, got {found}: give what hook.state_dict() returned"
        )
    state = dict(MIGRATIONS[version](given) if version in MIGRATIONS else given)
    for name, kind in TYPES.items():
        if name in LATER and name not in state:
            state[name] = LATER[name](state)
        fits = isinstance(state.get(name), kind) and (kind is bool or not isinstance(state[name], bool))
        found = type(state[name]).__name__ if name in state else "nothing"
        _check(fits, f"incomplete: {name} should be a {kind.__name__}, got {found}")
    unknown = sorted(map(str, state.keys() - TYPES.keys() - {"version"}))
    _check(not unknown, f"{NEWER}: it has entries that are unknown, {', '.join(unknown)}")
    says_units = isinstance(state["options"].get("per_head"), bool)
    _check(says_units, f"incomplete: options should hold per_head, True or False, got {state['options']}")
    state["layers"] = _layers_in_order(state["layers"], state["order"])
    _check_counters(state)
    named = {"recent_moments": state["rows"].get("moments"), "window": list(ROWS["window"]), **state["rows"]}
    for name, rows in ROWS.items():
        state[name] = _in_order(name, state[name], named.get(name), rows)
    heads = sum(state["layers"].values())
    for name in TENSORS:
        if name not in (*BY_COMPONENT, *BY_LAYER):
            _check_shape(name, state[name], (*state[name].shape[:-1], heads))
        _check_dtype(name, state[name], TENSORS[name])
    for name in ("beta", "beta_default"):
        bounds = f"between {SMALLEST_BETA:g} and {LARGEST_BETA:g}"
        are_betas = bool((state[name].isnan() | is_beta(state[name])).all())
        _check(are_betas, f"damaged: {name} has entries that are not positive and finite, {bounds}")
    unknown = sorted(set(state["condition"].flatten().tolist()) - set(range(CONDITIONS)))
    _check(not unknown, f"{NEWER}: condition has entries that are unknown, {unknown}")
    for index, entry in enumerate(state["controllers"]):
        _check_controller(index, entry)
    are_words = all(isinstance(words, str) for words in state["trained_by"])
    _check(are_words, f"damaged: trained_by should be controllers in words, got {state['trained_by']}")
    return {**state, "version": VERSION, "rows": {name: list(rows) for name, rows in ROWS.items()}}


def match(
    state: dict[str, Any], own: dict[str, Any], ranges: Sequence[HeadRange], controllers: Sequence[Controller]
) -> dict[str, Any]:
    """Return a state from `parse` in the form in which a hook continues from it, with the layers in the hook's order.

    Controllers other than the saved ones start afresh, with a warning, if beta is the model's own.

    Args:
        state: the layers of its model may have another order.
        own: the state dict of the hook.
        ranges: the head ranges of its layers.
        controllers: the controllers of the hook.

    Raises:
        ValueError: the state belongs to another model, other options or other controllers; the message says which.
    """
    if state["layers"] != own["layers"]:
        raise ValueError(_difference(state["layers"], own["layers"]) + other_names(state))
    there, here = state["options"]["per_head"], own["options"]["per_head"]
    if there is not here:
        raise ValueError(
            f"the state belongs to a hook with per_head={there}, this one has per_head={here}: give this one the same"
        )
    for name in TENSORS:
        _check_shape(name, state[name], own[name].shape)
    names = list(own["layers"])
    head_dims = {name: each.head_dim for name, each in zip(names, ranges, strict=True)}
    if other := handover.difference(state["controllers"], own["controllers"], controllers):
        return of_layers(handover.begun_anew(state, own, controllers, other), names, head_dims)
    pairs = zip(controllers, state["controllers"], own["controllers"], strict=True)
    matched = [{**entry, "state": _memory(each, entry["state"], like["state"])} for each, entry, like in pairs]
    if state["steps"] == 0:  # memories begin in the first step, when beta is known
        matched = [{**entry, "state": {}} for entry in matched]
    return of_layers({**state, "controllers": matched}, names, head_dims)


def _difference(there: dict[str, int], here: dict[str, int]) -> str:
    """Describe which layers only the state or only the hook has, and what to do."""
    differing = [name for name in there.keys() & here.keys() if there[name] != here[name]]
    names = {
        "only the state has": there.keys() - here.keys(),
        "only this hook has": here.keys() - there.keys(),
        "the number of heads differs in": differing,
    }
    said = "; ".join(f"{which} {', '.join(sorted(each))}" for which, each in names.items() if each)
    return f"the state belongs to other layers: {said}. Attach to the model of the state, with the same layers=..."


def other_names(state: Mapping[str, Any]) -> str:
    """Return a hint, for errors about layers, that another version of transformers may have named them differently."""
    if state["transformers"] == transformers_version:
        return ""
    saved = f"transformers {state['transformers']}" if state["transformers"] else "another version of transformers"
    return (
        f". Layers may have other names in {saved} than in {transformers_version}: restore and fold with "
        "the one that saved it, then load the folded model with this one"
    )


def _memory(controller: Controller, given: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the saved memory of a controller in its present form, with the names and dtypes of its `own` memory."""
    name = type(controller).__qualname__
    memory = controller.migrate(given) if given else given
    is_known = not memory or memory.keys() == own.keys()
    _check(is_known, f"damaged: the memory of {name} is not that of {', '.join(own)}")
    for key, value in memory.items():
        like = own[key]
        _check_shape(f"{key} of {name}", value, like.shape)
        _check(is_of_kind(value, like), f"damaged: {key} of {name} should be of {like.dtype}, got {value.dtype}")
    return {key: memory[key].cpu().to(like.dtype) for key, like in own.items() if memory}


def restore(state: State, given: dict[str, Any]) -> None:
    """Write a parsed and matched state into the tensors and counters of a hook."""
    state.settle()  # so that no pending sums are added to the restored ones
    for name in TENSORS:
        getattr(state, name).copy_(given[name])
    for name in COUNTERS:
        setattr(state, name, given[name])
    for name in REPORTED:
        setattr(state.reported, name, given[name])
    if state.steps == 0:  # it may have been saved between a forward and the first step
        state.seen |= not bool(state.beta_default.isnan().all())
        state.recorded |= bool(state.table[statistics.ROW["pairs"]].any())
    state.has_loss |= bool(state.table[statistics.ROW["losses"]].any())
    state.first_spectral_ratio = None  # it described the previous weights
    state.beta_acts |= not bool(state.beta.isnan().all())
    state.all_watched = state.beta_acts
    state.gains.recall(state.beta_default)
    state.gains.set_sensitivity(state.table[statistics.ROW["sensitivity"]])
    state.memories = [
        {name: value.to(state.device, copy=True) for name, value in entry["state"].items()}
        for entry in given["controllers"]
    ]
    state.lost_beta.fill_(torch.nan)
    forget_refused(state)


def makers(state: Mapping[str, Any]) -> list[str]:
    """Describe the controllers that trained the beta of a state, without options that have their defaults."""
    return state["trained_by"] or [format_controller(each["class"], each["options"]) for each in state["controllers"]]


def _layers_in_order(layers: dict[Any, Any], order: list[Any]) -> dict[str, int]:
    """Return the number of heads by layer name, in the order of the layers in the tensors."""
    for name, heads in layers.items():
        are_heads = isinstance(name, str) and type(heads) is int and heads >= 1
        _check(are_heads, f"damaged: layers should be names with numbers of heads, got {name!r}: {heads!r}")
    are_named = all(isinstance(name, str) for name in order) and sorted(order) == sorted(layers)
    _check(are_named, f"damaged: order should have the name of each layer once, got {order}")
    return {name: layers[name] for name in order}


def _check_counters(state: dict[str, Any]) -> None:
    steps, skipped, batches, alerts = (state[name] for name in ("steps", "skipped_steps", "batches", "alerts_step"))
    _check(
        0 <= skipped <= steps < 2**53 and 0 <= batches <= steps and 0 <= alerts < 2**53,
        f"damaged: {steps} steps, {skipped} of them skipped, {batches} since the last pooling, alerts until step "
        f"{alerts}",
    )
    scale = state["loss_scale"]
    _check(math.isfinite(scale) and scale >= 0, f"damaged: the loss scale should be a number, 0 or more, got {scale}")


def _check_controller(index: int, entry: Any) -> None:
    """Refuse an entry of `controllers` that does not describe a controller."""
    match entry:
        case {"class": str(), "options": dict(given), "state": dict(memory)}:
            is_controller = all(isinstance(name, str) for name in (*given, *memory)) and all(
                map(is_json, given.values())
            )
        case _:
            is_controller = False
    words = "a class, options and a state by name"
    _check(is_controller, f"damaged: controller {index} should be {words}, got {entry!r}")
    for name, value in entry["state"].items():
        is_flat = isinstance(value, Tensor) and value.dim() == 1
        _check(is_flat, f"damaged: {name} of controller {index} should be a tensor of one dimension")
        _check_dtype(f"{name} of controller {index}", value, DTYPES)


def _in_order(name: str, values: Tensor, rows: Any, expected: Sequence[str]) -> Tensor:
    """Return the rows of a tensor in the expected order; a missing row was not measured, and is zero."""
    are_named = isinstance(rows, list) and values.dim() == 2 and len(values) == len(rows) == len({*map(str, rows)})
    wanted, shape = "the shape [rows, heads] and a name for each row", list(values.shape)
    _check(are_named, f"incomplete: {name} should have {wanted}, got {shape} and {rows!r}")
    unknown = [row for row in rows if row not in expected]
    _check(not unknown, f"{NEWER}: {name} has rows that are unknown, {', '.join(map(str, unknown))}")
    zero = torch.zeros_like(values[0])
    return torch.stack([values[rows.index(row)] if row in rows else zero for row in expected])


def _check_shape(name: str, value: Tensor, shape: Sequence[int]) -> None:
    wanted, found = list(shape), list(value.shape)
    _check(found == wanted, f"incomplete: {name} should have the shape {wanted}, got {found}")


def _check_dtype(name: str, value: Tensor, allowed: Sequence[torch.dtype]) -> None:
    wanted = " or ".join(map(str, allowed))
    _check(not value.is_meta, f"incomplete: {name} is on the meta device, which holds no numbers")
    _check(value.dtype in allowed, f"damaged: {name} should be of {wanted}, got {value.dtype}")


def _check(holds: bool, complaint: str) -> None:
    """Raise an error with this complaint about the state unless a condition holds."""
    if not holds:
        raise ValueError(f"the state is {complaint}")
