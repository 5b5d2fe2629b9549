"""The score products of a forward, and what forwards have shown of the products at each site."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from betahook.models.labels import MadeOf
from betahook.tap.by_hand.factors import Factor, are_alike, is_zero
from betahook.tap.by_hand.sites import Site


@dataclass(eq=False)
class History:
    """Facts on the products at one site that forwards have shown; each is None, or empty, before one has.

    Attributes:
        makes_scores: True if they reach a softmax.
        since: the step in which one was first seen to.
        leader: the site of the first product before the same softmax, whose scale is the model's own beta.
        scalings: the factors on the way to a softmax that followed, one for each scaling.
        way: the factor from product to softmax, kept only where it is not theirs multiplied, as after a change of sign.
        scaled, on_way: the sites of all scalings so far, and of those on the way to a softmax.
        key_factor: the factor that a key carried in the last forward in which that showed.
        key_first: the left operand is k, not q.
    """

    makes_scores: bool | None = None
    since: int | None = None
    leader: Site | None = None
    scalings: list[Factor] | None = None
    way: Factor | None = None
    scaled: set[Site] = field(default_factory=set)
    on_way: set[Site] = field(default_factory=set)
    key_factor: Factor | None = None
    key_first: bool | None = None

    def is_aside(self, site: Site) -> bool:
        """Return True for a scaling that no softmax ever saw, such as one of logits that are kept for a plot."""
        return site in self.scaled and site not in self.on_way

    def is_settled(self, step: int) -> bool:
        """Tell if steps before this one have shown that a product makes scores.

        Not in the same step: gradient checkpointing runs a forward again in its backward, when more is known, and what
        is then kept for the backward must be the same.
        """
        return self.since is not None and self.since < step


@dataclass(eq=False)
class Product:
    """One product of two activations in one forward, which makes scores if it reaches a softmax.

    Attributes:
        site: where the user's code calls it.
        history: of the products there.
        assured: both operands are activations that no weighted value went into, so that a lost trace is a lost score.
        learned: its left operand is a parameter, see `traces.is_learned`.
        makers: earlier products in whose results this one's operands lie.
        acts: its left operand gets the factor of beta.
        settled: steps before this one have shown that it makes scores.
        acting: that factor, `beta / beta_default`, `[heads]`; ones where it does not act, None where it cannot.
        scalings: the factors put on the product since, for whatever use, each with its site.
        on_way: the sites of those that came to a softmax.
        prescale: the factor that its operands carry.
        total: the factor with which it came to a softmax, as the first of the products there; None elsewhere, or if 0.
        reached: it came to a softmax.
        consumed: it made an operand of a product that did.
        lost: the operation after which nothing more is known, None for none.
        counts: its gradient is a part of the sensitivity.
        index: its number among the products of the forward.
        default: the model's own beta by which it is scaled; None for that of the last forward.
        made_of: the features that its operands are made of, see `head_axes.made_of`.
    """

    site: Site
    history: History
    assured: bool
    learned: bool = False
    makers: tuple[Product, ...] = ()
    acts: bool = True
    settled: bool = False
    acting: Tensor | None = None
    scalings: list[tuple[Site, Factor]] = field(default_factory=list)
    on_way: set[Site] = field(default_factory=set)
    prescale: Factor = 1.0
    total: Factor | None = None
    reached: bool = False
    consumed: bool = False
    lost: str | None = None
    counts: bool = False
    index: int = 0
    default: Factor | None = None
    made_of: MadeOf | None = None

    @property
    def after(self) -> Factor | None:
        """The factor that further scalings put on it up to its softmax in the last forward; None if none was."""
        scalings, done = self.history.scalings, self._done
        if scalings is None:
            return None
        if self.history.way is not None:
            return self.history.way / math.prod(done, start=1.0)
        return math.prod(scalings[len(done) :], start=1.0)

    def expected(self, site: Site) -> Factor | None:
        """The factor that the scaling at this position had in the last forward.

        None in the first, past the last position, and at a site that never led to a softmax.
        """
        scalings, done = self.history.scalings or [], len(self._done)
        return None if self.history.is_aside(site) or done >= len(scalings) else scalings[done]

    @property
    def _done(self) -> list[Factor]:
        """The factors put on it so far on the way to its softmax."""
        return [factor for site, factor in self.scalings if not self.history.is_aside(site)]

    def learn(self, step: int, *, are_read: bool) -> str | None:
        """Remember it when its forward has ended; return why the module is to be left alone, or None.

        `are_read` is True if factors that are tensors may be read.
        """
        history = self.history
        if self.lost is not None and self.assured and not (self.reached or self.consumed):
            return f"its scores reach {self.lost}, which is not followed"
        if history.makes_scores not in (None, self.reached):
            return f"the product at {self.site.line} reaches a softmax at times and at times it does not"
        history.makes_scores = self.reached
        if self.reached:
            history.on_way |= self.on_way
            history.scaled |= {site for site, _ in self.scalings}
            if not any(map(is_zero, done := self._done)):
                history.scalings = done
            if self.total is not None:
                known = self.prescale * math.prod(done, start=1.0)
                if history.way is not None or not are_alike(self.total, known, are_read=are_read):
                    history.way = self.total / self.prescale
            if history.since is None:
                history.since = step
        return None

    def reach(self) -> None:
        """Note that the product came to a softmax."""
        self.reached = True
        for maker in self.makers:
            maker.consumed = True
