"""Modes for a while."""

import random
import sys
import threading
import types
from contextlib import suppress
from unittest import mock

import numpy
import pytest
import torch

from betahook.models import modes
from betahook.models.modes import RandomState, eagerly, full_precision
from support.training import float32_precision


def stance():
    """The stance of the compiler, by what compiled code does."""
    compiled = torch.compile(lambda: torch.compiler.is_compiling(), backend="eager")
    return "default" if compiled() else "force_eager"


def test_threads_that_overlap_leave_the_stance_of_the_compiler():
    """The first one leaves while the second is at work, and this one then puts back what it found."""
    torch.compiler.reset()
    assert stance() == "default"
    entered, left = threading.Event(), threading.Event()

    def second():
        with eagerly():
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=second)
    with eagerly():
        assert stance() == "force_eager"
        thread.start()
        entered.wait(10)
    assert stance() == "force_eager"
    left.set()
    thread.join()
    assert stance() == "default"


def precisions():
    """All that torch says about the precision of float32, and None where it will not say."""
    found = [part.fp32_precision for part in modes._float32_parts()]
    for switch in (torch.get_float32_matmul_precision, lambda: torch.backends.cudnn.allow_tf32):
        found.append(None)
        with suppress(RuntimeError):
            found[-1] = switch()
    return found


def choose_for_all(precision):
    torch.backends.fp32_precision = precision
    torch.backends.cuda.matmul.fp32_precision = "none"


def choose_for_products(precision):
    torch.backends.cuda.matmul.fp32_precision = precision


@pytest.fixture
def _of_torch():
    """What torch begins with, whatever other tests have chosen."""

    def reset():
        torch.set_float32_matmul_precision("highest")
        torch.backends.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"
        torch.backends.mkldnn.matmul.fp32_precision = torch.backends.mkldnn.conv.fp32_precision = "none"
        torch.backends.cudnn.allow_tf32 = True

    reset()
    yield
    reset()


@pytest.mark.usefixtures("_of_torch")
@pytest.mark.needs_torch("2.9", "one precision is for all")
@pytest.mark.parametrize(
    ("choose", "precision"),
    [
        (torch.set_float32_matmul_precision, "highest"),
        (torch.set_float32_matmul_precision, "high"),
        (torch.set_float32_matmul_precision, "medium"),
        (choose_for_all, "tf32"),
        (choose_for_products, "tf32"),
    ],
)
def test_full_precision_is_for_a_while(choose, precision):
    choose(precision)
    before = precisions()
    with full_precision():
        assert precisions() == ["ieee"] * 5 + ["highest", False]
    assert precisions() == before


@pytest.mark.usefixtures("_of_torch")
@pytest.mark.needs_torch("2.9", "one precision is for all")
def test_what_inherits_its_precision_does_so_afterwards():
    choose_for_all("tf32")
    with full_precision():
        pass
    torch.backends.fp32_precision = "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == torch.backends.mkldnn.matmul.fp32_precision == "ieee"


def test_full_precision_of_torch_before_2_9(monkeypatch):
    """Where `torch.backends` has one switch for products and one for convolutions."""
    monkeypatch.setattr(modes, "_float32_parts", list)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    with float32_precision("high"):
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_the_random_state_of_a_device_is_kept(kind):
    device, other = torch.device(kind, 1), torch.device("cpu")
    tensors = [types.SimpleNamespace(device=each) for each in (device, other, device)]
    states = [torch.tensor(1), torch.tensor(2)]
    module = getattr(torch, kind)
    with (
        mock.patch.object(module, "get_rng_state", side_effect=states) as get,
        mock.patch.object(module, "set_rng_state") as put_back,
    ):
        before = torch.get_rng_state()
        with RandomState(torch.nn.Module()).preserved(tensors):
            torch.rand(2)
            put_back.assert_not_called()
    assert torch.equal(torch.get_rng_state(), before)
    get.assert_called_once_with(device)
    put_back.assert_called_once_with(states[0], device)


class Drawing(torch.nn.Module):
    """A module that draws numbers of all kinds, as a LayerDrop by `random` does, and holds a child that does too."""

    def __init__(self, *, inner=True):
        super().__init__()
        self.torch, self.python, self.system = torch.Generator(), random.Random(0), random.SystemRandom()
        self.numpy, self.several = [numpy.random.default_rng(0)], {"old": numpy.random.RandomState(0)}
        self.inner = Drawing(inner=False) if inner else torch.nn.Identity()

    def draw(self):
        own = [torch.rand((), generator=self.torch).item(), self.python.random(), self.numpy[0].random()]
        shared = [torch.rand(()).item(), random.random(), numpy.random.rand()]
        inner = [] if isinstance(self.inner, torch.nn.Identity) else self.inner.draw()
        return [*own, self.several["old"].rand(), *shared, *inner]


def test_random_numbers_of_all_kinds_come_again():
    module = Drawing()
    with RandomState(module).preserved():
        drawn = module.draw()
    assert len(drawn) == 14
    assert module.draw() == drawn


def test_random_state_is_kept_without_numpy(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy.random")
    with RandomState(torch.nn.Module()).preserved():
        drawn = random.random()
    assert random.random() == drawn
