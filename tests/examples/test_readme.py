"""The Python in the README and in docs runs, block by block."""

import copy
import itertools
import logging
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import betahook
from betahook.integrations.tensorboard import CALM
from betahook.report.pictures import PIXELS
from support.models import build, inputs
from support.pages import blocks, run, tables
from support.trainer import Tokens

ROOT = Path(__file__).parents[2]


@pytest.fixture
def names(tmp_path, monkeypatch):
    """What the blocks take as given, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    model = build("llama")
    return {
        "model": model,
        "dataset": Tokens(),
        "batches": torch.utils.data.DataLoader(Tokens(), batch_size=8),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_blocks_of_the_readme_one_after_the_other(names, capsys):
    codes = blocks("README.md")
    assert len(codes) == 4
    for code in codes:
        run(code, **names)
    assert "both layers" in capsys.readouterr().out
    assert [*Path("runs/attention").iterdir()]
    assert {"model.safetensors"} == {file.name for file in Path("trained").glob("*.safetensors")}
    saved, plain, resumed = torch.load("checkpoint.pt"), build("llama"), build("llama")
    plain.load_state_dict(torch.load("plain.pt"))
    with betahook.attach(resumed) as hook:
        resumed.load_state_dict(saved["model"])
        hook.load_state_dict(saved["betahook"])
        assert hook.steps == len(names["batches"])
        batch = inputs("llama")
        torch.testing.assert_close(resumed.eval()(**batch).logits, plain.eval()(**batch).logits)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
@pytest.mark.parametrize(("page", "heading"), [("docs/API.md", None), ("docs/STACKS.md", "Accelerate")])
def test_block_of_a_page(page, heading, names):
    (code,) = blocks(page, heading)
    run(code, **names)


def test_the_blocks_of_the_page_of_findings(capsys):
    reads, makes_the_table = blocks("docs/FINDINGS.md")
    model = build("llama").train()
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama")).loss.backward()
        hook.step()
        run(reads, hook=hook)
    run(makes_the_table)
    printed = capsys.readouterr().out
    assert "Step 1: both layers healthy" in printed
    lines = re.findall(r"^(\d+) ([\d.]+) tensor\(([\d.]+)\) tensor\(([\d.]+)\)$", printed, re.MULTILINE)
    ratios, shares = ({(int(line[0]), line[1]): float(line[at]) for line in lines} for at in (2, 3))
    rows = {row[0]: row[1:] for row in tables("docs/FINDINGS.md")}
    stds = rows["std of normal logits"]
    assert len(lines) == 3 * len(stds)
    for keys in (16, 128, 1024):
        said = [float(number) for number in rows[f"entropy ratio, {keys:,} keys"]]
        assert said == pytest.approx([ratios[keys, std] for std in stds], abs=0.006)
    said = [float(number) for number in rows["keys looked at / all, 128 keys"]]
    assert said == pytest.approx([shares[128, std] for std in stds], abs=0.006)


def test_the_picture_of_the_page_of_metrics(names):
    pytest.importorskip("matplotlib")
    shows, *_ = blocks("docs/METRICS.md")
    logged, wandb = [], SimpleNamespace(Image=lambda image: image)
    with betahook.attach(names["model"].train(), controller="monitor") as hook:
        batches = itertools.islice(itertools.cycle(names["batches"]), 10)
        run(shows, **{**names, "batches": batches}, hook=hook, wandb=wandb, run=SimpleNamespace(log=logged.append))
    assert logged[0]["attention"].size == PIXELS


def test_the_blocks_of_the_page_of_metrics(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, logs, remarks = blocks("docs/METRICS.md")
    lines = []
    model, messages = build("llama").train(), logging.getLogger("betahook")
    before = messages.level, list(messages.handlers)
    try:
        run(remarks)
        with betahook.attach(model, controller="monitor") as hook:
            model(**inputs("llama")).loss.backward()
            hook.step()
            hook.findings()
            run(logs, hook=hook, step=10, run=SimpleNamespace(log=lambda numbers, step: lines.append((numbers, step))))
    finally:
        messages.level, (*_, handler) = before[0], messages.handlers
        messages.removeHandler(handler)
        handler.close()
    assert messages.handlers == before[1]
    assert "attention is now" in Path("betahook.log").read_text()
    ((numbers, step),) = lines
    assert step == 10
    assert "attention/logit_std/model.layers.0.self_attn" in numbers


def test_the_page_of_metrics_counts_the_charts_of_a_layer():
    page = " ".join((ROOT / "docs/METRICS.md").read_text().split())
    told = re.search(r"(\d+) for each layer under the default .*?, (\d+) under .*? draws (\d+) and (\d+) of", page)
    counts = []
    for controller in (betahook.Search(window=1, warmup=0, rise=False), "monitor"):
        model = build("llama").train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with betahook.attach(model, controller=controller) as hook:
            for _ in range(3):
                model(**inputs("llama")).loss.backward()
                optimizer.step()
                hook.step()
            counts.append(len({name.partition("/")[0] for name in hook.metrics()}))
    assert [int(number) for number in told.groups()] == [*counts, *(count - len(CALM) for count in counts)]


def test_a_fresh_model_at_a_high_rate():
    """The range that the card of Search gives for a tiny Llama."""
    card = (ROOT / "docs/controllers/search.md").read_text()
    low, high = map(int, re.search(r"is at (\d+) to (\d+) times", card).groups())
    ratios = []
    for seed in range(6):
        config = build("llama").config
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        with betahook.attach(model) as hook:
            for _ in range(10):
                model(**inputs("llama")).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                hook.step()
            ratios += [layer.beta / layer.beta_default for layer in hook.layers.values()]
    assert (min(ratios), max(ratios)) == pytest.approx((low, high), rel=0.05)


def test_as_many_model_types_as_the_table_of_support_has():
    rows = [line.split(" | ") for line in (ROOT / "docs/SUPPORT.md").read_text().splitlines() if line.startswith("| ")]
    (attached,) = re.findall(r"^(\d+ of \d+) model types attach", (ROOT / "docs/SUPPORT.md").read_text(), re.MULTILINE)
    exact = sum(row[4] == "exact" for row in rows)
    numbers = re.findall(r"\d+", f"{attached} {exact}")
    assert int(numbers[1]) == len(rows) - 2  # without its header and the line below
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "{} of the {} tested model types of transformers ({} fold exactly)".format(*numbers) in readme


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


def test_contributing_lists_every_file():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    files = [*(ROOT / "betahook").rglob("*.py"), *(ROOT / "integrations").glob("*.py")]
    assert [file.name for file in files if file.name != "__init__.py" and f"`{file.name}`" not in text] == []


PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_begin_with_a_title_and_link_to_what_is_there(page):
    text = page.read_text()
    assert text.startswith("# ")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("http")]
    assert [link for link in links if not (page.parent / link).exists()] == []
