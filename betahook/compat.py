"""Private and undocumented names of torch, transformers and PEFT that betahook relies on, each with a link upstream.

Every package of betahook may import this file, which imports none of them. Each entry says what it is for and has a
test of its own in tests/unit/test_compat.py, which fails when upstream changes it.
"""

from __future__ import annotations

import copy
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import parametrize

# Keyed by identity: a tensor compares by its entries. https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/weak.py
from torch.utils.weak import WeakIdRef as WeakIdRef
from torch.utils.weak import WeakTensorKeyDictionary as WeakTensorKeyDictionary

# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_common_utils.py
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/eval_frame.py
WRAPPERS = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"}
"""Attributes under which activation checkpointing, FSDP 1 and `torch.compile` keep the wrapped module. A saved model
leaves them out of the names of weights and modules."""

# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/transformer.py
NESTED_TENSORS = "use_nested_tensor"
"""Attribute that makes `nn.TransformerEncoder` pack padded batches, past all hooks; no public API stops it later."""

# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/parallel/replicate.py
REPLICATE = "_replicate_for_data_parallel"
"""The method by which `nn.DataParallel` copies a module for each GPU."""

# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/decorators.py
CALLED_BY_GRAPHS = "_dynamo_marked_constant"
"""Attribute of a function that the compiler calls instead of tracing; torch's API for it would load the compiler."""

# https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/trainer.py
TRAINER_STATE = "trainer_state.json"
"""Name of the file in which a Trainer keeps its state; its own constant would import the Trainer, an extra."""

# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/overrides.py
TRANSPOSING_GETTERS = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}
"""Getters that a `TorchFunctionMode` receives for `x.T` etc.; all are named `__get__`, so only identity tells which."""


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/module_tracker.py
def is_in_backward() -> bool:
    """True in a forward pass inside a backward pass, as when gradient checkpointing recomputes it.

    False while a compiler traces: the graph is traced for the first run, and operations in it ask when they run.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/checkpoint.py
def is_recomputation() -> bool:
    """True in a forward pass that non-reentrant checkpointing recomputes, whose first run had gradients, too.

    Only the stack shows it: the recomputation is run by the hook that unpacks the first tensor that was not saved.
    """
    frame = sys._getframe() if is_in_backward() else None
    while frame is not None:
        if frame.f_code.co_name == "unpack_hook" and frame.f_globals is vars(torch.utils.checkpoint):
            return True
        frame = frame.f_back
    return False


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/compiler/__init__.py
def outside_of_graphs(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """Exclude a function from compiled graphs, which break at it; `reason` is shown if this torch version takes one."""
    told = {"reason": reason} if "reason" in inspect.signature(torch.compiler.disable).parameters else {}
    outside: Callable[..., Any] = torch.compiler.disable(function, **told)
    return outside


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/eval_frame.py
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/module.py
def is_compiled(module: nn.Module) -> bool:
    """True for a module compiled by `torch.compile` or `Module.compile`, whose graph bypasses later changes."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/python_cpp_function.h
def age_of(node: Any) -> int:
    """Return the sequence number of an autograd node, larger than those of all nodes it leads to."""
    return int(node._sequence_nr())


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/compiler/__init__.py
def has_compiled() -> bool:
    """True if anything may have been compiled, i.e. the compiler is loaded; loading it just to ask takes seconds."""
    return "torch._dynamo" in sys.modules


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/cuda/graphs.py
def is_captured(device: torch.device) -> bool:
    """True if the current operations are captured in a graph, of the compiler or CUDA, that later steps run again."""
    return torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/compiler/__init__.py
def is_exporting() -> bool:
    """True in a forward pass that `torch.export` traces; always False in torch 2.6, which does not show it."""
    # In a graph, torch 2.7 to 2.11 take `torch.compiler.is_exporting()`, which returns this flag, as True.
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/_python_dispatch.py
def is_without_data() -> bool:
    """True in a `FakeTensorMode`, in which tensors have shapes but no entries."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/autograd/function.py
def is_transformed() -> bool:
    """True in `torch.func.grad` and the like, forward-mode AD, `torch.export`, `torch.jit.trace`, a `FakeTensorMode`.

    Only the model's own computation may run there, since tensors created there mean nothing outside.
    """
    if torch.compiler.is_compiling():
        return is_exporting()
    in_func = torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    return in_func or is_without_data() or torch._C._is_tracing()


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_subclasses/meta_utils.py
def is_batched(tensor: Tensor) -> bool:
    """True for a tensor that is batched by a vmap, including the legacy vmap of batched gradients."""
    return torch._C._functorch.is_batchedtensor(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor)


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_functorch/pyfunctorch.py
@contextmanager
def untransformed() -> Iterator[None]:
    """Compute with tensors from outside while in a transform of `torch.func`, a `FakeTensorMode` or an export."""
    with torch._C._DisableFuncTorch(), torch.utils._python_dispatch._disable_current_modes(), unwatched():
        yield


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/utils/disable_torch_function.cpp
def unwatched() -> AbstractContextManager[None]:
    """Return a context in which function calls bypass every `TorchFunctionMode`."""
    return torch._C.DisableTorchFunction()


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/python_variable.cpp
def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor of which this one is a view, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def inplace_version(tensor: Tensor) -> int | None:
    """Return how often a tensor, or its base if it is a view, was changed in place; None for an inference tensor."""
    return None if tensor.is_inference() else base_of(tensor)._version


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/functional.py
_OF_TORCH = inspect.unwrap(F.multi_head_attention_forward)


def multi_head_attention_forward() -> Callable[..., Any]:
    """Return `F.multi_head_attention_forward` without its first lines, which dispatch to a `TorchFunctionMode`."""
    original = F.multi_head_attention_forward
    if "has_torch_function" not in getattr(getattr(original, "__code__", None), "co_names", ()):
        original = _OF_TORCH  # e.g. if a profiler has wrapped it
    names = {**original.__globals__, "has_torch_function": lambda tensors: False}
    plain = types.FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
    plain.__kwdefaults__ = original.__kwdefaults__
    return plain


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fully_shard.py
def unsharded_memo(module: nn.Module) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy` with unsharded, empty stand-ins for what FSDP 2 shards and refuses to copy."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        if hasattr(parameter, "full_tensor"):
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            memo[id(parameter)] = nn.Parameter(whole, parameter.requires_grad)
    for part in reversed([*module.modules()]):  # inner modules first
        if is_fsdp2(part):
            made = (kind := _without_fsdp2(part)).__new__(kind)
            nn.Module.__init__(made)
            state = {name: value for name, value in vars(part).items() if not _is_of_fsdp2(name)}
            vars(made).update(copy.deepcopy(state, memo))
            memo[id(part)] = made
    return memo


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/_composable/contract.py
def _is_of_fsdp2(attribute: str) -> bool:
    """True for module attributes in which FSDP 2 may keep references to itself."""
    return attribute.endswith("_hooks") or attribute.startswith("__composable_api_state_key")


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/amp/grad_scaler.py
def steps_since_rescaling(state: Mapping[str, Any]) -> int:
    """Return the steps of a `GradScaler` since its scale last changed or it skipped one, from its `state_dict()`."""
    return int(state["_growth_tracker"])


def is_before_update(scaler: GradScaler) -> bool:
    """True between `unscale_()` or `step()` of a `GradScaler` and its `update()`, which clears the optimizer states."""
    return bool(getattr(scaler, "_per_optimizer_states", None))  # absent if it is disabled


def initial_scale(scaler: GradScaler) -> float:
    """Return the scale with which a `GradScaler` was created, or the one that it last loaded."""
    return float(scaler._init_scale)


# https://github.com/deepspeedai/DeepSpeed/blob/v0.17.0/deepspeed/runtime/zero/partition_parameters.py
def is_zero3(parameter: Tensor) -> bool:
    """True for a parameter that DeepSpeed's ZeRO-3 shards, which is empty outside the forward pass."""
    return hasattr(parameter, "ds_id")


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_common_utils.py
def is_flattened(parameter: Tensor) -> bool:
    """True for a parameter that FSDP 1 shards, which holds only this rank's part outside the forward pass."""
    return hasattr(parameter, "_fsdp_flattened")


# PEFT: its layers have no documented way to read the effective weight without changing the layer.
# https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/tuners_utils.py
def is_adapter(module: object) -> bool:
    """True for a PEFT layer, which wraps another layer (`base_layer`) and adds to its output."""
    return hasattr(module, "base_layer")


def is_active_adapter(adapter: Any) -> bool:
    """True unless an adapter is merged into the weight, or disabled."""
    return not (getattr(adapter, "merged", False) or getattr(adapter, "disable_adapters", False))


# https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/lora/layer.py
def is_known_adapter(adapter: Any) -> bool:
    """True for LoRA, which only adds to the weight, and for DoRA if it is the only active adapter."""
    active = set(getattr(adapter, "active_adapters", ())) & set(getattr(adapter, "lora_A", ()))
    dora = active & set(getattr(adapter, "lora_magnitude_vector", ()))
    variants = active & set(getattr(adapter, "lora_variant", ()))
    return hasattr(adapter, "lora_A") and (not dora | variants or (active == dora and len(active) == 1))


def magnitudes(adapter: Any) -> list[Any]:
    """Return the magnitude modules of DoRA, whose `weight [out]` holds the norms of the rows; empty without DoRA."""
    vectors = getattr(adapter, "lora_magnitude_vector", {}) if is_active_adapter(adapter) else {}
    return [vectors[name] for name in getattr(adapter, "active_adapters", ()) if name in vectors]


def adapter_weights(adapter: Any) -> Iterator[Tensor]:
    """Yield the tensors that an adapter adds to the weight."""
    return (adapter.get_delta_weight(name) for name in adapter.active_adapters if name in adapter.lora_A)


def adapter_outputs(adapter: Any) -> Iterator[nn.Module]:
    """Yield, for each adapter of an adapter layer, the module whose output is added to that of the wrapped layer."""
    return iter(getattr(adapter, "lora_B", {}).values())


# https://github.com/huggingface/peft/blob/v0.21.2/src/peft/peft_model.py
# https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/adaption_prompt/layer.py
def learns_prompts(module: object) -> bool:
    """True for a model or attention module that learns prompts (LLaMA-Adapter), saved without the model's weights."""
    in_model = bool(getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False))
    return in_model or hasattr(module, "adaption_prompt")


# https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/configuration_utils.py
def replace_config(model: Any, config: dict[str, Any]) -> None:
    """Give a diffusers model another config, since the entries of a config cannot be changed."""
    model._internal_dict = type(model.config)(config)


# https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/integrations/peft.py
def saves_adapters(model: object) -> bool:
    """True for a model that got adapters from its own `add_adapter`, and saves them with its own method."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


# https://github.com/huggingface/peft/blob/v0.21.2/src/peft/utils/other.py
def parameters_of_adapters(model: nn.Module) -> dict[int, str]:
    """Return the parameters that are saved with the adapters of a model: parameter id to adapter name."""
    found = {}
    kept = ((module, prefix) for module in model.modules() for prefix in getattr(module, "adapter_layer_names", ()))
    for module, prefix in kept:  # the attribute is a dictionary by adapter
        named = ((name.removeprefix(prefix), p) for name, p in module.named_parameters() if name.startswith(prefix))
        found.update({id(parameter): rest.split(".")[1] for rest, parameter in named})
    return found


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fully_shard.py
def is_fsdp2(module: nn.Module) -> bool:
    """True for a module that `fully_shard` was applied to; compares names, as torch may lack distributed."""
    return _without_fsdp2(module) is not type(module)


def _without_fsdp2(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before `fully_shard` put `FSDPModule` in front of it."""
    kinds = type(module).__mro__
    names = [kind.__name__ for kind in kinds]
    return kinds[names.index("FSDPModule") + 1] if "FSDPModule" in names else type(module)


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/utils/parametrize.py
def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module as it was written, without what `fully_shard` and parametrizations put before it."""
    return next(kind for kind in _without_fsdp2(module).__mro__ if kind.__module__ != parametrize.__name__)
