"""What measuring adds to a layer, counted: the same on every machine."""

import gc

import pytest
import torch

from support.examples import imported


@pytest.fixture(scope="module")
def example():
    with imported("operations") as modules:
        yield modules["operations"]


@pytest.fixture(autouse=True)
def without_garbage():
    """A model of an earlier test that is collected in a step would be counted."""
    gc.collect()


@pytest.mark.parametrize(
    ("length", "dtype", "cpu", "most"),
    [(256, torch.float32, False, 52), (256, torch.bfloat16, False, 55), (64, torch.float32, True, 44)],
    ids=["accelerator", "accelerator, half precision", "cpu, short"],
)
def test_a_measured_step_adds_few_operations_to_a_layer(example, length, dtype, cpu, most):
    launched, _ = example.added(length, dtype, cpu=cpu)
    assert min(launched.values()) >= 0
    assert 20 < sum(launched.values()) <= most
    together, _ = example.added(length, dtype, cpu=cpu, alone=False)
    assert 4 < sum(together.values()) <= 10


def test_waiting_for_a_device_is_refused(example):
    with example.Operations(), pytest.raises(RuntimeError, match="_local_scalar_dense makes the host wait"):
        torch.ones(()).item()


def test_memory_grows_by_tokens_and_nothing_is_kept_of_them(example):
    (short, kept), (long, kept_of_long) = (example.memory(length, torch.float32) for length in (1024, 2048))
    assert long < 2.1 * short
    assert kept == kept_of_long


def test_it_prints_what_it_counted(example, capsys):
    example.main(["--length", "64"])
    printed = capsys.readouterr().out
    assert printed.startswith("added to a layer in a measured step: ")
    assert "bytes for each entry of a query" in printed
