"""A stand-in for Apple's MPS: a device without float64 on a machine without the device.

Tensors stay on the CPU. Those on the stand-in are known by their storage and say "mps:0" when asked for their device;
what the device lacks, float64 and a few operations, raises as it does there.
"""

import contextlib
import functools
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from betahook.models.torch_calls import tensors_in

CPU, MPS = torch.device("cpu"), torch.device("mps", 0)
LACKING = {torch.ops.aten.segment_reduce.default}
"""Operations used here that native_functions.yaml of torch 2.13 has for CPU and CUDA, and not for MPS."""
MIXING = {torch.ops.aten.copy_.default, torch.ops.aten.index.Tensor}
"""Operations that take tensors of two devices."""

_there: set[StorageWeakRef] = set()
"""Never cleared: some facts about masks are kept for as long as the process runs."""
_device, _to, _numpy = torch._C.TensorBase.device, Tensor.to, Tensor.numpy


@contextlib.contextmanager
def stand_in():
    """A context in which `.to("mps")`, `device="mps"` and what follows from them work."""
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in [
            (Tensor, "to", _moved_as_asked),
            (Tensor, "cpu", lambda tensor: tensor.to(CPU)),
            (Tensor, "numpy", _refuse_numpy),
            (torch, "tensor", _made(torch.tensor)),
            (torch, "as_tensor", _made(torch.as_tensor)),
        ]:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        for function in ("get_rng_state", "set_rng_state"):
            stack.enter_context(mock.patch.object(torch.mps, function))
        Tensor.device = property(_device_of)
        stack.callback(delattr, Tensor, "device")
        stack.enter_context(_Mode())
        yield


class _Mode(TorchDispatchMode):
    """Keeps account of which tensors are there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = tensors_in((args, kwargs))
        if kwargs.get("device") is not None:
            there = torch.device(kwargs["device"]).type == "mps"
            kwargs["device"] = CPU
        elif func._schema.name.endswith("_"):
            there = _is_there(args[0])
        else:
            there = any(_is_there(x) for x in tensors)
        if there and func in LACKING:
            raise NotImplementedError(f"The operator '{func}' is not currently implemented for the MPS device")
        if len({_is_there(x) for x in tensors if x.dim()}) > 1 and func not in MIXING:
            raise RuntimeError(f"{func}: Expected all tensors to be on the same device, found mps:0 and cpu")
        output = func(*args, **kwargs)
        if there:
            for tensor in tensors_in(output):
                _put(tensor)
        return output


def _is_there(tensor):
    return StorageWeakRef(tensor.untyped_storage()) in _there


def _put(tensor):
    if tensor.dtype == torch.float64:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
    _there.add(StorageWeakRef(tensor.untyped_storage()))
    return tensor


def _device_of(tensor):
    device = _device.__get__(tensor)
    return MPS if device.type == "cpu" and _is_there(tensor) else device


def _moved(tensor, device):
    if (device.type == "mps") == _is_there(tensor):
        return tensor
    with _disable_current_modes():
        copy = tensor.clone()
    return _put(copy) if device.type == "mps" else copy


def _moved_as_asked(tensor, *args, **kwargs):
    """`Tensor.to`: first from the device to the dtype, or first to the dtype and then to the device."""
    if args and isinstance(args[0], Tensor):
        device, dtype = args[0].device, args[0].dtype
    else:
        device, dtype = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})[:2]
    if device is None or device.type not in ("cpu", "mps"):
        return _to(tensor, *args, **kwargs)
    if device == CPU:
        tensor = _moved(tensor, device)
    return _moved(tensor if dtype is None else _to(tensor, dtype), device)


def _refuse_numpy(tensor, **kwargs):
    if _is_there(tensor):
        raise TypeError("can't convert mps:0 device type tensor to numpy. Use Tensor.cpu() to copy it to host memory")
    return _numpy(tensor, **kwargs)


def _made(function):
    @functools.wraps(function)
    def make(data, *args, device=None, **kwargs):
        device = torch.device(device or getattr(data, "device", CPU))
        data = data.cpu() if isinstance(data, Tensor) else data
        return function(data, *args, device=CPU if device.type == "mps" else device, **kwargs).to(device)

    return make
