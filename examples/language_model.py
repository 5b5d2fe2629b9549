"""Train a byte-level GPT-2, Llama or Qwen3 on the standard library's source, with 1/sqrt(d_k) and with betahook.

    python examples/language_model.py                          # 400 steps at learning rate 1e-2, a few minutes
    python examples/language_model.py --model llama --learning-rates 1e-3 3e-2 --seeds 0 1 2

Both runs of a pair see the same batches and start from the same weights; the validation files are never trained on.
"""

from __future__ import annotations

import argparse
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
    TrainingArguments,
)

from betahook.integrations.trainer import BetaHookCallback

BYTES = 256


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


def build(name: str, length: int) -> PreTrainedModel:
    """Four layers of four heads, width 128: about 0.9 million parameters. Qwen3 is Llama with QK-norm."""
    if name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=BYTES,
                n_positions=length,
                n_embd=128,
                n_layer=4,
                n_head=4,
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
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
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


def train(controller: str, learning_rate: float, seed: int, options: argparse.Namespace) -> list[tuple[int, float]]:
    """Train once and return steps and validation losses (nats per byte)."""
    torch.manual_seed(seed)
    training, validation = (Windows(text, options.length) for text in read_library())
    callback = BetaHookCallback(controller)
    trainer = Trainer(
        model=build(options.model, options.length),
        args=TrainingArguments(
            output_dir=str(options.output / f"{controller}-{learning_rate:g}-seed{seed}"),
            max_steps=options.steps,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=64,
            learning_rate=learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, options.steps // 20),
            eval_strategy="steps",
            eval_steps=max(1, options.steps // 4),
            logging_steps=max(1, options.steps // 40),
            save_strategy="no",
            report_to="tensorboard",
            disable_tqdm=True,  # its bar; see Bar
            seed=seed,
        ),
        train_dataset=training,
        eval_dataset=Subset(validation, range(min(256, len(validation)))),
        callbacks=[callback, Bar()],
    )
    trainer.pop_callback(PrinterCallback)
    trainer.train()
    return [(entry["step"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["gpt2", "llama", "qwen3"], default="gpt2")
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[1e-2])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=positive, default=400)
    parser.add_argument("--length", type=positive, default=128, help="bytes in a window")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/language_model"), help="folder of the TensorBoard runs"
    )
    options = parser.parse_args(arguments)

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
