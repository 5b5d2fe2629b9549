"""The hook's state in checkpoints of the Trainer, resumed from, and unfinished ones set aside."""

import json
import shutil
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import betahook
from betahook import checkpoint
from betahook.hook import hooks_of
from betahook.integrations.trainer import BetaHookCallback, last_checkpoint, watch
from support.models import build, inputs
from support.trainer import arguments_of_rank_one, make_trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with checkpoints of the steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("run")
    make_trainer(folder, BetaHookCallback(), save_strategy="steps", save_steps=2).train()
    return folder


@pytest.fixture
def copy_of_run(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def unexport(folder):
    """Make a checkpoint that of a version whose state of the Trainer held none of the hook."""
    file = folder / "trainer_state.json"
    state = json.loads(file.read_text())
    del state["stateful_callbacks"]["betahook"]
    file.write_text(json.dumps(state))


def damage(file, text=None):
    file.unlink()
    if text is not None:
        file.write_text(text)


def test_an_unfinished_checkpoint_that_cannot_be_renamed_is_in_nobodys_way(copy_of_run, caplog, monkeypatch):
    damage(copy_of_run / "checkpoint-6" / "trainer_state.json")
    refuse = mock.Mock(side_effect=PermissionError("read-only"))
    monkeypatch.setattr("pathlib.Path.rename", refuse)
    make_trainer(copy_of_run, BetaHookCallback("monitor"))
    assert "checkpoint-6 was not finished, and cannot be renamed: read-only. The newest whole one is" in caplog.text


@pytest.mark.parametrize("text", [None, '{"global_step": 6,'], ids=["missing", "half written"])
def test_unfinished_checkpoints_are_set_aside(copy_of_run, caplog, text):
    newest, before, whole = (copy_of_run / f"checkpoint-{step}" for step in (6, 4, 2))
    damage(newest / "trainer_state.json", text)
    damage(before / checkpoint.FILE)
    (copy_of_run / "unfinished-checkpoint-6.1").mkdir()
    expected = content(newest), content(before), content(whole)
    trainer = make_trainer(copy_of_run, BetaHookCallback())
    aside = copy_of_run / "unfinished-checkpoint-6.2", copy_of_run / "unfinished-checkpoint-4.1"
    assert (*map(content, aside), content(whole)) == expected
    assert last_checkpoint(copy_of_run) == str(whole)
    assert "checkpoint-6 was not finished, its process ended while it saved. It is called unfinished" in caplog.text
    assert f"unfinished-checkpoint-6.2 now; the newest whole one is {whole}" in caplog.text
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6


def test_what_was_never_begun_is_set_aside(tmp_path, caplog):
    (tmp_path / "checkpoint-2").mkdir()
    make_trainer(tmp_path, BetaHookCallback())
    assert (tmp_path / "unfinished-checkpoint-2.1").is_dir()
    assert "the newest whole one is none" in caplog.text
    assert last_checkpoint(tmp_path) is None


def test_the_newest_checkpoint_is_that_of_the_highest_step(copy_of_run):
    """By its number: names are in another order."""
    nine, ten = copy_of_run / "checkpoint-9", copy_of_run / "checkpoint-10"
    (copy_of_run / "checkpoint-4").rename(nine)
    (copy_of_run / "checkpoint-6").rename(ten)
    assert last_checkpoint(copy_of_run) == str(ten)
    damage(ten / "trainer_state.json")
    make_trainer(copy_of_run, BetaHookCallback())
    assert (copy_of_run / "unfinished-checkpoint-10.1").is_dir()
    assert last_checkpoint(copy_of_run) == str(nine)


def test_the_last_checkpoint_of_what_is_no_folder():
    with pytest.raises(TypeError, match=r"last_checkpoint\(output_dir\) takes the folder of a run; got None"):
        last_checkpoint(None)


def test_finished_checkpoints_stay(copy_of_run, caplog):
    damage(copy_of_run / "checkpoint-4/trainer_state.json")  # older than a whole one: nothing resumes from it
    expected = content(copy_of_run)
    make_trainer(copy_of_run, BetaHookCallback())
    assert content(copy_of_run) == expected
    assert not caplog.text


def test_checkpoints_of_a_run_without_betahook_stay(copy_of_run, caplog):
    for step in (2, 4, 6):
        (copy_of_run / f"checkpoint-{step}" / checkpoint.FILE).unlink()
    damage(copy_of_run / "checkpoint-4/trainer_state.json")
    expected = content(copy_of_run)
    trainer = make_trainer(copy_of_run, BetaHookCallback())
    assert content(copy_of_run) == expected
    assert not caplog.text
    with pytest.raises(FileNotFoundError, match=r"checkpoint-6.* the checkpoint was saved without betahook"):
        trainer.train(resume_from_checkpoint=True)


def test_a_checkpoint_of_a_newer_version_is_not_taken_for_an_unfinished_one(copy_of_run, caplog):
    newest = copy_of_run / "checkpoint-6"
    state = {**checkpoint.read(newest).state, "version": 99}
    weights = load_file(newest / "model.safetensors")
    checkpoint.save(SimpleNamespace(state_dict=lambda: state), newest, weights)
    expected = content(copy_of_run)
    trainer = make_trainer(copy_of_run, BetaHookCallback())
    assert content(copy_of_run) == expected
    assert not caplog.text
    assert last_checkpoint(copy_of_run) == str(newest)
    with pytest.raises(ValueError, match=r"checkpoint-6.*of version 99, and this betahook reads"):
        trainer.train(resume_from_checkpoint=True)


class Nothing(TrainerCallback):
    """In place of betahook."""


@pytest.mark.parametrize("watched", [False, True])
def test_the_mark_of_weights_without_beta_is_expected_where_a_run_goes_on(copy_of_run, caplog, watched):
    """Also where the best checkpoint is loaded at the end."""
    assert "needs_betahook_restore" in load_file(copy_of_run / "checkpoint-4/model.safetensors")
    steps = dict(max_steps=8, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)
    callback = Nothing() if watched else BetaHookCallback()
    trainer = make_trainer(copy_of_run, callback, load_best_model_at_end=True, **steps)
    if watched:
        watch(trainer, BetaHookCallback())
    trainer.train(resume_from_checkpoint=str(copy_of_run / "checkpoint-4"))
    assert "unexpected" not in caplog.text
    assert not trainer.model._load_state_dict_pre_hooks


@pytest.mark.parametrize("controller", ["monitor", betahook.Search(window=1, warmup=0, rise=False)])
def test_a_run_that_has_checkpoints_already_may_go_on_with_betahook(tmp_path, caplog, controller):
    saving = dict(save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True)
    saving |= dict(metric_for_best_model="eval_loss", greater_is_better=True)  # the first is the best
    make_trainer(tmp_path, Nothing(), max_steps=4, **saving).train()
    callback = BetaHookCallback(controller, on_end="keep")
    trainer = make_trainer(tmp_path, callback, **saving)
    trainer.train(resume_from_checkpoint=True)
    assert caplog.text.count("checkpoint-4 was saved without betahook: beta begins as the model's own") == 1
    assert callback.hook.steps == 2
    assert checkpoint.was_save_started(tmp_path / "checkpoint-6")
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert not callback.hook.layers.are_adapted  # as the best model was
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-6)


@pytest.mark.parametrize("given", [False, True])
def test_a_checkpoint_without_beta_leaves_none_of_the_training_before(tmp_path, caplog, given):
    """A hook that was given keeps the beta that it has, and the warning says so."""
    make_trainer(tmp_path, Nothing(), max_steps=2, save_strategy="steps", save_steps=2).train()
    trainer = make_trainer(tmp_path, Nothing())
    controller = betahook.Search(window=1, warmup=0, rise=False)
    hook = betahook.attach(trainer.model, controller) if given else None
    callback = BetaHookCallback(hook=hook, on_end="keep") if given else BetaHookCallback(controller, on_end="keep")
    trainer.add_callback(callback)
    trainer.train()
    assert callback.hook.layers.are_adapted

    class Look(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                seen.append((callback.hook.layers.are_adapted, callback.hook.steps))

    seen = []
    trainer.add_callback(Look())
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert seen == [(True, 6) if given else (False, 0)]
    begins = "stays as the hook that was given has it" if given else "begins as the model's own"
    assert f"checkpoint-2 was saved without betahook: beta {begins}" in caplog.text


@pytest.mark.parametrize("left", ["the mark", "the mark of an adapter", "the state", "an unfinished file"])
def test_a_checkpoint_that_has_lost_its_beta_is_refused(copy_of_run, left):
    folder = copy_of_run / "checkpoint-6"
    (folder / checkpoint.FILE).unlink()
    if left != "the state":
        unexport(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config.pop(checkpoint.MARK)
    if left != "the mark":
        (folder / "config.json").write_text(json.dumps(config))
    if left == "the mark of an adapter":
        (folder / "adapter").mkdir()
        (folder / "adapter/adapter_config.json").write_text('{"needs_betahook_restore": "x"}')
    if left == "an unfinished file":
        (folder / "betahook.unfinished").touch()
    trainer = make_trainer(copy_of_run, Nothing())
    trainer.add_callback(BetaHookCallback())
    with pytest.raises(FileNotFoundError, match=r"betahook.safetensors does not exist"):
        trainer.train(resume_from_checkpoint=str(folder))


def test_checkpoints_of_a_later_training_without_betahook_stay(copy_of_run, caplog):
    newest = copy_of_run / "checkpoint-6"
    (newest / checkpoint.FILE).unlink()
    config = json.loads((newest / "config.json").read_text())
    del config[checkpoint.MARK]
    (newest / "config.json").write_text(json.dumps(config))
    expected = content(copy_of_run)
    make_trainer(copy_of_run, BetaHookCallback())
    assert content(copy_of_run) == expected
    assert not caplog.text
    assert last_checkpoint(copy_of_run) == str(copy_of_run / "checkpoint-4")


@pytest.mark.parametrize("resumed", [False, True], ids=["over it", "resumed from it"])
@pytest.mark.parametrize("config", [True, False], ids=["of transformers", "without a config"])
def test_a_later_training_without_betahook_is_that_of_its_checkpoints(copy_of_run, caplog, resumed, config):
    """It leaves the files of beta where they were, and hands on the state that it resumed from."""
    trainer = make_trainer(copy_of_run, Nothing(), save_strategy="steps", save_steps=2, learning_rate=1e-2)
    trainer.train(resume_from_checkpoint=str(copy_of_run / "checkpoint-2") if resumed else None)
    assert ("unexpected keys in the checkpoint model loaded: ['needs_betahook_restore']" in caplog.text) == resumed
    caplog.clear()
    for step in (4, 6):
        assert checkpoint.was_save_started(copy_of_run / f"checkpoint-{step}")
        if not config:
            (copy_of_run / f"checkpoint-{step}/config.json").unlink()
    expected = content(copy_of_run)
    trainer = make_trainer(copy_of_run, BetaHookCallback(on_end="keep"), max_steps=8)
    assert content(copy_of_run) == expected
    assert not caplog.text
    assert last_checkpoint(copy_of_run) == (str(copy_of_run / "checkpoint-2") if resumed else None)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 8
    assert "checkpoint-6 was saved without betahook: beta begins as the model's own" in caplog.text


def test_only_the_unfinished_checkpoint_of_a_run_without_betahook_is_set_aside(tmp_path, caplog):
    make_trainer(tmp_path, Nothing(), save_strategy="steps", save_steps=2, max_steps=4).train()
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}/config.json").unlink()  # as an adapter, or a model that is not of transformers
    (tmp_path / "checkpoint-6").mkdir()
    make_trainer(tmp_path, BetaHookCallback())
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-4", "unfinished-checkpoint-6.1"}
    assert f"the newest whole one is {tmp_path / 'checkpoint-4'}" in caplog.text


def test_other_ranks_rename_nothing(copy_of_run):
    damage(copy_of_run / "checkpoint-6/trainer_state.json")
    expected = content(copy_of_run)
    arguments = arguments_of_rank_one(output_dir=str(copy_of_run))
    BetaHookCallback().on_init_end(arguments, TrainerState(), TrainerControl())
    assert content(copy_of_run) == expected


@pytest.mark.parametrize("each_node", [False, True])
def test_beta_is_saved_where_the_trainer_saves(tmp_path, each_node):
    """By the first process of another node too, if each is to save."""
    arguments = arguments_of_rank_one(output_dir=str(tmp_path), save_on_each_node=each_node)
    state, callback = TrainerState(global_step=2, is_world_process_zero=False), BetaHookCallback()
    (tmp_path / "checkpoint-2").mkdir()
    with betahook.attach(build("llama")) as callback.hook:
        callback.on_save(arguments, state, TrainerControl())
    assert (tmp_path / "checkpoint-2" / checkpoint.FILE).exists() is each_node


@pytest.mark.parametrize(("kind", "words"), [("model.safetensors", 0), ("pytorch_model_fsdp_0", 1)])
def test_a_run_that_saves_shards_is_told_once_that_these_lack_beta(tmp_path, caplog, kind, words):
    arguments, callback = TrainingArguments(str(tmp_path)), BetaHookCallback()
    with betahook.attach(build("llama")) as callback.hook:
        for step, beta in enumerate((None, 1.0, 2.0)):
            (tmp_path / f"checkpoint-{step}" / kind).mkdir(parents=True)
            if beta is not None:
                callback.hook.layers["model.layers.0.self_attn"].beta = beta
            callback.on_save(arguments, TrainerState(global_step=step), TrainerControl())
            assert len(caplog.records) == (words if beta else 0)
    assert f"the checkpoints in {tmp_path} hold weights in shards: merged, they lack beta" in caplog.text or not words


def test_the_files_that_are_pushed_have_beta_beside_them(tmp_path):
    """The Trainer copies to its output folder what it knows of a checkpoint, and pushes that."""
    callback = BetaHookCallback(betahook.Search(window=1, warmup=0, rise=False), on_end="keep")
    trainer = make_trainer(tmp_path, callback)
    trainer.train()
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    assert torch.equal(checkpoint.read(tmp_path).state["beta"], callback.hook.state_dict()["beta"])
    trainer.state.is_world_process_zero = False
    content_of_zero = (tmp_path / checkpoint.FILE).read_bytes()
    (tmp_path / checkpoint.FILE).write_bytes(b"of rank 0")
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    assert (tmp_path / checkpoint.FILE).read_bytes() == b"of rank 0"
    (tmp_path / checkpoint.FILE).write_bytes(content_of_zero)
    trainer.state.is_world_process_zero = True
    betahook.fold(callback.hook)
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    assert not (tmp_path / checkpoint.FILE).exists()  # beside weights that have beta in them
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)  # nor is it missed


def test_the_checkpoints_of_a_trial_lie_in_a_folder_of_their_own(tmp_path, caplog):
    """In a search for hyperparameters; a plain module does not save beta by itself."""
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    state, control, callback = TrainerState(global_step=2), TrainerControl(), BetaHookCallback()
    state.is_hyper_param_search = True
    for trial in ("run-0", "run-1"):
        (tmp_path / trial / "checkpoint-2").mkdir(parents=True)
        time.sleep(0.01)
    with betahook.attach(build("llama")) as callback.hook:
        callback.on_save(arguments, state, control)
        assert [path.parent.parent.name for path in tmp_path.rglob(checkpoint.FILE)] == ["run-1"]
        state.global_step = 3
        callback.on_save(arguments, state, control)
    assert f"beta of step 3 was not saved: there is no {tmp_path / 'checkpoint-3'}" in caplog.text


@pytest.mark.parametrize("restoring", [False, True])
def test_a_fork_of_a_run_ends_with_the_same_bits(tmp_path, restoring):
    """In another output folder, from a checkpoint that was moved; whatever the Trainer does with other callbacks."""
    rules = [betahook.Search(window=1, warmup=0, rise=False, opening=0.3, largest=1.0), betahook.Cap(2.0)]
    ends = []
    for output in ("one", "other"):
        callback = BetaHookCallback(rules, on_end="keep", per_head=True)
        trainer = make_trainer(
            tmp_path / output,
            callback,
            save_strategy="steps",
            save_steps=4,
            restore_callback_states_from_checkpoint=restoring,
        )
        trainer.train(resume_from_checkpoint=None if output == "one" else str(tmp_path / "moved"))
        assert callback.hook.steps == 6
        ends.append([*trainer.model.state_dict().values(), callback.hook.state_dict()["beta"]])
        if output == "one":
            (tmp_path / "one/checkpoint-4").rename(tmp_path / "moved")
        callback.hook.detach()
    assert all(map(torch.equal, *ends))
    assert (ends[0][-1] != ends[0][-1][0]).any()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_run_that_was_watched_goes_on_with_what_its_findings_advise(tmp_path, caplog, elsewhere):
    """As a folder of the run, or by the state in that of the Trainer."""
    make_trainer(tmp_path / "run", BetaHookCallback("monitor"), save_strategy="steps", save_steps=3).train()
    callback = BetaHookCallback(betahook.Clip(0.01), on_end="keep")
    trainer = make_trainer(tmp_path / ("other" if elsewhere else "run"), callback)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-3"))
    assert "[Monitor()], which left beta the model's own: [Clip(threshold=0.01)] takes over at step 3" in caplog.text
    assert callback.hook.steps == 6
    assert callback.hook.metrics()["clips/model.layers.0.self_attn"] > 0
    callback.hook.detach()


def test_a_run_whose_beta_has_moved_is_folded_before_others_take_over(copy_of_run, tmp_path):
    folder = copy_of_run / "checkpoint-4"
    trainer = make_trainer(tmp_path / "other", BetaHookCallback(betahook.Clip()))
    with pytest.raises(ValueError, match=r"restore\(model, folder\), one forward, betahook\.fold\(model\)"):
        trainer.train(resume_from_checkpoint=str(folder))
    assert not hooks_of(trainer.model)
    model = type(trainer.model).from_pretrained(folder)  # as the message says
    betahook.restore(model, folder)
    model(**inputs("llama"))
    betahook.fold(model)
    trainer = make_trainer(tmp_path / "other", BetaHookCallback(betahook.Clip()))
    trainer.model = trainer.model_wrapped = model
    trainer.train()
    assert trainer.state.global_step == 6


@pytest.mark.parametrize(
    ("tensors", "controller", "error"),
    [
        ("AAAA", "default", "resume from is damaged"),
        (None, "default", "resume from is damaged"),
        ("as it was", betahook.Gradient(), "resume from: the state belongs to"),
    ],
)
def test_a_state_in_that_of_the_trainer_which_does_not_fit_is_refused(
    copy_of_run, tmp_path, tensors, controller, error
):
    file = copy_of_run / "checkpoint-4/trainer_state.json"
    state = json.loads(file.read_text())
    if tensors != "as it was":
        state["stateful_callbacks"]["betahook"]["tensors"] = tensors
    file.write_text(json.dumps(state))
    trainer = make_trainer(tmp_path / "other", BetaHookCallback(controller))
    with pytest.raises(ValueError, match=f"trainer_state.json of the checkpoint to {error}"):
        trainer.train(resume_from_checkpoint=str(file.parent))


def test_the_state_of_the_trainer_is_that_of_any_run_once_beta_is_folded(tmp_path):
    trainer = make_trainer(tmp_path, BetaHookCallback())
    trainer.train()
    trainer.save_state()
    assert "betahook" not in json.loads((tmp_path / "trainer_state.json").read_text())["stateful_callbacks"]


def test_beta_of_an_older_version_is_resumed_from_where_the_weights_are(tmp_path):
    """Whatever checkpoint of the same step lies in the output folder."""
    saving = dict(save_strategy="steps", save_steps=4, logging_steps=2)
    for name, rate in (("one", 1e-3), ("other", 1e-2)):
        make_trainer(tmp_path / name, BetaHookCallback(), learning_rate=rate, **saving).train()
        unexport(tmp_path / name / "checkpoint-4")
    there = str(tmp_path / "one/checkpoint-4")
    for output in ("other", "new"):
        trainer = make_trainer(tmp_path / output, BetaHookCallback())
        with pytest.raises(
            ValueError,
            match=r"resume from is not .*nothing of betahook. Name it in the arguments too, TrainingArguments\(",
        ):
            trainer.train(resume_from_checkpoint=there)
        trainer = make_trainer(tmp_path / output, BetaHookCallback(), resume_from_checkpoint=there)
        trainer.train(resume_from_checkpoint=there)
    # What the arguments still name is not what is resumed from.
    trainer = make_trainer(
        tmp_path / "one", BetaHookCallback(), resume_from_checkpoint=str(tmp_path / "other/checkpoint-4")
    )
    with mock.patch.object(checkpoint.Saved, "load", autospec=True, side_effect=checkpoint.Saved.load) as load:
        trainer.train(resume_from_checkpoint=there)
    assert str(load.call_args.args[0].place.parent) == there
