"""Processes of their own that start with everything imported, and ranks among them, over gloo."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM

from support.models import build

IMPORTED = ["betahook.integrations.trainer", "transformers.trainer", "transformers.models.llama.modeling_llama"]
IMPORTED += ["tensorboard.backend.event_processing.event_accumulator", "torch.utils.tensorboard", "accelerate.utils"]
IMPORTED += ["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"]


def processes() -> Any:
    """The context of processes that are forked from one which has imported once for all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def run_ranks(function: Callable[..., None], world: int, folder: str, *arguments: Any, limit: float = 120) -> None:
    """Call `function(rank, *arguments)` on `world` ranks; raises what a rank raises, or TimeoutError.

    Ranks that have not ended after `limit` seconds, as they wait for one another, are killed.
    """
    processes()
    ranks = mp.start_processes(
        _rank, (function, world, folder, arguments), nprocs=world, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + limit
    try:
        while not ranks.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{world} ranks did not end in {limit} seconds")
    finally:
        for process in ranks.processes:
            process.kill()


def _rank(rank: int, function: Callable[..., None], world: int, folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    function(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def shard(model: nn.Module, *, by_layer: bool = True) -> nn.Module:
    """A Llama in shards of FSDP 2, each of its layers by itself or all of it at once."""
    for layer in model.model.layers if by_layer else ():
        fully_shard(layer)
    return fully_shard(model)


def tensor_parallel(rank: int, folder: str) -> nn.Module:
    """A Llama whose heads are divided over two ranks, two of four on each, in training mode."""
    from transformers.distributed import DistributedConfig  # not in the oldest version

    if rank == 0:
        build("llama").save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(tp_size=2, tp_plan="auto")
    return LlamaForCausalLM.from_pretrained(folder, distributed_config=config).train()
