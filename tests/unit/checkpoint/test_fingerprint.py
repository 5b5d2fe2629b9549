"""Beta and the weights beside it: what was saved together is known in any form, and what was not is refused."""

import copy
import os
from unittest import mock

import pytest
import torch
from torch import nn

import betahook
from betahook import checkpoint
from betahook.checkpoint import file as files
from betahook.checkpoint import fingerprint
from betahook.cli import main
from betahook.integrations.trainer import BetaHookCallback
from support.models import build, inputs
from support.trainer import make_trainer
from support.training import LAYER, train
from support.training import fingerprint as traces_in


def moved(hook):
    """A hook whose beta acts."""
    hook.model(**inputs("llama"))
    hook.layers[LAYER].beta = 0.5
    return hook


@pytest.fixture
def folder(tmp_path):
    with betahook.attach(build("llama"), controller="monitor") as hook:
        moved(hook).model.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def torn(folder):
    """Killed between the state and the weights of a second save."""
    with betahook.attach(build("llama"), controller="monitor") as hook:
        train(hook.model, moved(hook), 1)
        checkpoint.save(hook, folder)
    return folder


def load(folder, **options):
    return type(build("llama")).from_pretrained(folder, attn_implementation="eager", **options).train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_the_same_weights_in_another_dtype(tmp_path, saved, dtype):
    with betahook.attach(build("llama", dtype=saved), controller="monitor") as hook:
        moved(hook).model.save_pretrained(tmp_path)
    with betahook.restore(load(tmp_path, dtype=dtype), tmp_path) as hook:
        assert hook.layers[LAYER].beta == 0.5
    checkpoint.read(tmp_path).check_files()


def test_the_same_weights_in_shards_or_given_by_name(tmp_path):
    model = build("llama")
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    with betahook.attach(model, controller="monitor") as hook:
        moved(hook)
        model.lm_head.weight.data.zero_()  # as where ranks hold a part each, and the whole is given to save_pretrained
        model.save_pretrained(tmp_path, state_dict=weights, max_shard_size="10kB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    checkpoint.read(tmp_path).check_files()
    betahook.restore(load(tmp_path), tmp_path).detach()


def test_tied_weights(tmp_path):
    """Saved under one of their names."""
    with betahook.attach(build("gpt2"), controller="monitor") as hook:
        hook.model(**inputs("gpt2"))
        next(iter(hook.layers.values())).beta = 0.5
        hook.model.save_pretrained(tmp_path)
    checkpoint.read(tmp_path).check_files()
    betahook.restore(type(build("gpt2")).from_pretrained(tmp_path), tmp_path).detach()


@pytest.mark.filterwarnings("ignore:.*needs_betahook_restore")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize("changes", [False, True])
def test_adapters(tmp_path, changes):
    """Whose base is not saved."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama"))
        next(iter(hook.layers.values())).beta = 0.5
        model.save_pretrained(tmp_path)
        if changes:
            model.base_model.model.get_submodule(LAYER).q_proj.lora_B["default"].weight.data += 0.5
            checkpoint.save(hook, tmp_path)
    again = peft.PeftModel.from_pretrained(build("llama"), tmp_path)
    if not changes:
        betahook.restore(again, tmp_path).detach()
        return
    with pytest.raises(ValueError, match=r"1 of \d+ differ, .*q_proj.lora_B.default.weight first, expected 0.5 got 0"):
        betahook.restore(again, tmp_path)


def test_a_state_with_other_weights_is_not_restored(torn):
    model = load(torn)
    before = traces_in(model)
    message = (
        r"betahook.safetensors: its beta belongs to other weights than those of this LlamaForCausalLM: \d+ of \d+ "
        r"differ, lm_head.weight first, expected \S+ got \S+. Load those of the same folder, .* its last "
        "save was interrupted: take another checkpoint"
    )
    with pytest.raises(ValueError, match=message):
        betahook.restore(model, torn)
    assert traces_in(model) == before
    assert checkpoint.is_marked(model)
    with betahook.attach(build("llama"), controller="monitor") as hook:
        expected = hook.state_dict()["beta"]
        with pytest.raises(ValueError, match="its beta belongs to other weights"):
            checkpoint.read(torn).load(hook)
        torch.testing.assert_close(hook.state_dict()["beta"], expected, equal_nan=True)


def test_the_command_says_that_beta_and_weights_do_not_belong_together(torn, capsys):
    assert main(["inspect", str(torn)]) == 1
    said = capsys.readouterr().err
    assert "its beta does not belong to the weights beside it" in said
    assert "The last save was interrupted: take another checkpoint" in said


def test_weights_that_are_damaged(torn, capsys):
    path = torn / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["inspect", str(torn)]) == 1
    assert "the weights beside it are damaged" in capsys.readouterr().err


def test_a_shard_of_another_save(tmp_path):
    """Killed between two shards; even if it holds no attention."""
    with betahook.attach(build("llama"), controller="monitor") as hook:
        moved(hook).model.save_pretrained(tmp_path, max_shard_size="10kB")
        first = {path: path.read_bytes() for path in tmp_path.glob("model-*.safetensors")}
        hook.model.lm_head.weight.data += 1e-3
        hook.model.save_pretrained(tmp_path, max_shard_size="10kB")
    changed = [path for path, content in first.items() if path.read_bytes() != content]
    assert len(changed) == 1
    checkpoint.read(tmp_path).check_files()
    changed[0].write_bytes(first[changed[0]])
    with pytest.raises(ValueError, match=r"beside it: 1 of \d+ differ, lm_head.weight first"):
        checkpoint.read(tmp_path).check_files()
    with pytest.raises(ValueError, match=r": 1 of \d+ differ, lm_head.weight first"):
        betahook.restore(load(tmp_path), tmp_path)


@pytest.mark.parametrize("controller", ["monitor", "default"])
def test_a_run_resumes_with_weights_that_the_trainer_did_not_load_if_no_beta_moves(tmp_path, controller):
    """Those of ViT, say: transformers saves them under names that the Trainer does not load."""
    steps = dict(save_strategy="steps", save_steps=2)
    make_trainer(tmp_path, BetaHookCallback(controller), max_steps=2, **steps).train()
    trainer = make_trainer(tmp_path, BetaHookCallback(controller), max_steps=4, **steps)
    trainer._load_from_checkpoint = lambda *args, **kwargs: None
    if controller == "monitor":
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == 4
        return
    with pytest.raises(ValueError, match=r"Load those of the same folder, with from_pretrained, and change them only"):
        trainer.train(resume_from_checkpoint=True)


def test_a_run_does_not_resume_from_a_state_with_other_weights(tmp_path, caplog):
    """That of a run that was saving over the checkpoints of another; the newest one is set aside."""
    make_trainer(tmp_path, BetaHookCallback(), save_strategy="steps", save_steps=2, max_steps=4).train()
    caplog.clear()
    states = [tmp_path / f"checkpoint-{step}" / checkpoint.FILE for step in (2, 4)]
    older, newer = (path.read_bytes() for path in states)
    states[0].write_bytes(newer)
    trainer = make_trainer(tmp_path, BetaHookCallback(), max_steps=6)
    assert not caplog.records
    with pytest.raises(ValueError, match=r"checkpoint-2.betahook.safetensors: its beta belongs to other weights"):
        trainer.train(resume_from_checkpoint=str(states[0].parent))
    for path in states:
        path.write_bytes(older)
    make_trainer(tmp_path, BetaHookCallback(), max_steps=6)
    assert "checkpoint-4 was not finished" in caplog.records[-1].getMessage()


def test_a_state_that_knows_no_weights_belongs_to_any(folder):
    with mock.patch.object(fingerprint, "take", return_value={}), betahook.restore(load(folder), folder) as hook:
        checkpoint.save(hook, folder)
    model = load(folder)
    model.lm_head.weight.data += 1
    betahook.restore(model, folder).detach()


def test_what_is_not_at_hand_is_left_out():
    model = nn.Module()
    for name in ("quantised", "offloaded", "zero_3", "flattened", "empty"):
        model.register_parameter(name, nn.Parameter(torch.ones(3)))
    model.quantised = nn.Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)
    model.offloaded = nn.Parameter(torch.ones(3, device="meta"))
    model.zero_3.ds_id = 0
    model.flattened._fsdp_flattened = True
    model.empty = nn.Parameter(torch.ones(0))
    model.single = nn.Parameter(torch.tensor(torch.nan))
    model.transposed = nn.Parameter(torch.arange(32.0).view(2, 16).mT)
    taken = fingerprint.take(model)
    assert taken.keys() == {"single", "transposed"}
    assert all(entries.shape == (fingerprint.ENTRIES,) for entries in taken.values())
    flat = model.transposed.detach().flatten()
    assert taken["transposed"].tolist() == [float(flat[31 * index // 15]) for index in range(16)]
    fingerprint.refuse_other_weights(taken, copy.deepcopy(model))  # a NaN is the same as before


def test_the_next_save_takes_away_what_a_crash_left(tmp_path):
    with betahook.attach(build("llama"), controller="monitor") as hook:
        with mock.patch.object(files.os, "replace", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            checkpoint.save(hook, tmp_path)
        assert checkpoint.was_save_started(tmp_path)
        assert checkpoint.FILE not in os.listdir(tmp_path)
        checkpoint.save(hook, tmp_path)
    assert os.listdir(tmp_path) == [checkpoint.FILE]
