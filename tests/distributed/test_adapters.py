"""Adapters that FSDP 2 divides over two ranks while their frozen base stays whole."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard

import betahook
from support.models import build, inputs
from support.processes import run_ranks

pytestmark = [
    pytest.mark.oldest_skips("FSDP 2 does not run on a CPU"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

NAME = "base_model.model.model.layers.0.self_attn"


def train(rank, dora):
    torch.manual_seed(0)
    model = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj", "k_proj"], r=4, use_dora=dora))
    frozen = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        if rank is not None:
            for layer in model.base_model.model.model.layers:
                fully_shard(layer, ignored_params=frozen)
            fully_shard(model, ignored_params=frozen)
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
        for _ in range(2):
            model(**inputs("llama", padded=False)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            hook.step()
        return None if rank else hook.metrics()  # which one rank may ask for alone


def run(rank, folder):
    found = [train(rank, dora) for dora in (False, True)]
    if rank == 0:
        torch.save(found, f"{folder}/metrics")


def test_one_rank_reports_weights_whose_adapter_alone_is_sharded(tmp_path):
    run_ranks(run, 2, str(tmp_path), str(tmp_path))
    for dora, metrics in enumerate(torch.load(tmp_path / "metrics")):
        assert metrics == pytest.approx(train(None, bool(dora)), rel=1e-4, abs=1e-5)
