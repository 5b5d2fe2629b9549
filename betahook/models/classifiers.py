"""Classifiers, which decide from the code of a module if it is attention and what its scores come from.

`discovery.survey` calls `classify` for every module of a model; the first classifier with a verdict decides. Its name
says what it may do: `accept` attention that betahook can reach, `refuse` attention that it cannot, `rule_out` what is
none, or `doubt` a module, on which a trial may then decide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from betahook import compat
from betahook.models.code import PRODUCTS, SOFTMAXES, is_user_module, names_held, operations, scripted
from betahook.models.families import facts

Route = Literal["interface", "torch", "by hand"]
"""The source of scores: the attention "interface" of transformers, "torch" or another kernel, or "by hand"."""

APART = "{} with q, k and v apart"
TORCH_ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward"}
NAMED_KERNELS = {
    "flex_attention",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "varlen_attn",
    "memory_efficient_attention",
}
"""Kernels, softmax included, that user code calls by name; `tap.kernels` has their signatures."""
UNFOLLOWED_KERNELS = {
    **dict.fromkeys(["flash_attn_qkvpacked_func", "flash_attn_kvpacked_func"], APART.format("flash_attn_func")),
    **dict.fromkeys(
        ["flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func"], APART.format("flash_attn_varlen_func")
    ),
    "flash_attn_with_kvcache": "flash_attn_func, without a cache",
    "memory_efficient_attention_forward": "memory_efficient_attention",
    "sageattn": "F.scaled_dot_product_attention",
}
"""Other functions that are known to compute attention, each with what to call instead."""
FOLLOWED_FUNCTIONS = TORCH_ATTENTION | NAMED_KERNELS
"""All functions that compute attention and that betahook follows."""
LOG_SOFTMAX = {"log_softmax", "LogSoftmax"}
SOFTMAX = {*SOFTMAXES, *LOG_SOFTMAX, "Softmax", "XSoftmax"}
SCRIPTED = torch.jit.ScriptFunction.__name__
IN_NAME = re.compile("attention|attn", re.IGNORECASE)


@dataclass(frozen=True)
class Verdict:
    """The result of classifying a module; it is not attention if there is neither a route nor an obstacle.

    Attributes:
        route: the source of its scores, if betahook can reach them.
        obstacle: the reason why betahook cannot.
        by_name_only: True if only its name makes it look like attention.
        unnamed: True if its code may be attention but its name does not say so; a trial decides.
    """

    route: Route | None = None
    obstacle: str | None = None
    by_name_only: bool = False
    unnamed: bool = False


NO_ATTENTION = Verdict()
UNKNOWN_CODE = Verdict(
    obstacle="neither its code nor the functions that it calls by name have a product followed by a softmax; attention "
    "by F.scaled_dot_product_attention would be recognised",
    by_name_only=True,
)


@dataclass(frozen=True)
class Suspect:
    """A module to be classified, with the names in its code.

    Attributes:
        module: the module.
        used: names that its code uses.
        used_below: the same, and the names that the code of its parts uses, see `_parts`.
    """

    module: nn.Module
    used: frozenset[str]
    used_below: frozenset[str]


def classify(module: nn.Module, names: Callable[[type], frozenset[str]]) -> Verdict:
    """The verdict of the first classifier that has one; `names` returns the names in the code of a class."""
    used = names(compat.class_of(module))
    if hasattr(module, "processor"):  # diffusers separates the attention's code from the module that owns the weights
        used |= names(type(module.processor))
    if is_user_module(module):
        used |= names_held(module)
    suspect = Suspect(module, used, used.union(*(names(compat.class_of(part)) for part in _parts(module))))
    verdicts = (classifier(suspect) for classifier in CLASSIFIERS)
    return next((verdict for verdict in verdicts if verdict is not None), NO_ATTENTION)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Children without matrices, and all that they contain: the product or the softmax may be one of them."""
    return (part for child in module.children() if not has_matrix(child) for part in child.modules())


def rule_out_listed(suspect: Suspect) -> Verdict | None:
    """A class that `families` lists as something other than attention."""
    reason = facts(suspect.module).not_attention
    return None if reason is None else Verdict(obstacle=reason)


def refuse_scripted_module(suspect: Suspect) -> Verdict | None:
    """Attention compiled by `torch.jit`, whose calls cannot be seen."""
    name = suspect.module.original_name if isinstance(suspect.module, torch.jit.ScriptModule) else ""
    reason = f"torch.jit compiled this {name}, which hides its products; keep it in Python"
    return Verdict(obstacle=reason) if IN_NAME.search(name) else None


def rule_out_own_call(suspect: Suspect) -> Verdict | None:
    """A module with its own `__call__`, which bypasses `forward`: its computation belongs to its caller."""
    return None if type(suspect.module).__call__ is nn.Module.__call__ else NO_ATTENTION


def accept_interface(suspect: Suspect) -> Verdict | None:
    """Attention that calls `get_interface` of transformers for its attention function."""
    if "get_interface" not in suspect.used:
        return None
    bypasses = facts(suspect.module).bypasses_interface
    return Verdict("by hand" if bypasses is not None and bypasses(suspect.module) else "interface")


def accept_torch(suspect: Suspect) -> Verdict | None:
    """Attention by torch or a named kernel; "by hand" if its code, or torch's multi-head one, may take a softmax."""
    used, kernels = suspect.used, {"scaled_dot_product_attention"}
    if is_user_module(suspect.module):
        used, kernels = suspect.used_below, kernels | NAMED_KERNELS
    if not used & (TORCH_ATTENTION | kernels):
        return None
    return Verdict("torch" if used & kernels and not used & SOFTMAX else "by hand")


def refuse_other_kernel(suspect: Suspect) -> Verdict | None:
    """Attention by a kernel that betahook does not follow, unless the code also computes attention by hand."""
    called = next((name for name in UNFOLLOWED_KERNELS if name in suspect.used), None)
    if called is None or _has_product_and_softmax(suspect):
        return None
    return Verdict(obstacle=f"it calls {called}, which is not followed: call {UNFOLLOWED_KERNELS[called]}")


def refuse_scripted_function(suspect: Suspect) -> Verdict | None:
    """Attention whose product or softmax is inside a function compiled by `torch.jit.script`."""
    if SCRIPTED not in suspect.used_below or _has_product_and_softmax(suspect):
        return None
    called = [each for part in (suspect.module, *_parts(suspect.module)) for each in scripted(compat.class_of(part))]
    hiding = {each: operations(each) & {*SOFTMAX, *PRODUCTS} for each in called}
    shown = replace(suspect, used_below=suspect.used_below.union(*hiding.values()))
    if not _has_product_and_softmax(shown) or not has_matrix(suspect.module):
        return None
    name = min(str(each.name) for each, found in hiding.items() if found)
    reason = f"it calls {name}, whose scores are hidden, since torch.jit.script compiled it: keep it in Python"
    return Verdict(obstacle=reason)


def doubt_unnamed(suspect: Suspect) -> Verdict | None:
    """A module that is not named attention: its own product, softmax and matrix make it a candidate for a trial."""
    if is_named(suspect.module):
        return None
    has_weights = has_matrix(suspect.module)  # without one, it is a part of its caller
    computes = is_user_module(suspect.module) and _has_product_and_softmax(suspect)
    return Verdict("by hand", unnamed=True) if computes and has_weights else NO_ATTENTION


def accept_by_hand(suspect: Suspect) -> Verdict | None:
    """Attention with a product and a softmax in its code, or that reads transformers' registry directly."""
    by_hand = _has_product_and_softmax(suspect) or "ALL_ATTENTION_FUNCTIONS" in suspect.used
    return Verdict("by hand") if by_hand else None


def doubt_name_only(suspect: Suspect) -> Verdict | None:
    """A module named attention; if its name goes on, as in `AttentionOutput`, its code must mention a softmax."""
    name = compat.class_of(suspect.module).__name__
    has_softmax = is_user_module(suspect.module) and any("softmax" in used.lower() for used in suspect.used)
    return UNKNOWN_CODE if has_softmax or re.search("(attention|attn)[0-9]*$", name, re.IGNORECASE) else None


def is_named(module: nn.Module) -> bool:
    """True for a module whose class name contains "attention" or "attn"."""
    return IN_NAME.search(compat.class_of(module).__name__) is not None


def has_matrix(module: nn.Module) -> bool:
    """True for a module that has a matrix, not only scalars or one number per head."""
    return any(hasattr(part, "in_features") for part in module.modules()) or any(  # a quantised one has no parameter
        is_lazy(parameter) or compat.is_zero3(parameter) or sum(size > 1 for size in parameter.shape) > 1
        for parameter in module.parameters()
    )


def _has_product_and_softmax(suspect: Suspect) -> bool:
    """True if the code has a product and a softmax."""
    return have_product_and_softmax(suspect.used_below)


def have_product_and_softmax(names: Set[str]) -> bool:
    """True if code that uses these names has a product and a softmax."""
    return bool(names & SOFTMAX and names & {"@", *PRODUCTS})


CLASSIFIERS = (
    *(rule_out_listed, refuse_scripted_module, rule_out_own_call, accept_interface, accept_torch),
    *(refuse_other_kernel, refuse_scripted_function, doubt_unnamed, accept_by_hand, doubt_name_only),
)
"""In the order in which `classify` asks them."""
