"""State files: a resumed run goes on bit-identically; damaged or foreign files are refused by name."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import TrainerCallback

import betahook
from betahook import checkpoint
from betahook.integrations.trainer import BetaHookCallback
from models import build, inputs
from test_hook import train
from test_trainer import make_trainer


def attach(model):
    return betahook.attach(model, controller=[betahook.Search(window=2, warmup=0), betahook.Cap(2.0)])


class Interrupt(TrainerCallback):
    """Ends the run as a crash would, without `on_train_end`."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise KeyboardInterrupt


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    def run(folder, *more, resume=None):
        torch.manual_seed(0)
        callback = BetaHookCallback(
            controller=[betahook.Search(window=1, warmup=0, opening=0.3, largest=1.0), betahook.Cap(2.0)], on_end="keep"
        )
        trainer = make_trainer(folder, callback, save_strategy="steps", save_steps=3, max_steps=8)
        for other in more:
            trainer.add_callback(other)
        try:
            trainer.train(resume_from_checkpoint=resume)
        finally:
            state = callback.hook.state_dict()
            callback.hook.detach()
        return trainer.model.state_dict(), state

    weights, state = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", Interrupt())
    resumed_weights, resumed_state = run(tmp_path / "parts", resume=True)
    assert all(torch.equal(value, resumed_weights[name]) for name, value in weights.items())
    assert torch.equal(state["beta"], resumed_state["beta"])
    assert state["steps"] == resumed_state["steps"] == 8
    for expected, actual in zip(state["controllers"], resumed_state["controllers"], strict=True):
        assert all(torch.equal(value, actual["state"][name]) for name, value in expected["state"].items())


def test_resuming_from_a_checkpoint_without_betahook_is_an_error(tmp_path):
    trainer = make_trainer(tmp_path, BetaHookCallback(), save_strategy="steps", save_steps=3)
    trainer.train()
    (tmp_path / "checkpoint-3" / checkpoint.FILE).unlink()
    (tmp_path / "checkpoint-6" / checkpoint.FILE).unlink()
    with pytest.raises(FileNotFoundError, match=r"checkpoint-6.*saved without betahook"):
        make_trainer(tmp_path, BetaHookCallback(), max_steps=9).train(resume_from_checkpoint=True)


def test_a_round_trip_restores_everything(tmp_path):
    model = build("llama")
    with attach(model) as hook:
        train(model, hook, 3)
        model(**inputs("llama"))
        expected = checkpoint.save(hook, tmp_path).read_bytes()
    assert [file.name for file in tmp_path.iterdir()] == [checkpoint.FILE]
    with attach(model) as hook:
        checkpoint.load(hook, tmp_path)
        assert checkpoint.save(hook, tmp_path).read_bytes() == expected


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip_header(path):
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def replace(tensors, metadata):
    return lambda path: save_file(tensors, path, metadata)


def rewrite(change):
    """Save the same file with a changed header."""

    def damage(path):
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            state = json.loads(file.metadata()["betahook"])
        tensors, state = change(tensors, state)
        save_file(tensors, path, {"betahook": json.dumps(state)})

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "is damaged"),
        (flip_header, "is damaged"),
        (lambda path: path.write_bytes(b""), "is damaged"),
        (replace({"x": torch.zeros(1)}, None), "no state of a hook"),
        (replace({"x": torch.zeros(1)}, {"betahook": "{"}), "is damaged"),
        (rewrite(lambda t, s: (t, {**s, "version": 0})), "expected a betahook state of version 1, got 0"),
        (
            rewrite(lambda t, s: ({k: v for k, v in t.items() if k != "beta"}, s)),
            r"beta should have the shape \[8\], got None",
        ),
        (rewrite(lambda t, s: ({**t, "sums": t["sums"][:2]}, s)), "sums should have the shape"),
        (rewrite(lambda t, s: (t, {**s, "layers": {"a": 8}})), "these differ: a, model.layers.0.self_attn"),
    ],
)
def test_bad_files_are_refused_and_change_nothing(tmp_path, damage, message):
    model = build("llama")
    with attach(model) as hook:
        train(model, hook, 2)
        path = checkpoint.save(hook, tmp_path)
        before = repr(hook.state_dict())
        damage(path)
        with pytest.raises(ValueError, match=message) as caught:
            checkpoint.load(hook, tmp_path)
        assert str(path) in str(caught.value)
        assert repr(hook.state_dict()) == before
