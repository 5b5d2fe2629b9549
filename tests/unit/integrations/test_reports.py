"""Metrics and alerts in every tracker that the Trainer, or Accelerate, reports to: each once, at its step."""

import json
import sqlite3
import struct
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainerCallback, TrainerState, TrainingArguments

import betahook
from betahook.integrations import reports
from betahook.integrations.trainer import BetaHookCallback, watch
from betahook.report.alerts import Alert
from betahook.report.pictures import PIXELS
from support.models import build, inputs
from support.trainer import make_trainer
from support.training import LAYER

TAG = f"score_std/{LAYER}"
LARGEST = "attention/max_logit"
GLANCE = "attention/at a glance"


class Reporter(TrainerCallback):
    """Keeps what a reporter is given to log."""

    def __init__(self):
        self.rows = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.rows.append((state.global_step, dict(logs)))


@pytest.fixture
def reporter(monkeypatch):
    monkeypatch.setitem(reports.REPORTERS, "kept", Reporter)
    return Reporter()


class Seen(TrainerCallback):
    """Keeps the metrics at each log, read by itself, and what the console would print."""

    def __init__(self, callback):
        self.callback, self.metrics, self.printed = callback, {}, []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.printed.append(dict(logs))
        if "loss" in logs:
            self.metrics[state.global_step] = self.callback.hook.metrics()


def train(folder, callback, *added, resume=None, **arguments):
    trainer = make_trainer(folder, callback, **arguments)
    trainer.callback_handler.callbacks[1:1] = added  # as reporters, before what the user gives
    seen = Seen(watch(trainer))
    trainer.add_callback(seen)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, seen


def test_a_reporter_gets_the_metrics_in_the_row_of_the_loss(tmp_path, reporter):
    callback = BetaHookCallback(quantities=["score_std"])
    trainer, seen = train(tmp_path, callback, reporter, eval_strategy="steps", eval_steps=3)
    rows = {step: row for step, row in reporter.rows if "loss" in row}
    assert sorted(rows) == [2, 4, 6]
    for step, metrics in seen.metrics.items():
        expected = {key: value for key, value in metrics.items() if key.startswith("score_std/")}
        assert {key: value for key, value in rows[step].items() if key in metrics} == expected
        largest = max(value for key, value in metrics.items() if key.startswith("max_logit/"))
        assert rows[step][LARGEST] == pytest.approx(largest)
    assert not any(TAG in row or LARGEST in row for _, row in reporter.rows if "loss" not in row)
    assert not any(TAG in printed or LARGEST in printed for printed in seen.printed)
    assert "on_log" not in vars(reporter)  # which is as it was
    assert not any(TAG in entry for entry in trainer.state.log_history)


def test_a_reporter_gets_few_numbers_unless_it_asks_for_more(tmp_path, reporter):
    _, seen = train(tmp_path, BetaHookCallback(), reporter)
    rows = [row for _, row in reporter.rows if "loss" in row]
    assert not any(key in seen.metrics[2] for key in rows[0])
    assert all(len([key for key in row if key.startswith("attention/")]) <= 15 for row in rows)
    with pytest.raises(ValueError, match=r"got \['score_sdt'\]"):
        BetaHookCallback(quantities=["score_sdt"])


def test_a_resumed_run_goes_on_at_its_step(tmp_path, reporter):
    train(tmp_path, BetaHookCallback(), reporter, max_steps=4, save_strategy="steps", save_steps=4)
    _, seen = train(tmp_path, BetaHookCallback(quantities="all"), reporter, resume=str(tmp_path / "checkpoint-4"))
    rows = [(step, row) for step, row in reporter.rows if "loss" in row]
    assert [step for step, _ in rows] == [2, 4, 6]
    assert rows[-1][1][TAG] == seen.metrics[6][TAG]


@pytest.fixture
def showing(monkeypatch):
    """A reporter to a tracker that shows pictures."""
    monkeypatch.setitem(reports.REPORTERS, "shown", Reporter)
    monkeypatch.setattr(reports, "SHOWING", ("shown",))
    monkeypatch.setitem(sys.modules, "shown", SimpleNamespace(Image=lambda image: image))
    return Reporter()


def test_a_tracker_that_shows_pictures_gets_one_when_it_is_due(tmp_path, showing):
    pytest.importorskip("matplotlib")
    train(tmp_path, BetaHookCallback("monitor"), showing, max_steps=10)
    shown = {step: row[GLANCE] for step, row in showing.rows if GLANCE in row}
    assert list(shown) == [2, 4, 6, 10]  # logs 1, 2, 3 and 5
    assert {image.size for image in shown.values()} == {PIXELS}
    assert shown[10].tobytes() != shown[6].tobytes()


def test_two_trackers_that_show_pictures_get_the_same_ones(tmp_path, showing):
    pytest.importorskip("matplotlib")
    train(tmp_path, BetaHookCallback("monitor"), showing, other := Reporter())
    first, second = ([(step, row[GLANCE]) for step, row in each.rows if GLANCE in row] for each in (showing, other))
    assert [step for step, _ in first] == [2, 4, 6]
    assert first == second


def test_without_matplotlib_one_warning_says_that_there_is_no_picture(tmp_path, showing, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    train(tmp_path, BetaHookCallback("monitor"), showing)
    assert caplog.text.count("no picture in shown: pictures need matplotlib: pip install matplotlib") == 1
    assert not any(GLANCE in row for _, row in showing.rows)
    assert sum(LARGEST in row for _, row in showing.rows) == 3


@pytest.mark.parametrize("name", ["metrics", "findings"])
def test_a_step_is_read_once_for_all_reporters(tmp_path, reporter, monkeypatch, name):
    pytest.importorskip("tensorboard")
    read, original = [], getattr(betahook.Hook, name)
    monkeypatch.setattr(betahook.Hook, name, lambda hook: read.append(hook.steps) or original(hook))
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    trainer = make_trainer(tmp_path, BetaHookCallback(), report_to=["tensorboard"])
    trainer.callback_handler.callbacks[1:1] = [reporter, Reporter()]
    watch(trainer)
    trainer.train()
    assert read == [2, 4, 6]


def test_after_a_training_that_was_broken_off_each_metric_still_comes_once(tmp_path, reporter):
    class Interrupt(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise KeyboardInterrupt

    trainer = make_trainer(tmp_path, BetaHookCallback())
    trainer.callback_handler.callbacks[1:1] = [reporter]
    trainer.add_callback(Interrupt())
    watch(trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(Interrupt)
    reporter.rows.clear()
    trainer.train()
    assert [step for step, row in reporter.rows if LARGEST in row] == [2, 4, 6]
    assert "on_log" not in vars(reporter)


def test_other_ranks_report_nothing(tmp_path, reporter):
    trainer = make_trainer(tmp_path, BetaHookCallback())
    trainer.callback_handler.callbacks[1:1] = [reporter]
    callback = watch(trainer)
    state = TrainerState(is_world_process_zero=False, stateful_callbacks=[])
    callback.on_train_begin(trainer.args, state, trainer.control, model=trainer.model)
    trainer.model(**inputs("llama"))
    callback.on_step_end(trainer.args, state, trainer.control)
    trainer.callback_handler.on_log(trainer.args, state, trainer.control, {"loss": 1.0})
    callback.hook.detach()
    assert [sorted(row) for _, row in reporter.rows] == [["loss"]]


def test_watch_takes_the_callback_of_the_trainer_or_adds_one(tmp_path):
    own = BetaHookCallback("monitor")
    trainer = make_trainer(tmp_path, own)
    assert watch(trainer) is own
    assert watch(trainer, own) is own
    with pytest.raises(ValueError, match=r"second BetaHookCallback: leave it out, or call trainer\.remove_callback"):
        watch(trainer, BetaHookCallback())
    trainer.remove_callback(BetaHookCallback)
    (tmp_path / "checkpoint-2").mkdir()  # never begun
    added = watch(trainer)
    assert added in trainer.callback_handler.callbacks
    assert added._options["controller"] == "monitor"  # to watch changes nothing
    assert (tmp_path / "unfinished-checkpoint-2.1").is_dir()
    trainer.remove_callback(BetaHookCallback)
    assert watch(trainer, own) is own
    with pytest.raises(TypeError, match=r"watch\(\) takes a transformers.Trainer; got LlamaForCausalLM"):
        watch(trainer.model)
    fresh = make_trainer(tmp_path, own)
    fresh.remove_callback(BetaHookCallback)
    for wrong in ("monitor", BetaHookCallback):
        with pytest.raises(
            TypeError, match=r"takes a BetaHookCallback second; got .*\. Options go into it: watch\(tra"
        ):
            watch(fresh, wrong)
    assert not any(isinstance(each, str | BetaHookCallback) for each in fresh.callback_handler.callbacks)


def test_without_watch_a_warning_says_what_is_missing(tmp_path, caplog):
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=["wandb", "mlflow"], use_cpu=True)
    with betahook.attach(build("llama")) as hook:
        reports.Reports(hook, arguments, None, ()).close()
    assert "do not reach wandb and mlflow, whose callbacks run before this one: call " in caplog.text
    assert "betahook.integrations.trainer.watch(trainer) before trainer.train()" in caplog.text


@pytest.mark.parametrize(("layer", "named"), [("layers.0", "layers.0"), ("", "the model")])
def test_an_alert_goes_to_the_open_runs_and_to_its_function(tmp_path, monkeypatch, layer, named):
    shown = []
    run = SimpleNamespace(alert=lambda title, text, level: shown.append(("wandb", title, text, level)))
    current = SimpleNamespace(current_run=SimpleNamespace(get=lambda: "r"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    tracker = SimpleNamespace(alert=lambda title, text: shown.append(("trackio", title, text)), context_vars=current)
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    alert = Alert(4, "max_logit", layer, 60.0, 50.0)
    alerts = betahook.Alerts(lambda alert: shown.append(alert), max_logit=50)
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=["trackio"], use_cpu=True)
    reports.with_trackers(alerts, arguments).on_alert(alert)
    title = f"max_logit of {named}"
    assert shown == [("wandb", title, str(alert), "WARN"), ("trackio", title, str(alert)), alert]
    run.alert = tracker.alert = None
    monkeypatch.setattr(sys.modules["wandb"], "run", None)
    current.current_run.get = lambda: None
    reports.send_alert(alert)  # no run is open
    arguments.report_to = ["mlflow"]
    assert reports.with_trackers(alerts, arguments) is alerts


def records(path):
    """The records of an offline run of W&B, in the log format of LevelDB."""
    from wandb.proto import wandb_internal_pb2

    data, at, part, block = path.read_bytes(), 7, b"", 32_768
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            yield wandb_internal_pb2.Record.FromString(part)
            part = b""


def rows_of_wandb(folder):
    """Step to value of the tag in the runs, and the texts of the alerts."""
    rows, texts = [], []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for record in records(path):
            if record.WhichOneof("record_type") == "history":
                row = {(*item.nested_key, item.key)[0]: json.loads(item.value_json) for item in record.history.item}
                rows.append(row)
            elif record.WhichOneof("record_type") == "alert":
                texts.append(record.alert.text)
    return rows, texts


def rows_of_trackio(folder):
    from trackio.utils import TRACKIO_DIR  # read once a process, when it is imported

    with sqlite3.connect(TRACKIO_DIR / f"{folder.name}.db") as database:
        rows = [json.loads(row) for (row,) in database.execute("select metrics from metrics order by id")]
        texts = [text for (text,) in database.execute("select text from alerts order by id")]
    return rows, texts


def rows_of_mlflow(folder):
    (path,) = folder.rglob(f"metrics/{TAG}")
    lines = [line.split() for line in path.read_text().splitlines()]
    return [{f"train/{TAG}": float(value), "train/global_step": int(step)} for _, value, step in lines], []


ROWS = {"wandb": rows_of_wandb, "trackio": rows_of_trackio, "mlflow": rows_of_mlflow}


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A folder in which each tracker keeps its runs."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # databases need more than mlflow-skinny
    return tmp_path


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of the trackers
@pytest.mark.parametrize("tracker", ROWS)
def test_real_trackers_get_each_metric_once_at_its_step_after_a_resume_too(store, monkeypatch, tracker):
    heard, values = [], {}
    for resume in (None, str(store / "out/checkpoint-4")):
        alerts = betahook.Alerts(heard.append, entropy=100.0)
        callback, steps = BetaHookCallback("monitor", alerts=alerts, quantities="all"), 6 if resume else 4
        arguments = dict(max_steps=steps, save_strategy="steps", save_steps=4, run_name="r", project=store.name)
        _, seen = train(store / "out", callback, resume=resume, report_to=[tracker, "tensorboard"], **arguments)
        values |= {step: metrics[TAG] for step, metrics in seen.metrics.items()}
        finish(tracker, monkeypatch)
    rows, texts = ROWS[tracker](store)
    logged = [(row["train/global_step"], row[f"train/{TAG}"]) for row in rows if f"train/{TAG}" in row]
    assert logged == [(step, pytest.approx(values[step])) for step in (2, 4, 6)]
    if tracker == "trackio":
        assert all("train/loss" in row for row in rows if f"train/{TAG}" in row)
    pictures = [row["train/global_step"] for row in rows if f"train/{GLANCE}" in row]
    assert pictures == ([] if tracker == "mlflow" else [2, 4, 6])
    if tracker != "mlflow":
        assert texts == [str(alert) for alert in heard]
        assert len(texts) == 6  # two layers, three logs


def finish(tracker, monkeypatch):
    """End the run, and keep its id for MLflow to go on with it."""
    if tracker == "wandb":
        sys.modules["wandb"].finish()
        sys.modules["wandb"].teardown()
    elif tracker == "mlflow":
        monkeypatch.setenv("MLFLOW_RUN_ID", sys.modules["mlflow"].last_active_run().info.run_id)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("tracker", ROWS)
def test_trackers_of_accelerate_take_the_metrics(store, tracker):
    accelerator = Accelerator(cpu=True, log_with=tracker, project_dir=str(store))
    accelerator.init_trackers(store.name)
    model = build("llama")
    hook, said = betahook.attach(model, controller="monitor"), {}
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in (1, 2):
        accelerator.backward(wrapped(**inputs("llama")).loss)
        optimizer.step()
        optimizer.zero_grad()
        hook.step(accelerator.scaler)
        said[step] = hook.metrics()[TAG]
        accelerator.log({"loss": 1.0, **hook.metrics()}, step)
    accelerator.end_training()
    finish(tracker, pytest.MonkeyPatch())
    rows, _ = ROWS[tracker](store)
    logged = [value for row in rows for key, value in row.items() if key.removeprefix("train/") == TAG]
    assert logged == [pytest.approx(said[1]), pytest.approx(said[2])]
