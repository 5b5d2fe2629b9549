"""A folder saved to again and again by a process that is killed; `python -m support.overwritten`, in tests/, does 30.

The truth is in the weights: all entries of all of them, and beta of every layer, are the number of the save.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import LlamaConfig, LlamaForCausalLM

import betahook
from betahook import checkpoint
from betahook.cli import main as command
from support.processes import processes

REFUSED = "two saves, refused"
SIZE = dict(hidden_size=128, num_attention_heads=4, num_hidden_layers=6, intermediate_size=512, vocab_size=4096)


def save_forever(folder: Path) -> None:
    """Save a model whose weights and betas are the number of the save, in shards, until the process is killed."""
    torch.set_num_threads(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZE))
    hook = betahook.attach(model, controller="monitor")
    for number in range(1, 10_000):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        for layer in hook.layers.values():
            layer.beta = number
        model.save_pretrained(folder, max_shard_size="2MB")


def kill_a_save(folder: Path, seconds: float) -> None:
    """Kill the process so long after its first save."""
    process = processes().Process(target=save_forever, args=(folder,))
    process.start()
    while process.is_alive() and not list(folder.glob("*.index.json")):
        time.sleep(1e-3)
    process.join(seconds)
    assert process.is_alive()
    process.kill()
    process.join()


def outcome(folder: Path) -> str:
    """Say what a folder holds and what `restore` and the command make of it."""
    inspected = command(["inspect", str(folder)]) == 0
    try:
        model = LlamaForCausalLM.from_pretrained(folder)
    except (OSError, ValueError, SafetensorError):
        return "refused by transformers"
    numbers = {float(x) for parameter in model.parameters() for x in parameter.detach().unique()}
    try:
        with betahook.restore(model, folder) as hook:
            numbers |= {float(hook.layers[name].beta) for name in hook.layers}
            agreed = len(numbers) == 1 and inspected
            return "one save" if agreed else f"SILENT: {sorted(numbers)} restored, inspect said {inspected}"
    except ValueError as error:
        said = "its beta belongs to other weights" in str(error) and not inspected
        numbers.add(float(betahook.checkpoint.read(folder).state["beta"][0]))
        return REFUSED if said and len(numbers) > 1 else f"UNCLEAR: {sorted(numbers)} refused, {error}"


def main(points: int = 30, seed: int = 0, refused: int = 0) -> Counter[str]:
    """Kill that many processes while they save; how often each outcome came.

    How many are hit between two files depends on the machine: up to three times as many are killed, until `refused` of
    them were.
    """
    moments, outcomes = random.Random(seed), Counter[str]()
    for point in range(3 * points):
        if point >= points and outcomes[REFUSED] >= refused:
            break
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name, "model")
            kill_a_save(folder, moments.uniform(0, 1))
            outcomes[outcome(folder)] += 1
            assert (folder / checkpoint.FILE).exists()
            print(point, dict(outcomes), flush=True)
    return outcomes


if __name__ == "__main__":
    main()
