"""A check for functions that hide scores: what torch shows to no function mode, as those of `torch.jit.script`.

Behind such a function nothing is known of the scores, and at the softmax they look like a bias of those of another
product. The graph of autograd still leads from the softmax to the product.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor

from betahook import compat
from betahook.tap.by_hand.products import Product


def behind(logits: Tensor, nodes: dict[Product, Any]) -> Product | None:
    """The first product that makes what a softmax gets although no trace of it came there; None where none does.

    Args:
        logits: what the softmax gets.
        nodes: those of autograd, of the products so far.
    """
    if all(product.reached for product in nodes):
        return None
    known = _with_makers(product for product in nodes if product.reached)
    # What a known operation lost is left alone for that.
    goals = {nodes[each]: each for each in nodes if each.assured and each.lost is None and each not in known}
    found = _first(logits.grad_fn, goals)
    return None if found is None else goals[found]


def _with_makers(products: Iterable[Product]) -> set[Product]:
    """Products, and those that made their operands, and so on."""
    waiting, found = list(products), set[Product]()
    while waiting:
        product = waiting.pop()
        if product not in found:
            found.add(product)
            waiting += product.makers
    return found


def _first(node: Any, goals: Collection[Any]) -> Any:
    """The first of some nodes to which the graph leads from another one; None where it leads to none."""
    # A node is younger than those it leads to: beyond the oldest goal there is none.
    oldest = min(map(compat.age_of, goals), default=0)
    waiting, seen = [node] if goals else [], set[Any]()
    while waiting:
        node = waiting.pop()
        if node in goals:
            return node
        if node is not None and node not in seen and compat.age_of(node) >= oldest:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return None
