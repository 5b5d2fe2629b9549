"""Which modules of a model compute attention, and how: read off their code, which says it before any forward."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Literal

from torch import Tensor, nn

from betahook.models import projections
from betahook.models.families import NO_ATTENTION, facts

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads", "attention_heads", "heads")
HEAD_DIM = (
    *("qk_head_dim", "head_dim", "attention_head_size", "attention_head_dim", "key_value_proj_dim", "head_size"),
    *("key_dim", "dim_head", "d_head"),
)

Route = Literal["interface", "torch", "by hand"]


WRAPPERS = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"}
"""Under which activation checkpointing, FSDP 1 and `torch.compile` keep a module; weights are saved without them."""


class Refused(str):
    """Why betahook cannot attach to a module that looks like attention."""


NOT_FOUND = Refused("no product with a softmax behind it was found in its code")


TORCH_ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward"}
SOFTMAX = {"softmax", "Softmax", "XSoftmax"}
PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum", "@"}


@dataclass(frozen=True)
class Found:
    """An attention module.

    Attributes:
        module: the module.
        heads: number of query heads.
        head_dim: d_k.
        route: where its scores come from: the attention "interface" of transformers, "torch", which takes the softmax
            too, or products "by hand".
    """

    module: nn.Module
    heads: int
    head_dim: int
    route: Route


@dataclass(frozen=True)
class Survey:
    """What attention a model has.

    Attributes:
        found: the modules to which betahook can attach, by name.
        not_reached: names of those that look like attention, with the reason why it cannot.
    """

    found: dict[str, Found]
    not_reached: dict[str, str]


def survey(model: nn.Module) -> Survey:
    """Look at every module of a model."""
    found: dict[str, Found] = {}
    refused: dict[str, tuple[nn.Module, str]] = {}
    routes = {kind: _route(module) for kind, module in {type(module): module for module in model.modules()}.items()}
    able = {module for module in model.modules() if not isinstance(routes[type(module)], Refused | None)}
    for name, module in named_modules(model):
        route = routes[type(module)]
        if route is None:
            continue
        if route != "interface" and any(part in able for part in module.modules() if part is not module):
            continue
        if isinstance(route, Refused):
            refused[name] = module, route
        elif (size := count_heads(module)) is None:
            refused[name] = module, "it says neither how many heads it has nor how wide they are"
        elif getattr(module, "reorder_and_upcast_attn", False):  # GPT-2: past the interface, in eager
            found[name] = Found(module, *size, "by hand")
        else:
            found[name] = Found(module, *size, route)
    # Parts of a hooked module are not reported, unless they were refused for a reason of their own.
    reached = {part for one in found.values() for part in one.module.modules()}
    not_reached = {
        name or "the model": f"{type(module).__name__}: {reason}"
        for name, (module, reason) in refused.items()
        if reason is not NOT_FOUND or module not in reached
    }
    return Survey(found, not_reached)


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules, the names as those of the weights in a saved model, without what wrappers add to them."""
    for path, module in model.named_modules():
        yield ".".join(part for part in path.split(".") if part not in WRAPPERS), module


def _route(module: nn.Module) -> Route | Refused | None:
    """The route of what is attention, the reason where it has none, or None for what is no attention."""
    kind = type(module)
    if kind.__name__ in NO_ATTENTION:
        return Refused(NO_ATTENTION[kind.__name__])
    if kind.__name__.endswith("Indexer"):
        return Refused("it picks the keys of another attention, without a softmax")
    used = names_used(kind)
    if hasattr(module, "processor"):  # diffusers keeps the attention apart from the module that owns the weights
        used |= names_used(type(module.processor))
    if "get_interface" in used:
        return "interface"
    if used & TORCH_ATTENTION:
        return "torch" if "scaled_dot_product_attention" in used and not used & SOFTMAX else "by hand"
    if not re.search("attention|attn", kind.__name__, re.IGNORECASE):
        return None
    if "ALL_ATTENTION_FUNCTIONS" in used:  # asked past get_interface
        return "by hand"
    # A product or a softmax may be a module of its own, without parameters.
    used = used.union(*(names_used(type(child)) for child in module.children() if not list(child.parameters())))
    if used & SOFTMAX and used & PRODUCTS:
        return "by hand"
    if not re.search("(attention|attn)[0-9]*$", kind.__name__, re.IGNORECASE):
        return None  # a part of an attention, its output say
    return NOT_FOUND


def names_used(kind: type) -> frozenset[str]:
    """The global names and attributes that the methods of a class use; "@" for the operator."""
    classes = [cls for cls in kind.__mro__ if cls not in (nn.Module, object)]
    methods = {name: member for cls in reversed(classes) for name, member in vars(cls).items()}
    codes = (getattr(inspect.unwrap(member), "__code__", None) for member in methods.values() if callable(member))
    return frozenset(name for code in codes if code is not None for name in _names(code))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    if any(i.opname == "BINARY_OP" and i.argrepr in ("@", "@=") for i in dis.get_instructions(code)):
        yield "@"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def count_heads(module: nn.Module) -> tuple[int, int] | None:
    """Number of query heads and width d_k of each, or None where the module does not say."""

    def first(owner: object, names: tuple[str, ...]) -> int | None:
        found = (getattr(owner, name, None) for name in names)
        return next((value for value in found if isinstance(value, int) and value > 0), None)

    config = getattr(module, "config", None)
    heads, head_dim = facts(module).heads or first(module, HEADS), first(module, HEAD_DIM)
    width = _width(module, [query for query, _ in projections.SEPARATE])
    if heads is None and head_dim is not None:
        # The config knows about gated projections, which are wider than heads * d_k; but not every module has one.
        heads = first(config, HEADS)
        if width is not None and (heads is None or width % (heads * head_dim)):
            heads = width // head_dim
    if heads is None and (head_dim := first(config, HEAD_DIM)) is not None:
        heads = first(config, HEADS)
    if heads is not None and head_dim is None:
        fused = _width(module, projections.FUSED)
        # A pooling head has a learned query, and a projection of the keys only.
        width = width or (fused and fused // 3) or _width(module, [key for _, key in projections.SEPARATE])
        width = width or first(module, ("embed_dim",))
        head_dim = width and width // heads
    return None if heads is None or head_dim is None else (heads, head_dim)


def _width(module: nn.Module, names: Iterable[str]) -> int | None:
    """Width of what the first of these projections returns."""
    for projection in (getattr(module, name, None) for name in names):
        if isinstance(projection, nn.Module) and isinstance(getattr(projection, "weight", None), Tensor):
            return projections.matrix(projection).shape[0]
    return None
