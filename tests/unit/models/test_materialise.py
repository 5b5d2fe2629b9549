"""Weights as they act: whole, in floating point, with their adapters; or the reason why not."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import betahook
from betahook.models import materialise
from betahook.models.projections import locate


def read(module, adapter=None, weight=None):
    weight = module.weight if weight is None else weight
    assert materialise.obstacle(weight, module, adapter) is None
    return materialise.read(weight, module, adapter)


def linear(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(3, 4, bias=False, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_plain_weight_is_read_as_it_is(dtype):
    module = linear(dtype)
    found = read(module)
    assert torch.equal(found, module.weight)
    assert found.dtype == dtype
    assert not found.requires_grad
    assert found.data_ptr() == module.weight.data_ptr()  # no copy
    assert not materialise.is_sharded(module.weight)


def test_a_weight_on_the_meta_device_is_offloaded():
    module = linear().to("meta")
    assert materialise.obstacle(module.weight, module, None) == "offloaded, on the meta device outside the forward"


@pytest.mark.parametrize("left", [torch.zeros(0), torch.zeros(6), torch.zeros(2, 3)])
def test_a_part_of_a_weight_is_sharded(left):
    """As FSDP 1 leaves its own, and ZeRO-3 an empty one."""
    module = linear()
    module.weight = nn.Parameter(left)
    assert materialise.obstacle(module.weight, module, None) == "sharded outside the forward"


def test_a_weight_whose_memory_is_freed_is_sharded():
    module = linear()
    module.weight.data.untyped_storage().resize_(0)
    assert materialise.obstacle(module.weight, module, None) == "sharded outside the forward"


def test_a_module_that_does_not_say_its_size_has_all_its_entries():
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(2, 3))
    assert torch.equal(read(module), module.weight)


class Sharded(torch.Tensor):
    """A tensor that stands for its whole, as a DTensor does."""

    def full_tensor(self):
        return 2 * self.as_subclass(torch.Tensor)

    def detach(self):
        return super().detach().as_subclass(Sharded)


def test_a_sharded_weight_is_gathered():
    module = linear()
    weight = module.weight.detach().as_subclass(Sharded)
    assert materialise.is_sharded(weight)
    found = read(module, weight=weight)
    assert torch.equal(found, 2 * module.weight)
    assert type(found) is torch.Tensor


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_a_quantisation_that_nobody_knows_is_named(dtype):
    module = linear()
    weight = nn.Parameter(torch.zeros(4, 3, dtype=dtype), requires_grad=False)
    expected = f"quantised in an unknown way, a Parameter of {dtype}"
    assert materialise.obstacle(weight, module, None) == expected


class Params4bit(nn.Parameter):
    """As bitsandbytes keeps a weight in four bits, two in a byte."""


class Int8Params(nn.Parameter):
    """As bitsandbytes keeps a weight in eight bits."""


def quantised(kind, data, **attributes):
    weight = kind(data, requires_grad=False)
    for name, value in attributes.items():
        setattr(weight, name, value)
    return weight


def test_four_bits_are_dequantised_by_bitsandbytes(monkeypatch):
    library = types.ModuleType("bitsandbytes.functional")
    library.dequantize_4bit = lambda data, state: data.float().reshape(state) / 8
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", library)
    packed = torch.arange(12, dtype=torch.uint8)[:, None]
    weight = quantised(Params4bit, packed, quant_state=(4, 3))
    assert torch.equal(read(linear(), weight=weight), torch.arange(12.0).reshape(4, 3) / 8)


@pytest.mark.parametrize("place", ["weight", "module"])
def test_eight_bits_are_dequantised_by_their_scales(place):
    """The scales move from the weight to its module in the first forward."""
    module, scales = linear(), torch.tensor([127.0, 254.0, 0.0, 12.7])
    module.state = types.SimpleNamespace(SCB=scales if place == "module" else None)
    weight = quantised(Int8Params, torch.ones(4, 3, dtype=torch.int8), SCB=scales if place == "weight" else None)
    torch.testing.assert_close(read(module, weight=weight), torch.tensor([1, 2, 0, 0.1])[:, None].expand(4, 3))


def test_eight_bits_without_scales_are_out_of_reach():
    module = linear()
    module.state = types.SimpleNamespace(SCB=None)
    weight = quantised(Int8Params, torch.ones(4, 3, dtype=torch.int8))
    assert materialise.obstacle(weight, module, None) == "quantised in an unknown way, a Int8Params of torch.int8"


@pytest.mark.parametrize("kind", [Params4bit, Int8Params])
def test_a_weight_that_is_still_to_be_quantised_is_read_as_it_is(kind):
    """bitsandbytes quantises when the module first goes to a device."""
    module = linear()
    assert torch.equal(read(module, weight=quantised(kind, module.weight.detach())), module.weight)


class Quantised(torch.Tensor):
    """A tensor of torchao, which says that it is of floating point."""

    def dequantize(self):
        return self.as_subclass(torch.Tensor) / 4

    def detach(self):
        return super().detach().as_subclass(Quantised)


def test_a_tensor_of_torchao_dequantises_itself(monkeypatch):
    monkeypatch.setattr(Quantised, "__module__", "torchao.dtypes")
    module = linear()
    weight = module.weight.detach().as_subclass(Quantised)
    assert torch.equal(read(module, weight=weight), module.weight / 4)


class Lora(nn.Module):
    """An adapter as PEFT makes it, with two that add to the weight, of which those in `active_adapters` act."""

    def __init__(self, base, **attributes):
        super().__init__()
        self.base_layer, self.active_adapters = base, ["one", "prompts"]
        self.lora_A = nn.ModuleDict({"one": nn.Identity(), "two": nn.Identity()})
        self.merged, self.disable_adapters, self.lora_variant = False, False, {}
        for name, value in attributes.items():
            setattr(self, name, value)

    def get_delta_weight(self, name):
        weight = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
        return weight * {"one": 1, "two": 10}[name]


@pytest.mark.parametrize(
    ("attributes", "added"),
    [
        ({}, 1),
        ({"active_adapters": ["one", "two"]}, 11),
        ({"active_adapters": []}, 0),
        ({"merged": True}, 0),
        ({"disable_adapters": True}, 0),
        ({"merged": True, "lora_variant": {"one": None}}, 0),
        ({"disable_adapters": True, "lora_variant": {"one": None}}, 0),
    ],
    ids=str,
)
def test_active_adapters_are_added(attributes, added):
    module = linear()
    found = read(module, Lora(module, **attributes))
    torch.testing.assert_close(found, module.weight.detach() + added)
    assert found.dtype == torch.float32


def test_adapters_are_added_to_what_was_gathered_and_dequantised():
    module = linear()
    sharded = module.weight.detach().as_subclass(Sharded)
    torch.testing.assert_close(read(module, Lora(module), sharded), 2 * module.weight.detach() + 1)
    module.state = types.SimpleNamespace(SCB=torch.full((4,), 127.0))
    weight = quantised(Int8Params, torch.ones(4, 3, dtype=torch.int8))
    torch.testing.assert_close(read(module, Lora(module), weight), torch.full((4, 3), 2.0))


@pytest.mark.parametrize(
    "adapter", [Lora(linear(), lora_variant={"one": None}), nn.Identity()], ids=["a variant", "other"]
)
def test_an_adapter_of_an_unknown_kind_is_named(adapter):
    module = linear()
    expected = f"under an adapter of an unknown kind, {type(adapter).__name__}"
    assert materialise.obstacle(module.weight, module, adapter) == expected


def test_projections_are_read_as_they_act():
    attention = nn.Module()
    attention.q_proj, attention.k_proj = Lora(linear()), linear()
    query, key = locate(attention, 2, 2)
    torch.testing.assert_close(query.entries.flatten(0, 1), linear().weight.detach() + 1)
    assert torch.equal(key.entries.flatten(0, 1), linear().weight)
    attention.q_proj.lora_variant = {"one": None}
    assert "of an unknown kind" in query.obstacle
    assert key.obstacle is None


class UnderSpectralNorm(nn.Module):
    num_heads = 2

    def __init__(self, *names, out):
        super().__init__()
        for name in names:
            setattr(self, name, parametrizations.spectral_norm(nn.Linear(4, out)))
        self.names = names

    def forward(self, x):
        made = torch.cat([getattr(self, name)(x) for name in self.names], -1)[..., :8]
        q, k = made.unflatten(-1, (4, 2)).transpose(1, 2).chunk(2, 1)
        return F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("names", "out"), [(("q_proj", "k_proj"), 4), (("qkv",), 12)], ids=str)
def test_to_look_at_a_weight_under_spectral_norm_changes_nothing(names, out):
    """In training mode, torch's parametrization moves its buffers whenever somebody asks for its weight."""
    torch.manual_seed(0)
    model = UnderSpectralNorm(*names, out=out)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hook = betahook.attach(model, controller="monitor")
    assert repr(hook)
    hook.layers.read_weights()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(part.training for part in model.modules())
    expected = getattr(model.eval(), names[0]).weight[:4].std(correction=0).item()
    assert hook.layers[""].weight_std_q == pytest.approx(expected, rel=1e-5)
