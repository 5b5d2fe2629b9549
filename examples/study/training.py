"""One watched run of the Trainer, shared by all tasks with a transformers model."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import neighbours  # noqa: F401
from betahook import Hook
from controllers import Treatment
from runs import Result
from task import TEST_STRINGS, accuracy


@dataclass(frozen=True)
class Settings:
    """Size of a run, and the folder for its files.

    Attributes:
        steps: optimizer steps.
        output: folder of the study.
        length: bytes in a window of text.
        evaluations: points on the validation curve, the start not counted.
        pretraining: optimizer steps before fine-tuning.
        test_strings: number of test strings of the flip task.
    """

    steps: int
    output: Path
    length: int = 128
    evaluations: int = 12
    pretraining: int = 1_000
    test_strings: int = TEST_STRINGS


class Watch(TrainerCallback):
    """Step the hook, request evaluations at equal distances up to the last step, and note every beta there."""

    def __init__(self, hook: Hook, settings: Settings) -> None:
        self.hook = hook
        self.points = {settings.steps * (i + 1) // settings.evaluations for i in range(settings.evaluations)}
        self.betas: list[tuple[int, list[Any]]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.hook.step()
        if state.global_step in self.points:
            control.should_evaluate = True
            self.betas.append((state.global_step, list(betas(self.hook).values())))


def betas(hook: Hook) -> dict[str, Any]:
    """Every layer's beta, ready for JSON: a number, or a list where the heads differ."""
    found = {name: layer.head_beta.tolist() for name, layer in hook.layers.items()}
    return {name: heads if len(set(heads)) > 1 else heads[0] for name, heads in found.items()}


def fit(
    model: PreTrainedModel,
    training: Dataset[Any],
    validation: Dataset[Any],
    treatment: Treatment,
    rate: float,
    seed: int,
    settings: Settings,
    *,
    batch: int = 16,
    classify: bool = False,
) -> Result:
    """Train a model and return losses, beta and seconds of CPU time, ready for JSON; the model is left unhooked.

    AdamW without weight decay, gradients clipped at norm 1, a twentieth of the steps to warm up, then a cosine to zero.

    Args:
        model: a fresh or a trained model.
        training, validation: items that the model takes as keyword arguments, labels included.
        treatment: treatment of its attention.
        rate: learning rate.
        seed: seed for the order of the batches.
        settings: length of the run, points on the curve.
        batch: size of a training batch.
        classify: also compute the accuracy; the logits are then those of one label per item.
    """
    hook = treatment.attach(model)
    watch = Watch(hook, settings)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=scratch,
                max_steps=settings.steps,
                per_device_train_batch_size=batch,
                per_device_eval_batch_size=4 * batch,
                learning_rate=rate,
                lr_scheduler_type="cosine",
                warmup_steps=max(1, settings.steps // 20),
                eval_on_start=True,
                logging_steps=1,
                logging_nan_inf_filter=False,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=False,
                label_names=["labels"],
                seed=seed,
                use_cpu=True,
            ),
            train_dataset=training,
            eval_dataset=validation,
            compute_metrics=accuracy if classify else None,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
            callbacks=[watch],
        )
        trainer.pop_callback(PrinterCallback)
        started = time.process_time()
        trainer.train()
        seconds = time.process_time() - started
    curves = {
        name: [(entry["step"], entry[key]) for entry in trainer.state.log_history if key in entry]
        for name, key in (("loss", "eval_loss"), ("accuracy", "eval_accuracy"))
    }
    metrics = hook.metrics()
    hook.detach()
    return {
        **{name: curve[-1][1] for name, curve in curves.items() if curve},
        **{f"{name}_curve": curve for name, curve in curves.items() if curve},
        "training_losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "beta": betas(hook),
        "beta_curve": watch.betas,
        "max_logit": {name: metrics.get(f"max_logit/{name}") for name in hook.layers},
        "seconds": seconds,
    }
