"""The last call: that of the outermost module that is called, however much is called inside of it."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn

from betahook.tap.last_call import LastCall


class Call(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x, **options):
        return self.part(x + 1, **options)


@pytest.fixture
def nested():
    """Four modules, each of which calls the next, the last of which is a layer; and their last call."""
    layer = nn.Linear(1, 1)
    model = Call(Call(Call(layer)))
    with ExitStack() as undo:
        yield model, layer, LastCall(model, [layer], undo)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_model_itself(nested):
    model, _, last = nested
    assert (last.module, last.input) == (model, None)
    for number in (0.0, 5.0):
        model(torch.tensor([number]))
        assert last.module is model
        assert last.input[0][0] == number
        assert last.input[1] == {}


def test_a_part_until_more_is_called(nested):
    model, layer, last = nested
    for module, number in ((layer, 1.0), (model.part.part, 2.0), (model.part, 3.0), (model, 4.0)):
        for each in (number, number + 0.5):
            module(torch.tensor([each]))
            assert last.module is module
            assert last.input[0][0] == each
    layer(torch.tensor([5.0]))
    assert last.module is model
    assert last.input[0][0] == 4.5


def test_the_input_of_a_part_is_none_of_what_is_called_around_it(nested):
    model, layer, last = nested
    layer(torch.ones(1))
    with pytest.raises(TypeError):
        model(torch.ones(1), cache=object())  # whose input is not kept
    assert (last.module, last.input) == (model, None)


def test_layers_that_lie_apart():
    """A list of blocks is called by no one, and one block is not all of the layers."""
    model = nn.Sequential(nn.Linear(1, 1), nn.ModuleList([Call(nn.Linear(1, 1)) for _ in range(2)]))
    with ExitStack() as undo:
        last = LastCall(model, [block.part for block in model[1]], undo)
        model[1][0](torch.ones(1))
        assert (last.module, last.input) == (model, None)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_not_kept(nested, name):
    model, _, last = nested
    with pytest.raises(TypeError):
        model(torch.ones(1), **{name: object()})  # which a linear layer does not know
    assert last.input is None


def test_graphs_are_released(nested):
    model, _, last = nested
    leaf = torch.ones(1, requires_grad=True)
    same = torch.ones(1)
    model(leaf * 2)
    last.release_graph()
    assert last.input[0][0].grad_fn is None
    last.input = ((same, [same], (leaf * 2, {"a": leaf * 3})), {})
    last.release_graph()
    first, others, (second, named) = last.input[0]
    assert first is same
    assert others[0] is same
    assert second.grad_fn is named["a"].grad_fn is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("inner", [False, True])
def test_it_is_no_reason_to_compile_again(inner):
    layer = nn.Linear(1, 1)
    torch.compiler.reset()
    model, graphs = Call(layer), []

    def backend(graph, example):
        graphs.append(graph)
        return graph

    with ExitStack() as undo:
        last = LastCall(nn.Sequential(model) if inner else model, [layer], undo)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(3):
            compiled(torch.ones(1))
        assert (last.input is None) is inner
    assert len(graphs) == 1
