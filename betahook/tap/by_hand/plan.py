"""Facts on the products of one module that its forwards show, and that later ones go by.

The first forward of a module runs with its own beta, so nothing is at stake while it shows which products reach a
softmax, where their heads lie and by what they are scaled. Later forwards go by that, and are held against it.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from betahook.measure.masks import Band
from betahook.models.torch_calls import tensors_in
from betahook.tap.by_hand.contraction import Axis
from betahook.tap.by_hand.factors import Factor, same_factor
from betahook.tap.by_hand.products import History
from betahook.tap.by_hand.sites import Site, find_site

Choices: TypeAlias = tuple[bool | type[Tensor] | None, ...]
"""The arguments of a module that are True, False or None, which may choose a branch; `Tensor` for each tensor."""


class Form(NamedTuple):
    """The form of the inputs of a module.

    Attributes:
        sizes: True for sizes of 1, of each tensor: there an axis of heads and batch, say, looks like one of heads.
        choices: the inputs that may choose a branch.
    """

    sizes: tuple[tuple[bool, ...], ...]
    choices: Choices


def form_of(inputs: Any) -> Form:
    """The form of the nested inputs of a module."""
    sizes = (tuple(bool(size == 1) for size in x.shape) for x in tensors_in(inputs))
    return Form(tuple(sizes), choices_in(inputs))


def choices_in(inputs: Any) -> Choices:
    """The nested inputs of a module that may choose a branch."""
    if inputs is None or isinstance(inputs, bool):
        return (inputs,)
    if isinstance(inputs, Tensor):
        return (Tensor,)
    if isinstance(inputs, dict):
        inputs = tuple(inputs.values())
    return tuple(itertools.chain(*map(choices_in, inputs))) if isinstance(inputs, (tuple, list)) else ()


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
        fused: for the choices of each form, whether a graph of the compiler can hold such forwards, see `tap.compiled`.
        broken_since: for them, how often compiled code had been thrown away when a graph broke at such a forward.
    """

    histories: dict[Site, History] = field(default_factory=functools.partial(defaultdict, History))
    axes: dict[Form, dict[Site, Axis | None]] = field(default_factory=dict)
    varying: set[Site] = field(default_factory=set)
    firsts: dict[Site, bool] = field(default_factory=dict)
    band: Band | None = None
    mixes: bool = False
    only_projects: bool | None = None
    checked: bool = False
    fused: dict[Choices, bool] = field(default_factory=dict)
    broken_since: dict[Choices, int] = field(default_factory=dict)

    def forget(self) -> None:
        """Forget everything: the module has another forward."""
        vars(self).update(vars(Plan()))

    def fits_graph(self, choices: Choices, resets: int) -> bool:
        """Tell if a graph of the compiler is to hold a forward, after so many resets of the compiler.

        Where a graph broke here, not before the next reset: gradient checkpointing runs a forward again in its
        backward, when more is known, and what is then kept for the backward must be the same.
        """
        return self.fused.get(choices, False) and self.broken_since.get(choices, -1) < resets

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
        """Return True if something holds now, and has held at the site that runs in every forward.

        It looks up the site by the call stack, and so is only for what runs within the forward.
        """
        site = find_site("always")
        self.firsts[site] = now and self.firsts.get(site, True)
        return self.firsts[site]

    def at_first(self, now: bool) -> bool:
        """Return what held at the site that runs in the first forward, given what holds now; used as `always` is."""
        return self.firsts.setdefault(find_site("at first"), now)
