"""Count what measuring adds to a layer: operations and bytes, which depend on no machine.

    python examples/operations.py                       # the form of the statistics that accelerators get
    python examples/operations.py --length 128 --cpu    # the form of the CPU for short sequences
    python examples/operations.py --dtype bfloat16
    python examples/operations.py --estimate            # what a step would take on an H100, from the counts

A forward and backward of a Llama of three layers less one of two, measured less not hooked: the gain, its backward and
the adding up included. Views are counted apart, since they launch nothing. Everything runs on the CPU; operations that
would make the host wait for a value are refused.

The estimate counts operations, bytes and floating point operations of whole training steps of models of real sizes on
the meta device, which computes nothing. A launch takes `LAUNCH` seconds of the host, and an operation on the device the
longest of `START`, its bytes over the bandwidth, and its arithmetic over the peak. No GPU has confirmed it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM, PretrainedConfig

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

LAUNCH, START = 5e-6, 3e-6
"""Seconds that the host takes to launch an operation, and the least that it takes on the device: usual values."""

BANDWIDTH, PEAK = 3.35e12, {torch.bfloat16: 989e12, torch.float32: 67e12}
"""Of an H100 SXM, by its data sheet: bytes, and floating point operations a second, without TF32 for float32."""

MODELS: dict[str, tuple[PretrainedConfig, int, int]] = {
    "GPT-2-small": (GPT2Config(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0), 4, 1024),
    "Llama, 1 B": (
        LlamaConfig(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
        ),
        1,
        4096,
    ),
    "Llama, 7 B": (LlamaConfig(), 1, 4096),
}
"""Config, batch and length of the models of the estimate; those of Llama are the shapes of 3.2-1B and 2-7b."""


class Operations(TorchDispatchMode):
    """Count operations by name, views apart, and refuse those that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self.views = 0
        self.device_seconds = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in WAITING:
            raise RuntimeError(f"{name} makes the host wait for the device")
        returned = [part.alias_info for part in function._schema.returns]
        if name in STARTS_NOTHING or any(part and not part.is_write for part in returned):
            self.views += 1
        else:
            self.launched[name] += 1
        result = function(*args, **(kwargs or {}))
        if name in self.launched:
            given = {key: value for key, value in (kwargs or {}).items() if key != "out"}  # which is the result
            tensors = [x for x in tree_leaves((args, given, result)) if isinstance(x, Tensor)]
            formula = flop_registry.get(function.overloadpacket)
            work = formula(*args, **(kwargs or {}), out_val=result) if formula else 0
            self.run(work, tensors)
        return result

    def run(self, work: float, tensors: list[Tensor]) -> None:
        """Add the time on the device of an operation of so many floating point operations that touches some tensors."""
        moved = sum(tensor.nbytes for tensor in tensors)
        peak = PEAK[torch.bfloat16 if any(x.dtype == torch.bfloat16 for x in tensors) else torch.float32]
        self.device_seconds += max(START, moved / BANDWIDTH, work / peak)


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
            undo.enter_context(mock.patch.object(recorder, "room", return_value=1))
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
        calls.add_scores(table, moments, *operands, exact_max_logit=False)

    with mock.patch.object(devices, "is_cpu", return_value=cpu):
        measure()  # what all layers share is made here
        return allocated(measure), table.nbytes + moments.nbytes


class Flash(torch.autograd.Function):
    """A causal attention that counts as the two operations that it is on a GPU; on the meta device it would be many."""

    @staticmethod
    def forward(ctx: Any, counted: Operations, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.counted = counted
        ctx.save_for_backward(query, key, value)
        return Flash.count(counted, 1.0, query, key, value)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        return None, *Flash.count(ctx.counted, 2.5, *ctx.saved_tensors)

    @staticmethod
    def count(counted: Operations, passes: float, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add an attention of so many passes, 2 products of half the pairs each; return tensors like those given."""
        batch, heads, length, width = tensors[0].shape
        counted.launched["attention"] += 1
        counted.run(passes * 2 * batch * heads * length**2 * width, [*tensors, *tensors])
        query, key, value = (tensor.data for tensor in tensors)  # not counted: an operation there makes nothing
        return query, key, value


def train(model: nn.Module, ids: Tensor, hook: betahook.Hook | None) -> Operations:
    """Count a forward, a backward and a step of the hook."""
    with Operations() as counted:

        def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
            return Flash.apply(counted, query, key, value)

        with mock.patch.object(F, "scaled_dot_product_attention", attention):
            model(input_ids=ids, labels=ids).loss.backward()
        if hook is not None:
            hook.step()
    return counted


def whole_step(config: PretrainedConfig, batch: int, length: int, interval: int | None) -> tuple[float, float, int]:
    """Seconds of a training step for the host and for the device, and its operations; `interval` None for unhooked."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16).train()
        ids = torch.zeros(batch, length, dtype=torch.long)
    brief = betahook.Search(warmup=0, plateau_batches=0, rise_batches=1)  # so that the opening is over
    hook = betahook.attach(model, controller=brief, interval=interval) if interval else None
    if hook is not None:
        hook._state.to(torch.device("meta"))  # a forward there is a look at shapes, which is not measured
    for _ in range(4):
        counted = train(model, ids, hook)
    weights = [parameter.data for parameter in model.parameters()]
    counted.run(0, 7 * weights)  # a fused AdamW reads weights, gradients and two moments, and writes all but gradients
    operations = counted.launched.total() + 1
    return operations * LAUNCH, counted.device_seconds, operations


def estimate() -> None:
    """Print a table of estimated steps."""
    print(f"{'':13} {'operations':>10} {'host, ms':>9} {'device, ms':>10} {'every':>7} {'spread':>7} {'idle':>7}")
    for name, (config, batch, length) in MODELS.items():
        plain, every, idle = (whole_step(config, batch, length, interval) for interval in (None, 1, 10**6))
        # Each layer is measured in one step of ten.
        spread = [b + (a - b) / 10 for a, b in zip(every, idle, strict=True)]
        ratios = [max(ours[:2]) / max(plain[:2]) for ours in (every, spread, idle)]
        print(
            f"{name:13} {plain[2]:>10} {1e3 * plain[0]:>9.1f} {1e3 * plain[1]:>10.1f} "
            + " ".join(f"{ratio:>7.3f}" for ratio in ratios)
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--cpu", action="store_true", help="the forms of the CPU, not those of accelerators")
    parser.add_argument("--estimate", action="store_true", help="whole steps on an H100, estimated")
    options = parser.parse_args(arguments)
    if options.estimate:
        estimate()
        return
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
