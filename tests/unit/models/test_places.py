"""W_q and W_k of attention whose projections have names and layouts of their own, found by a trial of the forward."""

import pytest
import torch
from torch import nn

import betahook
from support.projections import (
    HEADS,
    WIDTH,
    AsManyHeadsAsComponents,
    AsManyHeadsAsTokens,
    BatchNormed,
    ByComponent,
    D,
    Folded,
    FoldedByHead,
    Gated,
    Halved,
    HeadAfterHead,
    HeadByHead,
    InAList,
    InPairs,
    KeysFirst,
    Latents,
    LowRank,
    Model,
    Moduli,
    MoreKeys,
    OfASubclass,
    OfGroups,
    OneAfterTheOther,
    OneKey,
    Picture,
    PositionsFirst,
    Rotated,
    RotatedBack,
    SharedKeys,
    Stacked,
    Tiled,
    by_head,
)

LOCATED = [Stacked, HeadByHead, ByComponent, KeysFirst, InAList, SharedKeys, OneKey, MoreKeys, Folded, FoldedByHead]
LOCATED += [InPairs, Latents, PositionsFirst, Rotated, AsManyHeadsAsComponents, Picture]


@pytest.mark.parametrize("kind", [*LOCATED, AsManyHeadsAsTokens])
def test_the_rows_of_q_and_k_are_found_by_what_the_forward_does_with_them(kind):
    torch.manual_seed(0)
    model = Model(kind)
    with betahook.attach(model, controller="monitor") as hook:
        (layer,) = hook.layers.values()
        for projection, (module, rows) in zip(layer.projections, model.layer.rows(), strict=True):
            assert projection.module is module
            expected = module.weight.detach().flatten(1)[rows]
            # The order within a head means nothing.
            assert torch.equal(projection.entries.sort(1).values, expected.sort(1).values)
        expected = [module.weight[rows].std(correction=0).item() for module, rows in model.layer.rows()]
        assert [layer.weight_std_q, layer.weight_std_k] == pytest.approx(expected, rel=1e-5)
        assert layer.remarks == []


@pytest.mark.parametrize("kind", LOCATED)
def test_beta_folds_into_the_rows_that_were_found(kind):
    torch.manual_seed(0)
    model, x = Model(kind).double(), torch.randn(2, 9, WIDTH, dtype=torch.float64)
    with betahook.attach(model, controller="monitor", per_head=True, when="always") as hook:
        model(x)
        (layer,) = hook.layers.values()
        layer.head_beta = layer.head_beta * torch.tensor([0.5, 1.3, 2, 3])
        expected = model(x)
        betahook.fold(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", LOCATED)
def test_clip_scales_the_rows_that_were_found(kind):
    torch.manual_seed(0)
    model, x = Model(kind), torch.randn(2, 9, WIDTH)
    with betahook.attach(model, controller="monitor", when="always", exact_max_logit=True) as hook:
        model(x)
        (layer,) = hook.layers.values()
        threshold = float((layer.head_statistics.max_score * layer.head_beta).amax()) / 2
    with betahook.attach(model, betahook.Clip(threshold), when="always") as hook:
        (layer,) = hook.layers.values()
        model(x)
        hook.step()
        model(x)
        assert (layer.head_statistics.max_score * layer.head_beta).amax().item() == pytest.approx(threshold, rel=1e-4)


@pytest.mark.parametrize(
    "kind",
    [LowRank, Gated, BatchNormed, Tiled, OfASubclass, Halved, OfGroups, HeadAfterHead, OneAfterTheOther, RotatedBack],
)
def test_what_no_weight_alone_makes_is_not_taken_for_its_rows(kind):
    torch.manual_seed(0)
    with betahook.attach(Model(kind), controller="monitor") as hook:
        (layer,) = hook.layers.values()
        assert (layer.heads, layer.head_dim) == (HEADS, D)
        assert layer.projections is None
        assert "W_q and W_k have no known form" in layer.remarks[0]


@pytest.mark.parametrize(
    "kind",
    [LowRank, Gated, BatchNormed, Tiled, OfASubclass, Halved, OfGroups, HeadAfterHead, OneAfterTheOther, RotatedBack],
)
def test_nor_does_the_first_forward_take_it_for_that(kind):
    torch.manual_seed(0)
    model = Model(kind)
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(2, 9, WIDTH))
        (layer,) = hook.layers.values()
        assert layer.projections is None


def test_the_modulus_of_complex_numbers_is_no_row():
    torch.manual_seed(0)
    model = Model(Moduli)
    with betahook.attach(model, controller="monitor") as hook:
        for run in (lambda: None, lambda: model(torch.randn(2, 9, WIDTH))):
            run()
            (layer,) = hook.layers.values()
            assert (layer.heads, layer.head_dim) == (HEADS, D // 2)
            assert layer.projections is None


def test_adapters_that_are_there_already_are_part_of_the_weight():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model, targets = Model(InAList), ["layer.linears.0", "layer.linears.1"]
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False), model)
    with betahook.attach(model, controller="monitor") as hook:
        (layer,) = hook.layers.values()
        for projection, linear in zip(layer.projections, model.layer.linears, strict=False):
            acting = linear.base_layer.weight + linear.get_delta_weight("default")
            torch.testing.assert_close(projection.entries.flatten(0, 1), acting.detach())


class Looking(nn.Module):
    """Cross-attention, whose queries look at themselves without a context, as in imagen and Perceiver."""

    heads, head_dim = HEADS, D

    def __init__(self):
        super().__init__()
        self.ask, self.answer = nn.Linear(WIDTH, WIDTH), nn.Linear(10, 2 * WIDTH)

    def forward(self, x, context=None):
        k, v = (by_head(part) for part in self.answer(x if context is None else context).chunk(2, -1))
        return ((by_head(self.ask(x)) @ k.mT * D**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


class LookingOnly(Looking):
    def forward(self, x, memory):
        return super().forward(x, memory)


class LookingAtFacts(Looking):
    """Under a name of its own, as in OpenFold and the Set Transformer."""

    def forward(self, x, facts):
        return super().forward(x, facts)


@pytest.mark.parametrize("kind", [Looking, LookingOnly, LookingAtFacts])
def test_what_queries_look_at_may_be_of_another_width(kind):
    torch.manual_seed(0)
    module = kind().double()
    x, context = (torch.randn(2, 5, width, dtype=torch.float64) for width in (WIDTH, 10))
    with betahook.attach(module, controller="monitor", when="always") as hook:
        (layer,) = hook.layers.values()
        assert layer.projections is not None  # by the trial: the first forward would leave their input unmeasured
        module(x, context)
        weights = module.ask.weight, module.answer.weight[:WIDTH]
        expected = [weight.std(correction=0).item() for weight in weights]
        assert [layer.weight_std_q, layer.weight_std_k] == pytest.approx(expected, rel=1e-6)
        layer.beta = 2 * layer.beta_default
        output = module(x, context)
        betahook.fold(module)
    torch.testing.assert_close(module(x, context), output, rtol=1e-10, atol=1e-12)


class KeysOnTheLeft(nn.Module):
    """Multiplies k by q, as Demucs and KeyValueAttention of speechbrain."""

    def __init__(self, with_trial):
        super().__init__()
        self.num_heads, self.head_dim, self.with_trial = HEADS, D, with_trial
        self.query_map, self.key_map = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        assert self.with_trial or not x.is_meta
        q, k = by_head(self.query_map(x)), by_head(self.key_map(x))
        return ((k @ q.mT * D**-0.5).softmax(-2).mT @ k).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("with_trial", [True, False])
def test_the_left_operand_may_be_the_key(with_trial):
    torch.manual_seed(0)
    model, x = KeysOnTheLeft(with_trial).double(), torch.randn(2, 9, WIDTH, dtype=torch.float64)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        layer = hook.layers[""]
        assert [projection.module for projection in layer.projections] == [model.query_map, model.key_map]
        measured = layer.statistics
        q, k = (by_head(part(x)).transpose(0, 1).flatten(1, 2) for part in (model.query_map, model.key_map))
        for got, side in ((measured.component_variance_q, q), (measured.component_variance_k, k)):
            assert float(got) == pytest.approx(side.var(1, correction=0).mean().item(), rel=1e-5)


class OneForAll(KeysOnTheLeft):
    """Its name says query, key and value."""

    def __init__(self):
        super().__init__(with_trial=True)
        self.query_key_value = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        q, k = map(by_head, self.query_key_value(x).chunk(2, -1))
        return ((q @ k.mT * D**-0.5).softmax(-1) @ k).transpose(1, 2).flatten(2)


def test_a_name_of_both_tells_no_order():
    model = OneForAll()
    with betahook.attach(model, controller="monitor") as hook:
        query, _ = hook.layers[""].projections
        assert torch.equal(query.entries.flatten(0, 1), model.query_key_value.weight[:WIDTH])


def test_the_default_controller_sees_that_a_model_with_names_of_its_own_is_fresh():
    torch.manual_seed(0)
    model, x = Model(InAList), torch.randn(2, 9, WIDTH)
    with betahook.attach(model) as hook:
        model(x).sum().backward()
        hook.step()
        (layer,) = hook.layers.values()
        assert layer.beta == pytest.approx(D**-0.5 * 10**-0.5, rel=0.1)  # held low in the warm-up
