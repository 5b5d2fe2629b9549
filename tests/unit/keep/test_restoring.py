"""A model that comes back from a folder, beta where it was; with what else: tests/unit/checkpoint."""

import pytest
import torch.distributed.checkpoint as dcp
from accelerate.utils import merge_fsdp_weights
from accelerate.utils.constants import FSDP_MODEL_NAME

import betahook
from betahook import checkpoint
from betahook.cli import main
from betahook.hook import hooks_of
from support.models import build, inputs
from support.training import train


@pytest.fixture
def folder(tmp_path):
    model = build("llama")
    with betahook.attach(model, controller=betahook.Gradient(0.1)) as hook:
        train(model, hook, 2)
        hook.model.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def shards(tmp_path):
    """A checkpoint of the Trainer under FSDP with SHARDED_STATE_DICT, which has no config."""
    model, folder = build("llama"), tmp_path / "checkpoint-2"
    with betahook.attach(model, controller=betahook.Gradient(0.1)) as hook:
        train(model, hook, 2)
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / f"{FSDP_MODEL_NAME}_0")
        checkpoint.save(hook, folder)
    return folder


def load(folder):
    return type(build("llama")).from_pretrained(folder, attn_implementation="eager").train()


def betas(hook):
    return [layer.beta for layer in hook.layers.values()]


def test_without_controllers_beta_stays_where_it_is(folder):
    model = load(folder)
    with betahook.restore(model, folder) as hook:
        assert hook.controllers == [betahook.Monitor()]
        before = betas(hook)
        assert all(layer.beta != layer.beta_default for layer in hook.layers.values())
        assert train(model, hook, 2) == [before, before]


@pytest.mark.parametrize("controller", [None, betahook.Gradient(0.1)])
def test_the_note_of_a_fold_names_what_trained_the_beta(folder, controller):
    model = load(folder)
    betahook.restore(model, folder, controller=controller)
    model(**inputs("llama"))
    betahook.fold(model)
    assert model.config.betahook_folded["controllers"] == [repr(betahook.Gradient(0.1))]


def test_what_trained_the_beta_is_saved_again(folder, tmp_path, capsys):
    model = load(folder)
    with betahook.restore(model, folder) as hook:
        model.save_pretrained(tmp_path / "again")
        state = hook.state_dict()
    assert main(["show", str(tmp_path / "again")]) == 0
    assert f"From {betahook.Gradient(0.1)!r}" in capsys.readouterr().out
    model = load(tmp_path / "again")
    hook = betahook.restore(model, tmp_path / "again")
    assert hook.trained_by == [repr(betahook.Gradient(0.1))]
    assert f"2 layers, [Monitor()], beta trained by {betahook.Gradient(0.1)!r})" in repr(hook)
    model(**inputs("llama"))
    betahook.fold(model)
    assert model.config.betahook_folded["controllers"] == hook.trained_by
    with betahook.attach(build("llama"), controller="monitor") as other:
        other.load_state_dict(state)
        assert other.trained_by == hook.trained_by


def test_an_empty_list_of_controllers_is_refused(folder):
    with pytest.raises(ValueError, match='controller is an empty list; use "monitor" to leave beta'):
        betahook.restore(load(folder), folder, controller=[])


def test_with_controllers_beta_goes_on(folder):
    model = load(folder)
    with betahook.restore(model, folder, controller=betahook.Gradient(0.1)) as hook:
        before = betas(hook)
        assert train(model, hook, 1) != [before]


def test_a_folder_whose_beta_was_left_behind(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(FileNotFoundError, match="the folder was copied without it"):
        betahook.restore(load(folder), tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "sum"}, rf"betahook {betahook.__version__} does not know its option pooling; restore it with the"),
        ({"interval": 0}, "is not the state of a hook: interval must be a whole number of steps, 1 or more; got 0"),
    ],
)
def test_options_of_another_version(folder, options, message):
    model = build("llama")
    with betahook.attach(model, controller=betahook.Gradient(0.1)) as hook:
        train(model, hook, 1)
        written = hook.state_dict
        hook.state_dict = lambda: {**(state := written()), "options": {**state["options"], **options}}
        hook.model.save_pretrained(folder)
    model = load(folder)
    with pytest.raises(ValueError, match=message):
        betahook.restore(model, folder)
    assert not hooks_of(model)


def test_a_model_that_needs_no_betahook(folder):
    with pytest.raises(
        ValueError, match=r"its beta is in the weights already, or is the model's own; .* load the weights of"
    ):
        betahook.restore(build("llama"), folder)
    (folder / "other").mkdir()
    with pytest.raises(ValueError, match=r"needs betahook: .*, and there is no .*safetensors"):
        betahook.restore(build("llama"), folder / "other")
    for model in (build("llama"), load(folder)):
        with pytest.raises(FileNotFoundError, match=r"there is no folder .*missing: name the one that the hooked mod"):
            betahook.restore(model, folder / "missing")
    with pytest.raises(TypeError, match=r"takes a folder second; got LlamaForCausalLM"):
        betahook.restore(folder, build("llama"))


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")  # a single process writes the shards
@pytest.mark.filterwarnings("ignore:TypedStorage:UserWarning")  # torch 2.6 writes them by it
@pytest.mark.parametrize("in_place", [False, True])
def test_weights_merged_of_shards_get_their_beta(shards, tmp_path, in_place):
    """They are loaded by the config of the model before its training, which has no mark."""
    merged = shards if in_place else tmp_path / "merged"
    merge_fsdp_weights(shards / f"{FSDP_MODEL_NAME}_0", merged)
    build("llama").config.save_pretrained(merged)
    model = load(merged)
    hook = betahook.restore(model, shards)
    assert betas(hook) == pytest.approx(checkpoint.read(shards).state["beta"][::4].tolist())
    assert hook.layers.are_adapted
    model(**inputs("llama"))
    betahook.fold(hook)
    model.save_pretrained(shards)
    for folded in (model, load(shards)):
        with pytest.raises(ValueError, match="its beta is in the weights already"):
            betahook.restore(folded, shards)


def test_a_file_without_weights_is_restored_from(folder, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / checkpoint.FILE).write_bytes((folder / checkpoint.FILE).read_bytes())
    trained = build("llama")
    trained.load_state_dict(load(folder).state_dict())
    with betahook.restore(trained, alone) as hook:
        assert hook.layers.are_adapted
    with pytest.raises(ValueError, match="its beta belongs to other weights"):
        betahook.restore(build("llama"), alone)


def test_other_controllers_leave_the_model_as_it_was(folder):
    model = load(folder)
    with pytest.raises(
        ValueError, match=r"other controllers.*, betahook.restore\(model, folder\), one forward, betahook.fold\(model\)"
    ):
        betahook.restore(model, folder, controller=betahook.Cap())
    betahook.restore(model, folder)  # as the message says
    model(**inputs("llama"))
    betahook.fold(model)
    betahook.attach(model, controller=betahook.Cap()).detach()


def test_a_model_that_is_hooked_already(folder):
    model = load(folder)
    with betahook.restore(model, folder) as hook:
        before = betas(hook)
        with pytest.raises(RuntimeError, match=r"is hooked already, perhaps by an earlier restore\(\)"):
            betahook.restore(model, folder)
        assert betas(hook) == before


def test_the_model_alone_is_another_one(folder):
    model, batch = load(folder), inputs("llama")
    plain = model(**batch).logits
    with betahook.restore(model, folder):
        assert (model(**batch).logits - plain).abs().max() > 1e-3
