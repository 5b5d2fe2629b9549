"""A check for functions that hide scores, since no torch function mode sees them, such as those of `torch.jit.script`.

After such a function scores have no trace, and added to scores of another product they look like a bias. The autograd
graph still leads from the softmax back to their product.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor

from betahook import compat
from betahook.tap.by_hand.products import Product


def find_hidden_product(logits: Tensor, nodes: dict[Product, Any]) -> Product | None:
    """Find a product from which the input of a softmax was computed although its trace did not reach it, else None.

    Args:
        logits: the input of the softmax.
        nodes: the autograd nodes of the products so far.
    """
    if all(product.reached for product in nodes):
        return None
    known = _with_makers(product for product in nodes if product.reached)
    # A module is left alone anyway if its product was lost at a known operation.
    goals = {nodes[each]: each for each in nodes if each.assured and each.lost is None and each not in known}
    found = _first(logits.grad_fn, goals)
    return None if found is None else goals[found]


def _with_makers(products: Iterable[Product]) -> set[Product]:
    """Return products together with those that made their operands, and so on."""
    waiting, found = list(products), set[Product]()
    while waiting:
        product = waiting.pop()
        if product not in found:
            found.add(product)
            waiting += product.makers
    return found


def _first(node: Any, goals: Collection[Any]) -> Any:
    """Search the autograd graph from a node, and return the first goal that is found; None if there is none."""
    # A node is younger than those it leads to, so nodes older than the oldest goal lead to none.
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
