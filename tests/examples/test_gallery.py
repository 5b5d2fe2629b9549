"""The runs and pictures of docs/GALLERY.md."""

import re
from pathlib import Path

import pytest

from support.examples import imported

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "GALLERY.md").read_text()


@pytest.fixture(scope="module")
def modules():
    with imported("gallery", "at_a_glance") as modules:
        yield modules


@pytest.fixture
def gallery(modules):
    return modules["gallery"]


def test_every_run_has_its_picture_on_the_page(gallery):
    assert re.findall(r"\(gallery/(.+)\.png\)", PAGE) == list(gallery.RUNS)
    sizes = {name: (ROOT / "docs" / "gallery" / f"{name}.png").stat().st_size for name in gallery.RUNS}
    assert max(sizes.values()) <= 40_000


def test_what_is_done_to_the_heads_is_found_in_them(gallery, tmp_path, capsys):
    gallery.main(["--only", "dead-head", "--steps", "2", "--every", "1", "--output", str(tmp_path)])
    assert (tmp_path / "dead-head.png").read_bytes().startswith(b"\x89PNG")
    assert "Step 2: all 6 layers" in capsys.readouterr().out
    _, found, _ = gallery.train(gallery.RUNS["dead-head"], steps=2, every=2, seed=0)
    logits = {
        (layer, head): x.max_logit for layer, each in enumerate(found) for head, x in enumerate(each.head_numbers)
    }
    assert {place for place, largest in logits.items() if largest == 0} == {(1, 0), (1, 3), (3, 2), (4, 5)}


def test_a_short_run_has_a_picture_of_its_last_step(modules, tmp_path):
    """Shorter than the steps between two looks."""
    modules["gallery"].main(["--only", "flat", "--steps", "2", "--output", str(tmp_path)])
    assert (tmp_path / "flat.png").read_bytes().startswith(b"\x89PNG")
    sizes = ["--layers", "1", "--heads", "1", "--width", "8", "--length", "16", "--batch", "2"]
    picture = tmp_path / "last.png"
    modules["at_a_glance"].main([*sizes, "--steps", "2", "--output", str(tmp_path), "--picture", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("script", ["gallery", "at_a_glance"])
@pytest.mark.parametrize("option", ["--steps", "--every"])
def test_no_steps_are_refused(modules, capsys, script, option):
    with pytest.raises(SystemExit, match="2"):
        modules[script].main([option, "0"])
    assert f"argument {option}: must be at least 1, not 0" in capsys.readouterr().err
