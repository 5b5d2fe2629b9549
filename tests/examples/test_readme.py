"""The Python in the README and in docs runs, block by block."""

import copy
import os
import re
import textwrap
from pathlib import Path

import pytest
import torch

import betahook
from support.models import build, inputs
from support.trainer import Tokens

ROOT = Path(__file__).parents[2]
BLOCKS = [
    (page, block)
    for page in ("README.md", "docs/API.md")
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
]


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
@pytest.mark.parametrize(("page", "code"), BLOCKS, ids=range(len(BLOCKS)))
def test_block(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    model = build("llama")
    names = {
        "model": model,
        "dataset": Tokens(),
        "batches": torch.utils.data.DataLoader(Tokens(), batch_size=8),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    exec(compile(code, page, "exec"), names)
    if "save_model" in code:
        assert os.path.exists("plain/model.safetensors")


def test_there_are_blocks():
    assert [page for page, _ in BLOCKS] == ["README.md"] * 4 + ["docs/API.md"]


def test_an_average_of_the_weights_gets_beta():
    """The block of docs/CHECKPOINTS.md."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/CHECKPOINTS.md").read_text(), re.DOTALL)
    model, batch = build("llama").train(), inputs("llama")
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with betahook.attach(model) as hook:
        for _ in range(3):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            hook.step()
            average.update_parameters(model)
        weights = copy.deepcopy(average.module.state_dict())
        exec(textwrap.dedent(code), {"betahook": betahook, "average": average, "hook": hook, "batch": batch})
        plain = average.module(**batch).logits
        model.load_state_dict(weights)
        torch.testing.assert_close(plain, model(**batch).logits)
        assert hook.layers["model.layers.0.self_attn"].beta != pytest.approx(8**-0.5)


PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_begin_with_a_title_and_link_to_what_is_there(page):
    text = page.read_text()
    assert text.startswith("# ")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("http")]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_public_names_are_all_described():
    described = (ROOT / "docs/API.md").read_text()
    assert [name for name in betahook.__all__ if f"`{name}" not in described] == []
