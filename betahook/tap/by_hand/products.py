"""The products of one forward that may make scores, and a history of the products at each call site.

`matrices` creates a `Product` for each, `softmaxes` and `following` note what becomes of it, and at the end of the
forward `learn` adds that to the `History` of its site, on which later forwards rely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from betahook.models.labels import FeaturePair
from betahook.tap.by_hand.factors import Factor, are_alike, is_zero
from betahook.tap.by_hand.sites import Site


@dataclass(eq=False)
class History:
    """Facts about the products at one site, as forwards have shown them; None or empty until one has.

    Attributes:
        makes_scores: True if the products reach a softmax.
        since: the step in which one was first seen to reach a softmax.
        leader: the site of the first product that reaches the same softmax, whose scale is the model's own beta.
        scalings: the factors applied between product and softmax, one for each scaling, in order.
        factor_to_softmax: the factor from product to softmax; None if it is the product of `scalings`, which it is not
            after a negation.
        scaling_sites: the sites of all scalings so far, for any use.
        sites_to_softmax: those between product and softmax.
        key_factor: the factor that the key carried in the last forward that showed it.
        key_first: True if the left operand is k, not q.
    """

    makes_scores: bool | None = None
    since: int | None = None
    leader: Site | None = None
    scalings: list[Factor] | None = None
    factor_to_softmax: Factor | None = None
    scaling_sites: set[Site] = field(default_factory=set)
    sites_to_softmax: set[Site] = field(default_factory=set)
    key_factor: Factor | None = None
    key_first: bool | None = None

    def is_aside(self, site: Site) -> bool:
        """Return True for a scaling whose result never reached a softmax, as of logits that are kept for a plot."""
        return site in self.scaling_sites and site not in self.sites_to_softmax

    def is_settled(self, step: int) -> bool:
        """Return True if steps before this one have shown that a product makes scores.

        Forwards of the same step do not count: gradient checkpointing runs a forward again in the backward pass, when
        more is known, and both runs must save the same tensors.
        """
        return self.since is not None and self.since < step


@dataclass(eq=False)
class Product:
    """One product of two activations in one forward, which makes scores if it reaches a softmax.

    Attributes:
        site: where the user's code calls it.
        history: the history of that site.
        assured: True if neither operand comes from parameters alone or from weighted values, so that losing the trace
            means losing scores.
        learned: True if its left operand is learned, see `traces.is_learned`.
        makers: the earlier products whose scores are operands of this one.
        acts: True if its left operand is to be multiplied by the gain.
        settled: True if steps before this one have shown that it makes scores.
        gain: `beta / beta_default` as it acted, `[heads]`; ones if it did not, None if it could not be applied.
        scalings: the factors applied to the product since, for any use, each with its site.
        sites_to_softmax: the sites of those that led to a softmax.
        prescale: the factor that its operands carry.
        total: the factor with which it reached a softmax, `prescale` included, if it is the first product there; None
            for other products, or if the factor is 0.
        reached: True if it reached a softmax.
        consumed: True if it made an operand of a product that did.
        lost: the operation after which its scores could not be followed, None for none.
        counts: True if its gradient is a part of the sensitivity.
        index: its number among the products of the forward.
        default: the model's own beta, from which the gain is computed; None to use that of the last forward.
        features: those that its operands come from, see `head_axes.feature_pair`.
    """

    site: Site
    history: History
    assured: bool
    learned: bool = False
    makers: tuple[Product, ...] = ()
    acts: bool = True
    settled: bool = False
    gain: Tensor | None = None
    scalings: list[tuple[Site, Factor]] = field(default_factory=list)
    sites_to_softmax: set[Site] = field(default_factory=set)
    prescale: Factor = 1.0
    total: Factor | None = None
    reached: bool = False
    consumed: bool = False
    lost: str | None = None
    counts: bool = False
    index: int = 0
    default: Factor | None = None
    features: FeaturePair | None = None

    @property
    def after(self) -> Factor | None:
        """The factor that the scalings yet to come applied in the last forward, up to the softmax; None if none was."""
        scalings, done = self.history.scalings, self._done
        if scalings is None:
            return None
        if self.history.factor_to_softmax is not None:
            return self.history.factor_to_softmax / math.prod(done, start=1.0)
        return math.prod(scalings[len(done) :], start=1.0)

    def expected(self, site: Site) -> Factor | None:
        """Return the factor that the next scaling had in the last forward, given the site of the one that runs now.

        None in the first forward, after the last known scaling, and at a site that never led to a softmax.
        """
        scalings, done = self.history.scalings or [], len(self._done)
        return None if self.history.is_aside(site) or done >= len(scalings) else scalings[done]

    @property
    def _done(self) -> list[Factor]:
        """The factors applied so far on the way to its softmax."""
        return [factor for site, factor in self.scalings if not self.history.is_aside(site)]

    def learn(self, step: int, *, are_read: bool) -> str | None:
        """Update the history at the end of the forward; return the reason to leave the module alone, or None.

        `are_read` is True if factors that are tensors may be read from the device.
        """
        history = self.history
        if self.lost is not None and self.assured and not (self.reached or self.consumed):
            return f"its scores reach {self.lost}, which is not followed"
        if history.makes_scores not in (None, self.reached):
            return f"the product at {self.site.line} reaches a softmax in some forwards and not in others"
        history.makes_scores = self.reached
        if self.reached:
            history.sites_to_softmax |= self.sites_to_softmax
            history.scaling_sites |= {site for site, _ in self.scalings}
            if not any(map(is_zero, done := self._done)):
                history.scalings = done
            if self.total is not None:
                known = self.prescale * math.prod(done, start=1.0)
                if history.factor_to_softmax is not None or not are_alike(self.total, known, are_read=are_read):
                    history.factor_to_softmax = self.total / self.prescale
            if history.since is None:
                history.since = step
        return None

    def reach(self) -> None:
        """Note that the product reached a softmax, and so its makers were consumed."""
        self.reached = True
        for maker in self.makers:
            maker.consumed = True
