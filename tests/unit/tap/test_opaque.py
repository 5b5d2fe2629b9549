"""The operations by which a compiled graph calls the recorder of a layer."""

import pytest
import torch
from torch import nn

from betahook.tap import opaque
from support.layers import attention, make


def test_a_graph_whose_hook_is_gone_says_so():
    _, _, (recorder,) = make(attention(nn.Module(), 4, 8))
    opaque.register(recorder)
    tensors = recorder.tensors
    operands = tensors.table, tensors.moments, tensors.beta_default, tensors.beta
    torch.ops.betahook.note_default(*operands, 0.5, None)
    assert tensors.beta_default.tolist() == [0.5] * 4
    with pytest.raises(RuntimeError, match=r"whose hook is gone: expected .* torch.compiler.reset\(\), and compile"):
        torch.ops.betahook.note_default(*operands[:3], tensors.beta.clone(), 0.5, None)
