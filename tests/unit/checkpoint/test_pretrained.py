"""The methods that save a hooked model, or a part of it: beta is saved with the weights, whichever is called."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, EncoderDecoderConfig, EncoderDecoderModel

import betahook
from betahook import checkpoint
from support.models import build, inputs
from support.training import bits


class Wrapped(nn.Module):
    """Holds a model of transformers, and has no method that saves it."""

    def __init__(self, family="llama"):
        super().__init__()
        self.net = build(family)

    def forward(self, **batch):
        return self.net(**batch).logits


def adapted(model, family="llama"):
    """A hook whose layers have a beta each."""
    hook = betahook.attach(model, controller="monitor", when="always")
    model.eval()(**inputs(family))
    for number, layer in enumerate(hook.layers.values(), start=2):
        layer.beta = number * layer.beta_default
    return hook


def test_the_model_in_a_hooked_one_saves_its_beta(tmp_path):
    model, tokens = Wrapped(), inputs("llama")["input_ids"]
    with adapted(model):
        expected = model(**inputs("llama"))
        model.net.save_pretrained(tmp_path)
        own = tmp_path / "body"
        model.net.model.save_pretrained(own)
        states = model.net.model(tokens).last_hidden_state
    for module in model.modules():
        assert not {"save_pretrained", "__reduce_ex__"} & vars(module).keys()
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with pytest.raises(ValueError, match="was saved with its beta beside the weights"):
        betahook.attach(again)
    with betahook.restore(again, tmp_path) as hook:
        assert list(hook.layers) == [f"model.layers.{index}.self_attn" for index in range(2)]
        torch.testing.assert_close(again(**inputs("llama")).logits, expected, rtol=1e-5, atol=1e-5)
    body = AutoModel.from_pretrained(own).eval()
    with betahook.restore(body, own) as hook:
        assert list(hook.layers) == [f"layers.{index}.self_attn" for index in range(2)]
        same = body(tokens).last_hidden_state
        torch.testing.assert_close(same, states, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ["", "model"])
def test_a_copy_that_shares_its_layers_is_refused_while_beta_acts(part):
    model = build("llama")
    with betahook.attach(model, controller="monitor", when="always") as hook:
        model(**inputs("llama"))
        assert "save_pretrained" not in vars(copy.copy(model.get_submodule(part)))
        hook.layers["model.layers.1.self_attn"].beta = 2.0
        with pytest.raises(TypeError, match="as the copy would be saved without that beta: copy it before"):
            copy.copy(model.get_submodule(part))
    copy.copy(model)


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_a_part_saves_its_own_layers(tmp_path, part):
    model = build("t5")
    with adapted(model, "t5") as hook:
        model.get_submodule(part).save_pretrained(tmp_path)
        held = {name: layer for name, layer in hook.layers.items() if name.startswith(f"{part}.")}
        assert 0 < len(held) < len(hook.layers)
        again = type(model)(model.config).get_submodule(part)
        again.load_state_dict(model.get_submodule(part).state_dict())
        with betahook.attach(again, controller="monitor") as other:
            checkpoint.read(tmp_path).load(other)
            assert list(other.layers) == [name.removeprefix(f"{part}.") for name in held]
            assert [layer.beta for layer in other.layers.values()] == [layer.beta for layer in held.values()]


def test_a_part_at_its_own_beta_saves_no_mark(tmp_path):
    model = build("t5")
    with betahook.attach(model, controller="monitor", when="always") as hook:
        model(**inputs("t5"))
        next(layer for name, layer in hook.layers.items() if name.startswith("decoder.")).beta = 0.5
        copy.copy(model.encoder)  # is not refused, as that of the decoder is
        model.encoder.save_pretrained(tmp_path / "encoder")
        model.decoder.save_pretrained(tmp_path / "decoder")
    marked = [checkpoint.MARK in (tmp_path / part / "config.json").read_text() for part in ("encoder", "decoder")]
    assert marked == [False, True]


class Saving(Wrapped):
    """As TRL's models with a value head: its method calls that of the model in it."""

    def save_pretrained(self, save_directory):
        self.net.save_pretrained(save_directory)


def test_a_model_that_saves_the_model_in_it_names_its_own_layers(tmp_path):
    with adapted(Saving()) as hook:
        hook.model.save_pretrained(tmp_path)
        saved = bits(checkpoint.read(tmp_path).state)
        assert saved == bits(hook.state_dict())
        with pytest.raises(TypeError):
            hook.model.save_pretrained(5)
        hook.model.net.save_pretrained(tmp_path)  # the one that raised is over
        assert checkpoint.read(tmp_path).state["order"] == [name.removeprefix("net.") for name in hook.layers]


class Sentences(Wrapped):
    """As a `SentenceTransformer`, whose `push_to_hub` calls `save` too."""

    saved = 0

    def save_pretrained(self, path, name=None):
        self.save(path, name)

    def save(self, path, name=None):
        self.saved += 1
        torch.save(self.state_dict(), Path(path, name or "weights.pt"))


@pytest.mark.parametrize("method", ["save", "save_pretrained"])
def test_either_method_of_a_model_saves_beta_once(tmp_path, method):
    model, states = Sentences(), []
    with adapted(model) as hook:
        state_dict = hook.state_dict
        hook.state_dict = lambda: states.append(state_dict()) or states[-1]
        getattr(model, method)(path=tmp_path, name="own.pt")
        assert (model.saved, len(states)) == (1, 1)
    assert bits(checkpoint.read(tmp_path).state) == bits(state_dict())
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint.FILE, "own.pt"]
    assert not {"save", "save_pretrained"} & vars(model).keys()


def make_composite(*parts):
    """An encoder and a decoder, from folders if there are any."""
    if parts:
        return EncoderDecoderModel.from_encoder_decoder_pretrained(*parts).eval()
    size = dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=32, vocab_size=64)
    return EncoderDecoderModel(
        EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**size), BertConfig(**size))
    )


def test_the_parts_of_a_composite_are_restored_one_by_one(tmp_path):
    folders, batch = [tmp_path / "encoder", tmp_path / "decoder"], inputs("bert")
    batch = dict(input_ids=batch["input_ids"], decoder_input_ids=batch["input_ids"])
    model = make_composite().eval()
    with betahook.attach(model, controller="monitor", when="always") as hook:
        model(**batch)
        for layer in hook.layers.values():
            layer.beta = 2 * layer.beta_default
        expected = model(**batch).logits
        for folder in folders:
            model.get_submodule(folder.name).save_pretrained(folder)
    again = make_composite(*folders)
    for folder in folders:
        with pytest.raises(ValueError, match=rf"betahook.restore\(model.{folder.name}, folder\)"):
            betahook.attach(again)
        hook = betahook.restore(again.get_submodule(folder.name), folder)
        again(**batch)
        betahook.fold(hook)
    torch.testing.assert_close(again(**batch).logits, expected, rtol=1e-4, atol=1e-5)
    betahook.attach(again).detach()
