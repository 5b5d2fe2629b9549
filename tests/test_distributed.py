"""Two processes against one on the joined batch."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import betahook
from models import build, inputs
from processes import run_ranks

STEPS = 4


def train(rank, folder):
    """Train on one row of the batch per rank, or on both without ranks; save what the hook says after every step."""
    batch = inputs("llama", padded=False)
    model = build("llama")
    hook = betahook.attach(
        model, controller=[betahook.Search(window=1, warmup=0, opening=0.3, largest=1.0), betahook.Cap(1.5)]
    )
    network = model
    if rank is not None:
        batch = {name: x[rank : rank + 1] for name, x in batch.items()}
        network = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = []
    for _ in range(STEPS):
        network(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hook.step()
        said.append((hook.metrics(), hook.state_dict()["beta"]))
    torch.save(said, f"{folder}/said-{rank}")


def test_two_ranks_agree_with_each_other_and_with_one_process(tmp_path):
    run_ranks(train, 2, str(tmp_path), str(tmp_path))
    train(None, str(tmp_path))
    first, second, alone = (torch.load(tmp_path / f"said-{rank}") for rank in (0, 1, None))
    for (metrics, beta), (metrics_other, beta_other), (metrics_alone, _) in zip(first, second, alone, strict=True):
        assert torch.equal(beta, beta_other)
        for key, value in metrics_alone.items():
            if not key.startswith("weight"):
                assert metrics[key] == metrics_other[key], key
            # A prediction from the moments of each forward, hence of half the batch here.
            tolerance = 5e-2 if key.startswith("independent_std") else 1e-5
            assert metrics[key] == pytest.approx(value, rel=tolerance, abs=1e-5), key
