"""Train small GPT-2s until each condition of attention can be seen, and draw the pictures of docs/GALLERY.md.

    python examples/gallery.py --output docs/gallery          # all of them, some minutes
    python examples/gallery.py --only flat sink --steps 50    # some, quickly

The text is the source of Python's standard library. What is wrong in a run is one line of `RUNS`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

import betahook
from at_a_glance import build
from language_model import Windows, positive, read_library

LAYERS, HEADS, WIDTH, LENGTH, BATCH = 6, 6, 96, 64, 8


@dataclass(frozen=True)
class Run:
    """One picture.

    Attributes:
        learning_rate: of AdamW, without warm-up.
        controller: of betahook.
        prepare: changes the fresh model.
        label: bytes `[batch, length]` to what is to be predicted at each.
        steps: of training.
    """

    learning_rate: float = 1e-3
    controller: str = "monitor"
    prepare: Callable[[GPT2LMHeadModel], None] = lambda model: None
    label: Callable[[Tensor], Tensor] = lambda ids: ids
    steps: int = 150


def silence_heads(model: GPT2LMHeadModel) -> None:
    """Set W_q and W_k of four heads to zero: neither has a gradient then, so they stay there."""
    d_k = WIDTH // HEADS
    for layer, head in ((1, 0), (1, 3), (3, 2), (4, 5)):
        with torch.no_grad():
            for start in (0, WIDTH):  # q, then k, in the columns of the fused projection
                first = start + head * d_k
                model.transformer.h[layer].attn.c_attn.weight[:, first : first + d_k] = 0


def sharpen(factor: float) -> Callable[[GPT2LMHeadModel], None]:
    """Start with larger W_q and W_k."""

    def prepare(model: GPT2LMHeadModel) -> None:
        with torch.no_grad():
            for block in model.transformer.h:
                block.attn.c_attn.weight[:, : 2 * WIDTH] *= factor

    return prepare


RUNS = {
    "flat": Run(learning_rate=1e-5),
    "healthy": Run(steps=250),
    "sharp": Run(prepare=sharpen(14.0)),
    "one-key": Run(prepare=sharpen(18.0)),
    "exploding": Run(learning_rate=1e-2),
    "sink": Run(label=lambda ids: ids[:, :1].expand_as(ids), steps=200),
    "dead-head": Run(prepare=silence_heads, steps=250),
    "rescued": Run(prepare=sharpen(18.0), controller="default", steps=250),
}


def train(run: Run, steps: int, every: int, seed: int) -> tuple[bytes, betahook.Findings, float]:
    """Train a model; return its picture, its findings and the mean loss of the last quarter."""
    torch.manual_seed(seed)
    model = build(LAYERS, HEADS, WIDTH, LENGTH)
    run.prepare(model)
    windows = Windows(read_library()[0], LENGTH).windows
    optimizer = torch.optim.AdamW(model.parameters(), run.learning_rate)
    picture, losses = betahook.Picture(), []
    with betahook.attach(model, controller=run.controller) as hook:
        for step in range(1, steps + 1):
            ids = windows[torch.randint(len(windows), (BATCH,))].long()
            loss = model(input_ids=ids, labels=run.label(ids)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            hook.step()
            losses.append(loss.item())
            if step % every == 0 or step == steps:
                picture.add(hook.findings(), step)
        found = hook.findings()
    last = losses[-max(1, steps // 4) :]
    return picture.png(), found, sum(last) / len(last)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN", help=", ".join(RUNS))
    parser.add_argument("--steps", type=positive, help="fewer or more than in RUNS")
    parser.add_argument("--every", type=positive, default=10, help="steps between two looks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/gallery"), help="folder for the pictures")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the rounding of sums decides such a run, and the number of threads the rounding
    for name in options.only:
        picture, found, loss = train(RUNS[name], options.steps or RUNS[name].steps, options.every, options.seed)
        (options.output / f"{name}.png").write_bytes(picture)
        print(f"{name:10} {len(picture) / 1000:3.0f} kB   loss {loss:.3f}   {found.summary}", flush=True)


if __name__ == "__main__":
    main()
