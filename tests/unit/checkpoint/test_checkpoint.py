"""State files: a resumed run goes on bit-identically; damaged or foreign files are refused by name."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import TrainerCallback

import betahook
from betahook import checkpoint
from betahook.checkpoint import pretrained
from betahook.integrations.trainer import BetaHookCallback
from support.models import build, inputs
from support.trainer import make_trainer
from support.training import LAYER, bits, fingerprint, train


def attach(model):
    return betahook.attach(model, controller=[betahook.Search(window=2, warmup=0, rise=False), betahook.Cap(2.0)])


class Interrupt(TrainerCallback):
    """Ends the run as a crash would, without `on_train_end`."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise KeyboardInterrupt


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    def run(folder, *more, resume=None):
        torch.manual_seed(0)
        callback = BetaHookCallback(
            controller=[betahook.Search(window=1, warmup=0, rise=False, opening=0.3, largest=1.0), betahook.Cap(2.0)],
            on_end="keep",
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
        assert bits(expected["state"]) == bits(actual["state"])


@pytest.mark.parametrize("native", [False, True])
def test_the_config_of_an_adapter_is_marked_where_it_is_saved(tmp_path, native):
    """PEFT has a folder for each adapter with a name of its own; `save_pretrained` of transformers has none."""
    model = SimpleNamespace(peft_config={"mine": None}, _hf_peft_config_loaded=native)
    configs = [folder / pretrained.ADAPTER_CONFIG for folder in (tmp_path, tmp_path / "mine")]
    configs[1].parent.mkdir()
    for path in configs:
        path.write_text("{}")
    pretrained._mark_files(model, tmp_path)
    assert [pretrained.NEEDS_RESTORE in path.read_text() for path in configs] == [native, not native]


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
        checkpoint.read(tmp_path).load(hook)
        assert checkpoint.save(hook, tmp_path).read_bytes() == expected


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip_header(path):
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def flip_beta(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def replace(tensors, metadata):
    return lambda path: save_file(tensors, path, metadata)


def rewrite(**changes):
    """The file that a hook with another state would have written."""

    def damage(path):
        state = {**checkpoint.read(path.parent).state, **changes}
        checkpoint.save(SimpleNamespace(model=nn.Module(), state_dict=lambda: state), path.parent)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "is damaged .*resume from an older checkpoint"),
        (flip_header, "is damaged"),
        (flip_beta, r"is damaged \(its checksum does not match\); resume from an older checkpoint"),
        (lambda path: path.write_bytes(b""), "is damaged"),
        (lambda path: path.write_text("{}"), "is damaged"),
        (replace({"x": torch.zeros(1)}, None), "is not the state of a hook"),
        (replace({"x": torch.zeros(1)}, {"betahook": "{"}), "is damaged"),
        (replace({"x": torch.zeros(1)}, {"betahook": f'{{"state": {"9" * 5000}}}'}), "is damaged"),
        (rewrite(version=0), "expected a betahook state of version 3, got 0"),
        (rewrite(table=torch.zeros(2, 8)), "table should have the shape"),
        (
            rewrite(layers={"a": 8}, order=["a"]),
            "other layers: only the state has a; only this hook has model.layers.0.self_attn, model.layers.1",
        ),
    ],
)
def test_bad_files_are_refused_and_change_nothing(tmp_path, damage, message):
    model = build("llama")
    with attach(model) as hook:
        train(model, hook, 2)
        path = checkpoint.save(hook, tmp_path)
        before = bits(hook.state_dict())
        damage(path)
        with pytest.raises(ValueError, match=message) as caught:
            checkpoint.read(tmp_path).load(hook)
        assert str(path) in str(caught.value)
        assert bits(hook.state_dict()) == before


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A hook in the middle of its run, and the bytes of its file."""
    model = build("llama")
    with attach(model) as hook:
        train(model, hook, 2)
        yield hook, checkpoint.save(hook, tmp_path_factory.mktemp("trained"))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_no_byte_of_a_file_can_change_unseen(trained, data):
    hook, path = trained
    good, state = path.read_bytes(), bits(hook.state_dict())
    cut = data.draw(st.integers(0, len(good)))
    junk = data.draw(st.binary(max_size=8))
    bad = good[:cut] + junk + good[cut + data.draw(st.sampled_from([0, len(junk), len(good)])) :]
    path.write_bytes(bad)
    try:
        checkpoint.read(path.parent).load(hook)
    except ValueError as caught:
        message = str(caught)
    else:
        message = f"{path} is the same" if bad == good else ""
    finally:
        path.write_bytes(good)
    assert str(path) in message
    assert bits(hook.state_dict()) == state


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), st.integers(), max_size=2),
    st.sampled_from([torch.zeros(8), torch.full((8,), -1.0), torch.zeros(2, dtype=torch.int64), torch.ones(8)]),
)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_state_with_a_foreign_part_is_refused_or_works(trained, data):
    """Any entry at any depth replaced or removed: a ValueError and no change, or a hook that goes on."""
    hook, _ = trained
    original = hook.state_dict()
    bad = copy.deepcopy(original)
    place = bad
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = data.draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and len(place[key]) and data.draw(st.booleans()):
            place = place[key]
            continue
        if data.draw(st.booleans()):
            place[key] = data.draw(JUNK)
        else:
            del place[key]
        break
    try:
        hook.load_state_dict(bad)
    except ValueError as caught:
        message = str(caught)
    else:
        message = "it goes on as another run"
        train(hook.model, hook, 1)
        hook.load_state_dict(original)
    assert len(message) > 20
    assert bits(hook.state_dict()) == bits(original)
    assert all(layer.beta > 0 for layer in hook.layers.values())


def test_a_state_per_head_is_not_one_per_layer():
    with betahook.attach(build("llama"), per_head=True) as hook:
        state = hook.state_dict()
    message = r"a hook with per_head=True, this one has per_head=False: give this one the same$"
    with betahook.attach(build("llama")) as hook, pytest.raises(ValueError, match=message):
        hook.load_state_dict(state)


def adapted(hook):
    for layer in hook.layers.values():
        layer.beta = 0.7
    return hook


def test_saved_while_hooked_it_comes_back(tmp_path):
    """From a folder with a mark; what transformers alone makes of it is another model."""
    model, batch = build("llama").eval(), inputs("llama")
    settings = {"per_head": True, "interval": 3, "when": "always", "exact_max_logit": True}
    with betahook.attach(model, controller="monitor", layers="*.1.*", **settings) as hook:
        model(**batch)
        adapted(hook)
        expected = model(**batch).logits
        model.save_pretrained(tmp_path)
        assert not hasattr(model.config, "betahook")
    assert "betahook.restore(model, folder)" in json.loads((tmp_path / "config.json").read_text())["betahook"]

    plain = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    assert not torch.allclose(plain(**batch).logits, expected, atol=1e-3)
    with pytest.raises(ValueError, match=r"saved with its beta beside the weights: betahook.restore\(model, folder\)"):
        betahook.attach(plain)
    with betahook.restore(plain, tmp_path) as restored:
        assert torch.equal(plain(**batch).logits, expected)
        assert restored.state_dict()["options"] == settings
        betahook.fold(plain)
    torch.testing.assert_close(plain(**batch).logits, expected, rtol=1e-5, atol=1e-5)
    plain.save_pretrained(tmp_path)
    assert "betahook" not in json.loads((tmp_path / "config.json").read_text())
    again = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    with pytest.raises(
        ValueError, match=r"not loaded from a checkpoint that needs betahook: its beta is in the weights already"
    ):
        betahook.restore(again, tmp_path)
    torch.testing.assert_close(again(**batch).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights_given", [False, True])
def test_weights_that_lack_beta_say_so_to_whatever_loads_them(tmp_path, weights_given):
    """As those of a checkpoint of the Trainer, which gives the weights."""
    model, mark = build("llama"), "needs_betahook_restore"
    names = set(model.state_dict())
    own, weights = ({"state_dict": model.state_dict()} if weights_given else {} for _ in range(2))
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama"))
        model.save_pretrained(tmp_path / "own", **own)
        assert not copy.deepcopy(model)._load_state_dict_pre_hooks
        adapted(hook)
        model.save_pretrained(tmp_path, **weights)
        assert set(model.state_dict()) == names
        saved = load_file(tmp_path / "model.safetensors")
        assert set(saved) == {*load_file(tmp_path / "own/model.safetensors"), mark}
        assert mark not in weights.get("state_dict", ())
        model.load_state_dict({**model.state_dict(), mark: saved[mark]})
    assert not model._load_state_dict_pre_hooks
    again, said = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert said["unexpected_keys"] == {mark}
    with pytest.raises(RuntimeError, match=f"Unexpected key.*{mark}"):
        model.load_state_dict({**model.state_dict(), mark: saved[mark]})
    betahook.restore(again, tmp_path)
    assert mark not in again.state_dict()


def test_a_restored_run_goes_on(tmp_path):
    model = build("llama")
    with attach(model) as hook:
        train(model, hook, 3)
        model.save_pretrained(tmp_path)
        expected = train(model, hook, 3)
    again = type(model).from_pretrained(tmp_path, attn_implementation="eager").train()
    controller = [betahook.Search(window=2, warmup=0, rise=False), betahook.Cap(2.0)]
    with betahook.restore(again, tmp_path, controller=controller) as hook:
        assert train(again, hook, 3) == expected


def test_what_cannot_be_restored_leaves_the_model_as_it_was(tmp_path):
    model = build("llama")
    with attach(model) as hook:
        train(model, hook, 2)
        model.save_pretrained(tmp_path)
    smaller = type(model).from_pretrained(tmp_path, num_hidden_layers=1, ignore_mismatched_sizes=True)
    wider = type(model).from_pretrained(tmp_path, num_attention_heads=2, ignore_mismatched_sizes=True)
    same = type(model).from_pretrained(tmp_path)
    for other, options, message in (
        (smaller, {}, "the state has layers that this model lacks: model.layers.1.self_attn"),
        (wider, {}, "the number of heads differs in model.layers.0.self_attn, model.layers.1.self_attn. Attach to"),
        (
            same,
            {"controller": betahook.Gradient()},
            r"other controllers, .*: expected \[Gradient\(\)\], got \[Search\(window=2, .*\), Cap\(threshold=2.0\)\]",
        ),
    ):
        before = fingerprint(other)
        with pytest.raises(ValueError, match=message) as caught:
            betahook.restore(other, tmp_path, **options)
        assert str(tmp_path / checkpoint.FILE) in str(caught.value)
        assert fingerprint(other) == before
        assert hasattr(other.config, "betahook")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(FileNotFoundError, match="copied without it"):
        betahook.restore(same, tmp_path / "elsewhere")


def test_a_hooked_model_at_its_own_beta_saves_no_mark(tmp_path):
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        train(model, hook, 1)
        model.save_pretrained(tmp_path)
        assert "betahook" not in json.loads((tmp_path / "config.json").read_text())
        model.save_pretrained(tmp_path / "other rank", False)
        assert not (tmp_path / "other rank" / checkpoint.FILE).exists()
    assert "save_pretrained" not in vars(model)


def test_a_hooked_model_is_pushed_to_the_hub_while_its_beta_is_its_own(tmp_path):
    model, pushed = build("llama"), []
    model.save_pretrained = lambda save_directory, **kwargs: pushed.append(kwargs)
    with betahook.attach(model, controller="monitor") as hook:
        train(model, hook, 1)
        model.save_pretrained(tmp_path, push_to_hub=True)
        hook.layers[LAYER].beta = 0.7
        with pytest.raises(ValueError, match=r"push_to_hub=True\) of a hooked model would leave beta behind"):
            model.save_pretrained(tmp_path, push_to_hub=True)
    assert pushed == [{"push_to_hub": True}]


def test_a_replaced_save_pretrained_is_put_back(tmp_path):
    model = build("llama")
    model.save_pretrained = own = lambda save_directory: None
    with betahook.attach(model) as hook:
        model.save_pretrained(tmp_path)
        checkpoint.read(tmp_path).load(hook)
    assert model.save_pretrained is own


def test_what_wrappers_add_to_a_name_is_not_saved(tmp_path):
    """As with activation checkpointing under FSDP: the weights have plain names too."""
    model = build("llama")
    apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ == "LlamaDecoderLayer")
    with betahook.attach(model, controller="monitor") as hook:
        assert list(hook.layers) == [f"model.layers.{index}.self_attn" for index in range(2)]
        model(**inputs("llama"))
        hook.layers[LAYER].beta = 0.5
        expected = model(**inputs("llama")).logits
        model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path)
    with betahook.restore(plain, tmp_path):
        torch.testing.assert_close(plain(**inputs("llama")).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", ["wrapped", "deleted"])
def test_a_save_pretrained_that_was_changed_after_attach_stays(tmp_path, change):
    model = build("llama")
    hook = betahook.attach(model)
    model(**inputs("llama"))
    ours = model.save_pretrained
    if change == "wrapped":
        model.save_pretrained = lambda folder: ours(folder)
    else:
        del model.save_pretrained
    kept = model.save_pretrained
    hook.detach()
    assert not hook.attached
    assert model.save_pretrained == kept
    model.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").exists()
    assert not (tmp_path / checkpoint.FILE).exists()
