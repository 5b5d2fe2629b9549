"""Attributes of a module that have another value for a while."""

import pytest
from torch import nn

from betahook.tap.override import Override


def test_an_attribute_of_the_class_is_covered_and_comes_back():
    module = nn.Linear(2, 2)
    before = dict(vars(module))
    override = Override(module, "forward", "another")
    assert module.forward == "another"
    assert override.active
    override.remove()
    assert vars(module) == before
    assert not override.active


def test_an_attribute_of_the_module_comes_back():
    module = nn.Linear(2, 2)
    module.use_nested_tensor = True
    Override(module, "use_nested_tensor", False).remove()
    assert module.use_nested_tensor is True


@pytest.mark.parametrize("first", [0, 1])
def test_two_on_one_attribute_end_in_either_order(first):
    module = nn.Linear(2, 2)
    overrides = [Override(module, "forward", name) for name in ("lower", "upper")]
    overrides[first].remove()
    assert module.forward == ("upper" if first == 0 else "lower")


def test_a_value_that_came_later_stays():
    module = nn.Linear(2, 2)
    override = Override(module, "forward", "ours")
    module.forward = "of another library"
    override.remove()
    assert module.forward == "of another library"


def test_removing_twice_changes_nothing():
    module = nn.Linear(2, 2)
    override = Override(module, "forward", "ours")
    override.remove()
    module.forward = "later"
    override.remove()
    assert module.forward == "later"
