"""The options of `attach`, checked without attaching: every message, word by word."""

import inspect

import numpy
import pytest
import torch
from torch import nn
from transformers import LlamaConfig

import betahook
from betahook import Cap, Controller, Monitor, Search, checkpoint, options
from betahook.hook import check_options
from betahook.options import Settings
from betahook.tap.recorder import ATTRIBUTE
from support.attention import ByHandAttention, FusedAttention
from support.models import build

EXPECTED = (
    'controller must be "default", "monitor", a controller (Search(), Variance(), Gradient(), Cap(), ...) or a list of '
    "them; got "
)


OTHERS = False, None, "training", False


def refused(kind, check, *arguments, **keywords):
    """What a check says."""
    with pytest.raises(kind) as caught:
        check(*arguments, **keywords)
    assert type(caught.value) is kind
    return str(caught.value)


class Model(nn.Module):
    """Attention under two names, and a layer that is none."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = FusedAttention(), ByHandAttention(), nn.Linear(2, 2)


def test_a_plain_model_passes():
    options.check_model(Model())


@pytest.mark.parametrize(
    ("model", "got"), [("llama", "'llama'"), (None, "NoneType"), (Model, "the class Model, not an instance")]
)
def test_what_is_no_model(model, got):
    said = refused(TypeError, options.check_model, model)
    assert said == f"attach() takes a torch module, the model itself; got {got}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_wrapped_model():
    said = refused(ValueError, options.check_model, nn.DataParallel(Model()))
    expected = "the model is wrapped in DataParallel: attach to the model inside, betahook.attach(model.module)"
    assert said == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself
def test_a_compiled_model():
    in_place = Model()
    in_place.compile()
    for model, name in ((torch.compile(Model()), "OptimizedModule"), (in_place, "Model")):
        said = refused(ValueError, options.check_model, model)
        assert said == f"{name} is compiled already: attach first, then compile"


def test_a_model_whose_beta_is_in_a_file():
    model = Model()
    model.config = LlamaConfig()
    options.check_model(model)
    setattr(model.config, checkpoint.MARK, True)
    assert refused(ValueError, options.check_model, model) == (
        "Model was saved with its beta beside the weights: betahook.restore(model, folder) attaches with that beta "
        "and returns the hook; BetaHookCallback(hook=...) trains on with it. If it is a new model, made from the "
        "config of a saved one: del model.config.betahook"
    )


@pytest.mark.parametrize(
    ("model", "path", "code"),
    [
        (nn.ModuleDict({"encoder": Model()}), "encoder", "model.encoder"),
        (nn.Sequential(nn.Sequential(Model())), "0.0", "model.get_submodule('0.0')"),
    ],
)
def test_a_model_of_which_a_part_has_its_beta_in_a_file(model, path, code):
    part = model.get_submodule(path)
    part.config = LlamaConfig()
    options.check_model(model)
    setattr(part.config, checkpoint.MARK, "in a file")
    assert refused(ValueError, options.check_model, model) == (
        f"{path} of {type(model).__name__}, a Model, was saved with its beta beside the weights: hook = "
        f"betahook.restore({code}, folder) attaches to it with that beta, and betahook.fold(hook), after a forward, "
        f"makes it plain. If it is new, made from the config of a saved one: del {code}.config.betahook"
    )


@pytest.mark.parametrize(("part", "place"), [("second", "second"), ("", "Model")])
def test_a_model_that_is_hooked(part, place):
    model = Model()
    setattr(model.get_submodule(part), ATTRIBUTE, object())
    assert refused(RuntimeError, options.check_model, model) == (
        f"Model is hooked already (at {place}): betahook.detach(model) removes the hook and resets beta; "
        "BetaHookCallback(hook=hook) gives it to the next Trainer"
    )


def test_the_names_of_controllers():
    assert options.controllers("default") == [Search()]
    assert options.controllers("monitor") == [Monitor()]


def test_controllers_keep_their_order():
    chain = [Cap(2.0), Search(), Cap(3.0)]
    assert options.controllers(chain) == chain
    assert options.controllers(chain) is not chain
    assert options.controllers(tuple(chain)) == chain
    assert options.controllers(chain[0]) == chain[:1]


@pytest.mark.parametrize(
    "choice", ["adam", "", None, 3, [Search], [Search(), "monitor"], {Monitor()}, ("default",)], ids=str
)
def test_what_is_no_controller(choice):
    error = ValueError if isinstance(choice, str) else TypeError
    assert refused(error, options.controllers, choice) == f"{EXPECTED}{choice!r}"


def test_a_class_or_a_model_is_no_controller():
    assert refused(TypeError, options.controllers, Search) == f"{EXPECTED}the class Search, not an instance"
    assert refused(TypeError, options.controllers, Model()) == f"{EXPECTED}Model"


@pytest.mark.parametrize("choice", [[], ()])
def test_no_controllers(choice):
    said = refused(ValueError, options.controllers, choice)
    assert said == 'controller is an empty list; use "monitor" to leave beta where it is'


class Undecorated(Controller):
    def update(self, beta, observation, state):
        return beta, state


@pytest.mark.parametrize("choice", [Undecorated(), [Search(), Undecorated()]], ids=["alone", "second"])
def test_a_controller_that_is_no_dataclass(choice):
    assert refused(TypeError, options.controllers, choice).startswith("class Undecorated is not decorated with @data")


def test_settings_by_default():
    assert Settings() == Settings(per_head=False, interval=10, when="training", exact_max_logit=False)
    assert Settings(per_head=True, interval=7, when="always").interval == 7
    assert type(Settings(interval=numpy.int64(7)).interval) is int  # which a checkpoint can hold


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"per_head": 1}, TypeError, "per_head must be True or False; got 1"),
        ({"per_head": None}, TypeError, "per_head must be True or False; got None"),
        ({"exact_max_logit": 1}, TypeError, "exact_max_logit must be True or False; got 1"),
        ({"interval": 0}, ValueError, "interval must be a whole number of steps, 1 or more; got 0"),
        ({"interval": True}, ValueError, "interval must be a whole number of steps, 1 or more; got True"),
        ({"interval": 2.0}, ValueError, "interval must be a whole number of steps, 1 or more; got 2.0"),
        ({"when": "never"}, ValueError, 'when must be "training" or "always"; got \'never\''),
        ({"when": None}, ValueError, 'when must be "training" or "always"; got None'),
    ],
    ids=str,
)
def test_settings_that_make_no_sense(settings, kind, message):
    assert refused(kind, Settings, **settings) == message


def test_alerts():
    options.resolve("default", *OTHERS, None)
    options.resolve("default", *OTHERS, betahook.Alerts(print, max_logit=50))
    said = refused(TypeError, options.resolve, "default", *OTHERS, print)
    assert said == f"alerts must be betahook.Alerts or None; got {print!r}"


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        (None, ["first", "second"]),
        ("*", ["first", "second"]),
        ("f*", ["first"]),
        (["sec*", "first"], ["first", "second"]),
        (("second",), ["second"]),
        (lambda name, module: isinstance(module, FusedAttention), ["first"]),
        (lambda name, module: name[:1] == "s", ["second"]),
    ],
)
def test_layers_that_are_chosen(choice, chosen):
    assert list(options.find_layers(Model(), choice).found) == chosen


@pytest.mark.parametrize("choice", [3, ["first", 3], {"first"}, True], ids=str)
def test_layers_that_are_no_choice(choice):
    said = refused(TypeError, options.find_layers, Model(), choice)
    assert said == f"layers must be a glob, a list of globs or a predicate (name, module) -> bool; got {choice!r}"


@pytest.mark.parametrize("choice", ["First", [], "last", ["fir"]], ids=str)
def test_layers_of_which_there_are_none(choice):
    said = refused(ValueError, options.find_layers, Model(), choice)
    assert said == f"layers={choice!r} matches none of the attention layers of Model: first, second"


def test_layers_of_a_deep_model_are_named_in_one():
    deep = nn.Sequential(*(Model() for _ in range(40)))
    said = refused(ValueError, options.find_layers, deep, "x")
    assert said == "layers='x' matches none of the attention layers of Sequential: 0-39.first, 0-39.second"


def test_a_glob_of_several_that_matches_nothing():
    said = refused(ValueError, options.find_layers, Model(), ["first", "secnd", "third*"])
    assert said == "layers='secnd', 'third*' matches none of the attention layers of Model: first, second"


def test_a_model_without_attention():
    said = refused(betahook.UnsupportedModelError, options.find_layers, nn.Linear(2, 2), None)
    assert said.startswith(
        "cannot attach to Linear: it has no module that computes softmax attention over q . k, by F.sc"
    )


def test_a_model_whose_attention_is_out_of_reach(monkeypatch):
    reasons = {"a": "it is compiled", "b": "too", "c": "again", "d": "no more than three"}
    monkeypatch.setattr(options, "survey", lambda model: options.Survey(model, {}, reasons))
    said = refused(betahook.UnsupportedModelError, options.find_layers, Model(), None)
    assert said == "cannot attach to Model: a, it is compiled; b, too; c, again"


def test_what_is_not_reached_is_passed_on(monkeypatch):
    found = options.survey(Model()).found
    monkeypatch.setattr(options, "survey", lambda model: options.Survey(model, found, {"a": "it is compiled"}))
    assert options.find_layers(Model(), None).not_reached == {"a": "it is compiled"}


def test_a_tensor_parallel_model_with_attention_of_torch():
    model = Model()
    model.tp_size = 1
    options.find_layers(model, None)
    model.tp_size = 2
    assert refused(betahook.UnsupportedModelError, options.find_layers, model, None) == (
        "cannot attach to Model: it is tensor-parallel, and outside of the attention interface of transformers "
        "betahook cannot tell which heads a rank computes; use data parallelism or FSDP (fully_shard)"
    )


def test_options_of_callbacks_are_those_of_attach():
    model = build("llama")
    every = check_options(interval=3)
    assert list(every) == list(inspect.signature(betahook.attach).parameters)[1:]
    with betahook.attach(model, **every) as hook:
        assert hook.settings.interval == 3
    assert refused(ValueError, check_options, interval=0).startswith("interval must be a whole number")
    assert refused(TypeError, check_options, layers=3).startswith("layers must be a glob, a list of globs or a")
    assert "unexpected keyword argument 'contoller'" in refused(TypeError, check_options, contoller="monitor")
