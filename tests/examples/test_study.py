"""The study example: its store, a tiny run of every task, the procedure, and the arithmetic of the report."""

import dataclasses
import json
import math

import pytest
import torch

import betahook
from support import commands
from support.examples import imported

NAMES = (
    *("neighbours", "controllers", "training", "tasks", "run", "procedure", "report"),
    *("runs", "task", "model", "language_model"),
)


LINE = {"loss": 1.0, "seconds": 1.0}


@pytest.fixture(scope="module")
def study():
    with imported(*NAMES, folder="study") as modules:
        yield modules


@pytest.fixture
def settings(study, tmp_path, monkeypatch):
    monkeypatch.setattr(study["tasks"], "VALIDATION", 8)
    return study["tasks"].Settings(steps=3, output=tmp_path, length=16, evaluations=2, pretraining=2, test_strings=50)


# The store.


def test_results_survive_an_interrupted_last_line(study, tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    results = study["runs"].Results(path)
    results.add({"a": 1})
    results.add({"a": 2})
    path.write_bytes(path.read_bytes() + b'{"a": 3, "curve": [0.')
    again = study["runs"].Results(path)
    assert again == [{"a": 1}, {"a": 2}]
    again.add({"a": 4})
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [1, 2, 4]
    assert study["runs"].Results(path) == again


def test_even_a_whole_last_line_counts_only_once_it_ends(study, tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"a": 1}\n{"a": 22}')  # the rest of {"a": 22, ...}? or all of it? nobody knows
    assert study["runs"].Results(path) == [{"a": 1}]


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_runs_are_executed_with_their_arguments(study, jobs):
    assert dict(study["runs"].execute(math.pow, {"a": (2, 3), "b": (3, 2)}, jobs)) == {"a": 8, "b": 9}


def test_the_search_reports_its_best_trial_and_the_cost_of_all(study):
    """With a training run whose loss is known: best at beta = 0.2."""
    trials = []

    def trial(beta):
        trials.append(beta)
        return {"loss": abs(math.log10(beta / 0.2)), "beta": beta, "seconds": 2.0}

    result = study["runs"].best_fixed(trial, score="loss", mode="min")
    assert result["beta"] == min(trials, key=lambda beta: abs(math.log10(beta / 0.2)))
    assert result["beta"] == pytest.approx(0.2, rel=0.5)
    assert [beta for beta, _ in result["trials"]] == trials
    assert result["runs"] == len(trials) > 4
    assert result["seconds"] == 2.0 * len(trials)


# Controllers and tasks.


def scores(model, hook):
    """Standard deviation of the scores of each layer on one batch."""
    torch.manual_seed(1)
    model.train()(torch.randint(256, (2, 16)))
    return torch.stack([layer.statistics.std for layer in hook.layers.values()])


def test_scaled_initialisation_multiplies_the_first_scores(study):
    build, treatments = study["language_model"].build, study["controllers"].CONTROLLERS
    stds = []
    for name in ("plain", "scaled-init"):
        torch.manual_seed(0)
        model = build("gpt2", 16)
        with treatments[name].attach(model) as hook:
            stds.append(scores(model, hook))
    first = (stds[1] / stds[0])[0].item()  # the layers above see another input
    assert first == pytest.approx(3.0, rel=1e-4)


def test_a_fixed_beta_is_relative_to_that_of_the_model(study):
    model = study["language_model"].build("llama", 16)
    with study["controllers"].Treatment(beta=5.0).attach(model) as hook:
        assert [layer.beta for layer in hook.layers.values()] == pytest.approx([5 / math.sqrt(32)] * 4)


def test_betas_that_differ_by_head_are_ready_for_json(study):
    model = study["language_model"].build("llama", 16)
    with study["controllers"].Treatment(per_head=True).attach(model) as hook:
        layers = list(hook.layers.values())
        for layer in layers:
            layer.beta = 0.25
        layers[0].head_beta = torch.tensor([0.25, 0.5, 1.0, 2.0])
        betas = study["training"].betas(hook)
    assert json.loads(json.dumps(list(betas.values()))) == [[0.25, 0.5, 1.0, 2.0], 0.25, 0.25, 0.25]


def test_qwen3_is_llama_with_norms_of_q_and_k(study):
    weights = []
    for name in ("llama", "qwen3"):
        torch.manual_seed(0)
        weights.append(dict(study["language_model"].build(name, 16).named_parameters()))
    llama, qwen3 = weights
    assert {name.split(".")[-2] for name in qwen3.keys() - llama.keys()} == {"q_norm", "k_norm"}
    assert all(torch.equal(weight, qwen3[name]) for name, weight in llama.items())


def test_a_rule_is_told_from_another_by_its_options(study):
    treatments = study["controllers"].CONTROLLERS
    assert len({str(treatment) for treatment in treatments.values()}) == len(treatments)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks
@pytest.mark.parametrize(
    ("task", "controller"),
    [
        ("lm", "betahook"),
        ("lm", "per-head"),
        ("lm-llama", "qk-norm"),
        ("lm-qwen3", "cap"),
        ("encoder", "gradient"),
        ("digits", "variance"),
        ("finetune", "betahook"),
        ("finetune-lora", "betahook"),
    ],
)
def test_each_task_trains(study, settings, task, controller):
    pytest.importorskip({"digits": "sklearn", "finetune-lora": "peft"}.get(task, "torch"))
    identity = {"task": task, "controller": controller, "rule": "", "rate": 1e-3, "seed": 0, "steps": 3}
    result = json.loads(json.dumps(study["run"].measure(identity, settings)))
    assert identity.items() <= result.items()
    assert [step for step, _ in result["loss_curve"]] == [0, 1, 3]
    assert [step for step, _ in result["beta_curve"]] == [1, 3]
    assert result["loss"] == result["loss_curve"][-1][1] != result["loss_curve"][0][1]
    assert len(result["training_losses"]) == 3
    assert len(result["beta"]) == len(result["beta_curve"][-1][1]) == (3 if task == "digits" else 4)
    assert all(beta > 0 for beta in result["beta"].values())
    assert result["seconds"] > 0
    assert ("accuracy" in result) == (task == "digits")


def test_a_row_of_the_paper_trains(study, settings):
    row = study["task"].Row(4, 6, 256, 2.0, 0.25, 1.0)
    treatment = study["controllers"].Treatment(beta=2.0)
    result = study["tasks"].train_flip(row, treatment, 1e-3, 0, settings)
    assert result["beta"] == {"attention": pytest.approx(2 / math.sqrt(6))}
    assert result["loss"] == result["loss_curve"][-1][1]
    assert 0 <= result["accuracy"] <= 1


def test_the_papers_betas_are_those_of_table_1(study):
    tasks = study["tasks"].TASKS
    assert len([name for name in tasks if name.startswith("flip-")]) == 6  # two rows differ in beta only
    offered = tasks["flip-1000-20-35000"].controllers
    assert [offered[name].beta / math.sqrt(20) for name in ("paper", "paper-6")] == pytest.approx([5, 6])


def test_pretrained_weights_are_made_once(study, settings, monkeypatch):
    folder = study["tasks"].pretrain(7, settings)
    monkeypatch.setattr(study["tasks"], "fit", lambda *_: pytest.fail("it was pretrained again"))
    assert study["tasks"].pretrain(7, settings) == folder
    assert "betahook" not in json.loads((folder / "config.json").read_text())
    assert sorted(file.name for file in folder.parent.iterdir()) == [folder.name]


def test_a_part_of_the_bytes_is_hidden_and_to_be_found(study):
    data = study["tasks"].Masked(study["language_model"].Windows(bytes(range(256)) * 50, 128))
    item = data[3]
    hidden = item["labels"] != -100
    assert 0.1 < torch.stack([(item["labels"] != -100).float().mean() for item in data]).mean() < 0.2
    assert (item["input_ids"][hidden] == 256).all()
    whole = torch.where(hidden, item["labels"], item["input_ids"])
    assert torch.equal(whole, data.data[3]["input_ids"])
    assert torch.equal(data[3]["labels"], item["labels"])


def test_no_digit_is_trained_on_and_held_out(study):
    pytest.importorskip("sklearn")
    training, held_out = study["tasks"].Digits(held_out=False), study["tasks"].Digits(held_out=True)
    assert (len(training), len(held_out)) == (1347, 450)
    assert training.images.min() == -1
    assert training.images.max() == 1


# The command.


@pytest.fixture
def fake(study, monkeypatch):
    """One task of no work: the loss depends on controller and rate as the report should show it."""
    calls = []

    def train(treatment, rate, seed, settings):
        calls.append((str(treatment), rate, seed))
        loss = 2 + abs(math.log10(rate / 1e-2)) + 0.01 * seed + 0.001 * math.log10(treatment.beta) ** 2
        losses = [loss] * 20
        return {"loss": loss, "loss_curve": [(0, 3.0), (9, loss)], "training_losses": losses, "seconds": 1.0}

    controllers = study["controllers"].CONTROLLERS
    task = study["tasks"].Task(train, (1e-3, 1e-2), 20, controllers, lambda *_: calls.append("prepared"))
    monkeypatch.setattr(study["run"], "TASKS", {"finetune": task})
    return calls


def test_a_finished_run_is_not_repeated(study, fake, tmp_path, capsys):
    arguments = ["--tasks", "fine*", "--output", str(tmp_path)]
    study["run"].main([*arguments, "--seeds", "0"])
    assert len(fake) == 5  # prepared once for four runs
    study["run"].main([*arguments, "--seeds", "0", "1"])
    assert len(fake) == 10
    study["run"].main([*arguments, "--seeds", "0", "1"])
    assert len(fake) == 10
    assert "8 of 8 runs are in" in capsys.readouterr().out
    study["run"].main([*arguments, "--seeds", "0", "--steps", "5"])  # another length is another run
    assert len(fake) == 15


def test_the_search_is_one_line(study, fake, tmp_path):
    arguments = ["--tasks", "finetune", "--controllers", "best-fixed", "--rates", "1e-2", "--output", str(tmp_path)]
    study["run"].main(arguments)
    (result,) = study["runs"].Results(tmp_path / "results.jsonl")
    assert result["loss"] == 2.0
    assert result["runs"] == result["seconds"] == len(fake) - 1


def test_a_row_of_the_paper_keeps_its_steps(study, monkeypatch, tmp_path):
    task = study["tasks"].TASKS["flip-10-20-8000"]
    monkeypatch.setitem(study["run"].TASKS, "flip-10-20-8000", dataclasses.replace(task, train=lambda *_: LINE))
    study["run"].main(["--tasks", "flip-10-*", "--steps", "5", "--controllers", "plain", "--output", str(tmp_path)])
    (result,) = study["runs"].Results(tmp_path / "results.jsonl")
    assert result["steps"] == 620


@pytest.mark.parametrize("arguments", commands.of("examples/study/run.py"), ids=" ".join)
def test_the_commands_of_the_pages_name_tasks_and_controllers(study, arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study["run"], "execute", lambda function, todo, jobs: iter(()))
    study["run"].main([*arguments, "--output", str(tmp_path)])
    assert capsys.readouterr().out.startswith("0 of ")


def test_what_no_task_offers_is_refused(study, tmp_path, capsys):
    with pytest.raises(SystemExit):
        study["run"].main(["--tasks", "lm", "--controllers", "paper", "--output", str(tmp_path)])
    assert "no run has such a task and such a controller" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "lm", "foo*"], "--tasks: foo* matches none of flip-"),
        (["--controllers", "foo"], "--controllers: foo matches none of plain, betahook, "),
        (["--jobs", "0"], "argument --jobs: must be at least 1, not 0"),
        (["--steps", "0"], "argument --steps: must be at least 1, not 0"),
    ],
)
def test_bad_options_of_the_study_are_refused(study, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        study["run"].main([*arguments, "--output", str(tmp_path)])
    assert message in capsys.readouterr().err


# The report.


def test_the_standard_error_is_that_of_the_mean(study):
    assert study["report"].standard_error([1.0, 2.0, 3.0, 6.0]) == pytest.approx(math.sqrt(14 / 3) / 2)
    assert math.isnan(study["report"].standard_error([1.0]))


def test_a_table_of_losses_by_hand(study):
    """Plain 1 and 3, mean 2; betahook 1.1 and 2.4 on the same seeds, and one seed that plain has not."""
    losses = {"betahook": {0: 1.1, 1: 2.4, 5: 100.0}, "plain": {0: 1.0, 1: 3.0, 7: math.nan}}
    cells = {
        (name, 1e-3): {seed: {"loss": loss, "seconds": 2.0 + seed} for seed, loss in seeds.items()}
        for name, seeds in losses.items()
    }
    plain, adapted = study["report"].values_table(cells, "loss")[2:4]
    assert plain == "| 0.001 | plain | nan |  | nan |  |  | 3 | 1 | 5 |"
    # Of 5 % and -30 %: the mean, and half their distance.
    assert adapted == "| 0.001 | betahook | 34.5000 | 32.7522 | 100.0000 | -12.50 | 17.50 | 3 | 1 | 4 |"


def test_a_table_of_accuracies_by_hand(study):
    accuracies = {("plain", 0.1): {0: 0.5, 1: 0.7}, ("best-fixed", 0.1): {0: 0.9, 1: 0.7}}
    cells = {
        key: {seed: {"accuracy": value, "seconds": 1.0, "runs": 7} for seed, value in seeds.items()}
        for key, seeds in accuracies.items()
    }
    header, _, plain, best = study["report"].values_table(cells, "accuracy")[:4]
    assert "accuracy, % | s.e. | worst | to plain, points" in header
    assert plain == "| 0.1 | plain | 60.00 | 10.00 | 50.00 |  |  | 2 | 7 | 1 |"
    assert best == "| 0.1 | best-fixed | 80.00 | 10.00 | 70.00 | +20.00 | 20.00 | 2 | 7 | 1 |"


def test_the_range_ends_where_the_loss_passes_the_limit(study):
    losses = {1e-4: 3.0, 1e-3: 2.0, 1e-2: 2.5, 1e-1: 2.1}  # the last one is beyond a hill
    low, high, seen = study["report"].span(losses, 2.2)
    assert low == pytest.approx(10**-3.2)
    assert high == pytest.approx(10**-2.6)
    assert seen


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({1e-3: 2.1, 1e-2: 2.0}, (1e-3, 1e-2, False)),
        ({1e-3: 2.0, 1e-2: math.nan}, (1e-3, 1e-3, False)),
        ({1e-3: 2.3, 1e-2: 2.5}, None),
    ],
)
def test_the_range_at_its_edges(study, losses, expected):
    assert study["report"].span(losses, 2.2) == expected


def test_excess_is_relative_and_smoothed(study):
    report = study["report"]
    assert report.smoothed([1.0, 2.0, 6.0, 1.0], 3) == [3.0, 3.0]
    assert report.excess([2.2, 0.9], [2.0, 1.0]) == pytest.approx([0.1, -0.1])


def test_the_report_has_tables_and_plots(study, fake, tmp_path, capsys):
    names = ["plain", "uniform"]
    arguments = ["--tasks", "finetune", "--controllers", *names, "--seeds", "0", "1", "--output", str(tmp_path)]
    study["run"].main(arguments)
    study["report"].main(["--output", str(tmp_path)])
    text = (tmp_path / "report.md").read_text()
    assert text in capsys.readouterr().out
    assert "| 0.001 | plain | 3.0050 | 0.0050 | 3.0100 |  |  | 2 | 1 | 1 |" in text
    assert "| 0.01 | uniform | 2.0410 | 0.0050 | 2.0460 | +1.80 | 0.00 | 2 | 1 | 1 |" in text
    # Ten percent above 2.005, on a slope of one a decade.
    assert f"| plain | 2.0050 | {10 ** -(2 + 0.2005):.2g} to 0.01 | ≥ {10**0.2005:.1f} |" in text
    worst = 100 * (2.036 / 2.0 - 1)
    assert f"| 0.01 | uniform | +{worst:.2f} % | +{worst:.2f} % | +{worst:.2f} % |" in text
    for plot in ("rates-finetune-20.png", "curves-finetune-20.png"):
        assert (tmp_path / plot).read_bytes().startswith(b"\x89PNG")


def test_a_report_of_nothing_is_refused(study, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        study["report"].main(["--output", str(tmp_path / "none")])
    assert f"--output: there is no result in {tmp_path}/none/results.jsonl" in capsys.readouterr().err


def test_the_report_keeps_to_the_newest_rule(study):
    old, new = ({"task": "lm", "steps": 4, "controller": "betahook", "rate": 1e-3, "seed": 0, "rule": r} for r in "ab")
    (cells,) = study["report"].by_task([old, {**old, "seed": 1}, new]).values()
    assert cells == {("betahook", 1e-3): {0: new}}


# The paper's procedure.


def test_the_procedure_finds_enough_data_beta_and_least_data(study):
    """With an accuracy that is known: best at beta = 3, and better with more data."""
    calls = []

    def trial(strings, beta):
        calls.append((strings, beta))
        accuracy = 1 - abs(math.log10((beta or 3) / 3)) * 1_000 / strings
        return {"strings": strings, "beta": beta, "validation_accuracy": accuracy, "seconds": 1.0}

    steps = study["procedure"].procedure(trial, length=16, strings=300)
    assert calls[:3] == [(300, 1.0), (600, 1.0), (1_200, 1.0)]  # 1 - 0.48 / 1.2 = 0.6 passes
    assert steps["enough data"]["strings"] == 1_200
    beta = steps["best beta"]["beta"]
    assert beta == pytest.approx(10**0.5)
    error = abs(math.log10(beta / 3)) * 1_000
    kept = steps["least data"]["strings"]
    assert 1 - error / kept > 0.95 >= 1 - error / int(0.8 * kept)
    assert calls[-2:] == [(kept, 0.25), (kept, None)]


def test_a_procedure_that_never_passes_says_so(study):
    with pytest.raises(RuntimeError, match=r"beta = 1 does not pass 50 % with 25600 strings: begin with more than 100"):
        study["procedure"].procedure(lambda strings, beta: {"validation_accuracy": 0.1}, 4, 100)


@pytest.mark.parametrize("option", ["--strings", "--test-strings"])
def test_a_procedure_without_strings_is_refused(study, capsys, option):
    with pytest.raises(SystemExit, match="2"):
        study["procedure"].main([option, "0"])
    assert f"argument {option}: must be at least 1, not 0" in capsys.readouterr().err


def test_the_procedure_is_not_run_twice(study, tmp_path, monkeypatch, capsys):
    """With training runs that take no time; what they cost is added up, the adaptive one apart."""

    def train(run, *, test_strings):
        accuracy = 0.9 if run.controller else 1 - abs(math.log10(run.beta / 3)) * 5_000 / run.row.strings
        beta = run.beta or 3.3
        return {"accuracy": accuracy, "validation_accuracy": accuracy, "beta": beta, "seconds": 10.0}

    monkeypatch.setattr(study["task"], "train", train)
    study["procedure"].main(["--output", str(tmp_path)])
    first = capsys.readouterr().out
    lines = (tmp_path / "procedure.jsonl").read_text().splitlines()
    assert f"the procedure: {len(lines) - 1} training runs, {len(lines) - 1}0 s; the adaptive one: 10 s" in first
    assert "| adaptive | " in first
    assert "| 3.3 | 90.00 % |" in first
    monkeypatch.setattr(study["task"], "train", lambda *_, **__: pytest.fail("a finished run was repeated"))
    study["procedure"].main(["--output", str(tmp_path)])
    assert capsys.readouterr().out == first[first.index("\n| |") :]
    trials = tmp_path / "procedure.jsonl"
    trials.write_text(trials.read_text().replace(', "test_strings": 100000', ""))  # as it was before it was noted
    study["procedure"].main(["--output", str(tmp_path)])
    assert capsys.readouterr().out == first[first.index("\n| |") :]
    monkeypatch.setattr(study["task"], "train", train)
    study["procedure"].main(["--output", str(tmp_path), "--test-strings", "50000"])
    assert capsys.readouterr().out == first


def test_a_trial_of_the_procedure_trains(study, tmp_path):
    row = study["task"].Row(4, 6, 512, 2.0, 0.25, 1.0)
    trials = study["procedure"].Trials(row, 0, 50, study["runs"].Results(tmp_path / "procedure.jsonl"))
    result = trials(128, 1.0)
    assert (result["strings"], result["row"], result["beta"]) == (128, "4/6/128", 1.0)
    assert trials.used == {(128, 1.0): result}
    assert trials(128, None)["beta"] == pytest.approx(6**-0.5 / 10**0.5)  # ten steps, all of them in the warm-up


def test_a_controller_as_it_is_written_is_a_treatment(study, fake, tmp_path, capsys):
    arguments = ["--tasks", "finetune", "--rates", "1e-2", "--output", str(tmp_path), "--rules"]
    study["run"].main([*arguments, "Search(rise=False), Cap(30)"])
    assert [call[0] for call in fake if call[0].startswith("[Search(rise=False), Cap(threshold=30)]")]
    with pytest.raises(SystemExit):
        study["run"].main([*arguments, "Search("])
    assert "--rules: expected controllers such as" in capsys.readouterr().err
    controllers = study["controllers"]
    made = controllers.treatment("Search(rise=False), Cap(30)", controllers.CONTROLLERS)
    assert made.rule() == [betahook.Search(rise=False), betahook.Cap(30)]
    assert controllers.treatment("cap", controllers.CONTROLLERS) is controllers.CONTROLLERS["cap"]
    for text in ("Search(", "Nothing()", "1", "Search(speed=1)", "__import__('os')"):
        with pytest.raises(ValueError, match="expected controllers such as"):
            controllers.written(text)
