"""The published runs of the study: its pages show what they say."""

import math
import statistics

import pytest

from support.examples import EXAMPLES, imported

NAMES = (
    *("neighbours", "controllers", "training", "tasks", "report", "published"),
    *("runs", "task", "model", "language_model"),
)


@pytest.fixture(scope="module")
def study():
    with imported(*NAMES, folder="study") as modules:
        yield modules


def test_the_tables_of_the_page_are_those_of_the_published_runs(study, tmp_path, capsys):
    study["published"].main(["--picture", str(tmp_path / "rates.png")])
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(lines) > 15
    page = (EXAMPLES / "study/README.md").read_text().splitlines()
    assert [line for line in lines if line not in page] == []
    assert (tmp_path / "rates.png").stat().st_size > 10_000


def test_the_readme_has_the_language_model_of_the_published_runs(study):
    page = (EXAMPLES.parent / "README.md").read_text()
    published = study["published"]
    shown = [
        each
        for each in published.comparisons(study["runs"].published(EXAMPLES / "study"))
        if each.task == "lm" and each.rate in study["tasks"].LM_RATES
    ]
    assert len(shown) == 3
    for each in shown:
        ends = [f"{statistics.mean(each.values(name).values()):.3f}" for name in ("plain", "betahook")]
        change, error = each.change("betahook")
        cells = [published.power(each.rate), *ends, f"{published.signed(change, 1)} %", f"{error:.1f} %"]
        assert f"| {' | '.join(cells)} |" in page


@pytest.mark.parametrize(
    ("page", "task", "rate", "controller"),
    [
        ("README.md", "lm", 3e-4, "betahook"),
        ("README.md", "lm-llama", 3e-4, "betahook"),
        ("README.md", "encoder", 3e-4, "betahook"),
        ("README.md", "encoder", 1e-3, "betahook"),
        ("README.md", "digits", 1e-3, "betahook"),
        *[
            ("docs/ABLATIONS.md", task, 3e-4, controller)
            for task in ("lm", "lm-llama", "encoder")
            for controller in ("betahook", "Search(plateau_fall=1.0, plateau_growth=1000)")
        ],
        ("docs/ABLATIONS.md", "encoder", 1e-3, "betahook"),
        ("docs/ABLATIONS.md", "encoder", 1e-3, "no-rise"),
        ("docs/controllers/search.md", "encoder", 1e-3, "betahook"),
        ("docs/controllers/search.md", "encoder", 1e-3, "no-rise"),
    ],
)
def test_the_prose_of_other_pages_has_the_published_changes(study, page, task, rate, controller):
    published = study["published"]
    found = published.comparisons(study["runs"].published(EXAMPLES / "study"))
    (comparison,) = (each for each in found if (each.task, each.rate) == (task, rate))
    change, error = comparison.change(controller)
    assert f"{published.signed(change, 1)} ± {error:.1f}" in (EXAMPLES.parent / page).read_text()


def test_a_published_change_is_paired_by_seed(study):
    cells = {
        ("plain", 1e-3): {seed: {"loss": loss} for seed, loss in enumerate([1.0, 2.0, 3.0])},
        ("betahook", 1e-3): {0: {"loss": 0.9}, 1: {"loss": 1.7}},
        ("qk-norm", 1e-2): {0: {"loss": 0.9}},
    }
    one = study["published"].Comparison("lm", 1e-3, cells)
    assert one.change("betahook") == pytest.approx((-100 * 0.2 / 1.5, 100 * 0.1 / 1.5))
    assert all(map(math.isnan, one.change("qk-norm")))
    cells = {
        (name, 1e-3): {0: {"loss": 1.0, "accuracy": accuracy}}
        for name, accuracy in (("plain", 0.5), ("betahook", 0.75))
    }
    points = study["published"].Comparison("digits", 1e-3, cells)
    assert points.change("betahook")[0] == 25
    assert points.mean("betahook") == "75.0 %"
