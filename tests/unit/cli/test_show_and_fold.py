"""`betahook show` and `betahook fold`, called as the console script calls them."""

import json
import shutil
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

import betahook
from betahook import checkpoint
from betahook.cli import main
from support.models import build, inputs
from support.training import LAYER


@dataclass(frozen=True)
class Halved(betahook.Controller):
    """A controller of a user, which the command does not know."""

    def update(self, beta, observation, state):
        return beta / 2, state


def test_show(saved, capsys):
    assert main(["show", str(saved / "hooked")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{saved / 'hooked'}: beta at step 1"
    cells = [line.split() for line in lines]
    assert ["0", "0.3536", "0.5", "1.41", "x"] in cells
    assert ["1", "0.3536", "0.3536", "1", "x"] in cells
    assert lines[-1] == "From Search(window=3, rise=False)"


def test_show_tells_heads_that_differ(tmp_path, capsys):
    model = build("llama")
    with betahook.attach(model, per_head=True) as hook:
        model(**inputs("llama"))
        hook.step()
        hook.layers[LAYER].head_beta = torch.tensor([0.1, 0.2, 0.4, 0.8])
        checkpoint.save(hook, tmp_path)
    assert main(["show", str(tmp_path)]) == 0
    assert "0.283 to 2.26 x" in capsys.readouterr().out


def test_fold_makes_the_plain_model_of_a_checkpoint(saved, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["fold", str(saved / "hooked"), str(out)]) == 0
    assert "Beta, 1 to 1.41 times the model's own, is in the weights of 1 of 2 layers" in capsys.readouterr().out
    assert not (out / checkpoint.FILE).exists()
    assert not (out / "optimizer.pt").exists()
    assert (out / "tokenizer.json").read_bytes() == (saved / "hooked/tokenizer.json").read_bytes()
    assert checkpoint.MARK not in json.loads((out / "config.json").read_text())
    ids = torch.arange(20)[None]
    model = AutoModelForCausalLM.from_pretrained(saved / "hooked")
    with betahook.restore(model, saved / "hooked"), torch.no_grad():
        expected = model(input_ids=ids).logits
    with torch.no_grad():
        assert torch.allclose(AutoModelForCausalLM.from_pretrained(out)(input_ids=ids).logits, expected, atol=1e-5)


def test_fold_takes_along_what_is_neither_of_the_weights_nor_of_the_training(saved, tmp_path):
    """Every tokenizer names its files as it likes: those of Marian, FSMT, LUKE and BioGPT are among these."""
    source, out = tmp_path / "checkpoint-3", tmp_path / "out"
    shutil.copytree(saved / "hooked", source)
    saves = {path.name for path in source.iterdir()} - {"optimizer.pt", checkpoint.FILE}
    taken = ["source.spm", "target.spm", "bpe.codes", "entity_vocab.json", "dict.txt", "vocab-src.json", "merges.txt"]
    taken += ["additional_chat_templates/tool_use.jinja", "modules.json", "1_Pooling/config.json", "tokenizing.py"]
    left = ["scheduler.pt", "scaler.pt", "optimizer.bin", "rng_state.pth", "rng_state_0.pth", "training_args.bin"]
    left += ["pytorch_model.bin", "pytorch_model.bin.index.json", "model-00001-of-00002.safetensors", "tf_model.h5"]
    left += ["model.safetensors.index.json", "flax_model.msgpack", "trainer_state.json", "latest", "zero_to_fp32.py"]
    left += ["events.out.tfevents.1.host", ".gitattributes", ".git/config", "runs/now/events.out.tfevents.1.host"]
    left += ["checkpoint-1/vocab.txt", "global_step3/states.pt", "pytorch_model_fsdp_0/.metadata", "betahook.1.partial"]
    for name in (*taken, *left):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(f"of {name}")
    assert main(["fold", str(source), str(out)]) == 0
    made = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert made == saves | set(taken)
    assert all((out / name).read_text() == f"of {name}" for name in taken)


def test_layers_that_were_never_reached_have_no_beta(tmp_path, capsys):
    model = build("gpt2", add_cross_attention=True)
    with betahook.attach(model, controller=Halved()) as hook:
        model(**inputs("gpt2")).loss.backward()
        hook.step()
        model.save_pretrained(tmp_path / "hooked")
    assert main(["show", str(tmp_path / "hooked")]) == 0
    shown = capsys.readouterr().out
    assert "0.5 x" in shown
    assert "nan" not in shown
    assert main(["fold", str(tmp_path / "hooked"), str(tmp_path / "plain")]) == 0
    assert "Beta, 0.5 times the model's own, is in the weights of 2 of 4 layers." in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`", "ignore:Unexpected keyword")  # both are of PEFT
def test_fold_names_the_way_for_an_adapter(tmp_path, capsys):
    peft = pytest.importorskip("peft")
    base, folder = tmp_path / "base", tmp_path / "adapter"
    build("llama").save_pretrained(base)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(build("llama"), config).eval()
    with betahook.attach(adapted, controller="monitor", when="always") as hook, torch.no_grad():
        adapted(**inputs("llama"))
        for layer in hook.layers.values():
            layer.beta = 2 * layer.beta_default
        expected = adapted(**inputs("llama")).logits
        adapted.save_pretrained(folder)
    capsys.readouterr()
    assert main(["fold", str(folder), str(tmp_path / "plain")]) == 1
    assert capsys.readouterr().err == (
        f"betahook fold: {folder} holds an adapter and no model; in Python, load its base model and the adapter, then "
        "betahook.restore(model, folder), merged = model.merge_and_unload(), one forward of it, betahook.fold(merged)\n"
    )
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    betahook.restore(model, folder)
    merged = model.merge_and_unload()
    merged(**inputs("llama"))
    betahook.fold(merged)
    torch.testing.assert_close(merged(**inputs("llama")).logits, expected, rtol=1e-4, atol=1e-5)


def test_fold_reads_the_file_of_beta_once(saved, tmp_path, monkeypatch):
    places, read = [], checkpoint.file._put_together
    monkeypatch.setattr(checkpoint.file, "_put_together", lambda *given: places.append(given[-1]) or read(*given))
    assert main(["fold", str(saved / "hooked"), str(tmp_path / "out")]) == 0
    assert places == [saved / "hooked" / checkpoint.FILE]


def test_fold_names_the_beta_of_heads(tmp_path, capsys):
    """Whose geometric mean is the model's own."""
    model = build("llama")
    with betahook.attach(model, controller="monitor", per_head=True) as hook:
        model(**inputs("llama"))
        hook.step()
        layer = hook.layers[LAYER]
        layer.head_beta = layer.head_beta_default * torch.tensor([0.5, 2.0, 0.25, 4.0])
        model.save_pretrained(tmp_path / "hooked")
    assert main(["fold", str(tmp_path / "hooked"), str(tmp_path / "plain")]) == 0
    assert "Beta, 0.25 to 4 times the model's own, is in the weights of 1 of 2 layers" in capsys.readouterr().out


def test_fold_names_one_beta_once(tmp_path, capsys):
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama"))
        hook.step()
        for layer in hook.layers.values():
            layer.beta = 2 * layer.beta_default
        model.save_pretrained(tmp_path / "hooked")
    assert main(["fold", str(tmp_path / "hooked"), str(tmp_path / "plain")]) == 0
    assert "Beta, 2 times the model's own, is in the weights of 2 of 2 layers" in capsys.readouterr().out


def test_beta_that_was_still_on_its_way(saved, tmp_path, capsys):
    model = build("llama")
    with betahook.attach(model, controller=[betahook.Search(warmup=5), Halved()]) as hook:
        for _ in range(3):
            model(**inputs("llama")).logits.sum().backward()
            hook.step()
        model.save_pretrained(tmp_path / "hooked")
    assert main(["show", str(tmp_path / "hooked")]) == 0
    assert capsys.readouterr().out.endswith("From Search(warmup=5), Halved(), and still on its way\n")
    assert main(["fold", str(tmp_path / "hooked"), str(tmp_path / "plain")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "When the checkpoint was saved, beta was still on its way. If the model is worse" in said
    assert main(["fold", str(saved / "hooked"), str(tmp_path / "arrived")]) == 0
    assert "on its way" not in capsys.readouterr().out


def test_fold_that_cannot_save_leaves_nothing(saved, tmp_path, capsys, monkeypatch):
    out = tmp_path / "new" / "out"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copy2", mock.Mock(side_effect=OSError(28, "No space left on device")))
        assert main(["fold", str(saved / "hooked"), str(out)]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert list(out.parent.iterdir()) == []
    out.mkdir()
    assert main(["fold", str(saved / "hooked"), str(out)]) == 0
    assert (out / "tokenizer.json").exists()
    assert list(out.parent.iterdir()) == [out]


def test_fold_overwrites_nothing(saved, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert main(["fold", str(saved / "hooked"), str(tmp_path)]) == 1
    assert (
        capsys.readouterr().err == f"betahook fold: {tmp_path} exists already; give a new folder for the plain model\n"
    )


def test_fold_has_nothing_to_do_where_beta_is_the_models_own(tmp_path, capsys):
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama"))
        hook.step()
        model.save_pretrained(tmp_path / "watched")
    assert main(["fold", str(tmp_path / "watched"), str(tmp_path / "plain")]) == 1
    message = "watched is a plain model already: beta is in the weights, or was never changed\n"
    assert capsys.readouterr().err.endswith(message)
    assert not (tmp_path / "plain").exists()


@pytest.mark.parametrize("command", [["show"], ["fold", "out"]])
def test_what_is_no_checkpoint(saved, run, tmp_path, capsys, command):
    name, *rest = command
    for inside in ("checkpoint-3", "checkpoint-12", f"{checkpoint.UNFINISHED}checkpoint-6.1"):
        (tmp_path / "killed" / inside).mkdir(parents=True)
        (tmp_path / "killed" / inside / checkpoint.FILE).touch()
    for folder, message in [
        (tmp_path / "killed", f"has no {checkpoint.FILE}; name one of its checkpoints: checkpoint-3, checkpoint-12"),
        (tmp_path / "gone", "is not a folder; give a checkpoint of a run with betahook"),
        (tmp_path, f"has no {checkpoint.FILE} and no config.json; give a checkpoint of a run with betahook"),
        (saved / "plain", f"has no {checkpoint.FILE}: beta is in the weights already, or was never changed"),
        (run, f"has no {checkpoint.FILE}; name one of its checkpoints: checkpoint-3, checkpoint-6"),
    ]:
        assert main([name, str(folder), *rest]) == 1
        assert capsys.readouterr().err == f"betahook {name}: {folder} {message}\n"


@pytest.mark.parametrize("content", ['{"hidden_size":', "null"], ids=["cut", "no dictionary"])
@pytest.mark.parametrize("command", ["show", "fold", "examine", "inspect"])
def test_a_damaged_config_is_named(saved, tmp_path, capsys, command, content):
    folder = shutil.copytree(saved / "hooked", tmp_path / "hooked")
    (folder / "config.json").write_text(content)
    more = {"fold": [str(tmp_path / "out")], "examine": ["--text", str(saved / "text.txt")]}.get(command, [])
    assert main([command, str(folder), *more]) == 1
    said = capsys.readouterr().err
    assert f"{folder / 'config.json'} is damaged (" in said
    assert said.endswith("; take another checkpoint\n")
    assert said.count("\n") == 1


@pytest.mark.oldest_skips("its configs take values of any type", value="*intermediate_size*")
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"intermediate_size": 64.0}, "StrictDataclassFieldValidationError: Validation error for field 'intermediate_"),
        ({"hidden_act": "none"}, "KeyError: 'none'"),
    ],
    ids=["intermediate_size", "hidden_act"],
)
@pytest.mark.parametrize("command", ["fold", "examine", "inspect"])
def test_a_config_that_transformers_rejects_is_named(saved, tmp_path, capsys, command, value, reason):
    given = {"fold": [str(tmp_path / "out")], "examine": ["--text", str(saved / "text.txt")]}
    folder = shutil.copytree(saved / "hooked", tmp_path / "rejected")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **value}))
    assert main([command, str(folder), *given.get(command, [])]) == 1
    said = capsys.readouterr().err
    start = f"betahook {command}: transformers makes no model of {folder}; correct its config.json: {reason}"
    assert said.startswith(start)
    assert said.count("\n") == 1


def test_a_plain_model_that_was_saved_over_a_hooked_one_is_plain(saved, tmp_path, capsys):
    """The file of beta stays where it was."""
    folder = shutil.copytree(saved / "hooked", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    hook = betahook.restore(model, folder)
    model(**inputs("llama"))
    betahook.fold(hook)
    model.save_pretrained(folder)
    left = (folder / checkpoint.FILE).read_bytes()
    (folder / checkpoint.FILE).write_bytes(b"damaged")
    capsys.readouterr()
    assert main(["inspect", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("LlamaForCausalLM: betahook attaches to 2 attention layers")
    assert "Saved with beta" not in said
    arguments = ["--text", str(saved / "text.txt"), "--length", "32", "--batch", "2", "--batches", "3"]
    assert main(["examine", str(folder), *arguments]) == 0
    assert "Beta is the model's own." in capsys.readouterr().out
    (folder / checkpoint.FILE).write_bytes(left)
    assert main(["show", str(folder)]) == 1
    message = f"{folder}: {checkpoint.FILE} is left from an earlier save, the model is plain: beta is in the weights"
    assert capsys.readouterr().err.startswith(f"betahook show: {message} already")
