"""`torch.foreach` of torch 2.15, or functions that look like it to a mode."""

import torch
from torch.overrides import handle_torch_function, has_torch_function


def _of_lists(function, name):
    def of_lists(inputs, other, /):
        if has_torch_function(inputs):
            return handle_torch_function(of_lists, inputs, inputs, other)
        others = other if isinstance(other, list | tuple) else [other] * len(inputs)
        return tuple(map(function, inputs, others))

    of_lists.__name__, of_lists.__module__ = name, "torch.foreach"
    return of_lists


if hasattr(torch, "foreach"):
    mm, mul, mul_ = torch.foreach.mm, torch.foreach.mul, torch.foreach.mul_
else:
    mm, mul, mul_ = _of_lists(torch.mm, "mm"), _of_lists(torch.mul, "mul"), _of_lists(torch.Tensor.mul_, "mul_")
