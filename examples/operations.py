"""Count what measuring adds to a layer: operations and bytes, which depend on no machine.

    python examples/operations.py                       # the form of the statistics that accelerators get
    python examples/operations.py --length 128 --cpu    # the form of the CPU for short sequences
    python examples/operations.py --dtype bfloat16

A forward and backward of a Llama of three layers less one of two, measured less not hooked: the gain, its backward and
the adding up included. Views are counted apart, since they launch nothing. Everything runs on the CPU; operations that
would make the host wait for a value are refused.
"""

from __future__ import annotations

import argparse
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import betahook
from betahook.measure import calls, devices, statistics
from betahook.measure.masks import Band, Mask
from betahook.measure.rows import PLAIN
from betahook.tap import gain, recorder
from timing import allocated

WAITING = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select", "equal", "unique", "_unique2")
"""Operations that read a value back to the host, or whose result has a shape that depends on values."""

STARTS_NOTHING = ("_unsafe_view", "promote_types", "empty_like", "empty")
"""Operations that compute nothing, beside those that return a view."""


class Operations(TorchDispatchMode):
    """Count operations by name, views apart, and refuse those that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self.views = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in WAITING:
            raise RuntimeError(f"{name} makes the host wait for the device")
        returned = [part.alias_info for part in function._schema.returns]
        if name in STARTS_NOTHING or any(part and not part.is_write for part in returned):
            self.views += 1
        else:
            self.launched[name] += 1
        return function(*args, **(kwargs or {}))


def build(layers: int, dtype: torch.dtype, length: int) -> nn.Module:
    """A Llama of a width that takes no time; four queries share two keys."""
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=length,
    )
    return LlamaForCausalLM(config).to(dtype).train()


def run(layers: int, hooked: bool, length: int, dtype: torch.dtype) -> Operations:
    """Operations of one forward and backward, the third."""
    model = build(layers, dtype, length)
    ids = torch.randint(0, 64, (1, length))

    def train() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    hook = betahook.attach(model, controller="monitor", interval=1) if hooked else None
    for _ in range(2):
        train()
        if hook is not None:
            hook.step()
    with Operations() as counted:
        train()
    return counted


def added(length: int, dtype: torch.dtype, *, cpu: bool = False, alone: bool = True) -> tuple[Counter[str], int]:
    """Operations that measuring adds to one layer, by name, and the number of views.

    Layers as small as these are measured together; `alone` is how large ones are, and their query is scaled.
    """
    with ExitStack() as undo:
        undo.enter_context(mock.patch.object(devices, "is_cpu", return_value=cpu))
        if alone:
            undo.enter_context(mock.patch.object(recorder, "calls_at_once", return_value=1))
        if alone and not cpu:
            undo.enter_context(mock.patch.object(gain, "SMALL", 0))
        of = {(layers, hooked): run(layers, hooked, length, dtype) for layers in (2, 3) for hooked in (False, True)}
    launched, views = Counter[str](), 0
    for (layers, hooked), counted in of.items():
        sign = 1 if (layers == 3) == hooked else -1
        for name, number in counted.launched.items():
            launched[name] += sign * number
        views += sign * counted.views
    return launched, views


def memory(length: int, dtype: torch.dtype, *, cpu: bool = False) -> tuple[int, int]:
    """Bytes that one layer of 8 heads of 64, all with keys of their own, needs while it is measured, and keeps."""
    heads, width = 8, 64
    query, key = torch.randn(2, 1, length, heads, width, dtype=dtype).transpose(2, 3)
    table = statistics.empty(heads, query.device)
    moments = table.new_zeros(4, heads * width)
    operands = query, key, Mask(Band(None, 0)), torch.ones(2, heads), PLAIN

    def measure() -> None:
        calls.add_scores(table, moments, *operands, exact_max_logit=False, inputs=())

    with mock.patch.object(devices, "is_cpu", return_value=cpu):
        measure()  # what all layers share is made here
        return allocated(measure), table.nbytes + moments.nbytes


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--cpu", action="store_true", help="the forms of the CPU, not those of accelerators")
    options = parser.parse_args(arguments)
    launched, views = added(options.length, getattr(torch, options.dtype), cpu=options.cpu)
    together, _ = added(options.length, getattr(torch, options.dtype), cpu=options.cpu, alone=False)
    print(f"added to a layer in a measured step: {sum(launched.values())} operations and {views} views")
    print(f"and {sum(together.values())} operations to one so small that it is measured with the others")
    for name, number in launched.most_common():
        if number:
            print(f"{number:>4} {name}")
    needed, kept = memory(options.length, getattr(torch, options.dtype), cpu=options.cpu)
    of_token = f"{needed / options.length / 8 / 64:.1f} bytes for each entry of a query"
    print(f"while a layer of 8 heads of 64 is measured: {of_token}; kept: {kept} bytes a layer")


if __name__ == "__main__":
    main()
