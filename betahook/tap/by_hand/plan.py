"""Facts on the products of one module that its forwards show, and that later ones go by.

The first forward of a module runs with its own beta, so nothing is at stake while it shows which products reach a
softmax, where their heads lie and by what they are scaled. Later forwards go by that, and are held against it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from betahook.measure.masks import Band
from betahook.models.torch_calls import tensors_in
from betahook.tap.by_hand.contraction import Axis
from betahook.tap.by_hand.sites import Site, find_site
from betahook.tap.by_hand.traces import Factor, Product, is_zero, same_factor

Form = tuple[tuple[bool, ...], ...]
"""True for sizes of 1 in some inputs: there an axis of heads and batch, say, looks like one of heads."""


def form_of(inputs: Any) -> Form:
    """The form of the tensors in nested inputs of a module."""
    return tuple(tuple(bool(size == 1) for size in x.shape) for x in tensors_in(inputs))


@dataclass
class Plan:
    """Facts on the products of one module, by their sites in the user's code.

    Attributes:
        makes_scores: True for products that reach a softmax.
        leaders: the first product before the same softmax, whose scale is the model's own beta.
        axes: the axis of the heads in a left operand, or in what a softmax gets, for inputs of each form; None where
            the first forward did not tell.
        scalings: the factors that followed on a product, see `Product.scalings`.
        ways: of products that are scaled on several ways, see `Product.way`.
        key_factors: the factor that a key carried in the last forward in which that showed.
        since: the step in which a product was first seen to reach a softmax.
        varying: the sites of scales that changed from one forward to another.
        firsts: what held at other sites in the first forward, see `at_first`.
        key_first: the sites of products whose left operand is k, not q.
        band: the one that mask tensors of a kernel are expected to have, as the first one has it; None before any.
        mixes: a product or a softmax got what weights had made of values.
        only_projects: forwards ran projections and showed no attention; None before any did, False once there was one.
        checked: what beta does was checked by numbers, see `tap.by_hand.shadows`.
        fused_only: a graph of the compiler can hold its forwards, see `tap.compiled`; None before any.
        broken_since: how often compiled code had been thrown away when a graph broke at this module; None for never.
    """

    makes_scores: dict[Site, bool] = field(default_factory=dict)
    leaders: dict[Site, Site] = field(default_factory=dict)
    axes: dict[Form, dict[Site, Axis | None]] = field(default_factory=dict)
    scalings: dict[Site, list[Factor]] = field(default_factory=dict)
    ways: dict[Site, Factor] = field(default_factory=dict)
    key_factors: dict[Site, Factor] = field(default_factory=dict)
    since: dict[Site, int] = field(default_factory=dict)
    varying: set[Site] = field(default_factory=set)
    firsts: dict[Site, bool] = field(default_factory=dict)
    key_first: set[Site] = field(default_factory=set)
    band: Band | None = None
    mixes: bool = False
    only_projects: bool | None = None
    checked: bool = False
    fused_only: bool | None = None
    broken_since: int | None = None

    def forget(self) -> None:
        """Forget everything: the module has another forward."""
        vars(self).update(vars(Plan()))

    def learn(self, products: list[Product], step: int) -> str | None:
        """Remember the products of a forward that has ended; return why the module is to be left alone, or None."""
        for product in products:
            site, line = product.site, product.site.line
            if product.lost is not None and product.assured and not (product.reached or product.consumed):
                return f"its scores come to {product.lost}, which is not followed"
            if self.makes_scores.setdefault(site, product.reached) != product.reached:
                return f"the product at {line} reaches a softmax at times and at times it does not"
            if product.reached:
                if not any(map(is_zero, product.scalings)):
                    self.scalings[site] = product.scalings
                if product.way is not None:
                    self.ways[site] = product.way
                self.since.setdefault(site, step)
        return None

    def fits_graph(self, resets: int) -> bool:
        """Tell if a graph of the compiler is to hold the forward, after so many resets of the compiler.

        Where a graph broke here, not before the next reset: gradient checkpointing runs a forward again in its
        backward, when more is known, and what is then kept for the backward must be the same.
        """
        return bool(self.fused_only) and (self.broken_since is None or self.broken_since < resets)

    def is_settled(self, site: Site, step: int) -> bool:
        """Tell if steps before this one have shown that a product makes scores.

        Not in the same step: gradient checkpointing runs a forward again in its backward, when more is known, and what
        is then kept for the backward must be the same.
        """
        return self.since.get(site, step) < step

    def varies(self, before: Factor, now: Factor) -> bool:
        """Tell if the scale at the site that runs has ever changed; a tensor, which nobody reads, always has.

        A recomputation finds the scale of its forward, and must run the same operations.
        """
        site = find_site("varies")
        if isinstance(now, Tensor) or not same_factor(before, now):
            self.varying.add(site)
        return site in self.varying

    def at_first(self, now: bool) -> bool:
        """Return what held at the site that runs in the first forward, given what holds now."""
        return self.firsts.setdefault(find_site("at first"), now)

    def after(self, product: Product) -> Factor | None:
        """The factor that further scalings put on a product up to its softmax in the last forward; None if none was."""
        scalings = self.scalings.get(product.site)
        if scalings is None:
            return None
        if product.site in self.ways:
            return self.ways[product.site] / math.prod(product.scalings, start=1.0)
        return math.prod(scalings[len(product.scalings) :], start=1.0)

    def expected(self, product: Product) -> Factor | None:
        """The scaling that came next upon a product in the last forward; None if there was none."""
        scalings = self.scalings.get(product.site, [])
        return scalings[len(product.scalings)] if len(product.scalings) < len(scalings) else None
