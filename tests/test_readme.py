"""The README's Python runs, block by block."""

import os
import re
from pathlib import Path

import pytest
import torch

from models import build
from test_trainer import Tokens

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_block(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    model = build("llama")
    names = {
        "model": model,
        "dataset": Tokens(),
        "batches": torch.utils.data.DataLoader(Tokens(), batch_size=8),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    exec(compile(code, str(README), "exec"), names)
    if "save_model" in code:
        assert os.path.exists("plain/model.safetensors")


def test_there_are_blocks():
    assert len(BLOCKS) == 4
