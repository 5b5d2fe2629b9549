"""Handlers one by one: what a function makes of scores, of operands and of weights."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from betahook.models.torch_calls import Call
from betahook.tap.by_hand.handlers import HANDLERS
from betahook.tap.by_hand.products import History, Product
from betahook.tap.by_hand.sites import Site
from betahook.tap.by_hand.situation import Situation, other
from betahook.tap.by_hand.traces import Operand, Scores, Shift, Weights


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


S = normal(2, 4, 5, 6)
"""A product, of which the scores in these tests are half."""
MASKED = torch.ones(5, 6, dtype=torch.bool).triu(1)


def a_product(index=0):
    return Product(Site("product", (), "model.py:1", False), History(), assured=True, index=index)


def scores(value=S, factor=0.5, **more):
    return Scores(factor, value, products=(a_product(),), axis=-3, **more)


@pytest.fixture(autouse=True)
def line(monkeypatch):
    monkeypatch.setattr("betahook.tap.by_hand.situation.find_line", lambda: "model.py:2")


def derive(function, *args, traces=(), **kwargs):
    """Run a function as the tap does; `traces` are those of the first arguments that are tensors."""
    call = Call(function, args, kwargs)
    known = list(zip([x for x in call.tensors if x is not MASKED], traces, strict=False))

    def trace_of(tensor):
        return next((trace for x, trace in known if x is tensor), None)

    handler = HANDLERS.get(call.name, other)
    situation = Situation(call, trace_of, lambda now: now, lambda now: now, lambda tensor: False, lambda scores: None)
    return handler(situation), call.run()


LINEAR = {
    "mul by a number": (torch.mul, 3.0),
    "mul by a tensor": (torch.mul, torch.tensor([3.0])),
    "mul by one for each head": (torch.mul, normal(4, 1, 1)),
    "mul by one for each pair": (torch.mul, normal(5, 6)),
    "operator *": (operator.mul, 3.0),
    "div": (torch.div, 3.0),
    "div by one for each pair": (torch.div, 1 + normal(5, 6).square()),
    "neg": (torch.neg,),
    "reshape": (torch.reshape, (8, 30)),
    "view": (Tensor.view, 2, 4, -1),
    "transpose": (torch.transpose, 1, 2),
    "permute": (torch.permute, (3, 0, 1, 2)),
    "flatten": (torch.flatten, 0, 1),
    "unsqueeze": (torch.unsqueeze, 0),
    "expand": (Tensor.expand, 3, 2, 4, 5, 6),
    "getitem": (Tensor.__getitem__, (slice(None), 1, ..., slice(2, 4))),
    "gather": (torch.gather, -1, torch.zeros(2, 4, 5, 1, dtype=torch.long)),
    "roll": (torch.roll, 1, -1),
    "repeat": (Tensor.repeat, 1, 2, 1, 1),
    "repeat_interleave": (torch.repeat_interleave, 2, 1),
    "contiguous": (Tensor.contiguous,),
    "clone": (torch.clone,),
    "detach": (torch.detach,),
    "dropout of nothing": (F.dropout, 0.0, True),
    "dropout in evaluation": (F.dropout, 0.5, False),
    "expand_as": (Tensor.expand_as, normal(3, 2, 4, 5, 6)),
    "type_as": (Tensor.type_as, normal(1)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_function_does_to_the_scores_what_it_does_to_the_logits(name):
    function, *args = LINEAR[name]
    logits = 0.5 * S
    derived, output = derive(function, logits, *args, traces=[scores()])
    trace = derived[0] if isinstance(derived, list) else derived
    assert trace.lost is None
    assert trace.linear
    torch.testing.assert_close(output, (trace.factor * trace.value).expand(output.shape))


PARTS = {"split": (torch.split, 2, -1), "chunk": (torch.chunk, 3, -1), "unbind": (torch.unbind, 1)}


@pytest.mark.parametrize("name", PARTS)
def test_each_part_of_scores_is_scores(name):
    function, *args = PARTS[name]
    derived, output = derive(function, 0.5 * S, *args, traces=[scores()])
    for trace, part in zip(derived, output, strict=True):
        torch.testing.assert_close(part, trace.factor * trace.value)


def test_scores_with_factors_of_their_own_are_put_together():
    derived, output = derive(torch.cat, [0.5 * S, 2 * S], -1, traces=[scores(), scores(factor=2.0)])
    torch.testing.assert_close(output, derived[0].factor * derived[0].value)
    assert derived[0].prescale == 0.5


def test_a_column_from_elsewhere_is_no_score():
    derived, _ = derive(torch.cat, [0.5 * S, normal(2, 4, 5, 1)], -1, traces=[scores()])
    assert derived[0].allowed[..., :-1].all()
    assert not derived[0].allowed[..., -1].any()
    torch.testing.assert_close(derived[0].value[..., :-1], S)


def test_padded_columns_are_no_scores():
    derived, output = derive(F.pad, 0.5 * S, (1, 0), traces=[scores()])
    assert derived.value.shape == output.shape
    assert torch.equal(derived.allowed, output != 0)


SUMS = {
    "+": (operator.add, 0.5 * S + 2 * S, 0.5 * S, 2 * S),
    "-": (operator.sub, 0.5 * S - 2 * S, 0.5 * S, 2 * S),
    "rsub": (torch.rsub, 2 * S - 0.5 * S, 0.5 * S, 2 * S),
}


@pytest.mark.parametrize("name", SUMS)
def test_the_sum_of_scores_is_scores(name):
    function, expected, left, right = SUMS[name]
    further = Scores(2.0, S, products=(a_product(1),))
    derived, _ = derive(function, left, right, traces=[scores(), further])
    torch.testing.assert_close(derived.factor * derived.value, expected)
    assert len(derived.products) == 2


@pytest.mark.parametrize("function", [torch.add, torch.sub, torch.rsub])
def test_a_sum_takes_a_multiple_of_one_operand(function):
    bias = normal(5, 6)
    derived, _ = derive(function, 0.5 * S, bias, alpha=3.0, traces=[scores()])
    without_bias = function(0.5 * S, torch.zeros_like(bias), alpha=3.0)
    torch.testing.assert_close(derived.factor * derived.value, without_bias)


def test_a_product_that_came_first_leads_a_sum():
    first = scores(factor=2.0)
    second = Scores(0.5, S, products=(a_product(1),))
    derived, _ = derive(operator.add, 0.5 * S, 2 * S, traces=[second, first])
    assert derived.prescale == 2.0


MASKS = {
    "masked_fill": (torch.masked_fill, MASKED, -100.0),
    "where": (lambda s: (torch.where, ~MASKED, s, -1e9), None),
    "add": (torch.add, torch.zeros(5, 6).masked_fill(MASKED, -1e4)),
    "add infinity": (torch.add, torch.zeros(5, 6).masked_fill(MASKED, -torch.inf)),
    "add hundreds": (torch.add, torch.zeros(5, 6).masked_fill(MASKED, -200.0)),
    "sub": (torch.sub, MASKED.float() * 1e9),
    "tril": (torch.tril,),
}


@pytest.mark.parametrize("name", MASKS)
def test_masked_pairs_are_not_allowed(name):
    function, *args = MASKS[name]
    logits = 0.5 * S
    if name == "where":
        function, *rest = function(logits)
        derived, _ = derive(function, *rest, traces=[None, scores()])
    else:
        derived, _ = derive(function, logits, *args, traces=[scores()])
    assert torch.equal(derived.allowed, ~MASKED.expand(2, 4, 5, 6))
    torch.testing.assert_close(derived.value, S)


def test_the_places_of_scores_are_no_scores():
    derived, _ = derive(torch.where, 0.5 * S, traces=[scores()])
    assert derived is None


@pytest.mark.parametrize("bias", [normal(5, 6), -40 * torch.arange(6.0), -300 * normal(5, 6).abs()])
def test_a_bias_masks_nothing(bias):
    derived, _ = derive(torch.add, 0.5 * S, bias, traces=[scores()])
    assert derived.allowed is None or derived.allowed.all()
    assert not derived.unbiased


BENT = {
    "tanh": (torch.tanh,),
    "clamp": (torch.clamp, -1.0, 1.0),
    "clip": (torch.clip, -1.0, 1.0),
    "nan_to_num": (torch.nan_to_num,),
    "maximum": (torch.maximum, torch.tensor(-1.0)),
    "max with a tensor": (torch.max, torch.tensor(-1.0)),
}


@pytest.mark.parametrize("name", BENT)
def test_an_element_behind_a_soft_cap_is_still_that_of_its_score(name):
    function, *args = BENT[name]
    derived, _ = derive(function, 0.5 * S, *args, traces=[scores()])
    assert derived.value is S
    assert not derived.linear


REDUCED = {
    "max": (torch.max, -1, True),
    "amax": (torch.amax, -1, True),
    "mean": (torch.mean, -1, True),
    "logsumexp": (torch.logsumexp, -1, True),
    "sum": (torch.sum, (2, 3), True),
}


@pytest.mark.parametrize("name", REDUCED)
def test_a_shift_of_rows_keeps_scores(name):
    function, *args = REDUCED[name]
    derived, _ = derive(function, 0.5 * S, *args, traces=[scores()])
    assert isinstance(derived, Shift)
    shift = normal(2, 4, 5, 1)
    shifted, _ = derive(torch.sub, 0.5 * S, shift, traces=[scores(), derived])
    assert shifted.lost is None
    assert shifted.shifted
    lost, _ = derive(torch.sub, 0.5 * S, normal(2, 4, 1, 6), traces=[scores(), derived])
    assert lost.lost == "sub of what was made of scores at model.py:2"
    turned, _ = derive(torch.transpose, 0.5 * S, -1, -2, traces=[shifted])
    assert turned.lost == "transpose after a shift of rows at model.py:2"


@pytest.mark.parametrize("name", ["dim", "axis"])
@pytest.mark.parametrize("dim", [0, 1, -2, (0, 1)])
def test_a_mean_of_rows_is_no_score(dim, name):
    derived, _ = derive(torch.mean, 0.5 * S, traces=[scores()], **{name: dim})
    same, _ = derive(torch.mean, 0.5 * S, dim, traces=[scores()])
    assert derived.lost == same.lost
    assert derived.lost == "mean over another axis than that of the rows at model.py:2"


MOVED = {
    "permute": (torch.permute, (0, 1, 3, 2)),
    "view_as": (Tensor.view_as, normal(2, 4, 6, 5)),
    "view": (Tensor.view, 8, 5, 6),
    "flatten": (torch.flatten, 2),
    "unflatten": (Tensor.unflatten, 1, (2, 2)),
    "gather": (torch.gather, -2, torch.zeros(2, 4, 1, 6, dtype=torch.long)),
    "flip": (torch.flip, (-1,)),
    "expand_as": (Tensor.expand_as, normal(3, 2, 4, 5, 6)),
    "narrow": (torch.narrow, -1, 0, 3),
    "getitem": (Tensor.__getitem__, (0,)),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_shift_stays_with_whole_rows_and_an_axis_of_heads_where_it_is(name):
    function, *args = MOVED[name]
    derived, _ = derive(function, S, *args, traces=[scores(shifted=True)])
    trace = derived[0] if isinstance(derived, list) else derived
    assert (trace.lost is None) == (name in {"expand_as", "narrow", "getitem", "view", "unflatten"})
    derived, _ = derive(function, S, *args, traces=[scores()])
    assert derived[0].axis == (-3 if name in {"gather", "flip", "narrow"} else None)


LOST = {
    "softplus": (F.softplus,),
    "exp": (torch.exp,),
    "square": (torch.square,),
    "cumsum": (torch.cumsum, -1),
    "dropout": (F.dropout, 0.5, True),
    "linear": (F.linear, normal(3, 6)),
}


@pytest.mark.parametrize("name", LOST)
def test_what_is_not_understood_loses_scores_by_name(name):
    function, *args = LOST[name]
    trace = scores()
    derived, _ = derive(function, 0.5 * S, *args, traces=[trace])
    assert derived.lost.startswith(name.split()[0])
    assert derived.lost.endswith("at model.py:2")
    assert derived.value is None
    assert trace.products[0].lost == derived.lost


@pytest.mark.parametrize("function", [torch.square, torch.relu, torch.detach, torch.cumsum, F.normalize, torch.sort])
def test_what_comes_of_weights_is_weights(function):
    args = (-1,) if function is torch.cumsum else ()
    derived, _ = derive(function, S, *args, traces=[Weights()])
    assert isinstance(derived, Weights)


def test_shape_and_dtype_of_weights_make_no_weights():
    derived, _ = derive(Tensor.view_as, S, 2 * S, traces=[scores(), Weights()])
    assert derived[0].value.shape == S.shape
    assert derive(torch.zeros_like, S, traces=[Weights()])[0] is None
    assert derive(Tensor.type_as, normal(3), S, traces=[None, Weights()])[0] is None


OPERANDS = {
    "mul": (torch.mul, 3.0, 1.5),
    "div": (torch.div, 2.0, 0.25),
    "neg": (torch.neg, None, 0.5),
    "transpose": (Tensor.mT.__get__, None, 0.5),
    "to": (Tensor.to, torch.float64, 0.5),
    "a rotation": (torch.mul, normal(5, 6), 0.5),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_an_operand_keeps_its_factor(name):
    function, argument, factor = OPERANDS[name]
    derived, _ = derive(function, S, *([] if argument is None else [argument]), traces=[Operand(0.5)])
    assert derived.factor == factor


def test_an_operand_that_something_is_added_to_has_no_factor():
    assert derive(torch.add, S, normal(6), traces=[Operand(0.5)])[0] is None
    assert derive(torch.add, S, 2 * S, traces=[Operand(0.5), Operand(0.5)])[0] == Operand(0.5)


def test_values_are_known_by_what_is_made_of_them():
    assert derive(torch.square, S, traces=[Operand(from_values=True)])[0] == Operand(from_values=True)
    assert derive(torch.square, S, traces=[Operand(0.5)])[0] is None


def test_a_view_of_a_parameter_is_learned():
    derived, _ = derive(Tensor.view, nn.Parameter(normal(4, 6)), 24)
    assert derived == Operand(learned=True)


LEARNED, ROWS = Operand(learned=True), nn.Parameter(normal(4, 6))


@pytest.mark.parametrize("function", [torch.cat, torch.stack])
def test_what_is_put_together_is_learned_if_all_of_it_is(function):
    other = ROWS.detach() + 1
    assert derive(function, [ROWS, ROWS])[0] == LEARNED
    assert derive(function, [ROWS, other])[0] is None
    assert derive(function, [other, other])[0] is None
    assert derive(function, [other, ROWS], traces=[LEARNED])[0] == LEARNED
    assert derive(function, [S, S + 1], traces=[LEARNED, LEARNED])[0] == LEARNED
    assert derive(function, [S, S + 1], traces=[LEARNED, Operand()])[0] == Operand()
    assert derive(function, [S, S + 1], traces=[Operand(), LEARNED])[0] == Operand()
    assert derive(function, [S, S + 1], traces=[Operand(), Operand(from_values=True)])[0] == Operand(from_values=True)


def test_a_tensor_that_gives_its_shape_alone_is_no_part_of_the_result():
    assert derive(Tensor.view_as, S, S + 1, traces=[LEARNED])[0] == LEARNED


def test_every_function_of_the_table_exists():
    """In torch, in `torch.nn.functional` or on tensors."""
    owners = (torch, F, Tensor)
    assert not [name for name in HANDLERS if not any(hasattr(owner, name) for owner in owners)]
