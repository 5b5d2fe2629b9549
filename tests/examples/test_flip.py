"""The flip example: its model, its data, and a whole run of a table with tiny rows."""

import json
import math

import pytest
import torch

from support import commands
from support.examples import EXAMPLES, imported

FOLDER = EXAMPLES / "flip"


@pytest.fixture
def flip():
    with imported("model", "task", "report", "runs", "run", "start", folder="flip") as modules:
        yield modules


def test_the_model_is_that_of_the_paper(flip):
    model = flip["model"].FlipModel(flip["model"].FlipConfig(attn_implementation="eager"))
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_000
    bound = math.sqrt(6 / (20 + 60))  # Xavier-uniform on the fused shape
    weight = model.attention.qkv.weight.detach()
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert not model.attention.qkv.bias.any()


def test_labels_are_the_reversed_string(flip):
    row = flip["task"].TABLE_1[0]
    example = flip["task"].Strings(3, row, torch.Generator().manual_seed(0))[1]
    assert example["input_ids"].shape == (20,)
    assert example["labels"].tolist() == example["input_ids"].tolist()[::-1]


def test_the_schedule_warms_up_and_ends_at_zero(flip):
    parameter = torch.nn.Linear(1, 1)
    optimizer, schedule = flip["task"].optimizer_and_schedule(parameter, 100)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"] / 5e-4)
        optimizer.step()
        schedule.step()
    assert rates[0] == 0
    assert rates[25] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.25)) * 0.5)
    assert rates[75] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.75)))


@pytest.mark.slow
def test_a_table_from_runs_to_report_and_not_twice(flip, tmp_path, monkeypatch, capsys):
    row = flip["task"].Row(4, 6, 512, 2.0, 0.25, 1.0)
    monkeypatch.setattr(flip["run"], "TABLE_1", (row,))
    monkeypatch.setattr(flip["task"], "EPOCHS", 1)
    arguments = ["--rows", row.name, "--test-strings", "100", "--output", str(tmp_path), "--seeds", "0"]
    columns = ["plain", "paper", "scaled-init", "betahook", "no-rise", "variance", "gradient"]
    flip["run"].main([*arguments, "--columns", *columns])
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [result["column"] for result in results] == columns
    by_column = {result["column"]: result for result in results}
    assert by_column["plain"]["beta"] == pytest.approx(6**-0.5)
    assert by_column["paper"]["beta"] == 2.0
    assert by_column["variance"]["beta"] != pytest.approx(6**-0.5, rel=1e-3)
    assert all(0 <= result["accuracy"] <= 1 for result in results)
    printed = capsys.readouterr().out
    for column in columns:
        accuracy = by_column[column]["accuracy"]
        assert any(line.startswith(column) and f"{100 * accuracy:.2f} %" in line for line in printed.splitlines())
    assert (tmp_path / "flip.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(flip["run"], "measure", lambda *_: pytest.fail("a finished run was repeated"))
    flip["run"].main([*arguments, "--columns", *columns])
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("option", ["--jobs", "--test-strings"])
def test_runs_of_nothing_are_refused(flip, capsys, option):
    with pytest.raises(SystemExit, match="2"):
        flip["run"].main([option, "0"])
    assert f"{option} must be at least 1, not 0" in capsys.readouterr().err


def test_a_run_on_fewer_test_strings_is_another_run(flip, tmp_path, monkeypatch, capsys):
    """With training runs that take no time, whose accuracy is known by the number of test strings."""
    tested = []

    def train(run, *, test_strings, **options):
        tested.append(test_strings)
        result = {"accuracy": test_strings / 1e6, "validation_accuracy": 0.5, "beta": run.beta or 0.2, "seconds": 1.0}
        return {"row": run.row.name, "seed": run.seed, "steps_to_95": None, "test_strings": test_strings, **result}

    monkeypatch.setattr(flip["run"], "train", train)
    monkeypatch.setattr(flip["run"], "draw", lambda *_: None)
    arguments = ["--columns", "plain", "procedure", "--output", str(tmp_path), "--test-strings"]

    def shown(test_strings):
        """The accuracies of both columns, and on how many strings each new run was tested."""
        tested.clear()
        flip["run"].main([*arguments, str(test_strings)])
        rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("plain", "proced"))]
        return [row[1] for row in rows], [row[7] for row in rows], set(tested)

    assert shown(50_000) == (["5.00", "5.00"], ["1", "1"], {50_000})
    assert shown(100_000) == (["10.00", "10.00"], ["1", "1"], {100_000})
    assert shown(50_000) == (["5.00", "5.00"], ["1", "1"], set())
    for file in [tmp_path / "results.jsonl", *tmp_path.rglob("trials.jsonl")]:  # as they were before it was noted
        file.write_text(file.read_text().replace('"test_strings": 100000, ', ""))
    assert shown(100_000) == (["10.00", "10.00"], ["1", "1"], set())
    lines = (tmp_path / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "results.jsonl").write_text("".join(line for line in lines if '"procedure"' not in line))
    assert shown(100_000) == (["10.00", "10.00"], ["1", "1"], set())  # from the trials


@pytest.mark.parametrize("arguments", commands.of("examples/flip/run.py"), ids=" ".join)
def test_the_commands_of_the_pages_name_rows_and_columns(flip, arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(flip["run"], "execute", lambda function, todo, jobs: iter(()))
    monkeypatch.setattr(flip["run"], "draw", lambda *_: None)
    flip["run"].main([*arguments, "--output", str(tmp_path)])


def test_the_procedure_searches_by_validation_accuracy(flip, monkeypatch, tmp_path):
    """With a training run whose accuracy is known: best at beta = 0.2."""
    betas = []

    def train(run, **options):
        betas.append(run.beta)
        validation = 1 - abs(math.log10(run.beta / 0.2)) / 10
        return {"accuracy": run.beta, "validation_accuracy": validation, "beta": run.beta, "seconds": 1.0}

    monkeypatch.setattr(flip["run"], "train", train)
    options = {"output": str(tmp_path), "test_strings": 100_000}
    result = flip["run"].measure("procedure", flip["task"].TABLE_1[0], 0, options)
    assert result["accuracy"] == result["beta"] == pytest.approx(0.2, rel=0.5)
    assert result["validation_accuracy"] == max(score for _, score in result["trials"])
    assert result["runs"] == len(result["trials"]) > 4
    assert betas == [beta for beta, _ in result["trials"]]
    assert "trial" not in result

    trials = tmp_path / "trials.jsonl"
    trials.write_text("".join(trials.read_text().splitlines(keepends=True)[:3]))  # as an interrupted search leaves it
    assert flip["run"].measure("procedure", flip["task"].TABLE_1[0], 0, options) == result
    assert betas[len(result["trials"]) :] == betas[3 : len(result["trials"])]


def test_the_procedure_does_not_go_where_chance_was_kinder(flip, monkeypatch, tmp_path):
    """As on 100/200/19300: neither beta = 1 nor 10 learns anything, and 10 guesses better."""
    scores = {1.0: 0.010095, 10.0: 0.010335, 0.1: 1.0}

    def train(run, **options):
        validation = next((score for beta, score in scores.items() if math.isclose(beta, run.beta)), 0.01)
        return {"accuracy": validation, "validation_accuracy": validation, "beta": run.beta, "seconds": 1.0}

    monkeypatch.setattr(flip["run"], "train", train)
    options = {"output": str(tmp_path), "test_strings": 100_000}
    result = flip["run"].measure("procedure", flip["task"].TABLE_1[1], 7, options)
    assert result["beta"] == pytest.approx(0.1)


def test_scaled_initialisation_starts_with_the_logits_of_the_paper_beta(flip):
    run = flip["run"].COLUMNS["scaled-init"][1](flip["task"].TABLE_1[0], 0)
    assert run.init_scale**2 / math.sqrt(20) == pytest.approx(5.0)


def test_the_published_runs_make_the_table_of_the_example(flip):
    runs = flip["runs"].published(FOLDER)
    lines = flip["report"].markdown(runs)
    assert len(lines) > 15
    page = (FOLDER / "README.md").read_text().splitlines()
    assert [line for line in lines if line not in page] == []


def test_every_cell_of_the_paper_table_has_runs(flip):
    runs = flip["runs"].published(FOLDER)
    columns = {run["column"] for run in runs}
    assert columns == set(flip["run"].COLUMNS)
    for row in {row.name for row in flip["task"].TABLE_1}:
        assert columns == {run["column"] for run in runs if run["row"] == row}


def accuracies(flip, column):
    """Percent of 100/20/15,000 on the seeds of the README."""
    runs = {r["seed"]: r for r in flip["runs"].published(FOLDER) if (r["row"], r["column"]) == ("100/20/15000", column)}
    return [100 * runs[seed]["accuracy"] for seed in flip["report"].SEEDS]


def test_the_published_runs_are_those_of_the_readme(flip):
    readme = (FOLDER.parents[1] / "README.md").read_text()
    for column in ("plain", "paper", "variance-weights", "procedure", "decades", "betahook"):
        each = " ".join(f"{accuracy:.1f}" for accuracy in accuracies(flip, column))
        mean = f"{sum(accuracies(flip, column)) / 5:.1f} %"
        assert any(each in line and mean in line for line in readme.splitlines()), column


REPEATED = {
    "examples/flip/README.md": ["betahook", "paper", "rise-only", "no-rise"],
    "docs/ABLATIONS.md": ["betahook", "rise-only", "no-rise"],
    "docs/controllers/search.md": ["betahook", "plain", "paper", "no-rise"],
    "docs/controllers/beta_search.md": ["procedure", "betahook"],
    "docs/controllers/gradient.md": ["gradient", "betahook"],
    "docs/controllers/variance.md": ["variance", "plain"],
    "docs/controllers/variance_weights.md": ["variance-weights", "plain", "variance", "betahook"],
    "docs/controllers/decades.md": ["plain", "variance-weights", "decades", "betahook"],
}
"""Columns whose mean a page gives in its text."""


@pytest.mark.parametrize("page", REPEATED)
def test_pages_repeat_the_means_of_the_published_runs(flip, page):
    text = (FOLDER.parents[1] / page).read_text()
    prose = " ".join(line for line in text.splitlines() if not line.startswith("| 100/20/15000"))
    means = {column: f"{sum(accuracies(flip, column)) / 5:.1f} %" for column in REPEATED[page]}
    assert {column: mean for column, mean in means.items() if mean not in prose} == {}


def test_the_card_of_decades_shows_the_paths_of_published_runs(flip):
    lines = (FOLDER.parents[1] / "docs/controllers/decades.md").read_text().splitlines()
    steps, *paths = [line.strip("| ").split(" | ") for line in lines if line.startswith(("| batch ", "| seed "))]
    assert len(paths) == 2
    for seed, *path in paths:
        (run,) = (
            r
            for r in flip["runs"].published(FOLDER)
            if (r["row"], r["column"], f"seed {r['seed']}") == ("10/20/8000", "decades", seed)
        )
        betas = dict(run["beta_curve"])
        assert path == [f"{betas[int(step)]:.2g}" for step in steps[1:]]


def test_the_scores_start_far_below_the_std_that_the_assumptions_give(flip):
    start = flip["start"].start_std
    assert start(0, layer_norm=False, unfused=False) < 1.2
    assert 2 < start(0, layer_norm=True, unfused=True) < 20**0.5
