"""The tasks of the study: each trains once with a treatment, a learning rate and a seed, and returns the results."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset
from transformers import (
    GPT2LMHeadModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

import neighbours  # noqa: F401
import task as flip
from controllers import CONTROLLERS, Treatment
from language_model import BYTES, Windows, build, read_library
from runs import Result
from training import Settings, fit

VALIDATION = 256
"""Windows of text in an evaluation."""


@dataclass(frozen=True)
class Task:
    """Something to train.

    Attributes:
        train: called with treatment, learning rate, seed and settings.
        rates: learning rates, from a comfortable one upwards.
        steps: optimizer steps of a run.
        controllers: treatments that it offers.
        prepare: called with seed and settings before any run with that seed, in one process.
        own_steps: True if the number of steps cannot be changed.
    """

    train: Callable[[Treatment, float, int, Settings], Result]
    rates: tuple[float, ...]
    steps: int
    controllers: Mapping[str, Treatment]
    prepare: Callable[[int, Settings], Any] | None = None
    own_steps: bool = False


def train_flip(row: flip.Row, treatment: Treatment, rate: float, seed: int, settings: Settings) -> Result:
    """Train a row of the paper's Table 1, exactly as in examples/flip: accuracy on test strings, loss on validation."""
    own = row.length**-0.5
    run = flip.Run(
        row,
        seed,
        beta=None if treatment.beta == 1 else treatment.beta * own,
        controller=treatment.rule,
        init_scale=treatment.init**0.5,
        rate=rate,
    )
    result = flip.train(run, test_strings=settings.test_strings)
    return {**result, "loss": result["validation_loss"], "beta": {"attention": result["beta"]}}


def train_lm(name: str, treatment: Treatment, rate: float, seed: int, settings: Settings) -> Result:
    """Train the byte-level language model of examples/language_model.py."""
    torch.manual_seed(seed)
    model = build("qwen3" if treatment.qk_norm else name, settings.length)
    return fit(model, *windows(read_library(), settings), treatment, rate, seed, settings)


def windows(texts: tuple[bytes, bytes], settings: Settings) -> tuple[Dataset[Any], Dataset[Any]]:
    """Windows of a training text, and the first few of a validation text."""
    training, validation = (Windows(text, settings.length) for text in texts)
    return training, head(validation)


def head(data: Windows | Masked) -> Dataset[Any]:
    return Subset(data, range(min(VALIDATION, len(data))))


class Masked(Dataset[dict[str, Tensor]]):
    """Windows with a share of the bytes hidden behind a symbol of their own; those are the labels."""

    SYMBOL, SHARE = BYTES, 0.15

    def __init__(self, data: Windows) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.data[index]["input_ids"]
        hidden = torch.rand(len(ids), generator=torch.Generator().manual_seed(index)) < self.SHARE
        return {"input_ids": ids.masked_fill(hidden, self.SYMBOL), "labels": ids.masked_fill(~hidden, -100)}


def train_encoder(treatment: Treatment, rate: float, seed: int, settings: Settings) -> Result:
    """Train a ModernBERT of 0.7 million parameters on masked bytes of the same text.

    Not by BERT: of the same size, with a learning rate of 1e-3, it still predicts byte frequencies after 400 steps.
    """
    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(
        vocab_size=BYTES + 1,
        max_position_embeddings=settings.length,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        cls_token_id=None,
        sep_token_id=None,
    )
    model = ModernBertForMaskedLM(ModernBertConfig(**sizes))
    training, validation = (Masked(Windows(text, settings.length)) for text in read_library())
    return fit(model, training, head(validation), treatment, rate, seed, settings)


class Digits(Dataset[dict[str, Tensor]]):
    """scikit-learn's handwritten digits, 8 x 8: every fourth held out, the others for training."""

    def __init__(self, held_out: bool) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        chosen = (torch.arange(len(labels)) % 4 == 0) == held_out
        self.images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[chosen] / 8 - 1
        self.labels = torch.tensor(labels)[chosen]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def train_digits(torch_init: bool, treatment: Treatment, rate: float, seed: int, settings: Settings) -> Result:
    """Train a small vision transformer on digits of 8 x 8 pixels, cut into 16 patches.

    Either as transformers makes it, with weights of a std of 0.02, or as torch does, whose are 3.6 times as large, on
    small batches: its loss then stays near that of guessing for the first 30 of them.
    """
    torch.manual_seed(seed)
    model = ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_labels=10,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    if torch_init:
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.reset_parameters()
    data = Digits(held_out=False), Digits(held_out=True)
    return fit(model, *data, treatment, rate, seed, settings, batch=16 if torch_init else 64, classify=True)


PRETRAINING_RATE = 2e-3


def pretrain(seed: int, settings: Settings) -> Path:
    """Folder of a GPT-2 fully trained on the library's source; made if it is missing."""
    folder = settings.output / "pretrained" / f"gpt2-{settings.pretraining}x{settings.length}-seed{seed}"
    if folder.exists():
        return folder
    torch.manual_seed(seed)
    model = build("gpt2", settings.length)
    whole = replace(settings, steps=settings.pretraining)
    result = fit(model, *windows(read_library(), whole), Treatment(), PRETRAINING_RATE, seed, whole)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    model.save_pretrained(scratch)
    (scratch / "result.json").write_text(json.dumps(result))
    return scratch.rename(folder)  # complete or not at all


def read_prose() -> tuple[bytes, bytes]:
    """The topics of Python's help(), English prose: every tenth for validation, the others for training."""
    from pydoc_data.topics import topics

    texts = [topics[name].encode() for name in sorted(topics)]
    return b"".join(text for index, text in enumerate(texts) if index % 10), b"".join(texts[::10])


def train_finetune(lora: bool, treatment: Treatment, rate: float, seed: int, settings: Settings) -> Result:
    """Fine-tune the pretrained model on other text, in full or with LoRA adapters, which begin at zero (B = 0)."""
    model: PreTrainedModel = GPT2LMHeadModel.from_pretrained(pretrain(seed, settings))
    torch.manual_seed(seed)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True))
    return fit(model, *windows(read_prose(), settings), treatment, rate, seed, settings)


def flip_task(name: str) -> Task:
    """A data set of Table 1, with the paper's betas for it: two in one case."""
    rows = [row for row in flip.TABLE_1 if row.name == name]
    papers = {f"paper-{row.beta:g}" if index else "paper": row for index, row in enumerate(rows)}
    factors = {controller: row.beta * row.length**0.5 for controller, row in papers.items()}
    controllers = {
        **CONTROLLERS,
        "scaled-init": Treatment(init=factors["paper"]),
        **{controller: Treatment(beta=factor) for controller, factor in factors.items()},
    }
    steps = rows[0].strings // flip.BATCH * flip.EPOCHS
    return Task(functools.partial(train_flip, rows[0]), (flip.LEARNING_RATE,), steps, controllers, own_steps=True)


TRAINED = {name: treatment for name, treatment in CONTROLLERS.items() if name != "scaled-init"}
LM_RATES = (1e-3, 1e-2, 3e-2)

TASKS = {
    **{"flip-" + row.name.replace("/", "-"): flip_task(row.name) for row in flip.TABLE_1},
    "lm": Task(functools.partial(train_lm, "gpt2"), LM_RATES, 400, CONTROLLERS),
    "lm-llama": Task(
        functools.partial(train_lm, "llama"), LM_RATES, 400, CONTROLLERS | {"qk-norm": Treatment(qk_norm=True)}
    ),
    "lm-qwen3": Task(functools.partial(train_lm, "qwen3"), LM_RATES, 400, CONTROLLERS),
    "encoder": Task(train_encoder, (1e-3,), 400, CONTROLLERS),
    "digits": Task(functools.partial(train_digits, False), (1e-3,), 800, CONTROLLERS),
    "digits-torch": Task(functools.partial(train_digits, True), (1e-3, 3e-3), 300, CONTROLLERS),
    "finetune": Task(functools.partial(train_finetune, False), (3e-4, 2e-3), 200, TRAINED, pretrain),
    "finetune-lora": Task(functools.partial(train_finetune, True), (2e-3, 1e-2), 200, TRAINED, pretrain),
}
