"""Sums of what enters W_q and W_k, and how they get into the table."""

import pytest
import torch

from betahook.measure import inputs, statistics
from betahook.measure.inputs import WaitingInputs, entries_of
from betahook.measure.masks import Band, Mask
from betahook.measure.statistics import ROW
from support.matrices import make, recorded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_are_summed(dtype):
    table = statistics.empty(3, torch.device("cpu"))
    given = torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(2)).to(dtype) * 2 + 1
    for part in given.split(1):
        inputs.add(table, "key", inputs.entries_of(part))
    assert not table[ROW["query_inputs"]].any()
    inputs.add(table, "query", inputs.entries_of(given))
    expected = [given.numel(), given.double().sum(), given.double().square().sum()]
    for side in ("query", "key"):
        for row, value in zip((f"{side}_inputs", f"{side}_input", f"{side}_input_square"), expected, strict=True):
            assert table[ROW[row]].tolist() == pytest.approx([float(value)] * 3, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_millions_of_entries_are_summed_as_precisely(dtype):
    given = torch.randn(8, 1024, 1024, generator=torch.Generator().manual_seed(2)).to(dtype)
    _, total, square = inputs.entries_of(given)
    assert float(square) == pytest.approx(float(given.double().square().sum()), rel=1e-6)
    assert float(total) == pytest.approx(float(given.double().sum()), rel=1e-4)


@pytest.mark.parametrize("length", [20, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_that_are_added_with_the_scores_are_the_same(length, dtype):
    query, key = make(length, length)
    sides = [entries_of(torch.randn(2, 9, 24).to(dtype) + side) for side in range(2)]
    found, without = (recorded(query, key, Mask(Band(None, 0)), **x) for x in ({"inputs": sides}, {}))
    table = statistics.empty(query.shape[1], query.device)
    for side, entries in zip(inputs.SIDES, sides, strict=True):
        inputs.add(table, side, entries)
    for name, row in ROW.items():
        expected = table[row] if "_input" in name else getattr(without, name)
        assert torch.equal(getattr(found, name), expected), name


def test_entries_wait_for_both_sides_and_are_never_lost():
    waiting, table = WaitingInputs(), statistics.empty(3, torch.device("cpu"))
    first, second = slice(0, 1), slice(1, 3)
    entries = [entries_of(torch.full((4,), value)) for value in (1.0, 2.0, 3.0)]
    waiting.note(table, second, ["query"], entries[0])
    assert waiting.take(second) == []
    waiting.note(table, second, ["query"], entries[1])
    assert table[ROW["query_input"]].tolist() == [0, 4, 4]
    waiting.note(table, first, ["query", "key"], entries[2])
    assert waiting.take(first) == [entries[2]] * 2
    waiting.add_all(table)
    waiting.add_all(table)
    assert table[ROW["query_input"]].tolist() == [0, 12, 12]
    assert not table[ROW["key_input"]].any()


class Shared(dict):
    """Entries that another thread takes as soon as one has looked if they are there."""

    def __contains__(self, name):
        found = super().__contains__(name)
        self.pop(name, None)
        return found

    def __iter__(self):
        names = list(super().__iter__())
        for name in names[1:]:
            self.pop(name)
        return iter(names)


def test_threads_that_share_a_layer_take_entries_but_once():
    """As the replicas of nn.DataParallel do."""
    waiting, table = WaitingInputs(), statistics.empty(3, torch.device("cpu"))
    heads, entries = slice(0, 3), entries_of(torch.ones(4))
    waiting._entries = Shared()
    waiting.note(table, heads, ["query", "key"], entries)
    waiting.note(table, heads, ["query"], entries)
    assert table[ROW["query_inputs"]].tolist() == [4, 4, 4]
    assert waiting.take(heads) == [entries] * 2
    assert waiting.take(heads) == []
    waiting.note(table, heads, ["query", "key"], entries)
    waiting.add_all(table)
    assert table[ROW["query_inputs"]].tolist() == [8, 8, 8]
    assert not table[ROW["key_inputs"]].any()
