"""Discovery of the attention modules of a model before any forward: by their code, or by a trial where that is mute.

`options.find_layers` calls `survey` when a hook is attached.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from betahook import compat
from betahook.models import trial
from betahook.models.classifiers import (
    ASKED,
    LOG_SOFTMAX,
    NO_ATTENTION,
    SOFTMAX,
    UNKNOWN_CODE,
    Route,
    Verdict,
    classify,
    has_matrix,
    is_named,
)
from betahook.models.code import is_users, names_used
from betahook.models.families import Facts, facts
from betahook.models.heads import count_heads, from_scale, missing, stated
from betahook.models.labels import Linear, MadeOf
from betahook.models.modes import RandomState
from betahook.models.places import Place, places_of
from betahook.models.projections import Pair, Projection, at_place, at_places, locate


@dataclass
class AttentionModule:
    """An attention module that betahook can attach to.

    Attributes:
        module: the module.
        heads: number of query heads.
        head_dim: d_k.
        route: the source of its scores.
        facts: about its class.
        places: those of W_q and W_k, as far as a forward showed them: the first one, or before it a trial.
        query_place: that of W_q, where the first forward showed it alone.
        has_changed: True once its forward is another one than at first.
        shared: modules in it that another attention holds too, and calls with inputs of its own.
    """

    module: nn.Module
    heads: int
    head_dim: int
    route: Route
    facts: Facts
    places: tuple[Place, Place] | None = None
    query_place: Place | None = None
    has_changed: bool = False
    shared: Set[nn.Module] = frozenset()

    @property
    def projections(self) -> Pair | None:
        """W_q and W_k as they are now, since adapters come and go; None if the module keeps them in no known form."""
        pair = None if self.places is None else at_places(self.module, self.places)
        return pair or locate(self.module, self.heads, self.head_dim)

    @property
    def query_projection(self) -> Projection | None:
        """W_q as it is now, also where W_k is in no known form; None if it is in none itself."""
        if (pair := self.projections) is not None:
            return pair[0]
        return None if self.query_place is None else at_place(self.module, self.query_place)

    @property
    def is_frozen(self) -> bool:
        """True where nothing that makes q or k needs a gradient; weights that FSDP 1 flattened do not tell."""
        owners = [each.adapter or each.module for each in self.projections or ()] or [self.module]
        parameters = [parameter for owner in owners for parameter in owner.parameters()]
        return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)

    @property
    def input_obstacle(self) -> str | None:
        """Reason why what enters W_q or W_k is out of reach, None where it is not."""
        pair = self.projections or ()
        if any(projection.argument is None for projection in pair):
            return "no module gets it as an argument or the first forward had to show them"
        shared = any(projection.module in self.shared for projection in pair)
        return "other layers put theirs through the same modules" if shared else None

    @torch.no_grad()  # a checkpoint counts what is saved for the backward, where a weight is made of others
    def correct(self, made_of: Sequence[MadeOf], linears: Sequence[Linear | None]) -> None:
        """Take the rows of W_q and W_k from the first forward: no trial may have run, or one went another way.

        Args:
            made_of: the features that q and k were made of, for each product that came to a softmax.
            linears: the projections, by number.
        """
        pair, (query, key) = self.projections, places_of(self.module, made_of[:1], linears)
        shown = at_places(self.module, (query, key)) if query and key else None
        if pair and query and key and shown and all(a.stored is b.stored for a, b in zip(pair, shown, strict=True)):
            self.places = replace(query, argument=pair[0].argument), replace(key, argument=pair[1].argument)
        elif pair is None or self.has_changed:
            query, key = places_of(self.module, made_of, linears)
            if query and key and self._is_plain(query) and self._is_plain(key):
                self.places = query, key
            is_whole = query is not None and len(query.rows) == self.heads  # fewer are those of a key
            self.query_place = query if query and is_whole and self._is_plain(query) else None

    def _is_plain(self, place: Place) -> bool:
        """Return True for the place of a weight that alone makes features, all of which is on this rank."""
        owner, found = self.module.get_submodule(place.owner), at_place(self.module, place)
        # An owner of a user's class may do more than to multiply; and ranks must agree on what they gather.
        multiplies = is_users(self.module) and (owner is self.module or not is_users(owner))
        return multiplies and found is not None and not found.is_sharded


@dataclass(frozen=True)
class Survey:
    """The attention of a model.

    Attributes:
        model: the model.
        found: the modules to which betahook can attach, by name.
        not_reached: names of those that look like attention, with the reason why it cannot.
    """

    model: nn.Module
    found: dict[str, AttentionModule]
    not_reached: dict[str, str]


HOLDS_ATTENTION = Verdict(
    obstacle="its own attention, if it has one, is not reached beside that of the modules in it, which are hooked: "
    "move it into a module of its own"
)
HOLDS_ANOTHER = Verdict(
    obstacle="its own attention, if it has one, is not reached beside a module in it that looks like another: move it "
    "into a module of its own"
)
UNKNOWN_UNNAMED = Verdict(
    obstacle="it takes a softmax and multiplies; if that is an attention, set its attributes num_heads and head_dim "
    "before attach",
    by_name_only=True,
)


def survey(model: nn.Module) -> Survey:
    """Look at every module of a model."""
    # Cached for this survey: a class may be patched before the next one.
    names: Callable[[type], frozenset[str]] = functools.cache(names_used)
    verdicts = {module: classify(module, names) for module in model.modules()}
    tried = _trials()
    _decide(verdicts, tried)
    able = {module for module, verdict in verdicts.items() if verdict.route is not None}
    found: dict[str, AttentionModule] = {}
    missed: dict[str, tuple[nn.Module, Verdict]] = {}
    around: dict[str, nn.Module] = {}
    for name, module in named_modules(model):
        verdict = verdicts[module]
        if verdict == NO_ATTENTION:
            continue
        # Where one contains another, the inner one computes the scores, unless the outer one asks the interface.
        if verdict.route != "interface" and not able.isdisjoint(_inside(module)):
            around[name] = module
        elif verdict.route is None:
            missed[name] = module, verdict
        elif (attention := _sized(module, verdict.route, tried)) is None:
            missed[name] = module, Verdict(obstacle=missing(module))
        else:
            found[name] = attention
    _note_shared(found.values())
    hooked = {one.module for one in found.values()}
    for name, module in around.items():
        if module in able and _attends_itself(module, names(compat.class_of(module))):
            if not hooked.isdisjoint(module.modules()):
                missed[name] = module, HOLDS_ATTENTION
            elif is_named(module):
                missed[name] = module, HOLDS_ANOTHER
    reached = {part for one in found.values() for part in one.module.modules()}
    not_reached = {
        shown_name(name): f"{compat.class_of(module).__name__}: {verdict.obstacle}"
        for name, (module, verdict) in missed.items()
        if not (verdict.by_name_only and module in reached)
    }
    return Survey(model, found, not_reached)


def _note_shared(found: Collection[AttentionModule]) -> None:
    """Note which modules attention holds that other attention holds too, unless one is a part of the other."""
    holders = Counter(part for one in found for part in one.module.modules())
    for one in found:
        one.shared = {part for part in one.module.modules() if holders[part] > holders[one.module]}


def _inside(module: nn.Module) -> set[nn.Module]:
    """The modules that another one holds."""
    return {*module.modules()} - {module}


def _attends_itself(module: nn.Module, used: Set[str]) -> bool:
    """True if a module around others is an attention too; its config does not tell, which a whole model has as well.

    Nor does a softmax that is only taken as its logarithm, as that over the classes that a model returns.
    """
    of_classes = used & SOFTMAX and used & SOFTMAX <= LOG_SOFTMAX
    return is_users(module) and bool(used & ASKED or (stated(module)[0] and not of_classes) or is_named(module))


Try = Callable[[nn.Module], trial.Outcome | None]

ENOUGH = 2
"""Modules of a kind that run on no made-up input, after which no other is tried: that takes up to a second each."""


def _trials() -> Try:
    """Give a `trial.run` for one survey."""
    failures = Counter[Hashable]()

    @functools.cache
    def tried(module: nn.Module) -> trial.Outcome | None:
        kind = _kind(module)
        if failures[kind] == ENOUGH:
            return None
        with RandomState(module).kept():  # which Python and numpy may be asked for, and torch to fill a constant
            outcome = trial.run(module)
        failures[kind] += outcome is None
        return outcome

    return tried


def _kind(module: nn.Module) -> Hashable:
    """Class, flags and shapes of a module: equal ones run on the same inputs. Of its numbers, one may be its index."""
    flags = [(name, value) for name, value in vars(module).items() if isinstance(value, bool | str | None)]
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    shapes = [(name, None if is_lazy(tensor) else tensor.shape) for name, tensor in named]
    return compat.class_of(module), *flags, *shapes


def _sized(module: nn.Module, route: Route, tried: Try) -> AttentionModule | None:
    """The attention with its size, by what the module states or a trial shows; None if neither tells."""
    said = count_heads(module)
    # transformers' own classes state their size, and most have projections of known names.
    is_known = not is_users(module) and (said is None or locate(module, *said) is not None)
    outcome = (None if is_known else tried(module)) or trial.Outcome()
    size = _size(module, said, outcome)
    return None if size is None else AttentionModule(module, *size, route, facts(module), outcome.places)


def _size(module: nn.Module, said: tuple[int, int] | None, outcome: trial.Outcome) -> tuple[int, int] | None:
    """Heads and d_k: by the rows that made q, as the module said, as a trial counted, or by the scale of the scores."""
    if outcome.places is not None:  # a differential attention may state the number of its pairs of heads
        heads, head_dim = outcome.places[0].rows.shape
        return heads, head_dim
    if said is not None:
        return said
    # A size that contradicts the module is of some of the queries only, as in ProbSparse attention.
    if outcome.size is not None and stated(module)[0] in (None, outcome.size[0]):
        return outcome.size
    return from_scale(module) if is_users(module) else None


def _decide(verdicts: dict[nn.Module, Verdict], tried: Try) -> None:
    """Decide on modules around others, and on those that look like an attention by half: inner ones first."""
    for module, verdict in reversed(list(verdicts.items())):
        if not is_users(module) or (verdict.route is None and verdict != UNKNOWN_CODE):
            continue
        inner = {part for part in _inside(module) if verdicts[part].route is not None}
        whole = {part for part in inner if has_matrix(part) or count_heads(part) is not None}
        if verdict.unnamed and whole and count_heads(module) is None:
            verdicts[module] = NO_ATTENTION
            continue
        if (verdict.unnamed and not whole) or (verdict == UNKNOWN_CODE and not inner):
            verdicts[module] = _by_trial(module, verdict, tried(module))
        # Parts without matrices and sizes of their own belong to it.
        verdicts.update(dict.fromkeys(inner - whole, NO_ATTENTION))


def _by_trial(module: nn.Module, verdict: Verdict, result: trial.Outcome | None) -> Verdict:
    """The verdict on a module that only its code or only its name makes look like an attention."""
    if verdict == UNKNOWN_CODE:
        return Verdict("by hand") if result is not None and result.attends else verdict
    if result is not None and not result.attends:
        return NO_ATTENTION
    is_unknown = (result is None or result.size is None) and count_heads(module) is None
    return UNKNOWN_UNNAMED if is_unknown else verdict


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules, the names as those of the weights in a saved model, without what wrappers add to them."""
    for path, module in model.named_modules():
        yield ".".join(part for part in path.split(".") if part not in compat.WRAPPERS), module


def shown_name(name: str) -> str:
    """Return the name of a module for a message: the model, which may be the attention itself, has an empty one."""
    return name or "the model"
