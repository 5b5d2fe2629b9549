"""Layouts of fused projections: which rows they pick."""

from types import SimpleNamespace

import pytest
import torch

from betahook.models import layouts

HEADS, HEAD_DIM = 4, 2


def picked(selections, rows):
    """The first row of each head that is picked for q, and for k."""
    weight = torch.arange(rows)[:, None]
    chosen = [select(weight).squeeze(-1) for select in selections]
    assert all((x.diff(dim=1) == 1).all() and x.shape[1] == HEAD_DIM for x in chosen)
    return [x[:, 0].tolist() for x in chosen]


@pytest.mark.parametrize(
    ("layout", "rows", "query", "key"),
    [
        (layouts.stacked, 24, [0, 2, 4, 6], [8, 10, 12, 14]),
        (layouts.stacked, 16, [0, 2, 4, 6], [8, 10]),
        (layouts.stacked, 12, [0, 2, 4, 6], [8]),
        (layouts.usual, 24, [0, 2, 4, 6], [8, 10, 12, 14]),
        (layouts.head_by_head, 24, [0, 6, 12, 18], [2, 8, 14, 20]),
        (layouts.head_by_head, 28, [0, 7, 14, 21], [2, 9, 16, 23]),
        (lambda module, *sizes: layouts.grouped(2, *sizes), 16, [0, 2, 8, 10], [4, 12]),
        (lambda module, *sizes: layouts.grouped(1, *sizes), 12, [0, 2, 4, 6], [8]),
    ],
)
def test_rows_of_q_and_k(layout, rows, query, key):
    assert picked(layout(None, HEADS, HEAD_DIM, rows), rows) == [query, key]


@pytest.mark.parametrize("says", [{"head_first": True}, {"val_dim": 3}])
def test_a_module_says_that_its_rows_go_head_by_head(says):
    assert picked(layouts.usual(SimpleNamespace(**says), HEADS, HEAD_DIM, 28), 28)[0] == [0, 7, 14, 21]
    assert layouts.usual(SimpleNamespace(head_first=False), HEADS, HEAD_DIM, 24) is not None


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        *[(layouts.stacked, rows) for rows in (8, 10, 25)],
        (lambda module, *sizes: layouts.grouped(2, *sizes), 24),
        *[(layouts.head_by_head, rows) for rows in (8, 16, 25)],
    ],
)
def test_a_weight_of_another_size_does_not_fit(layout, rows):
    assert layout(None, HEADS, HEAD_DIM, rows) is None
