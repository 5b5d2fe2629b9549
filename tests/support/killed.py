"""Training runs that are killed, each in a process of its own.

`cd tests && python -m support.killed` kills 20 at random moments.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

import betahook
from betahook.checkpoint import file
from betahook.integrations.trainer import BetaHookCallback, last_checkpoint
from support.processes import processes
from support.trainer import make_trainer

STEPS, SAVE_STEPS = 8, 2
Bits = list[tuple[str, Tensor]]


def train(folder: Path, prepare: Callable[[], None] | None = None) -> None:
    """Train, resuming where there is something to resume; saves everything that a run ends with to `end.pt`."""
    gc.freeze()  # the Trainer collects garbage, which need not pass over all that was imported before the fork
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if prepare is not None:
        prepare()
    rules = [betahook.Search(window=1, warmup=0, rise=False, opening=0.3, largest=1.0), betahook.Cap(2.0)]
    callback = BetaHookCallback(rules, on_end="keep")
    settings = dict(save_strategy="steps", save_steps=SAVE_STEPS, save_total_limit=1, max_steps=STEPS)
    trainer = make_trainer(folder / "run", callback, **settings)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder / "run") is not None)
    state = callback.hook.state_dict()
    torch.save([trainer.model.state_dict(), trainer.optimizer.state_dict(), state], folder / "end.pt")


def in_process(*arguments: Any) -> int | None:
    """`train(*arguments)` in a process; its exit code, negative where a signal ended it."""
    process = processes().Process(target=train, args=arguments)
    process.start()
    process.join(120)
    process.kill()
    process.join()
    return process.exitcode


def kill_after(step: int, seconds: float, folder: Path) -> bool:
    """Kill a run so long after the folder for the checkpoint of a step appears; whether it was still running."""
    process = processes().Process(target=train, args=(folder,))
    process.start()
    while process.is_alive() and not (folder / f"run/checkpoint-{step}").exists():
        time.sleep(1e-3)
    process.join(seconds)
    process.kill()
    process.join()
    return bool(process.exitcode == -signal.SIGKILL)


def end(folder: Path) -> Bits:
    """Every tensor and number that a run ended with, by its place."""
    return flatten(torch.load(folder / "end.pt"))


def flatten(value: Any, place: str = "") -> Bits:
    """The tensors and numbers in nested lists and dictionaries."""
    if isinstance(value, dict):
        return [bits for key, part in value.items() for bits in flatten(part, f"{place}/{key}")]
    if isinstance(value, list | tuple):
        return [bits for index, part in enumerate(value) for bits in flatten(part, f"{place}/{index}")]
    if isinstance(value, int | float):
        return [(place, torch.tensor(value, dtype=torch.float64))]
    return [(place, value)] if isinstance(value, Tensor) else []


def differences(one: Bits, other: Bits) -> list[str]:
    """Where two runs ended with different bits."""
    assert [name for name, _ in one] == [name for name, _ in other]
    return [
        name
        for (name, a), (_, b) in zip(one, other, strict=True)
        if a.dtype != b.dtype or not torch.equal(a.nan_to_num(nan=-1.0), b.nan_to_num(nan=-1.0))
    ]


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_step(step: int, owner: Any, method: str) -> None:
    """Let a method of the Trainer kill the process when it is called in a step."""
    original = getattr(owner, method)

    def replaced(self: Trainer, *arguments: Any, **options: Any) -> Any:
        return die() if self.state.global_step == step else original(self, *arguments, **options)

    setattr(owner, method, replaced)


def before_the_weights() -> None:
    die_at_step(4, Trainer, "save_model")


def before_the_optimizer() -> None:
    die_at_step(4, Trainer, "_save_optimizer_and_scheduler")


def before_the_random_state() -> None:
    die_at_step(4, Trainer, "_save_rng_state")


def within_the_state_of_the_trainer() -> None:
    def half(self: Any, path: str) -> None:
        Path(path).write_text('{"global_step": 2,')
        die()

    sys.modules["transformers.trainer_callback"].TrainerState.save_to_json = half


def within_the_file_of_betahook() -> None:
    file.os = type("os", (), {**vars(os), "replace": die})


POINTS = [
    before_the_weights,
    before_the_optimizer,
    before_the_random_state,
    within_the_state_of_the_trainer,
    within_the_file_of_betahook,
]


def main(points: int = 20) -> int:
    """Kill that many runs around their saves; the number of those that were resumed to the same bits."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        assert in_process(root / "whole") == 0
        expected = end(root / "whole")
        print(f"a whole run ends with {len(expected)} tensors and numbers")
        moments, tries, recovered, half_written = random.Random(0), 0, [], 0
        while len(recovered) < points:
            tries += 1
            folder = root / str(tries)
            step, seconds = moments.randrange(SAVE_STEPS, STEPS, SAVE_STEPS), moments.uniform(0, 0.3)
            killed = kill_after(step, seconds, folder)
            newest = max((folder / "run").glob("checkpoint-*"), key=lambda f: int(f.name[11:])).name
            whole = Path(last_checkpoint(folder / "run") or "nothing").name
            if not killed or whole == f"checkpoint-{STEPS}":
                continue  # it had ended; the Trainer would make one step more
            half_written += newest != whole
            assert in_process(folder) == 0
            recovered.append(not differences(expected, end(folder)))
            said = f"killed {seconds:.3f} s after the begin of checkpoint-{step}: newest {newest}, resumed from {whole}"
            print(f"{said}, same bits: {recovered[-1]}", flush=True)
        print(f"{sum(recovered)} of {points} recovered; {half_written} had a half-written newest folder")
        return sum(recovered)


if __name__ == "__main__":
    main()
