"""Calls of torch functions: their operands and what they change, whichever way arguments are given."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from betahook.models.torch_calls import Call, name_of, tensors_in
from support import foreach


@pytest.mark.parametrize("sizes", [(4,), (3, 4), (2, 3, 4), (5, 2, 3, 4)])
@pytest.mark.parametrize(
    "given", [((-1,), {}), ((0,), {}), ((), {"dim": 0}), ((), {"dim": -1}), ((), {}), ((None,), {})]
)
def test_the_dimension_of_a_softmax_is_the_one_along_which_weights_sum_to_1(sizes, given):
    args, kwargs = given
    call = Call(F.softmax, (torch.randn(sizes), *args), kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a dimension that is not given
        output = call.run()
    torch.testing.assert_close(output.sum(call.dim), torch.ones(output.sum(call.dim).shape))


def test_a_softmax_may_name_its_dimension_axis_and_give_a_dtype_alone():
    x = torch.randn(2, 3, 4)
    assert Call(torch.softmax, (x,), {"axis": 1}).dim == 1
    assert Call(torch.softmax, (), {"input": x, "dtype": torch.double, "dim": 2}).dim == 2


def test_operands_are_in_the_order_of_the_signature():
    a, b = torch.randn(2), torch.randn(2)
    assert Call(torch.sub, (), {"other": b, "input": a}).operands == [a, b]
    assert Call(torch.where, (), {"other": b, "condition": a > 0, "input": a}).operands[1:] == [a, b]


@pytest.mark.parametrize(
    ("function", "in_place"),
    [
        (Tensor.mul_, True),
        (Tensor.__imul__, True),
        (Tensor.__setitem__, True),
        (torch.mul, False),
        (Tensor.__mul__, False),
        (foreach.mul_, True),
        (foreach.mul, False),
    ],
)
def test_a_call_in_place_is_known_by_its_name(function, in_place):
    assert Call(function, (), {}).in_place is in_place


def test_a_function_of_lists_is_not_taken_for_that_of_tensors():
    assert [name_of(function) for function in (foreach.mm, torch.mm, Tensor.mm)] == ["foreach.mm", "mm", "mm"]
    assert name_of(Tensor.T.__get__) == "transpose"


def test_tensors_are_found_in_nested_arguments_and_replaced_there():
    a, b, index = torch.ones(2), torch.ones(2), torch.zeros(2, dtype=torch.long)
    assert [id(x) for x in tensors_in(([a, {"key": (b, 3)}], index))] == [id(a), id(b), id(index)]
    output = Call(torch.cat, ([a, b],), {"dim": 0}).run_on(lambda x: 2 * x)
    assert output.tolist() == [2.0] * 4
