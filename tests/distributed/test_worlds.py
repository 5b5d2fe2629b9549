"""Ranks that differ in the model's own beta, and runs that resume in a world of another size."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import betahook
from betahook import checkpoint
from support.attention import HEADS, WIDTH, Block
from support.models import build, inputs
from support.processes import run_ranks

STEPS = 4


class LengthAttention(Block):
    """Scaled by the logarithm of the length, as some do for lengths beyond those of training."""

    def mix(self, q, k, v):
        return (q @ k.mT * (math.log(q.shape[2]) / self.head_dim)).softmax(-1) @ v


def by_hand(layer, x, beta):
    q, k, v = (layer.split(projection(x)) for projection in (layer.q_proj, layer.k_proj, layer.v_proj))
    return ((beta * (q @ k.mT)).softmax(-1) @ v).transpose(1, 2).flatten(2)


def scaled_apart(rank, folder):
    """Each rank has batches of its own length: what acts, and what is said to act, on every rank and step."""
    said = []
    for controller in ("monitor", betahook.Variance(smoothing=0.0)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), LengthAttention())
        x = torch.randn(2, (12, 48)[rank], WIDTH, generator=torch.Generator().manual_seed(rank))
        own = math.log(x.shape[1]) / (WIDTH // HEADS)
        hook = betahook.attach(model, controller=controller)
        layer, network = hook.layers["1"], DistributedDataParallel(model)
        for _ in range(STEPS):
            network(x).square().mean().backward()
            hook.step()
            beta = own if controller == "monitor" else layer.beta
            torch.testing.assert_close(model(x), by_hand(model[1], model[0](x), beta), rtol=1e-5, atol=1e-6)
            said.append((layer.beta, layer.beta_default))
        assert layer.refusal is None
    torch.save(said, f"{folder}/said-{rank}")


@pytest.mark.slow
def test_ranks_with_defaults_of_their_own(tmp_path):
    run_ranks(scaled_apart, 2, str(tmp_path), str(tmp_path))
    first, second = (torch.load(tmp_path / f"said-{rank}") for rank in range(2))
    assert first == second  # each rank says the same, though another beta acts while none is set
    defaults = [math.log(length) / (WIDTH // HEADS) for length in (12, 48)]
    assert all(defaults[0] < own < defaults[1] for _, own in first)
    assert all(beta == own for beta, own in first[:STEPS])
    assert any(beta != own for beta, own in first[STEPS:])


def controllers():
    return [betahook.Search(window=1, warmup=0, rise=False, opening=0.3, largest=1.0), betahook.Cap(1.5)]


def go_on(rank, folder, begins):
    """Train on an equal share of the four rows of each batch; beta and metrics of every step."""
    world, model = dist.get_world_size() if dist.is_initialized() else 1, build("llama")
    if not begins:
        model = type(model).from_pretrained(folder, attn_implementation="eager").train()
        hook = betahook.restore(model, folder, controller=controllers())
    else:
        hook = betahook.attach(model, controller=controllers())
    share, rows = slice(rank * 4 // world, (rank + 1) * 4 // world), inputs("llama", padded=False)
    batch = {name: torch.cat([x, x.flip(1)])[share] for name, x in rows.items()}
    network = model if world == 1 else DistributedDataParallel(model)
    optimizer, said = torch.optim.SGD(network.parameters(), lr=0.1), []
    for _ in range(STEPS):
        network(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hook.step()
        said.append((hook.state_dict()["beta"].tolist(), hook.metrics()))
    if begins and rank == 0:
        model.save_pretrained(folder)
        checkpoint.read(folder).check_files()
    torch.save(said, f"{folder}/{'begun' if begins else 'resumed'}-{world}-{rank}")


@pytest.mark.slow
def test_a_run_resumes_in_a_world_of_another_size(tmp_path):
    run_ranks(go_on, 2, str(tmp_path), str(tmp_path), True)
    go_on(0, tmp_path, False)
    alone = torch.load(tmp_path / "resumed-1-0")
    for world in (2, 4):
        (tmp_path / "store").unlink(missing_ok=True)
        run_ranks(go_on, world, str(tmp_path), str(tmp_path), False)
        first, *others = (torch.load(tmp_path / f"resumed-{world}-{rank}") for rank in range(world))
        assert all(other == first for other in others)
        for (beta, metrics), (beta_alone, metrics_alone) in zip(first, alone, strict=True):
            assert beta == pytest.approx(beta_alone, rel=1e-5)
            assert metrics == pytest.approx(metrics_alone, rel=1e-4, abs=1e-5, nan_ok=True)
    begun = torch.load(tmp_path / "begun-2-0")
    assert len({tuple(beta) for beta, _ in (*begun, *alone)}) > STEPS  # beta goes on


def save_at_once(rank, folder):
    """As a loop does that does not tell ranks apart."""
    model = build("llama")
    with betahook.attach(model) as hook:
        model(**inputs("llama"))
        for layer in hook.layers.values():
            layer.beta = 3 * layer.beta_default
        for _ in range(40):
            dist.barrier()
            model.save_pretrained(folder)


@pytest.mark.slow
def test_all_ranks_may_save_to_one_folder(tmp_path):
    run_ranks(save_at_once, 2, str(tmp_path), str(tmp_path / "saved"))
    assert checkpoint.read(tmp_path / "saved").state["beta"].tolist() == pytest.approx(8 * [3 * 8**-0.5])
    assert [file.name for file in (tmp_path / "saved").glob("betahook.*")] == [checkpoint.FILE]
