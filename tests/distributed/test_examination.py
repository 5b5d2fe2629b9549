"""One process of several examines its model alone; with weights in shards, all do together."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import betahook
from support.models import build, inputs
from support.processes import run_ranks

pytestmark = pytest.mark.oldest_skips("FSDP 2 does not run on a CPU")


def rows(rank):
    return {name: x[rank : rank + 1] for name, x in inputs("llama", padded=False).items()}


def run(rank, folder):
    found = {}
    if rank == 0:  # the other one goes on, and comes to the next collective
        found["alone"] = betahook.examine(build("llama"), [rows(0)]).metrics
    model = build("llama")
    fully_shard(model)
    found["shards"] = betahook.examine(model, [rows(rank)]).metrics
    torch.save(found, f"{folder}/{rank}")


def test_examining(tmp_path):
    run_ranks(run, 2, str(tmp_path), str(tmp_path))
    first, second = (torch.load(tmp_path / str(rank)) for rank in range(2))
    assert first["alone"] == pytest.approx(betahook.examine(build("llama"), [rows(0)]).metrics)
    together = betahook.examine(build("llama"), [rows(0), rows(1)]).metrics
    for found in (first, second):
        assert {key: found["shards"][key] for key in found["shards"] if key.startswith("score_std")} == pytest.approx(
            {key: value for key, value in together.items() if key.startswith("score_std")}
        )
