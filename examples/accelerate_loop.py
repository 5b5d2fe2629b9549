"""betahook in a hand-written, resumable Accelerate loop: a byte-level GPT-2, on one process or many.

    python examples/accelerate_loop.py
    torchrun --standalone --nproc_per_node 2 examples/accelerate_loop.py --cpu  # accelerate launch --cpu starts one
    python examples/accelerate_loop.py --resume        # continues from the last saved state

Statistics are pooled over the processes and beta is the same on all; the main one logs to TensorBoard.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

import betahook
from language_model import Windows, build, positive, read_library

STATE = "state"


def train(options: argparse.Namespace) -> None:
    """Train one run, or the rest of one, and save the plain model in the folder `model`."""
    set_seed(options.seed)
    accelerator = Accelerator(
        cpu=options.cpu,
        gradient_accumulation_steps=2,
        log_with="tensorboard",
        project_dir=options.output,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    accelerator.init_trackers("logs")
    if accelerator.num_processes > 1:
        accelerator.print(f"processes: {accelerator.num_processes}")
    model = build("gpt2", options.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = DataLoader(Windows(read_library()[0], options.length), batch_size=8, shuffle=True, drop_last=True)

    hook = betahook.attach(model)  # before prepare(), which wraps the model
    wrapped, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    accelerator.register_for_checkpointing(hook)

    step = 0
    if options.resume:
        accelerator.load_state(str(options.output / STATE))
        step = hook.steps
        if step >= options.steps:
            raise SystemExit(
                f"{options.output / STATE} is of step {step} already: give more than --steps {options.steps}"
            )
        accelerator.print(f"goes on after step {step}, from {options.output / STATE}")
    each = accelerator.gradient_accumulation_steps
    steps_of_a_pass = math.ceil(len(batches) / each)  # the last batches of a pass make a step, however many
    while step < options.steps:
        passes, done = divmod(step, steps_of_a_pass)
        batches.set_epoch(passes)  # in another order each time
        for batch in accelerator.skip_first_batches(batches, done * each) if done else batches:
            with accelerator.accumulate(wrapped):
                loss = wrapped(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            hook.step(accelerator.scaler)  # the scaler is None except in float16
            step += 1
            if step % options.log_every == 0:
                mean = accelerator.gather(loss.detach()).mean().item()
                accelerator.print(f"step {step}: loss {mean:.4f}")
                accelerator.log({"loss": mean, **hook.metrics()}, step)
            if step % options.save_every == 0:
                accelerator.save_state(str(options.output / STATE))
            if step == options.steps:
                break

    accelerator.wait_for_everyone()
    betahook.fold(model)  # on every process: the model is the same on all
    if accelerator.is_main_process:
        model.save_pretrained(options.output / "model")
    accelerator.end_training()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=200, help="optimizer steps, of two batches each")
    parser.add_argument("--length", type=positive, default=64, help="bytes in a window")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=positive, default=10)
    parser.add_argument("--save-every", type=positive, default=50)
    parser.add_argument("--resume", action="store_true", help="go on from the state that was saved last")
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    parser.add_argument("--output", type=Path, default=Path("runs/accelerate"))
    options = parser.parse_args(arguments)
    if options.resume and not (options.output / STATE).is_dir():
        parser.error(f"--resume: there is no {options.output / STATE}; a run saves it every --save-every steps")
    train(options)
    print(f"curves: {sys.executable} -m tensorboard.main --logdir {options.output}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    main()
