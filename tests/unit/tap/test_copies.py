"""Copies and pickles of hooked models are plain, or refused."""

import copy
import functools
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import betahook
from betahook.hook import hooks_of
from support.attention import LENGTH, WIDTH, ByHandAttention
from support.models import build, inputs
from support.training import LAYER

WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "average": lambda model: AveragedModel(model).module,
}


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


MODELS = {
    "transformers": lambda: (build("llama"), {"input_ids": inputs("llama")["input_ids"]}),
    "by hand": lambda: (nn.Sequential(ByHandAttention(), ByHandAttention()), {"input": torch.randn(2, LENGTH, WIDTH)}),
    "torch": lambda: (encoder(), {"src": torch.randn(2, LENGTH, WIDTH)}),
}


def run(model, batch):
    output = model.train()(**batch)
    return getattr(output, "logits", output)


def instance_state(model):
    """What copies share with nothing: names of attributes and the number of hooks of every module."""
    return [
        (name, sorted(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_a_copy_of_a_monitored_model_is_plain(name, way):
    model, batch = MODELS[name]()
    plain, expected = instance_state(model), run(model, batch)
    with betahook.attach(model, "monitor") as hook:
        run(model, batch).sum().backward()
        made = WAYS[way](model)
        assert instance_state(made) == plain
        assert not hooks_of(made)
        assert torch.equal(run(made, batch), expected)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.zero_()
        assert torch.equal(run(model, batch), expected)
        assert not torch.equal(run(made, batch), expected)
        run(model, batch).sum().backward()
        hook.step()
        assert {key.split("/")[0] for key in hook.metrics()} >= {"score_std", "beta"}
        betahook.attach(made, "monitor").detach()
    assert instance_state(model) == plain


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_without_its_beta_is_refused(way):
    words = r"whose beta is adapted cannot be copied or pickled, .*: copy it before attach, fold\(\) or detach"
    for controller in ("default", "monitor"):
        model = build("llama")
        with betahook.attach(model, controller) as hook:
            if controller == "monitor":
                hook.layers[LAYER].beta = 0.5
            with pytest.raises(TypeError, match=words):
                WAYS[way](model)
        WAYS[way](model)


def test_a_copy_that_would_call_the_original_is_refused():
    module = ByHandAttention()
    with betahook.attach(module, "monitor"):
        ours = module.forward
        module.forward = functools.wraps(ours)(lambda *args: ours(*args))
        with pytest.raises(TypeError, match="forward of a ByHandAttention was wrapped after attach"):
            copy.deepcopy(module)


def test_a_module_that_copies_itself_is_refused():
    class Own(ByHandAttention):
        def __deepcopy__(self, memo):
            made = type(self).__new__(type(self))
            vars(made).update(copy.deepcopy(vars(self), memo))
            return made

    module = Own()
    with betahook.attach(module, "monitor"), pytest.raises(TypeError, match="has a method of its own for copies"):
        copy.deepcopy(module)
    copy.deepcopy(module)


def test_a_part_that_pickles_itself_is_copied():
    class Own(ByHandAttention):
        def __getstate__(self):
            return {name: value for name, value in vars(self).items() if not name.endswith("_hooks")}

        def __setstate__(self, state):
            super().__init__()
            vars(self).update(state)

    module = Own()
    with betahook.attach(module, "monitor"):
        assert not hooks_of(copy.deepcopy(module))


def restored():
    return ByHandAttention()


@pytest.mark.parametrize("way", ["a constructor", "a name"])
def test_a_module_that_reduces_itself_does_so(way):
    """In a way that carries no attributes, and so nothing of the hook."""

    class Own(ByHandAttention):
        def __reduce_ex__(self, protocol):
            return "singleton" if way == "a name" else (restored, ())

    module = Own()
    with betahook.attach(module, "monitor"):
        made = copy.deepcopy(module)
    assert (made is module) is (way == "a name")
    assert isinstance(made, ByHandAttention)


def test_hooks_of_others_are_copied():
    module, seen = ByHandAttention(), []
    module.register_forward_pre_hook(lambda *given: seen.append("before"))
    with betahook.attach(module, "monitor"):
        module.register_forward_hook(lambda *given: seen.append("after"))
        copy.deepcopy(module)(torch.randn(2, LENGTH, WIDTH))
    assert seen == ["before", "after"]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_hook_is_not_copied(copied):
    with (
        betahook.attach(build("llama"), controller="monitor") as hook,
        pytest.raises(
            TypeError, match=r"a Hook cannot be copied or pickled, since it belongs to its model: copy its st"
        ),
    ):
        copied(hook)


@pytest.fixture
def replicate(monkeypatch):
    """That of `nn.DataParallel`, for one device that need not be there."""
    module = sys.modules[torch.nn.parallel.replicate.__module__]
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", lambda tensors, devices, detach=False: [tensors])
    return lambda model: torch.nn.parallel.replicate(model, [0])


def test_data_parallel_says_that_it_takes_no_attention_by_hand(replicate):
    """A replica would call the forward of the module that it was made of, whose weights are on the first GPU."""
    model = nn.Sequential(ByHandAttention())
    with betahook.attach(model, "monitor"), pytest.raises(RuntimeError, match="0 is attention by hand, which cannot"):
        replicate(model)
    assert torch.equal(replicate(model)[0][0].q_proj.weight, model[0].q_proj.weight)


def test_data_parallel_takes_attention_of_the_interface(replicate):
    with betahook.attach(build("llama"), "monitor") as hook:
        replicate(hook.model)
