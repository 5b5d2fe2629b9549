"""`betahook report`, called as the console script calls it."""

import json
import re
import shutil

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

import betahook
from betahook import checkpoint
from betahook.cli import main, runs
from betahook.integrations.trainer import BetaHookCallback
from support.html_page import Page
from support.models import build, inputs
from support.trainer import make_trainer
from support.training import LAYER


def said_of_sources(page):
    """What a page says that it was made from, up to the controllers; empty without it."""
    lines = [line for text in page.texts for line in text.splitlines() if line.startswith("From ")]
    return lines[0].partition(";")[0] if lines else ""


def test_report_leaves_out_a_checkpoint_that_is_damaged(run, tmp_path, capsys):
    folder, page = shutil.copytree(run, tmp_path / "run"), tmp_path / "page.html"
    (folder / "checkpoint-6" / checkpoint.FILE).write_bytes(b"damaged")
    assert main(["report", str(folder), "--html", str(page)]) == 0
    texts = " ".join(Page(page).texts)
    assert f"left out: {folder / 'checkpoint-6' / checkpoint.FILE} is damaged" in texts
    assert "Beta at step 3" in texts
    assert main(["report", str(folder / "checkpoint-6")]) == 1
    assert f"{folder / 'checkpoint-6' / checkpoint.FILE} is damaged" in capsys.readouterr().err


def test_report_of_nothing_that_can_be_read_names_no_source(tmp_path):
    page = tmp_path / "page.html"
    (tmp_path / "checkpoint-6").mkdir()
    (tmp_path / "checkpoint-6" / checkpoint.FILE).write_bytes(b"damaged")
    assert main(["report", str(tmp_path), "--html", str(page)]) == 0
    assert said_of_sources(Page(page)) == ""
    assert "left out: " in " ".join(Page(page).texts)


def test_report_of_a_run_is_one_file_that_needs_no_other(run, tmp_path, capsys):
    page = tmp_path / "run.html"
    assert main(["report", str(run), "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}: open it in a browser\n"
    shown = Page(page)
    assert all(address.startswith("data:") for address in shown.addresses)
    assert "script" not in shown.seen
    assert {"Loss", "Beta at step 6", "Assumptions behind 1/sqrt(d_k)", "from W_q and W_k"} <= set(shown.texts)
    assert "?" not in shown.texts
    assert [shown.texts.count(name) for name in ("attention", "beta / own", "own beta", "since step")] == [1] * 4
    assert any(re.match("Step 6: both layers", text) for text in shown.texts)
    assert any("Search()" in text for text in shown.texts)
    assert not list(tmp_path.glob("*.unfinished"))


def test_report_of_a_checkpoint_alone(run, tmp_path):
    page = tmp_path / "one.html"
    assert main(["report", str(run / "checkpoint-3"), "--html", str(page)]) == 0
    shown = Page(page)
    assert "Beta at step 3" in shown.texts
    assert said_of_sources(shown) == "From the Trainer's history and a checkpoint after 3 steps"
    assert any(text.startswith("training: ") for text in shown.texts)  # from the history of the Trainer
    assert any(text.startswith("largest logit: ") for text in shown.texts)


def test_report_of_a_checkpoint_whose_config_is_of_a_part_of_the_model(run, tmp_path):
    """As that of the encoder in a wrapper, whose layers have other names."""
    folder, page = tmp_path / "checkpoint-3", tmp_path / "one.html"
    shutil.copytree(run / "checkpoint-3", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    assert main(["report", str(folder), "--html", str(page)]) == 0
    assert "Beta at step 3" in Page(page).texts


def test_report_of_a_checkpoint_whose_config_transformers_rejects(run, tmp_path):
    folder, page = shutil.copytree(run / "checkpoint-6", tmp_path / "checkpoint-6"), tmp_path / "page.html"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "activation_function": "none", "hidden_act": "none"}))
    assert main(["report", str(folder), "--html", str(page)]) == 0
    assert "Beta at step 6" in Page(page).texts
    assert not any(re.match("Step 6:", text) for text in Page(page).texts)


def test_report_of_a_run_that_was_killed_in_its_last_save(run, tmp_path):
    page, folder = tmp_path / "one.html", tmp_path / "run"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("events.*"))
    written = folder / "checkpoint-6" / "trainer_state.json"
    written.write_text(written.read_text()[:100])
    assert main(["report", str(folder), "--html", str(page)]) == 0
    shown = Page(page)
    assert "Beta at step 6" in shown.texts
    assert any(re.match("training: .* at step 2, .* at 2", text) for text in shown.texts)  # of checkpoint-3


@pytest.mark.parametrize("aside", [True, False])
def test_report_judges_the_newest_whole_checkpoint(run, tmp_path, aside):
    """Of a run that was killed before the config of its last one was written."""
    page, folder = tmp_path / "one.html", tmp_path / "run"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("events.*"))
    unfinished = folder / "checkpoint-6"
    for name in ("config.json", "trainer_state.json"):
        (unfinished / name).unlink()
    if aside:
        make_trainer(folder, BetaHookCallback(), save_strategy="steps", save_steps=3)
        assert not unfinished.exists()
    assert main(["report", str(folder), "--html", str(page)]) == 0
    shown = Page(page)
    assert f"Beta at step {3 if aside else 6}" in shown.texts
    assert any(re.match("Step 3: both layers", text) for text in shown.texts)


def test_report_of_a_checkpoint_that_measured_nothing(tmp_path):
    page, model = tmp_path / "one.html", build("llama").eval()
    with betahook.attach(model) as hook:
        model(**inputs("llama"))
        hook.step()
        hook.layers[LAYER].beta = 0.5
        model.save_pretrained(tmp_path)
    assert main(["report", str(tmp_path), "--html", str(page)]) == 0
    assert "Beta at step 1" in Page(page).texts
    assert said_of_sources(Page(page)) == "From a checkpoint after 1 step"


def test_report_of_a_checkpoint_has_the_loss_of_its_evaluations(run, tmp_path):
    folder, page = tmp_path / "checkpoint-3", tmp_path / "one.html"
    shutil.copytree(run / "checkpoint-3", folder)
    written = json.loads((folder / "trainer_state.json").read_text())
    written["log_history"] += [{"step": step, "eval_loss": 4.0, "eval_steps_per_second": 9.0} for step in (2, 3)]
    (folder / "trainer_state.json").write_text(json.dumps(written))
    assert main(["report", str(folder), "--html", str(page)]) == 0
    assert any(text.startswith("evaluation: ") for text in Page(page).texts)
    assert {"eval/loss", "eval/steps_per_second"} <= runs.read(str(folder)).scalars.keys()  # the tags of TensorBoard


def test_report_of_a_resumed_run_has_what_was_logged_before(run, tmp_path):
    """TensorBoard's files begin at the resume, the Trainer's history does not; theirs is what both have."""
    folder = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("runs"))
    losses = [point for point in runs.read(str(folder)).scalars["train/loss"] if point[0] < 4]
    assert losses
    with SummaryWriter(str(folder / "runs" / "resumed")) as writer:
        for step in (4, 6):
            writer.add_scalar("train/loss", -1.0, step)
            writer.add_scalar("attention/max_logit", 9.0, step)
    scalars = runs.read(str(folder)).scalars
    assert scalars["train/loss"] == [*losses, (4, -1.0), (6, -1.0)]
    assert [step for step, _ in scalars["attention/max_logit"]] == [*(step for step, _ in losses), 4, 6]


@pytest.mark.parametrize(
    ("first", "second", "kept"), [((1, 10), (1, 3), (1, 3)), ((1, 10), (6, 8), (1, 8)), ((1, 3), (4, 6), (1, 6))]
)
def test_report_of_a_run_that_was_begun_anew_in_its_folder_is_of_the_last_one(tmp_path, first, second, kept):
    with SummaryWriter(str(tmp_path)) as writer:  # of files, TensorBoard reads one behind the other
        for number, (begin, end) in enumerate((first, second)):
            for step in range(begin, end + 1):
                writer.add_scalar("attention/max_logit", float(number), step)
    points = runs.read(str(tmp_path)).scalars["attention/max_logit"]
    assert points == [(step, float(step >= second[0])) for step in range(kept[0], kept[1] + 1)]


@pytest.mark.parametrize("text", ["null", "[3]", '{"log_history": null}', '{"log_history": 3}'])
def test_report_without_a_history_that_can_be_read(run, tmp_path, text):
    folder, page = shutil.copytree(run / "checkpoint-3", tmp_path / "checkpoint-3"), tmp_path / "one.html"
    (folder / "trainer_state.json").write_text(text)
    assert main(["report", str(folder), "--html", str(page)]) == 0
    assert "Beta at step 3" in Page(page).texts


def test_report_leaves_out_entries_without_a_step(run, tmp_path):
    """A callback of the user's may have added them."""
    folder = shutil.copytree(run / "checkpoint-3", tmp_path / "checkpoint-3")
    state = json.loads((folder / "trainer_state.json").read_text())
    expected = runs.read(str(folder)).scalars
    state["log_history"] += [{"note": 1.0}, {"step": None, "loss": 2.0}, None]
    (folder / "trainer_state.json").write_text(json.dumps(state))
    assert runs.read(str(folder)).scalars == expected
    assert main(["report", str(folder), "--html", str(tmp_path / "one.html")]) == 0


def test_report_leaves_out_values_that_are_no_numbers(run, tmp_path):
    folder = shutil.copytree(run / "checkpoint-3", tmp_path / "checkpoint-3")
    state = json.loads((folder / "trainer_state.json").read_text())
    expected = runs.read(str(folder)).scalars["train/loss"]
    state["log_history"] += [{"step": 3, "loss": loss, "note": {}} for loss in ("1.2", None, True, [1.0])]
    (folder / "trainer_state.json").write_text(json.dumps(state))
    scalars = runs.read(str(folder)).scalars
    assert scalars["train/loss"] == expected
    assert "train/note" not in scalars
    assert main(["report", str(folder), "--html", str(tmp_path / "one.html")]) == 0


@pytest.mark.parametrize("kind", ["folder", "broken link"])
def test_report_passes_by_what_has_the_name_of_tensorboard_files_and_is_none(run, tmp_path, capsys, kind):
    folder, page = shutil.copytree(run, tmp_path / "run"), str(tmp_path / "page.html")
    for place in (folder / "other", next(folder.rglob(runs.FILES)).parent):
        other = place / "events.out.tfevents.0"
        if kind == "folder":
            other.mkdir(parents=True)
        else:
            place.mkdir(exist_ok=True)
            other.symlink_to(tmp_path / "gone")
        if place.name == "other":
            assert main(["report", str(folder), "--html", page]) == 0
    capsys.readouterr()
    assert main(["report", str(folder), "--html", page]) == 1
    assert f"{other} is no file, and TensorBoard reads none behind it" in capsys.readouterr().err


def test_report_of_tensorboard_files_alone(tmp_path):
    page = tmp_path / "page.html"
    table = "**Step 2: layer 0 flat.**\n\n| layer | attention |\n| --- | --- |\n| 0 | flat |\n"
    with SummaryWriter(str(tmp_path / "older")) as writer:
        writer.add_scalar("attention/max_logit", 99.0, 0)
    with SummaryWriter(str(tmp_path / "logs")) as writer:
        for step in range(3):
            writer.add_scalar("attention/max_logit", 4.0 + step, step)
            writer.add_scalar("attention/layers_one_key", 0.5, step)
        writer.add_image("attention/at a glance", torch.zeros(3, 4, 4), 2)
        writer.add_text("attention/findings", table, 2)
    with SummaryWriter(str(tmp_path / "other")) as writer:
        writer.add_scalar("loss", 1.0, 0)
    assert main(["report", str(tmp_path), "--html", str(page)]) == 0
    shown = Page(page)
    assert {"Largest logit", "Step 2: layer 0 flat.", "attention", "flat"} <= set(shown.texts)
    assert said_of_sources(shown) == "From TensorBoard files"
    tips = [text for text in shown.texts if "at step" in text]
    assert tips == ["largest logit: 4 at step 0, 6 at 2", "one key: 0.5 at step 0, 0.5 at 2"]
    assert "img" in shown.seen


def test_all_charts_of_a_report_have_the_same_steps(tmp_path):
    page = tmp_path / "page.html"
    begins = {"train/loss": 0, "attention/max_logit": 500, "attention/lowest_entropy": 900}
    with SummaryWriter(str(tmp_path)) as writer:
        for tag, begin in begins.items():
            for step in range(begin, 1001, 100):
                writer.add_scalar(tag, float("nan") if step == 900 and tag == "train/loss" else 1.0, step)
    assert main(["report", str(tmp_path), "--html", str(page)]) == 0
    shown = Page(page)
    lines = re.findall('polyline[^>]* points="([^"]+)"', shown.source)
    assert [float(line.split(",")[0]) for line in lines] == [62, 62 + 484 * 0.5, 62 + 484 * 0.9]
    assert "training: 1 at step 0, 1 at 1000; not finite at step 900" in shown.texts


def test_report_says_why_it_cannot(tmp_path, capsys):
    page = str(tmp_path / "page.html")
    assert main(["report", str(tmp_path), "--html", page]) == 1
    assert "holds nothing of betahook: neither TensorBoard files with its numbers nor" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "gone"), "--html", page]) == 1
    assert "is not a folder; give that of a run" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_report_shows_no_image_of_others(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoint-*"))
    before = runs.read(str(folder)).picture
    events = next(folder.rglob("events.*"))
    with SummaryWriter(events.parent) as writer:
        writer.add_image("samples", torch.rand(3, 8, 8), 6)
    assert runs.read(str(folder)).picture == before
    assert len(before) > 10_000


def test_report_says_which_of_several_runs_it_shows(run, tmp_path):
    page = tmp_path / "page.html"
    for name in ("first", "second"):
        shutil.copytree(run / "runs", tmp_path / "all" / name, copy_function=shutil.copy)  # not the times
    assert main(["report", str(tmp_path / "all"), "--html", str(page)]) == 0
    shown = " ".join(Page(page).texts)
    assert "of 2 folders with TensorBoard files, the newest that has numbers of betahook is shown" in shown


def test_report_takes_the_checkpoints_of_the_run_that_it_shows(run, saved, tmp_path):
    page = tmp_path / "page.html"
    for name in ("first", "second"):
        shutil.copytree(run, tmp_path / "all" / name, copy_function=shutil.copy)
    shutil.copytree(saved / "hooked", tmp_path / "all" / "another")
    assert main(["report", str(tmp_path / "all"), "--html", str(page)]) == 0
    shown = " ".join(Page(page).texts)
    assert re.search("the newest that has numbers of betahook is shown, [^ ]*second[^ ]*: give another one", shown)
    assert "checkpoints after 3, 6 steps" in shown


def test_report_refuses_to_mix_models(run, tmp_path, capsys):
    shutil.copytree(run / "checkpoint-3", tmp_path / "one")
    model = build("gpt2", "sdpa")
    with betahook.attach(model) as hook:
        model(**inputs("gpt2"))
        hook.step()
        model.save_pretrained(tmp_path / "another")
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 1
    assert "holds checkpoints of different models; give the folder of one run" in capsys.readouterr().err
