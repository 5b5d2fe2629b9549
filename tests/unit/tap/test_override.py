"""Attributes of a module that have another value for a while."""

import copy
from contextlib import ExitStack

import pytest
from torch import nn

from betahook.tap.override import Override


def test_an_attribute_of_the_class_is_covered_and_comes_back():
    module = nn.Linear(2, 2)
    before = dict(vars(module))
    with ExitStack() as undo:
        override = Override(module, "forward", "another", undo)
        assert module.forward == "another"
        assert override.active
    assert vars(module) == before
    assert not override.active


def test_an_attribute_of_the_module_comes_back():
    module = nn.Linear(2, 2)
    module.use_nested_tensor = True
    with ExitStack() as undo:
        Override(module, "use_nested_tensor", False, undo)
    assert module.use_nested_tensor is True


@pytest.mark.parametrize("first", [0, 1])
def test_two_on_one_attribute_end_in_either_order(first):
    module, stacks = nn.Linear(2, 2), [ExitStack(), ExitStack()]
    for name, undo in zip(("lower", "upper"), stacks, strict=True):
        Override(module, "forward", name, undo)
    stacks[first].close()
    assert module.forward == ("upper" if first == 0 else "lower")


def test_a_copy_has_the_value_before_the_first_of_two():
    module = nn.Linear(2, 2)
    module.use_nested_tensor = True
    with ExitStack() as undo:
        for value in ("lower", "upper"):
            Override(module, "use_nested_tensor", value, undo)
        assert copy.copy(module).use_nested_tensor is True


def test_a_value_that_came_later_stays():
    module = nn.Linear(2, 2)
    with ExitStack() as undo:
        Override(module, "forward", "ours", undo)
        module.forward = "of another library"
    assert module.forward == "of another library"
