"""Find the attention modules of a model before any forward: by their code or, where it is inconclusive, by a trial.

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
    FOLLOWED_FUNCTIONS,
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
from betahook.models.code import is_user_module, names_used
from betahook.models.families import Facts, facts
from betahook.models.heads import count_heads, from_scale, missing, stated
from betahook.models.labels import FeaturePair, Linear
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
        facts: facts about its class.
        places: where W_q and W_k are stored, if the trial or the first forward revealed it.
        query_place: where W_q is stored, if the first forward revealed that alone.
        has_changed: True once its forward has been replaced.
        shared: its submodules that another attention holds too and calls with inputs of its own.
        is_by_scale: True if d_k was taken from its scale, which the first forward may contradict.
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
    is_by_scale: bool = False

    @property
    def projections(self) -> Pair | None:
        """W_q and W_k as they are now (adapters come and go); None if the module stores them in no known form."""
        pair = None if self.places is None else at_places(self.module, self.places)
        return pair or locate(self.module, self.heads, self.head_dim)

    @property
    def query_projection(self) -> Projection | None:
        """W_q as it is now, even if W_k has no known form; None if W_q has none."""
        if (pair := self.projections) is not None:
            return pair[0]
        return None if self.query_place is None else at_place(self.module, self.query_place)

    @property
    def is_frozen(self) -> bool:
        """True if no parameter that produces q or k requires a gradient; False if FSDP 1 has flattened them away."""
        owners = [each.adapter or each.module for each in self.projections or ()] or [self.module]
        parameters = [parameter for owner in owners for parameter in owner.parameters()]
        return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)

    @property
    def input_obstacle(self) -> str | None:
        """Reason why the input of W_q or W_k cannot be observed; None if it can."""
        pair = self.projections or ()
        if any(projection.argument is None for projection in pair):
            return "no module receives it as an argument, or only the first forward showed W_q and W_k"
        shared = any(projection.module in self.shared for projection in pair)
        return "other layers pass theirs through the same modules" if shared else None

    @torch.no_grad()  # else computing a parametrised weight saves tensors, which activation checkpointing counts
    def learn_places(self, features: Sequence[FeaturePair], linears: Sequence[Linear | None]) -> None:
        """Take the places of W_q and W_k from the first forward: a trial may have taken another path, or never run.

        Args:
            features: those of q and k, for each product that reached a softmax.
            linears: the linear maps of the projections, by number.
        """
        pair, (query, key) = self.projections, places_of(self.module, features[:1], linears)
        shown = at_places(self.module, (query, key)) if query and key else None
        if pair and query and key and shown and all(a.stored is b.stored for a, b in zip(pair, shown, strict=True)):
            self.places = replace(query, argument=pair[0].argument), replace(key, argument=pair[1].argument)
        elif pair is None or self.has_changed:
            query, key = places_of(self.module, features, linears)
            if query and key and self._is_plain(query) and self._is_plain(key):
                self.places = query, key
            is_whole = query is not None and len(query.rows) == self.heads  # a place with fewer heads is a key's
            self.query_place = query if query and is_whole and self._is_plain(query) else None

    def _is_plain(self, place: Place) -> bool:
        """Return True if the weight at a place alone determines the features and lies wholly on this rank."""
        owner, found = self.module.get_submodule(place.owner), at_place(self.module, place)
        # A user-defined owner may do more than multiply; and ranks must agree on what they gather.
        multiplies = is_user_module(self.module) and (owner is self.module or not is_user_module(owner))
        return multiplies and found is not None and not found.is_sharded


@dataclass(frozen=True)
class Survey:
    """The attention modules of a model.

    Attributes:
        model: the model.
        found: the modules that betahook can attach to, by name.
        not_reached: names of modules that look like attention but cannot be attached to, with the reason.
    """

    model: nn.Module
    found: dict[str, AttentionModule]
    not_reached: dict[str, str]


HOLDS_ATTENTION = Verdict(
    obstacle="it contains attention modules, which are hooked, so attention that it computes itself is not reached: "
    "move that into a module of its own"
)
HOLDS_ANOTHER = Verdict(
    obstacle="it contains a module that looks like attention, so attention that it computes itself is not reached: "
    "move that into a module of its own"
)
UNKNOWN_UNNAMED = Verdict(
    obstacle="it takes a softmax and multiplies; if that is an attention, set its attributes num_heads and head_dim "
    "before attach",
    by_name_only=True,
)


def survey(model: nn.Module) -> Survey:
    """Classify every module of a model, and size those that are attention."""
    # Cached for this survey only: a class may be patched before the next one.
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
        # Of nested attention modules, the inner one computes the scores, unless the outer one calls the interface.
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
    """Set `shared` of each attention: the submodules that another one holds too, unless one contains the other."""
    holders = Counter(part for one in found for part in one.module.modules())
    for one in found:
        one.shared = {part for part in one.module.modules() if holders[part] > holders[one.module]}


def _inside(module: nn.Module) -> set[nn.Module]:
    """The submodules of a module, without itself."""
    return {*module.modules()} - {module}


def _attends_itself(module: nn.Module, used: Set[str]) -> bool:
    """True if a module that contains attention computes attention itself.

    Heads in its config are no evidence, since a whole model has one too, nor are heads that it states itself if its
    only softmax is a log-softmax, such as that over the classes that a model returns.
    """
    of_classes = used & SOFTMAX and used & SOFTMAX <= LOG_SOFTMAX
    return is_user_module(module) and bool(
        used & FOLLOWED_FUNCTIONS or (stated(module)[0] and not of_classes) or is_named(module)
    )


Try = Callable[[nn.Module], trial.Outcome | None]

ENOUGH = 2
"""Number of failed trials after which no module of the same kind is tried: each takes up to a second."""


def _trials() -> Try:
    """Return a cached `trial.run` for one survey."""
    failures = Counter[Hashable]()

    @functools.cache
    def tried(module: nn.Module) -> trial.Outcome | None:
        kind = _kind(module)
        if failures[kind] == ENOUGH:
            return None
        with RandomState(module).preserved():  # user code may draw from Python or numpy, and fill constants from torch
            outcome = trial.run(module)
        failures[kind] += outcome is None
        return outcome

    return tried


def _kind(module: nn.Module) -> Hashable:
    """Class, flags and shapes of a module; modules that agree run on the same inputs.

    Its integers are left out, since one of them may be the index of a layer.
    """
    flags = [(name, value) for name, value in vars(module).items() if isinstance(value, bool | str | None)]
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    shapes = [(name, None if is_lazy(tensor) else tensor.shape) for name, tensor in named]
    return compat.class_of(module), *flags, *shapes


def _sized(module: nn.Module, route: Route, tried: Try) -> AttentionModule | None:
    """The attention with its size, as the module states it or a trial shows it; None if it remains unknown."""
    said = count_heads(module)
    # transformers' own classes state their size, and most have projections of known names.
    is_known = not is_user_module(module) and (said is None or locate(module, *said) is not None)
    outcome = (None if is_known else tried(module)) or trial.Outcome()
    size = _size(module, said, outcome)
    is_by_scale = size is None and is_user_module(module)
    size = from_scale(module) if is_by_scale else size
    if size is None:
        return None
    return AttentionModule(module, *size, route, facts(module), outcome.places, is_by_scale=is_by_scale)


def _size(module: nn.Module, said: tuple[int, int] | None, outcome: trial.Outcome) -> tuple[int, int] | None:
    """Heads and d_k: from the rows that produced q, else as stated, else from the trial."""
    if outcome.places is not None:  # a differential attention may state the number of its pairs of heads
        heads, head_dim = outcome.places[0].rows.shape
        return heads, head_dim
    if said is not None:
        return said
    # A size that contradicts the module counts only some of the queries, as in ProbSparse attention.
    if outcome.size is not None and stated(module)[0] in (None, outcome.size[0]):
        return outcome.size
    return None


def _decide(verdicts: dict[nn.Module, Verdict], tried: Try) -> None:
    """Settle the verdicts on modules that contain attention and on doubtful ones, innermost first."""
    for module, verdict in reversed(list(verdicts.items())):
        if not is_user_module(module) or (verdict.route is None and verdict != UNKNOWN_CODE):
            continue
        inner = {part for part in _inside(module) if verdicts[part].route is not None}
        whole = {part for part in inner if has_matrix(part) or count_heads(part) is not None}
        if verdict.unnamed and whole and count_heads(module) is None:
            verdicts[module] = NO_ATTENTION
            continue
        if (verdict.unnamed and not whole) or (verdict == UNKNOWN_CODE and not inner):
            verdicts[module] = _by_trial(module, verdict, tried(module))
        # Parts with neither matrices nor sizes of their own belong to it.
        verdicts.update(dict.fromkeys(inner - whole, NO_ATTENTION))


def _by_trial(module: nn.Module, verdict: Verdict, result: trial.Outcome | None) -> Verdict:
    """The verdict, after a trial, on a module that looks like attention only by its code or only by its name."""
    if verdict == UNKNOWN_CODE:
        return Verdict("by hand") if result is not None and result.attends else verdict
    if result is not None and not result.attends:
        return NO_ATTENTION
    is_unknown = (result is None or result.size is None) and count_heads(module) is None
    return UNKNOWN_UNNAMED if is_unknown else verdict


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules; as in the names of saved weights, what wrappers add to a name is left out."""
    for path, module in model.named_modules():
        yield ".".join(part for part in path.split(".") if part not in compat.WRAPPERS), module


def shown_name(name: str) -> str:
    """Return the name of a module for messages; the model, which may be the attention itself, has an empty one."""
    return name or "the model"
