"""The code and the names on the pages of the documentation: it runs, and they are those of the package."""

import re
from pathlib import Path

import torch

import betahook
from betahook.models import families

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "YOUR_ATTENTION.md").read_text()


def test_the_attention_of_the_page_is_measured_and_folded():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {}
    exec(code, names)
    model, hook = names["model"], names["hook"]
    with hook:
        x = torch.randn(2, 12, 64)
        model(x).sum().backward()
        hook.step()
        (layer,) = hook.layers.values()
        assert (layer.heads, layer.head_dim) == (4, 16)
        assert layer.weight_std_q > 0
        layer.beta = 2 * layer.beta_default
        expected = model(x)
        betahook.fold(model)
    torch.testing.assert_close(model(x), expected)
    betahook.attach(model, controller=betahook.Clip()).detach()


def test_the_page_has_every_name_that_is_known():
    names = {*families.HEADS, *families.HEAD_DIM, *families.FUSED, *families.QUERY_CLIPS}
    names |= {name for pair in families.SEPARATE for name in pair} | {"q_norm", "k_norm", "query_norm", "key_layernorm"}
    assert sorted(name for name in names if f"`{name}`" not in PAGE) == []


def test_the_reference_has_every_public_name():
    reference = (DOCS / "site/reference.md").read_text()
    documented = re.findall(r"^\.\. auto\w+:: (?:.*\.)?(\w+)$", reference, re.MULTILINE)
    names = set(betahook.__all__) - {"__version__"}
    for module in (DOCS.parent / "integrations").glob("*.py"):  # read, since not every framework is installed
        names |= {
            name
            for line in re.findall(r"^__all__ = \[(.*)\]", module.read_text(), re.MULTILINE)
            for name in re.findall(r"\w+", line)
        }
    assert sorted(names - set(documented)) == []


def test_a_clone_is_installed_editable():
    """Else Python that starts in the clone finds `betahook/` there, and no `betahook.integrations`."""
    pages = [DOCS.parent / "README.md", *DOCS.rglob("*.md"), *(DOCS.parent / "examples").rglob("*.md")]
    commands = [line.strip() for page in pages for line in page.read_text().splitlines() if "pip install" in line]
    assert commands
    assert [command for command in commands if not command.startswith("pip install -e '.[trainer]'")] == []


def test_the_pages_count_the_model_types_of_the_table():
    rows = [line.split(" | ") for line in (DOCS / "SUPPORT.md").read_text().splitlines() if line.startswith("| ")][2:]
    attached = [row for row in rows if "exact" in row[1] or "sampled" in row[1] or "exact" in row[2]]
    folded = [row for row in attached if row[4] == "exact"]
    waiting = [row for row in attached if row[5].endswith(", the others wait")]
    clipped = [row for row in attached if row[5] == "yes" or row in waiting]
    assert all(row in clipped for row in folded)
    count, of, folds, clips = map(len, (attached, rows, folded, clipped))
    readme, card = ((DOCS / page).read_text() for page in ("../README.md", "controllers/clip.md"))
    assert f"attaches to {count} of the {of} tested model types of transformers ({folds} fold exactly)" in readme
    assert f"Of the {count} model types that attach, {clips} can be clipped, all {folds} that fold among them" in card
    assert f"{len(waiting)} of these have layers that wait" in card
