"""Processes of their own that start with everything imported, and ranks among them, over gloo."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

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
