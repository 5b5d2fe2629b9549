"""`betahook.examine`: forwards only, the numbers of a float64 view of the attention, and a model as it was."""

import math

import pytest
import torch
from torch import nn

import betahook
from support.attention import LENGTH, WIDTH, FusedAttention
from support.models import build, inputs, trace


def batches(count=3):
    return [{name: value for name, value in inputs("llama", 16 + index).items()} for index in range(count)]


def test_numbers_are_those_of_the_attention_itself():
    model = build("llama").eval()
    found = betahook.examine(model, batches())
    seen = []
    for batch in batches():
        with trace() as calls, torch.no_grad():
            model(**batch)
        scores, allowed = calls[0].scores()
        seen.append((scores, allowed))
    by_head = torch.stack(
        [
            torch.cat([scores[:, head][allowed.expand_as(scores)[:, head]] for scores, allowed in seen]).var(
                correction=0
            )
            for head in range(4)
        ]
    )
    assert found.metrics["score_std/model.layers.0.self_attn"] == pytest.approx(by_head.mean().sqrt().item(), rel=1e-5)
    assert found.batches == 3
    assert len(found.findings) == len(found.audit) == 2
    assert not any(key.startswith("sensitivity") for key in found.metrics)
    assert "Both layers" not in str(found)
    assert "both layers healthy" in str(found)


def draw_a_number(*_):
    torch.rand(1)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model = build("llama").train(training)
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    generator = torch.get_rng_state()
    drawing = model.model.register_forward_pre_hook(draw_a_number)
    betahook.examine(model, batches())
    drawing.remove()
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_after_an_error_too():
    model = build("llama")
    with pytest.raises(RuntimeError):
        betahook.examine(model, [{"input_ids": torch.full((1, 4), 0)}, {"input_ids": torch.zeros(1, 4, 7, dtype=int)}])
    assert model.training
    betahook.attach(model).detach()  # it is not hooked


def test_batches_are_taken_one_at_a_time_and_let_go():
    import weakref

    alive, most = [], 0

    def stream():
        nonlocal most
        for batch in batches(5):
            ids = batch["input_ids"].clone()
            alive.append(weakref.ref(ids))
            yield {"input_ids": ids}
            del ids
            most = max(most, sum(ref() is not None for ref in alive))

    betahook.examine(build("llama"), stream())
    assert most <= 1


def test_what_is_no_batch():
    model = build("llama")
    with pytest.raises(ValueError, match=r"examine\(\) got no batch: give at least one"):
        betahook.examine(model, [])
    with pytest.raises(TypeError, match="a batch must be a mapping of keyword arguments of the model, or one tensor"):
        betahook.examine(model, [[1, 2]])
    with pytest.raises(TypeError, match=r"takes an iterable of batches, such as a list or a DataLoader; got None"):
        betahook.examine(model, None)
    for batch in (inputs("llama"), inputs("llama")["input_ids"]):
        with pytest.raises(TypeError, match=r"takes an iterable of batches; got one (dict|Tensor): put it into a list"):
            betahook.examine(model, batch)
    with (
        betahook.attach(model),
        pytest.raises(RuntimeError, match=r"already: call findings\(\) on its hook, or remove the hook"),
    ):
        betahook.examine(model, batches())


def test_a_tensor_is_a_batch():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    found = betahook.examine(Small(), [torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))])
    assert found.findings[0].layer == "attention"


def test_flat_saturated_and_overflowing_heads_are_told():
    """One head's query is zero, another's huge."""
    model = build("llama", num_key_value_heads=4)
    with torch.no_grad():
        query = model.model.layers[0].self_attn.q_proj.weight
        query[:8] = 0
        query[8:16] *= 1e5
    found = betahook.examine(model, batches())
    first = found.findings[0]
    assert first.condition is betahook.Condition.EXPLODING
    heads = {condition: which for condition, which in first.heads.items()}
    assert 0 in heads[betahook.Condition.DEAD]
    by_format = {each.name: each for each in found.precision if each.layer == first.layer}
    assert by_format["float16"].verdict == "overflows"
    assert by_format["float16"].overflowing == [1]
    assert by_format["bfloat16"].overflowing == []
    assert math.isinf(by_format["bfloat16"].weight_error[1]) or by_format["bfloat16"].weight_error[1] > 1
    assert "float16: 1 of 2 layers, the worst overflows (model.layers.0.self_attn)" in str(found)


def test_an_outlier_between_the_sampled_rows_is_seen():
    """The query and key of the last of 512 tokens are huge: it is the row of the largest score."""
    model = FusedAttention()
    inputs = torch.randn(1, 512, WIDTH, generator=torch.Generator().manual_seed(0))
    inputs[:, -1] *= 1e4
    with torch.no_grad():
        query, key = model.split(model.q_proj(inputs)), model.split(model.k_proj(inputs))
    largest = (query @ key.mT).abs().amax((0, 2, 3))
    (float16, *_) = betahook.examine(model, [inputs]).precision
    assert torch.allclose(float16.range_used.float() * torch.finfo(torch.float16).max, largest)
    assert float16.verdict == "overflows"


def test_a_model_that_is_itself_the_attention_is_called_the_model():
    model = FusedAttention()
    found = betahook.examine(model, [torch.randn(2, LENGTH, WIDTH) * 1e4])
    assert "(the model)" in str(found)


class OneOfTwo(nn.Module):
    """Two attentions, of which the first is idle."""

    def __init__(self):
        super().__init__()
        self.idle, self.used = (nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))

    def forward(self, x):
        return self.used(x, x, x)[0]


def test_an_idle_layer_does_not_hide_one_that_overflows():
    model = OneOfTwo()
    with torch.no_grad():
        model.used.in_proj_weight[:16] *= 1e6
    said = str(betahook.examine(model, [torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))]))
    assert "float16: 1 of 2 layers, the worst overflows (used)" in said
    assert "not measured (idle)" not in said
    assert said.endswith("\nNaN, or not measured: idle")


def test_a_nan_hides_no_overflow_of_other_heads_and_is_not_precise_enough():
    model = build("llama", num_key_value_heads=4)
    query = model.model.layers[1].self_attn.q_proj.weight
    with torch.no_grad():
        query[0] = math.nan
    said = str(betahook.examine(model, batches()))
    assert said.endswith("\nNaN, or not measured: model.layers.1.self_attn")
    with torch.no_grad():
        query[8:16] *= 1e6
    said = str(betahook.examine(model, batches()))
    assert "float16: 1 of 2 layers, the worst overflows (model.layers.1.self_attn)" in said
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.fill_(math.nan)
    said = str(betahook.examine(model, batches()))
    assert "precise enough" not in said
    assert said.endswith("\nNaN, or not measured: model.layers.0.self_attn and model.layers.1.self_attn")


def test_precise_enough_is_said_of_the_layers_that_were_measured():
    said = str(betahook.examine(OneOfTwo(), [torch.zeros(2, 6, 16)]))
    assert "float16, bfloat16 and float8 would all be precise enough elsewhere\nNaN, or not measured: idle" in said
