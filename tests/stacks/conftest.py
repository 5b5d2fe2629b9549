"""Tests with packages of `pyproject.toml`'s extra `stacks`. `make test-stacks` runs them where all are there.

Elsewhere nothing here is collected; with `BETAHOOK_STACKS` set, what is missing is an error.
"""

import importlib.util
import os

import pytest

from support.vision import let_torchvision_load

STACKS = ("datasets", "diffusers", "lightning", "optuna", "peft", "sentence_transformers", "timm", "trl", "vit_pytorch")
missing = [name for name in STACKS if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if missing and "BETAHOOK_STACKS" not in os.environ else []

library = let_torchvision_load()


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Blocks of a page write into the working directory, and train on the CPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.fixture
def tokenizer():
    """A tokenizer of 61 words, w0 to w60."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]
    model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=model, **names)


@pytest.fixture
def saved(tmp_path):
    """The folder of a tiny Llama."""
    from support.models import build

    build("llama").save_pretrained(tmp_path / "base")
    return tmp_path / "base"
