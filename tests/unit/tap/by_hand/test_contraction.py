"""Products of torch, read as `left [..., n, d]` times `right [..., m, d]`."""

import pytest
import torch

from betahook.models.torch_calls import Call
from betahook.tap.by_hand import contraction
from betahook.tap.by_hand.contraction import Shared

HEADS = 4


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def read(function, *args, **kwargs):
    return contraction.read(Call(function, args, kwargs))


Q, K = normal(2, HEADS, 5, 8), normal(2, HEADS, 6, 8)
PRODUCTS = {
    "matmul": (torch.matmul, (Q, K.mT), {}, 1),
    "matmul by name": (torch.matmul, (), {"other": K.mT, "input": Q}, 1),
    "of tensors": (torch.Tensor.__matmul__, (Q, K.mT), {}, 1),
    "einsum": (torch.einsum, ("bhid,bhjd->bhij", Q, K), {}, 1),
    "einsum of a list": (torch.einsum, ("bhid,bhjd->bhij", [Q, K]), {}, 1),
    "einsum with dots": (torch.einsum, ("...id, ...jd -> ...ij", Q, K), {}, 1),
    "einsum with dots and capitals": (torch.einsum, ("...AD,...BD->...AB", Q, K), {}, 1),
    "einsum, heads behind": (torch.einsum, ("bihd,bjhd->bhij", Q.transpose(1, 2), K.transpose(1, 2)), {}, 2),
    "bmm": (torch.bmm, (Q.flatten(0, 1), K.flatten(0, 1).mT), {}, Shared(0)),
    "keys without heads": (torch.einsum, ("bhid,bjd->bhij", Q, K[:, 0]), {}, 1),
    "one key for all": (torch.matmul, (Q.flatten(0, 1), K[:1, 0].mT), {}, Shared(0)),
    "heads in the rows": (torch.matmul, (Q.permute(2, 0, 1, 3).flatten(1, 2), K[:1, 0].mT), {}, Shared(1)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_runs_again_with_another_left_operand(name):
    function, args, kwargs, _ = PRODUCTS[name]
    product = read(function, *args, **kwargs)
    expected = function(*args, **kwargs)
    assert product.size == 8
    assert not product.biased
    torch.testing.assert_close(product.run(product.left), expected)
    torch.testing.assert_close(product.run(2 * product.left), 2 * expected)


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_tokens_of_a_product_lie_by_head(name):
    function, args, kwargs, axis = PRODUCTS[name]
    product = read(function, *args, **kwargs)
    left, right = product.tokens(axis, HEADS)
    queries = Q.permute(1, 2, 0, 3) if name == "heads in the rows" else Q.transpose(0, 1)
    torch.testing.assert_close(left, queries.flatten(1, 2)[None])
    without_heads = {"keys without heads": K[:, 0], "one key for all": K[:1, 0], "heads in the rows": K[:1, 0]}
    expected = without_heads[name][None] if name in without_heads else K.transpose(0, 1)
    torch.testing.assert_close(right, expected.flatten(1, 2)[None])


def test_baddbmm_has_an_addend_and_a_factor():
    q, k, addend = Q.flatten(0, 1), K.flatten(0, 1), normal(8, 5, 6)
    product = read(torch.baddbmm, addend, q, k.mT, alpha=0.5)
    assert product.biased
    assert product.alpha == 0.5
    torch.testing.assert_close(product.run(2 * q), torch.baddbmm(addend, q, k.mT))
    torch.testing.assert_close(product.alone(q), q @ k.mT)


NO_SCORES = {
    "a projection": (torch.matmul, normal(2, 5, 8), normal(8, 3)),
    "a weighted sum of an axis": (torch.einsum, "bid,d->bi", normal(2, 5, 8), normal(8)),
    "three operands": (torch.einsum, "bid,bjd,bij->bij", normal(2, 5, 8), normal(2, 6, 8), normal(2, 5, 6)),
    "two summed axes": (torch.einsum, "bide,bjde->bij", normal(2, 5, 8, 3), normal(2, 6, 8, 3)),
    "element by element": (torch.einsum, "bid,bid->bid", normal(2, 5, 8), normal(2, 5, 8)),
}


@pytest.mark.parametrize("name", NO_SCORES)
def test_other_products_can_be_no_scores(name):
    function, *args = NO_SCORES[name]
    assert read(function, *args) is None


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_function_on_heads_gets_their_axis(axis):
    tensor, gain = normal(4, 4, 4, 3, 2), torch.arange(1.0, 5)
    shape = [1] * 5
    shape[axis] = 4
    scaled = contraction.on_heads(tensor, axis, HEADS, lambda x, axis: x * gain.view(shape))
    torch.testing.assert_close(scaled, tensor * gain.view(shape))
    assert contraction.batched(tensor, axis, HEADS).shape == (16, 4, 3, 2)


def test_heads_that_share_an_axis_with_the_batch_get_one_of_their_own():
    tensor, gain = normal(8, 3, 2), torch.arange(1.0, 5)
    scaled = contraction.on_heads(tensor, Shared(0), HEADS, lambda x, axis: x * gain.view(4, 1, 1))
    torch.testing.assert_close(scaled, tensor * gain.repeat(2).view(8, 1, 1))
    torch.testing.assert_close(contraction.batched(tensor, Shared(0), HEADS), tensor.view(2, 4, 3, 2))


def test_scores_by_head_may_have_no_batch():
    scores = normal(4, 3, 2)
    assert contraction.batched(scores, 0, HEADS).shape == (1, 4, 3, 2)


def test_heads_move_with_their_axis():
    product = read(torch.einsum, "nbd,bmd->bnm", Q.flatten(0, 1).transpose(0, 1), K.flatten(0, 1))
    assert product.output_axis(Shared(1, heads_first=True)) == Shared(0, heads_first=True)
    product = read(torch.einsum, "nhd,hmd->nmh", Q[0].transpose(0, 1), K[0])
    assert product.output_axis(1) == 2
    assert product.output_axis("single") == "single"
