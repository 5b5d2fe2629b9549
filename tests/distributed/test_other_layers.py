"""Ranks with other layers than the first one has: none pools, and all say why."""

import pytest
import torch
from torch import nn

import betahook
from support.attention import HEADS, LENGTH, WIDTH, FusedAttention
from support.processes import run_ranks

LAYERS = {
    "other names": [{"0", "1"}, {"2", "3"}],
    "other numbers": [{"0"}, {"1", "2", "3"}],
    "the same": [{"0", "1"}, {"0", "1"}],
}
"""The layers that each rank keeps of a model, as stages of a pipeline do."""


def run(rank, folder):
    said = {}
    for case, kept in LAYERS.items():
        model = nn.Sequential()
        for name in sorted(kept[rank]):
            model.add_module(name, FusedAttention())
        hook = betahook.attach(model, controller="monitor")
        model(torch.randn(2, LENGTH, WIDTH)).sum().backward()
        try:
            hook.step()
            said[case] = sorted(hook.layers) if hook.metrics() else []
        except RuntimeError as error:
            said[case] = str(error)
            with pytest.raises(RuntimeError, match="ranks differ"):
                hook.step()
            assert hook.steps == 0
    torch.save(said, f"{folder}/{rank}")


def test_ranks_with_other_layers_are_refused(tmp_path):
    run_ranks(run, 2, str(tmp_path), str(tmp_path))
    first, second = (torch.load(tmp_path / str(rank)) for rank in range(2))
    assert first["the same"] == second["the same"] == ["0", "1"]
    size = f"{HEADS} heads of {WIDTH // HEADS}"
    for said, numbers in ((first, ("2, from 0", "1, from 0")), (second, ("2, from 2", "3, from 1"))):
        for case, number in zip(("other names", "other numbers"), numbers, strict=True):
            assert f"ranks differ, and this one has {number}: {size} to " in said[case]
            assert said[case].endswith("or train each model in a job of its own")
