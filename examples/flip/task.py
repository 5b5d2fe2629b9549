"""The flip task: reverse a string of random symbols. Table 1 of the paper, its data, and one training run."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import EvalPrediction, PrinterCallback, ProgressCallback, Trainer, TrainingArguments

import betahook
from betahook.integrations.trainer import BetaHookCallback
from model import FlipConfig, FlipModel

LEARNING_RATE, BATCH, EPOCHS, WARMUP, CLIP = 5e-4, 128, 10, 50, 5.0
TEST_STRINGS = 100_000
"""Fresh strings for the final accuracy, as in the paper; results that tell no number had so many."""
EVALUATIONS = 40
"""Points on the accuracy curve."""
GAIN = "attention/log10_beta_over_own_highest"
"""Where the callback logs beta, in decades over the model's own."""


@dataclass(frozen=True)
class Row:
    """Sizes, the paper's beta, and its accuracies with 1/sqrt(d_k) and with that beta; None where it has no number."""

    symbols: int
    length: int
    strings: int
    beta: float
    paper_default: float | None = None
    paper_beta: float | None = None

    @property
    def name(self) -> str:
        return f"{self.symbols}/{self.length}/{self.strings}"


TABLE_1 = (
    Row(100, 20, 15_000, 5.0, 0.015, 0.96),
    Row(100, 200, 19_300, 0.16, 0.0123, 1.0),
    Row(10, 20, 8_000, 6.55, 0.1856, 1.0),
    Row(1000, 20, 50_000, 5.0, 0.1856, 1.0),
    Row(1000, 20, 40_000, 5.0, 0.1068, 0.9979),
    Row(1000, 20, 35_000, 5.0, 0.0552, 0.9953),
    Row(1000, 20, 35_000, 6.0, 0.0552, 0.9977),
)
MORE_DATA = (
    Row(100, 20, 25_000, 5.0),
    Row(100, 20, 35_000, 5.0),
    Row(10, 20, 16_000, 6.55),
    Row(10, 20, 20_000, 6.55),
)
"""Rows that the paper's table lacks, for how many strings 1/sqrt(d_k) needs; it says 25,000 with 100 symbols."""


class Strings(Dataset[dict[str, Tensor]]):
    """Random strings and their reversals."""

    def __init__(self, count: int, row: Row, generator: torch.Generator) -> None:
        self.ids = torch.randint(row.symbols, (count, row.length), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index].flip(-1)}


@dataclass(frozen=True)
class Run:
    """One training run: beta or controller, scale of W_q and W_k at initialisation, learning rate."""

    row: Row
    seed: int
    beta: float | None = None
    controller: Callable[[], Any] | None = None
    init_scale: float = 1.0
    rate: float = LEARNING_RATE


class Bar(ProgressCallback):
    """A progress bar with accuracy and beta beside it, instead of a line per log."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title
        self.shown: dict[str, str] = {}

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        newest = state.log_history[-1]
        if "eval_accuracy" in newest:
            self.shown["accuracy"] = f"{newest['eval_accuracy']:.3g}"
        if GAIN in newest:
            self.shown["beta / own"] = f"{10 ** newest[GAIN]:.3g}"
        if self.training_bar is not None:
            self.training_bar.set_description(self.title)
            self.training_bar.set_postfix(self.shown)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """No second bar."""


def train(
    run: Run, *, test_strings: int = TEST_STRINGS, output: str | None = None, title: str | None = None
) -> dict[str, Any]:
    """Train once and return accuracies, curves, steps to 95 % and seconds of CPU time, ready for JSON.

    Args:
        run: the run.
        test_strings: number of fresh strings for the final accuracy per symbol.
        output: folder for the TensorBoard run; None for none.
        title: of a progress bar; None for no bar.
    """
    torch.manual_seed(run.seed)
    model = FlipModel(FlipConfig(symbols=run.row.symbols, length=run.row.length, attn_implementation="eager"))
    with torch.no_grad():
        query_and_key = model.attention.qkv.weight[: 2 * run.row.length]
        query_and_key.mul_(run.init_scale)
    generator = torch.Generator().manual_seed(run.seed + 1_000)
    data, validation = (Strings(count, run.row, generator) for count in (run.row.strings, 1_000))

    hook = betahook.attach(model, controller=run.controller() if run.controller else "monitor")
    if run.beta is not None:
        hook.layers["attention"].beta = run.beta
    steps = run.row.strings // BATCH * EPOCHS
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=output or scratch,
                num_train_epochs=EPOCHS,
                per_device_train_batch_size=BATCH,
                per_device_eval_batch_size=1_000,
                dataloader_drop_last=True,
                max_grad_norm=CLIP,
                eval_strategy="steps",
                eval_steps=max(1, steps // EVALUATIONS),
                logging_steps=max(1, steps // EVALUATIONS),
                save_strategy="no",
                report_to="tensorboard" if output else "none",
                disable_tqdm=True,
                seed=run.seed,
                use_cpu=True,
            ),
            train_dataset=data,
            eval_dataset=validation,
            compute_metrics=accuracy,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
            optimizers=optimizer_and_schedule(model, steps, run.rate),
            callbacks=[BetaHookCallback(hook=hook, on_end="keep"), *([Bar(title)] if title else [])],
        )
        trainer.pop_callback(PrinterCallback)
        started = time.process_time()
        trainer.train()
        seconds = time.process_time() - started
        history = trainer.state.log_history
    curves = {
        key: [(entry["step"], entry[key]) for entry in history if key in entry]
        for key in ("eval_accuracy", "eval_loss", GAIN)
    }
    result = {
        "row": run.row.name,
        "seed": run.seed,
        "test_strings": test_strings,
        "accuracy": test_accuracy(model, Strings(test_strings, run.row, generator)),
        "validation_accuracy": curves["eval_accuracy"][-1][1],
        "validation_loss": curves["eval_loss"][-1][1],
        "steps_to_95": next((step for step, value in curves["eval_accuracy"] if value >= 0.95), None),
        "seconds": seconds,
        "beta": hook.layers["attention"].beta,
        "accuracy_curve": curves["eval_accuracy"],
        "loss_curve": curves["eval_loss"],
        "beta_curve": [(step, 10**gain * run.row.length**-0.5) for step, gain in curves[GAIN]],
    }
    hook.detach()
    return result


def optimizer_and_schedule(
    model: FlipModel, steps: int, rate: float = LEARNING_RATE
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """Adam without weight decay; a cosine from 1 to 0 over all steps, with a linear warm-up."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)) * min(1.0, step / WARMUP)
    )
    return optimizer, schedule


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Share of the symbols that are right."""
    return {"accuracy": float((prediction.predictions == prediction.label_ids).mean())}


@torch.no_grad()
def test_accuracy(model: FlipModel, strings: Strings) -> float:
    """Share of right symbols over many strings, in evaluation mode."""
    model.eval()
    right = [(model(ids).logits.argmax(-1) == ids.flip(-1)).float().mean() for ids in strings.ids.split(1_000)]
    return float(torch.stack(right).mean())
