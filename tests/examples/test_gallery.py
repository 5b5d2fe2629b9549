"""The runs and pictures of docs/GALLERY.md."""

import re
from pathlib import Path

import pytest

from support.examples import imported

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "GALLERY.md").read_text()


@pytest.fixture(scope="module")
def gallery():
    with imported("gallery") as modules:
        yield modules["gallery"]


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
