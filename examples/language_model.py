"""Train a byte-level GPT-2, Llama or Qwen3 on the standard library's source, with 1/sqrt(d_k) and with betahook.

    python examples/language_model.py                          # 400 steps at learning rate 1e-2, a few minutes
    python examples/language_model.py --model llama --learning-rates 1e-3 3e-2 --seeds 0 1 2

Both runs of a pair see the same batches and start from the same weights; the validation files are never trained on.
A long comparison may be interrupted: with `--save-steps`, the same command goes on from the last checkpoints, and
another one needs another `--output`.

    python examples/language_model.py --layers 6 --width 384 --length 32 --bf16 --attention eager \
        --steps 5000 --save-steps 500 --learning-rates 3e-4
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME

from betahook.integrations.trainer import BetaHookCallback, last_checkpoint

BYTES, HEAD_DIM = 256, 32

MAKES_A_RUN = ("model", "steps", "length", "width", "layers", "bf16", "attention")
"""Options that a checkpoint depends on, besides those in the name of its folder."""


class Windows(Dataset[dict[str, Tensor]]):
    """Non-overlapping windows of a text, as byte values `[length]`."""

    def __init__(self, text: bytes, length: int) -> None:
        values = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.windows = values[: len(values) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.windows[index].long()
        return {"input_ids": ids, "labels": ids}


def read_library() -> tuple[bytes, bytes]:
    """The top-level modules of the standard library: every tenth file for validation, the others for training."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_bytes() for file in files]
    training = b"".join(text for index, text in enumerate(texts) if index % 10)
    return training, b"".join(texts[::10])


def build(name: str, length: int, width: int = 128, layers: int = 4) -> PreTrainedModel:
    """Heads of 32; about 0.9 million parameters, 10.8 million with six layers of 384. Qwen3 is Llama with QK-norm."""
    heads = width // HEAD_DIM
    if name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=BYTES,
                n_positions=length,
                n_embd=width,
                n_layer=layers,
                n_head=heads,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    sizes: dict[str, Any] = dict(
        vocab_size=BYTES,
        max_position_embeddings=length,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=HEAD_DIM,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(LlamaConfig(**sizes)) if name == "llama" else Qwen3ForCausalLM(Qwen3Config(**sizes))


class Bar(ProgressCallback):
    """A progress bar with the last losses beside it, instead of a line per log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        losses = {key: f"{value:.3f}" for key, value in logs.items() if key in ("loss", "eval_loss")}
        if self.training_bar is not None and losses:
            self.training_bar.set_postfix(losses)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """No second bar."""


def positive(text: str) -> int:
    """The type of an option that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def checkpoint_of(folder: Path, options: argparse.Namespace) -> str | None:
    """Return the last checkpoint in the folder of a run; None at its beginning, when its options are put there."""
    made = {name: getattr(options, name) for name in MAKES_A_RUN}
    file = folder / "options.json"
    if (checkpoint := last_checkpoint(folder)) is None:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(made))
        return None
    before = json.loads(file.read_text()) if file.exists() else {}
    others = [
        f"--{name} {before.get(name, 'unknown')}, not {made[name]}" for name in made if before.get(name) != made[name]
    ]
    if others:
        raise SystemExit(f"{folder} holds checkpoints of {'; '.join(others)}: give another --output")
    return checkpoint


def train(controller: str, learning_rate: float, seed: int, options: argparse.Namespace) -> list[tuple[int, float]]:
    """Train once and return steps and validation losses (nats per byte)."""
    torch.manual_seed(seed)
    training, validation = (Windows(text, options.length) for text in read_library())
    callback = BetaHookCallback(controller)
    model = build(options.model, options.length, options.width, options.layers)
    model.set_attn_implementation(options.attention)
    output = options.output / f"{controller}-{learning_rate:g}-seed{seed}"
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(output),
            max_steps=options.steps,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=64,
            learning_rate=learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, options.steps // 20),
            eval_strategy="steps",
            eval_steps=max(1, options.steps // 4),
            logging_steps=max(1, options.steps // 40),
            save_strategy="steps" if options.save_steps else "no",
            save_steps=options.save_steps or options.steps,
            save_total_limit=1,
            bf16=options.bf16,
            use_cpu=not torch.accelerator.is_available(),  # must be said for bfloat16
            report_to="tensorboard",
            disable_tqdm=True,  # its bar; see Bar
            seed=seed,
        ),
        train_dataset=training,
        eval_dataset=Subset(validation, range(min(256, len(validation)))),
        callbacks=[callback, Bar()],
    )
    trainer.pop_callback(PrinterCallback)
    checkpoint = checkpoint_of(output, options) if options.save_steps else None
    if checkpoint is not None and Path(checkpoint).name == f"checkpoint-{options.steps}":  # a Trainer would go beyond
        trainer.state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
    else:
        trainer.train(resume_from_checkpoint=checkpoint)
    return [(entry["step"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["gpt2", "llama", "qwen3"], default="gpt2")
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[1e-2])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=positive, default=400)
    parser.add_argument("--length", type=positive, default=128, help="bytes in a window")
    parser.add_argument("--width", type=positive, default=128, help=f"a multiple of {HEAD_DIM}, the width of a head")
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, by autocast")
    parser.add_argument(
        "--attention", choices=["sdpa", "eager"], default="sdpa", help="eager is the faster in bfloat16 on a CPU"
    )
    parser.add_argument("--save-steps", type=positive, help="save, and go on from, a checkpoint every so many steps")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/language_model"), help="folder of the TensorBoard runs"
    )
    options = parser.parse_args(arguments)
    if options.width % HEAD_DIM:
        parser.error(f"--width must be a multiple of {HEAD_DIM}, not {options.width}")

    lines = []
    for learning_rate in options.learning_rates:
        for seed in options.seeds:
            plain, adapted = (train(controller, learning_rate, seed, options) for controller in ("monitor", "default"))
            for (step, before), (_, after) in zip(plain, adapted, strict=True):
                change = 100 * (after / before - 1)
                lines.append(f"{learning_rate:>9g} {seed:>4} {step:>5} {before:>12.4f} {after:>9.4f} {change:>+8.2f} %")
    print(
        "\nvalidation loss, nats a byte\n"
        f"{'rate':>9} {'seed':>4} {'step':>5} {'1/sqrt(d_k)':>12} {'betahook':>9} {'change':>10}"
    )
    print("\n".join(lines))
    print(f"\ncurves: {sys.executable} -m tensorboard.main --logdir {options.output}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    main()
