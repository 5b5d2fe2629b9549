"""What a hook holds, for how long, and what it refuses."""

import copy
import gc
import weakref

import pytest
import torch
from accelerate import cpu_offload

import betahook
from betahook.measure import masks
from betahook.tap.last_call import CACHES
from support.attention import HEADS, LENGTH, WIDTH, ByHandAttention, FusedAttention
from support.models import build, inputs
from support.training import LAYER, train


def test_the_last_batch_stays_in_memory_until_the_next_or_detach():
    model = build("llama")
    hook = betahook.attach(model)
    alive = []
    for _ in range(2):
        batch = {name: value.clone() for name, value in inputs("llama").items()}
        model(**batch).loss.backward()
        alive.append([weakref.ref(value) for value in batch.values()])
        del batch
    gc.collect()
    assert [any(ref() is not None for ref in refs) for refs in alive] == [False, True]
    hook.detach()
    gc.collect()
    assert all(ref() is None for ref in alive[1])


@pytest.mark.parametrize("kind", ["interface", "by hand"])
@pytest.mark.parametrize("end", ["detached", "collected"])
def test_facts_of_bands_end_with_the_hook(kind, end):
    """They may lie on a GPU, and belong to no tensor of the model."""
    gc.collect()  # hooks of other tests
    model = build("llama", "sdpa") if kind == "interface" else FusedAttention()
    batch = {"input_ids": inputs("llama")["input_ids"]} if kind == "interface" else {"x": torch.ones(2, LENGTH, WIDTH)}
    hook = betahook.attach(model, controller="monitor")
    model(**batch)
    assert masks._of_band.cache_info().currsize > 0
    if end == "detached":
        hook.detach()
    else:
        del model, hook
        gc.collect()
    assert masks._of_band.cache_info().currsize == 0


def test_a_controller_serves_several_hooks():
    controller, paths = betahook.Gradient(), []
    for _ in range(2):
        model = build("llama")
        with betahook.attach(model, controller=controller) as hook:
            paths.append(train(model, hook, 3))
    assert paths[0] == paths[1]


def test_what_cannot_be_done_says_why():
    model = build("llama")
    with betahook.attach(model) as hook, pytest.raises(RuntimeError, match="run a forward first"):
        hook.audit()
    with pytest.raises(RuntimeError, match=r"step\(\) on a detached hook: attach to the model again"):
        hook.step()
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\) on a detached hook: attach to the model again"):
        hook.load_state_dict(hook.state_dict())


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_step_without_a_forward_of_this_model_names_the_likely_cause(by_hand):
    """The version of transformers is one only where a layer goes through its interface."""
    model = ByHandAttention() if by_hand else build("llama")
    other = copy.deepcopy(model)
    with betahook.attach(model, controller="monitor") as hook:
        other(*[torch.randn(2, LENGTH, WIDTH)] if by_hand else [], **{} if by_hand else inputs("llama"))
        with pytest.raises(RuntimeError, match=r"no forward has reached a hooked layer. Run hook.model first.") as e:
            hook.step()
        assert "If you did, it ran on another model object, such as a copy" in str(e.value)
        assert ("If it did not, this version of betahook does not know how transformers" in str(e.value)) is not by_hand


@pytest.mark.parametrize("when", ["before the weights are there", "while they are offloaded"])
def test_weights_on_the_meta_device_say_nothing_of_where_the_model_runs(when):
    model, batch = build("llama"), inputs("llama")
    expected = model(**batch).logits
    weights = copy.deepcopy(model.state_dict())
    if when == "while they are offloaded":
        cpu_offload(model, execution_device=torch.device("cpu"))
        hook = betahook.attach(model, controller="monitor")
    else:
        with torch.device("meta"):
            model = type(model)(model.config)
        hook = betahook.attach(model, controller="monitor")
        model.to_empty(device="cpu").load_state_dict(weights)
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffers are not in the weights
    with hook:
        assert torch.equal(model(**batch).logits, expected)
        hook.step()
        assert hook.metrics()[f"score_std/{LAYER}"] > 0


def test_a_forward_with_a_cache_is_not_the_one_to_check_on():
    model, ids = build("llama").eval(), inputs("llama")["input_ids"]
    with betahook.attach(model, controller="monitor") as hook:
        output = model(input_ids=ids, use_cache=True)
        name = next(name for name in CACHES if name in output)
        model(input_ids=ids[:, :1], **{name: output[name]})
        assert torch.equal(hook.last_call.input[1]["input_ids"], ids)


def test_a_hook_counts_its_layers():
    for layers, said in ((1, "1 layer, "), (2, "2 layers, ")):
        with betahook.attach(build("llama", num_hidden_layers=layers), "monitor") as hook:
            assert repr(hook).startswith(f"Hook(LlamaForCausalLM, {said}[Monitor()])")
    assert repr(hook).endswith("\n  model.layers.0-1.self_attn: 4 heads of 8")


def test_the_last_batch_holds_no_graph():
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model(inputs_embeds=model.get_input_embeddings()(inputs("llama")["input_ids"])).logits.sum().backward()
        hook.step()
        assert hook.last_call.input[1]["inputs_embeds"].grad_fn is None


def test_what_is_done_in_inference_mode_can_go_on_outside_of_it():
    model, batch = build("llama"), inputs("llama")
    with torch.inference_mode():
        hook = betahook.attach(model, controller="monitor", when="always")
        hook.layers[LAYER].beta = 0.5  # so that each step is watched
        model(**batch)
        hook.step()
        hook.load_state_dict(hook.state_dict())
    with hook:
        hook.load_state_dict(hook.state_dict())
        model(**batch).loss.backward()
        hook.step()
        assert hook.metrics()[f"sensitivity/{LAYER}"] != 0
        state = hook.state_dict()
        model(**batch).loss.backward()
        hook.step()
        with torch.inference_mode():
            hook.metrics()
        hook.load_state_dict(state)


def test_a_model_that_is_the_attention_itself_has_a_name_in_words():
    model = FusedAttention()
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(2, 5, WIDTH)).sum().backward()
        hook.step()
        assert f"the model: {HEADS} heads of " in repr(hook)
        assert hook.findings().table().rows[0][0] == "model"
