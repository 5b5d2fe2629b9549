"""The plan of one module: facts about its products that forwards have shown, and on which later ones rely.

The first forward of a module runs with the model's own beta, so nothing is at stake while it shows which products reach
a softmax, where their heads lie and how they are scaled. Later forwards rely on that, and are checked against it.
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
"""The arguments of a module that may select a branch: True, False and None as they are, `Tensor` for any tensor."""


class Form(NamedTuple):
    """The form of the inputs of a module, for each of which the axes of the heads are found anew.

    Attributes:
        sizes: for each tensor, True for sizes of 1: with a batch of 1, an axis of batch and heads may pass for one of
            heads.
        choices: the inputs that may select a branch.
    """

    sizes: tuple[tuple[bool, ...], ...]
    choices: Choices


def form_of(inputs: Any) -> Form:
    """Return the form of the nested inputs of a module."""
    sizes = (tuple(bool(size == 1) for size in x.shape) for x in tensors_in(inputs))
    return Form(tuple(sizes), choices_in(inputs))


def choices_in(inputs: Any) -> Choices:
    """Return the nested inputs of a module that may select a branch."""
    if inputs is None or isinstance(inputs, bool):
        return (inputs,)
    if isinstance(inputs, Tensor):
        return (Tensor,)
    if isinstance(inputs, dict):
        inputs = tuple(inputs.values())
    return tuple(itertools.chain(*map(choices_in, inputs))) if isinstance(inputs, (tuple, list)) else ()


@dataclass
class Plan:
    """Facts about the products of one module, by their sites in the user's code.

    Attributes:
        histories: the history of the products at each site.
        axes: for each form of the inputs, the axis of the heads in the operand or the scores used at each site; None
            for a site where the first forward did not show it.
        varying: the sites of scales that changed from one forward to another.
        firsts: by site, what held there in the first forward, or in all, see `at_first` and `always`.
        band: the band that mask tensors of a kernel are expected to have, that of the first one; None before any.
        takes_values: True if a product or a softmax ever took a tensor computed from weighted values.
        only_projects: True if forwards ran projections, which no hook watches, but showed no attention; None before any
            did, False once there was attention.
        checked: True once the effect of beta was checked by numbers, see `tap.by_hand.shadows`.
        fused: for the choices of each form, whether a compiled graph can hold such forwards, see `tap.compiled`.
        broken_since: for the same choices, the number of compiler resets when a graph last broke at such a forward.
    """

    histories: dict[Site, History] = field(default_factory=functools.partial(defaultdict, History))
    axes: dict[Form, dict[Site, Axis | None]] = field(default_factory=dict)
    varying: set[Site] = field(default_factory=set)
    firsts: dict[Site, bool] = field(default_factory=dict)
    band: Band | None = None
    takes_values: bool = False
    only_projects: bool | None = None
    checked: bool = False
    fused: dict[Choices, bool] = field(default_factory=dict)
    broken_since: dict[Choices, int] = field(default_factory=dict)

    def forget(self) -> None:
        """Forget everything, because the module has a new forward."""
        vars(self).update(vars(Plan()))

    def fits_graph(self, choices: Choices, resets: int) -> bool:
        """Return True if a compiled graph is to hold a forward, given the number of compiler resets so far.

        After a graph broke here, this takes another reset: gradient checkpointing runs a forward again in the backward
        pass, when more is known, and both runs must save the same tensors.
        """
        return self.fused.get(choices, False) and self.broken_since.get(choices, -1) < resets

    def varies(self, site: Site, before: Factor, now: Factor) -> bool:
        """Return True if the scale at a site has ever changed; a tensor, whose value is not read, counts as changed.

        The answer stays True, as a recomputation finds the scale of its own forward and must run the same operations.
        """
        if isinstance(now, Tensor) or not same_factor(before, now):
            self.varying.add(site)
        return site in self.varying

    def nearest(self, form: Form) -> Form:
        """Return the form to use for this one in an export: itself if it is known, else a known one with its sizes."""
        alike = (known for known in self.axes if known.sizes == form.sizes)
        return form if form in self.axes else next(alike, form)

    def always(self, now: bool) -> bool:
        """Return True if a condition holds now, and has held at the present site in every forward.

        The site is looked up on the call stack, so this only works while the forward runs.
        """
        site = find_site("always")
        self.firsts[site] = now and self.firsts.get(site, True)
        return self.firsts[site]

    def at_first(self, now: bool) -> bool:
        """Return what held at the present site in the first forward; that is `now` if this is the first."""
        return self.firsts.setdefault(find_site("at first"), now)
