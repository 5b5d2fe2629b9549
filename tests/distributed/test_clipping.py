"""Clipping on two ranks: what FSDP 2 or tensor parallelism divides is scaled as one process scales it."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import betahook
from support.attention import LENGTH, WIDTH, FusedAttention
from support.models import build, inputs
from support.processes import run_ranks, shard, tensor_parallel

pytestmark = pytest.mark.oldest_skips("FSDP 2 does not run on a CPU")

THRESHOLD = 1.0
STEPS = 3


def rows(start, stop):
    return {name: x[start:stop] for name, x in inputs("llama", padded=False).items()}


def train(network, hook, batch):
    """Steps of SGD; returns the largest logit of every forward."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for _ in range(STEPS):
        network(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hook.step()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def weights(model):
    return {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def of_shards(rank, family, by_layer):
    model = build(family)
    hook = betahook.attach(model, controller=betahook.Clip(THRESHOLD))
    shard(model, by_layer=by_layer)
    train(model, hook, rows(rank, rank + 1))
    hook.detach()
    return weights(model)


def of_heads(rank, folder):
    """Two of the four heads on each rank."""
    model = tensor_parallel(rank, folder)
    with betahook.attach(model, controller=betahook.Clip(THRESHOLD)) as hook:
        train(model, hook, rows(0, 2))
        return weights(model)


def refused(rank):
    """FSDP 1, whose weights are elsewhere outside the forward."""
    model = build("llama")
    hook = betahook.attach(model, controller=betahook.Clip(THRESHOLD))
    network = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    network(**rows(0, 2)).loss.backward()
    with pytest.raises(betahook.UnsupportedModelError, match=r"cannot clip .*(FSDP 1|sharded outside the forward)"):
        hook.step()
    hook.detach()


class FromIterator(nn.Sequential):
    def forward(self, batches):
        return super().forward(next(batches))


def does_not_run_again(rank):
    """On the first rank alone; the other one does not wait for its answers."""
    torch.manual_seed(0)
    model, batches = FromIterator(FusedAttention()), [torch.randn(2, LENGTH, WIDTH) for _ in range(1 + 9 * rank)]
    with betahook.attach(model, controller=betahook.Clip(THRESHOLD)) as hook:
        model(iter(batches)).sum().backward()
        found = "on another rank" if rank else "StopIteration"
        with pytest.raises(betahook.UnsupportedModelError, match=rf"FromIterator does not run again .*\({found}"):
            hook.step()


def run(rank, folder):
    found = {f"{family} {by_layer}": of_shards(rank, family, by_layer) for family, by_layer in SHARDED}
    found["heads"] = of_heads(rank, f"{folder}/heads")
    refused(rank)
    does_not_run_again(rank)
    torch.save(found, f"{folder}/{rank}")


SHARDED = [("llama", True), ("llama", False), ("gpt2", False), ("qwen3", False)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(run, 2, str(folder), str(folder))
    return [torch.load(folder / str(rank)) for rank in range(2)]


@pytest.mark.parametrize("scenario", [*(f"{family} {by_layer}" for family, by_layer in SHARDED), "heads"])
def test_ranks_clip_what_one_process_does_on_the_joined_batch(results, scenario):
    family = scenario.split()[0]
    model = build(family if family != "heads" else "llama")
    with betahook.attach(model, controller=betahook.Clip(THRESHOLD)) as hook:
        train(model, hook, rows(0, 2))
        assert sum(value for name, value in hook.metrics().items() if name.startswith("clips/")) > STEPS
    for result in results:
        for name, expected in weights(model).items():
            torch.testing.assert_close(result[scenario][name], expected, rtol=1e-4, atol=1e-5)
