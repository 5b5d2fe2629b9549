"""Facts on the products of one module that its forwards show, and that later ones go by.

The first forward of a module runs with its own beta, so nothing is at stake while it shows which products reach a
softmax, where their heads lie and by what they are scaled. Later forwards go by that, and are held against it.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from betahook.measure.masks import Band
from betahook.models.torch_calls import tensors_in
from betahook.tap.by_hand.contraction import Axis
from betahook.tap.by_hand.factors import Factor, same_factor
from betahook.tap.by_hand.products import History
from betahook.tap.by_hand.sites import Site, find_site


class Form(NamedTuple):
    """The form of the inputs of a module.

    Attributes:
        sizes: True for sizes of 1, of each tensor: there an axis of heads and batch, say, looks like one of heads.
        choices: the arguments that are True, False or None, which may choose a branch.
    """

    sizes: tuple[tuple[bool, ...], ...]
    choices: tuple[bool | None, ...]


def form_of(inputs: Any) -> Form:
    """The form of the nested inputs of a module."""
    sizes = (tuple(bool(size == 1) for size in x.shape) for x in tensors_in(inputs))
    return Form(tuple(sizes), tuple(_choices(inputs)))


def _choices(inputs: Any) -> Iterator[bool | None]:
    """The nested arguments of a module that are True, False or None."""
    if inputs is None or isinstance(inputs, bool):
        yield inputs
    elif isinstance(inputs, (tuple, list, dict)):
        for each in inputs.values() if isinstance(inputs, dict) else inputs:
            yield from _choices(each)


@dataclass
class Plan:
    """Facts on the products of one module, by their sites in the user's code.

    Attributes:
        histories: of the products at each site.
        axes: the axis of the heads in a left operand, or in what a softmax gets, for inputs of each form; None where
            the first forward did not tell.
        varying: the sites of scales that changed from one forward to another.
        firsts: what held at other sites in the first forward, or in all, see `at_first` and `always`.
        band: the one that mask tensors of a kernel are expected to have, as the first one has it; None before any.
        mixes: a product or a softmax got what weights had made of values.
        only_projects: forwards ran projections and showed no attention; None before any did, False once there was one.
        checked: what beta does was checked by numbers, see `tap.by_hand.shadows`.
        fused_only: a graph of the compiler can hold its forwards, see `tap.compiled`; None before any.
        broken_since: how often compiled code had been thrown away when a graph broke at this module; None for never.
    """

    histories: dict[Site, History] = field(default_factory=functools.partial(defaultdict, History))
    axes: dict[Form, dict[Site, Axis | None]] = field(default_factory=dict)
    varying: set[Site] = field(default_factory=set)
    firsts: dict[Site, bool] = field(default_factory=dict)
    band: Band | None = None
    mixes: bool = False
    only_projects: bool | None = None
    checked: bool = False
    fused_only: bool | None = None
    broken_since: int | None = None

    def forget(self) -> None:
        """Forget everything: the module has another forward."""
        vars(self).update(vars(Plan()))

    def fits_graph(self, resets: int) -> bool:
        """Tell if a graph of the compiler is to hold the forward, after so many resets of the compiler.

        Where a graph broke here, not before the next reset: gradient checkpointing runs a forward again in its
        backward, when more is known, and what is then kept for the backward must be the same.
        """
        return bool(self.fused_only) and (self.broken_since is None or self.broken_since < resets)

    def varies(self, site: Site, before: Factor, now: Factor) -> bool:
        """Tell if the scale at a site has ever changed; a tensor, which nobody reads, always has.

        A recomputation finds the scale of its forward, and must run the same operations.
        """
        if isinstance(now, Tensor) or not same_factor(before, now):
            self.varying.add(site)
        return site in self.varying

    def nearest(self, form: Form) -> Form:
        """Return a form that forwards have shown, for one that shows nothing: itself, or one with its sizes."""
        alike = (known for known in self.axes if known.sizes == form.sizes)
        return form if form in self.axes else next(alike, form)

    def always(self, now: bool) -> bool:
        """Return True if something holds now, and has held at the site that runs in every forward."""
        site = find_site("always")
        self.firsts[site] = now and self.firsts.get(site, True)
        return self.firsts[site]

    def at_first(self, now: bool) -> bool:
        """Return what held at the site that runs in the first forward, given what holds now."""
        return self.firsts.setdefault(find_site("at first"), now)
