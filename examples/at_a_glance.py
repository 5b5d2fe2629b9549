"""Train a byte-level GPT-2 of twelve layers with eight heads, and draw the picture of the README.

    python examples/at_a_glance.py --picture examples/at_a_glance.png     # some minutes
    python examples/at_a_glance.py --layers 32 --width 64 --steps 60      # wide pictures, quickly

The text is the source of Python's standard library; the learning rate is one at which attention becomes sharp.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import betahook
from betahook.integrations.tensorboard import TensorBoardWriter
from language_model import BYTES, Windows, positive, read_library


def build(layers: int, heads: int, width: int, length: int) -> GPT2LMHeadModel:
    """A GPT-2 without dropout."""
    sizes = dict(n_layer=layers, n_head=heads, n_embd=width, n_positions=length, vocab_size=BYTES)
    without = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None)
    return GPT2LMHeadModel(GPT2Config(**sizes, **without))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=positive, default=12)
    parser.add_argument("--heads", type=positive, default=8)
    parser.add_argument("--width", type=positive, default=128)
    parser.add_argument("--length", type=positive, default=128, help="bytes in a window")
    parser.add_argument("--batch", type=positive, default=8)
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--every", type=positive, default=10, help="steps between two logs")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--controller", default="default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/at_a_glance"), help="folder of the TensorBoard run")
    parser.add_argument("--picture", type=Path, help="file for the last picture")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)  # the rounding of sums decides such a run, and the number of threads the rounding
    torch.manual_seed(options.seed)
    model = build(options.layers, options.heads, options.width, options.length)
    windows = Windows(read_library()[0], options.length).windows
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    picture = betahook.Picture()
    with (
        betahook.attach(model, controller=options.controller) as hook,
        TensorBoardWriter(str(options.output)) as writer,
    ):
        for step in range(1, options.steps + 1):
            ids = windows[torch.randint(len(windows), (options.batch,))].long()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            warmup.step()
            optimizer.zero_grad()
            hook.step()
            if step % options.every == 0 or step == options.steps:
                writer.write(hook, step, loss=loss.item())
                picture.add(hook.findings(), step)
        print(hook.findings())
        if options.picture is not None:
            options.picture.write_bytes(picture.png())


if __name__ == "__main__":
    main()
