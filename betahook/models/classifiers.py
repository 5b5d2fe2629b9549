"""Classifiers, which tell attention and the source of its scores by the code of a module.

`discovery.survey` asks for a verdict on every module of a model: that of the first classifier that comes to one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from betahook import compat
from betahook.models.code import PRODUCTS, SOFTMAXES, is_users, names_held, operations, scripted
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
"""Functions that take the softmax too, called by name in users' code; `tap.kernels` has their signatures."""
UNFOLLOWED_KERNELS = {
    **dict.fromkeys(["flash_attn_qkvpacked_func", "flash_attn_kvpacked_func"], APART.format("flash_attn_func")),
    **dict.fromkeys(
        ["flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func"], APART.format("flash_attn_varlen_func")
    ),
    "flash_attn_with_kvcache": "flash_attn_func, without a cache",
    "memory_efficient_attention_forward": "memory_efficient_attention",
    "sageattn": "F.scaled_dot_product_attention",
}
"""Others that are known to compute an attention, to what may be called in their place."""
ASKED = TORCH_ATTENTION | NAMED_KERNELS
LOG_SOFTMAX = {"log_softmax", "LogSoftmax"}
SOFTMAX = {*SOFTMAXES, *LOG_SOFTMAX, "Softmax", "XSoftmax"}
SCRIPTED = torch.jit.ScriptFunction.__name__
IN_NAME = re.compile("attention|attn", re.IGNORECASE)


@dataclass(frozen=True)
class Verdict:
    """The result of classifying a module, which is no attention if there is neither a route nor an obstacle.

    Attributes:
        route: the source of its scores, where betahook can reach them.
        obstacle: the reason why it cannot.
        by_name_only: nothing but its name makes it look like attention.
        unnamed: its code may be an attention's, its name is not: a trial decides.
    """

    route: Route | None = None
    obstacle: str | None = None
    by_name_only: bool = False
    unnamed: bool = False


NO_ATTENTION = Verdict()
UNKNOWN_CODE = Verdict(
    obstacle="no product with a softmax behind it was found in its code, nor in the functions that this calls by name; "
    "attention by F.scaled_dot_product_attention would be",
    by_name_only=True,
)


@dataclass(frozen=True)
class Suspect:
    """A module, and what its code shows.

    Attributes:
        module: the module.
        used: names that its code uses.
        used_below: those, and the names that the code of its parts uses.
    """

    module: nn.Module
    used: frozenset[str]
    used_below: frozenset[str]


def classify(module: nn.Module, names: Callable[[type], frozenset[str]]) -> Verdict:
    """The verdict of the first classifier that comes to one; `names` are those that the code of a class uses."""
    used = names(compat.class_of(module))
    if hasattr(module, "processor"):  # diffusers keeps the attention apart from the module that owns the weights
        used |= names(type(module.processor))
    if is_users(module):
        used |= names_held(module)
    suspect = Suspect(module, used, used.union(*(names(compat.class_of(part)) for part in _parts(module))))
    verdicts = (classifier(suspect) for classifier in CLASSIFIERS)
    return next((verdict for verdict in verdicts if verdict is not None), NO_ATTENTION)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The parts with a scale at most: a product or a softmax may be one of them, also in another one."""
    return (part for child in module.children() if not has_matrix(child) for part in child.modules())


def known_otherwise(suspect: Suspect) -> Verdict | None:
    """A class that is known to be something else."""
    reason = facts(suspect.module).not_attention
    return None if reason is None else Verdict(obstacle=reason)


def is_scripted(suspect: Suspect) -> Verdict | None:
    """Attention that `torch.jit` compiled: nothing that it calls is seen."""
    name = suspect.module.original_name if isinstance(suspect.module, torch.jit.ScriptModule) else ""
    reason = f"torch.jit compiled this {name}, so that its products are out of sight; leave it in Python"
    return Verdict(obstacle=reason) if IN_NAME.search(name) else None


def is_called_otherwise(suspect: Suspect) -> Verdict | None:
    """A module with a `__call__` of its own, past its forward: what it computes is a part of what calls it."""
    return None if type(suspect.module).__call__ is nn.Module.__call__ else NO_ATTENTION


def asks_interface(suspect: Suspect) -> Verdict | None:
    """Attention that asks transformers for its attention function."""
    if "get_interface" not in suspect.used:
        return None
    bypasses = facts(suspect.module).bypasses_interface
    return Verdict("by hand" if bypasses is not None and bypasses(suspect.module) else "interface")


def asks_torch(suspect: Suspect) -> Verdict | None:
    """Attention that torch computes, unless its code has a softmax of its own for other cases."""
    used, kernels = suspect.used, {"scaled_dot_product_attention"}
    if is_users(suspect.module):
        used, kernels = suspect.used_below, kernels | NAMED_KERNELS
    if not used & (TORCH_ATTENTION | kernels):
        return None
    return Verdict("torch" if used & kernels and not used & SOFTMAX else "by hand")


def asks_other_kernel(suspect: Suspect) -> Verdict | None:
    """Attention by a kernel that is not followed, unless its code has one by hand, too."""
    called = next((name for name in UNFOLLOWED_KERNELS if name in suspect.used), None)
    if called is None or _has_product_and_softmax(suspect):
        return None
    return Verdict(obstacle=f"it calls {called}, which is not followed: call {UNFOLLOWED_KERNELS[called]}")


def calls_scripted(suspect: Suspect) -> Verdict | None:
    """Attention whose product or softmax lies in a function that `torch.jit.script` compiled."""
    if SCRIPTED not in suspect.used_below or _has_product_and_softmax(suspect):
        return None
    called = [each for part in (suspect.module, *_parts(suspect.module)) for each in scripted(compat.class_of(part))]
    hiding = {each: operations(each) & {*SOFTMAX, *PRODUCTS} for each in called}
    shown = replace(suspect, used_below=suspect.used_below.union(*hiding.values()))
    if not _has_product_and_softmax(shown) or not has_matrix(suspect.module):
        return None
    name = min(str(each.name) for each, found in hiding.items() if found)
    reason = (
        f"it calls {name}, which torch.jit.script compiled, so that its scores are out of sight: leave it in Python"
    )
    return Verdict(obstacle=reason)


def has_no_name(suspect: Suspect) -> Verdict | None:
    """Code that is not called attention, and asks nobody for one."""
    if is_named(suspect.module):
        return None
    has_weights = has_matrix(suspect.module)  # else it is a part of what calls it
    computes = is_users(suspect.module) and _has_product_and_softmax(suspect)
    return Verdict("by hand", unnamed=True) if computes and has_weights else NO_ATTENTION


def is_by_hand(suspect: Suspect) -> Verdict | None:
    """Attention with a product and a softmax in its code, or past `get_interface` in the registry of transformers."""
    by_hand = _has_product_and_softmax(suspect) or "ALL_ATTENTION_FUNCTIONS" in suspect.used
    return Verdict("by hand") if by_hand else None


def has_name_only(suspect: Suspect) -> Verdict | None:
    """Code that is called an attention; where more follows in the name, as in that of an output, it takes a softmax."""
    name = compat.class_of(suspect.module).__name__
    has_softmax = is_users(suspect.module) and any("softmax" in used.lower() for used in suspect.used)
    return UNKNOWN_CODE if has_softmax or re.search("(attention|attn)[0-9]*$", name, re.IGNORECASE) else None


def is_named(module: nn.Module) -> bool:
    """True for a module whose class is called attention."""
    return IN_NAME.search(compat.class_of(module).__name__) is not None


def has_matrix(module: nn.Module) -> bool:
    """True for a module with more parameters than a scale, or one of each head."""
    return any(hasattr(part, "in_features") for part in module.modules()) or any(  # quantised, it holds no parameter
        is_lazy(parameter) or compat.is_zero3(parameter) or sum(size > 1 for size in parameter.shape) > 1
        for parameter in module.parameters()
    )


def _has_product_and_softmax(suspect: Suspect) -> bool:
    """True for code with a product and a softmax."""
    return bool(suspect.used_below & SOFTMAX and suspect.used_below & {"@", *PRODUCTS})


CLASSIFIERS = (
    *(known_otherwise, is_scripted, is_called_otherwise, asks_interface, asks_torch),
    *(asks_other_kernel, calls_scripted, has_no_name, is_by_hand, has_name_only),
)
"""In the order in which they are asked."""
