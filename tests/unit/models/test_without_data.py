"""Runs without data, and what code that keeps tensors outside of its module has of them afterwards."""

import functools
import logging
import math
import warnings
from typing import ClassVar

import numpy
import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import betahook
from betahook.models import trial
from betahook.models.without_data import LARGEST, LEFTOVER_ERROR, without_data
from support.undeclared import HEAD_DIM, HEADS, WIDTH, Mixer, Model

LENGTH = trial.LENGTH
OUTSIDE = torch.ones(LENGTH, LENGTH).triu(1)
KNOWN = {}


@functools.lru_cache
def causal(length):
    return torch.ones(length, length).triu(1).bool()


@functools.lru_cache
def slopes(heads):
    return torch.tensor([2.0 ** -(1 + head) for head in range(heads)]).view(heads, 1, 1)


class ByLruCache(Mixer):
    def mask(self, length):
        return causal(length)

    def slopes(self):
        return slopes(HEADS)


class ByDictionary(Mixer):
    def mask(self, length):
        if length not in KNOWN:
            KNOWN[length] = torch.full((length, length), 1.0).triu_(1) > 0
        return KNOWN[length]

    def slopes(self):
        if "slopes" not in KNOWN:
            KNOWN["slopes"] = torch.arange(1, HEADS + 1).neg().exp2().view(HEADS, 1, 1)
        return KNOWN["slopes"]


class ByClass(Mixer):
    kept: ClassVar = {}

    def mask(self, length):
        return self.kept.setdefault(length, torch.arange(length)[None] > torch.arange(length)[:, None])

    def slopes(self):
        if not hasattr(ByClass, "of_heads"):
            ByClass.of_heads = torch.zeros(HEADS, 1, 1)
            for head in range(HEADS):
                ByClass.of_heads[head] = 0.5 / (1 + head)
        return ByClass.of_heads


def out_of_place(self, q, k, v):
    scores = q @ k.mT / math.sqrt(HEAD_DIM)
    scores = scores + self.slopes() * torch.arange(q.shape[-2])
    return scores.masked_fill(self.mask(q.shape[-2]), -math.inf).softmax(-1) @ v


def in_place(self, q, k, v):
    scores = q @ k.mT / math.sqrt(HEAD_DIM)
    scores.add_(self.slopes() * torch.arange(q.shape[-2])).masked_fill_(self.mask(q.shape[-2]), -math.inf)
    return scores.softmax(-1) @ v


def of_a_view(self, q, k, v):
    """As a chunk of Longformer; such attention is left alone."""
    scores = q @ k.mT / math.sqrt(HEAD_DIM)
    scores[..., :LENGTH, :LENGTH].masked_fill_(self.mask(LENGTH), -math.inf)
    scores[..., :LENGTH].mul_(self.slopes())
    return scores.softmax(-1) @ v


def forget():
    causal.cache_clear()
    slopes.cache_clear()
    KNOWN.clear()
    ByClass.kept.clear()
    if hasattr(ByClass, "of_heads"):
        del ByClass.of_heads


@pytest.mark.parametrize("mix", [out_of_place, in_place, of_a_view])
@pytest.mark.parametrize("kind", [ByLruCache, ByDictionary, ByClass])
def test_what_a_trial_leaves_in_caches_of_users_is_what_the_model_would_have_put_there(kind, mix):
    torch.manual_seed(0)
    model, x = Model(type(kind.__name__, (kind,), {"mix": mix})).eval(), torch.randn(2, LENGTH, WIDTH)
    forget()
    plain = model(x)
    expected = model.layer.mask(LENGTH), model.layer.slopes()
    forget()
    hook, state = betahook.attach(model, controller="monitor"), torch.get_rng_state()
    for kept, right in zip((model.layer.mask(LENGTH), model.layer.slopes()), expected, strict=True):
        assert type(kept) is torch.Tensor
        assert torch.equal(kept, right)
    assert torch.equal(model(x), plain)
    assert torch.equal(torch.get_rng_state(), state)
    hook.detach()
    assert torch.equal(model(x), plain)
    forget()


CONSTANTS = {
    "a view of a tensor of outside": lambda x: OUTSIDE[:3, :3],
    "made of a tensor of outside": lambda x: OUTSIDE.float() * -2,
    "of the dtype of an input": lambda x: x.new_full((3, 3), 2.0).tril(),
    "of the shape of an input": lambda x: torch.ones_like(x).triu(1),
    "of the strides of an input": lambda x: torch.zeros_like(x.mT),
    "by an index": lambda x: torch.ones(3, 3).index_fill_(1, torch.eye(3)[0].nonzero()[:, 0], 5),
    "by a number that it holds": lambda x: torch.arange(int(torch.tensor(4) + 1)),
    "out=": lambda x: torch.triu(torch.ones(3, 3), 1, out=torch.empty(3, 3)),
    "of numpy": lambda x: torch.from_numpy(numpy.arange(3)) * 2,
    "a list": lambda x: torch.tensor([[1.0, 2.0]], dtype=torch.float64).mul_(3),
    "two results": lambda x: torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")[1],
}


@pytest.mark.parametrize("made_by", CONSTANTS.values(), ids=CONSTANTS)
def test_constants_are_computed(made_by):
    expected = made_by(torch.zeros(2, 3))
    with without_data() as run:
        x = torch.zeros(2, 3)
        with run.computing_constants():
            made = made_by(x)
    assert type(made) is torch.Tensor
    assert (made.dtype, made.stride()) == (expected.dtype, expected.stride())
    assert torch.equal(made, expected)


def changed_by(x):
    made = torch.zeros(2, 3)
    made[:, 1:].copy_(x[:, 1:])
    return made + 1


def change_outside(x):
    OUTSIDE.mul_(3)
    return OUTSIDE + 1


WEIGHT = nn.Parameter(torch.ones(2, 3))
WITHOUT_DATA = {
    "an input": lambda x: x[0],
    "made of an input": lambda x: torch.arange(3) + x,
    "made of a weight": lambda x: WEIGHT[0],
    "made of what an input changed": changed_by,
    "made of what is not its own to change": change_outside,
    "made of a view of outside that it changes": lambda x: OUTSIDE[:2, :3].mul_(3) + 1,
    "made of a weight of outside that it changes": lambda x: WEIGHT.detach().mul_(3),
    "random numbers": lambda x: torch.rand(3),
    "random numbers of a generator": lambda x: torch.empty(3).normal_(generator=GENERATOR) + 1,
    "more than fits": lambda x: torch.ones(LARGEST // 4 + 1),
    "like more than fits": lambda x: x.new_empty(1).expand(LARGEST).new_ones(3),
    "on a device without data": lambda x: torch.ones(3, device="meta"),
    "on a device that is not there": lambda x: torch.ones(3, device="cuda:99"),
}
GENERATOR = torch.Generator()


@pytest.mark.parametrize("made_by", WITHOUT_DATA.values(), ids=WITHOUT_DATA)
def test_all_else_stays_without_data_and_says_so_when_it_is_used(made_by):
    states, outside = [torch.get_rng_state(), GENERATOR.get_state()], [OUTSIDE.clone(), WEIGHT.clone()]
    with without_data() as run:
        x = torch.zeros(2, 3)
        with run.computing_constants():
            made = made_by(x)
            assert (made + 1).shape == made.shape
    assert torch.equal(OUTSIDE, outside[0])
    assert torch.equal(WEIGHT, outside[1])
    for state, now in zip(states, (torch.get_rng_state(), GENERATOR.get_state()), strict=True):
        assert torch.equal(now, state)
    for use in (lambda: made * 2, lambda: torch.ones(made.shape).masked_fill_(made > 0, 0)):
        with pytest.raises(RuntimeError) as error:
            use()
        assert str(error.value) == LEFTOVER_ERROR
    assert "FakeTensor" in repr(made)


class KeepsNoise(Mixer):
    kept: ClassVar = {}

    def mix(self, q, k, v):
        if "noise" not in self.kept:
            self.kept["noise"] = torch.empty(64).fill_(math.nan).normal_()
        return super().mix(q, k, v) + 0 * self.kept["noise"].sum()


def test_random_numbers_fill_memory_that_is_there_and_come_again():
    model, state = Model(KeepsNoise).eval(), torch.get_rng_state()
    betahook.attach(model).detach()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.isfinite(model(torch.randn(2, LENGTH, WIDTH))).all()
    assert KeepsNoise.kept.pop("noise").unique().numel() > 1


def test_outside_the_code_of_users_nothing_is_computed():
    """As where the inputs of a trial are made, or a module is copied."""
    with without_data() as run:
        before = torch.ones(3)
        with run.computing_constants():
            within = torch.ones(3)
        after = torch.ones(3)
    assert [type(made) is torch.Tensor for made in (before, within, after)] == [False, True, False]


def test_an_operator_of_higher_order():
    """These go by the exact type of a mode."""
    with torch.no_grad(), without_data() as run:
        x = torch.zeros(1, 2, 128, 16)
        with run.computing_constants():
            assert flex_attention(x, x, x).shape == x.shape


def test_copies_without_data():
    """And nothing is printed where a shape does not fit."""
    model = nn.Linear(2**20, 2**20, device="meta")
    with without_data() as run:
        made = run.copied(model)
        assert made.weight is not model.weight
        assert made(torch.zeros(3, 2**20, device="meta")).shape == (3, 2**20)
        with pytest.raises(RuntimeError):
            made(torch.zeros(3, 2))
        assert logging.getLogger("torch._subclasses.fake_tensor").disabled
        warnings.warn("of a made-up input", stacklevel=1)
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled
