"""The ways people train: one optimizer step is one update of beta, whatever surrounds it."""

from dataclasses import dataclass

import pytest
import torch
from accelerate import Accelerator, dispatch_model
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

import betahook
from betahook.integrations.trainer import BetaHookCallback
from betahook.tap.gain import ScaleQuery
from support.attention import WIDTH, FusedAttention
from support.matrices import full
from support.models import build, inputs
from support.training import bits

LAYER = "model.layers.0.self_attn"


def memory(hook):
    """What the first controller of a hook remembers."""
    return hook.state_dict()["controllers"][0]["state"]


def attach(model):
    """A search that moves in every step."""
    return betahook.attach(model, controller=betahook.Search(window=1, warmup=0, rise=False, opening=0.1, growth=1.0))


def betas(hook):
    return [layer.beta for layer in hook.layers.values()]


def sensitivities(hook):
    return [value for key, value in hook.metrics().items() if key.startswith("sensitivity")]


def make_scaler(scale=2.0**10, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


def overflow(parameter):
    parameter.grad[0, 0] = torch.inf


def scaled_step(model, optimizer, scaler, hook, batch):
    scaler.scale(model(**batch).loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    hook.step(scaler)


def test_the_loss_scale_is_divided_out_before_the_step_too():
    model, batch, scaler = build("llama"), inputs("llama"), make_scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        layer = hook.layers[LAYER]
        scaled_step(model, optimizer, scaler, hook, batch)
        of_step = layer.statistics.sensitivity.item()
        scaler.scale(model(**batch).loss).backward()
        assert layer.statistics.sensitivity.item() == pytest.approx(of_step, rel=1e-6)


@pytest.mark.parametrize(("begun", "falls"), [(0, False), (4, False), (4, True)])
def test_a_scaler_that_was_in_use_before_the_hook(begun, falls):
    """A step after which its scale is another tells the scale of that step where this is beyond the first one."""
    model, batch, scaler = build("llama"), inputs("llama"), make_scaler(growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(**batch).loss.backward()
        hook.step()
        expected = sensitivities(hook)
        for _ in range(begun):
            handles = [model.lm_head.weight.register_post_accumulate_grad_hook(overflow)] if falls else []
            scaled_step(model, optimizer, scaler, hook, batch)
            for handle in handles:
                handle.remove()
        scaled_step(model, optimizer, scaler, hook, batch)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        scaled_step(model, optimizer, scaler, hook, batch)
        assert scaler.state_dict()["_growth_tracker"] == 0
        assert sensitivities(hook) == (pytest.approx(expected, rel=1e-4) if not falls else [])


def test_the_loss_scale_is_divided_out():
    """A power of two, so that the scaled run has the bits of the plain one."""
    said = []
    for scaler in (None, make_scaler(), make_scaler(enabled=False)):
        model, batch = build("llama"), inputs("llama")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attach(model) as hook:
            for _ in range(3):
                if scaler is None:
                    model(**batch).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    hook.step()
                else:
                    scaled_step(model, optimizer, scaler, hook, batch)
            said.append((sensitivities(hook), betas(hook)))
    assert said[0] == said[1] == said[2]


def test_a_skipped_step_moves_no_beta():
    """The overflow is in a gradient far from attention: every sensitivity is finite, beta stays all the same."""
    model, batch, scaler = build("llama"), inputs("llama"), make_scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model) as hook:
        scaled_step(model, optimizer, scaler, hook, batch)
        before, state = betas(hook), {name: x.clone() for name, x in memory(hook).items()}
        handle = model.lm_head.weight.register_post_accumulate_grad_hook(overflow)
        scaled_step(model, optimizer, scaler, hook, batch)
        assert scaler.get_scale() == 2.0**9
        assert betas(hook) == before
        assert bits(memory(hook)) == bits(state)
        metrics = hook.metrics()
        assert metrics[f"nonfinite/{LAYER}"] == 1
        assert f"sensitivity/{LAYER}" not in metrics
        assert metrics[f"score_std/{LAYER}"] > 0
        handle.remove()
        scaled_step(model, optimizer, scaler, hook, batch)
        assert betas(hook) != before
        assert hook.metrics()[f"nonfinite/{LAYER}"] == 0


def test_a_step_at_which_the_scale_grows_counts():
    """Every second step, or every one. The bits are those of a scale that stays, a power of two too."""
    said = []
    for interval, scale in ((1000, 2.0**10), (2, 2.0**12), (1, 2.0**15)):
        model, batch = build("llama"), inputs("llama")
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make_scaler(growth_interval=interval)
        with attach(model) as hook:
            for _ in range(5):
                scaled_step(model, optimizer, scaler, hook, batch)
                said.append((sensitivities(hook), betas(hook)))
                assert hook.metrics()[f"nonfinite/{LAYER}"] == 0
            assert scaler.get_scale() == scale
    assert said[:5] == said[5:10] == said[10:]


def test_growth_right_after_a_resume_counts():
    model, batch = build("llama"), inputs("llama")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make_scaler(growth_interval=3)
    with attach(model) as hook:
        for _ in range(2):
            scaled_step(model, optimizer, scaler, hook, batch)
        state = hook.state_dict()
    with attach(model) as hook:
        hook.load_state_dict(state)
        before = betas(hook)
        scaled_step(model, optimizer, scaler, hook, batch)
        assert scaler.get_scale() == 2.0**11
        assert betas(hook) != before


def test_micro_batches_after_a_resume_sum_up_to_the_same_bits():
    """The first of them must not go another way than the others, as where the model's own beta is noted anew."""

    def step(model, hook, number):
        for part in range(7):
            generator = torch.Generator().manual_seed(7 * number + part)
            ids = torch.randint(3, 64, (2, 12), generator=generator)
            (model(input_ids=ids, labels=ids).loss * 10).backward()
        hook.step()

    model, found, state = build("llama"), [], None
    for _ in range(2):
        with betahook.attach(model, controller=betahook.Gradient(0.2), per_head=True) as hook:
            if state is None:
                for number in range(3):
                    step(model, hook, number)
                state = hook.state_dict()
            else:
                hook.load_state_dict(state)
            step(model, hook, 3)
            found.append((memory(hook)["mean"], hook.metrics()))
    (mean, metrics), (mean_of_resumed, metrics_of_resumed) = found
    assert torch.equal(mean, mean_of_resumed)
    assert metrics == metrics_of_resumed


def test_controllers_do_not_count_skipped_steps():
    """Scalers begin too high, so that the first steps are skipped."""
    seen = []

    @dataclass
    class Watch(betahook.Controller):
        def update(self, beta, observation, state):
            seen.append(observation.step)
            return beta, state

    model, batch, scaler = build("llama"), inputs("llama"), make_scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with betahook.attach(model, controller=Watch()) as hook:
        handle = model.lm_head.weight.register_post_accumulate_grad_hook(overflow)
        scaled_step(model, optimizer, scaler, hook, batch)
        scaled_step(model, optimizer, scaler, hook, batch)
        handle.remove()
        state = hook.state_dict()
        scaled_step(model, optimizer, scaler, hook, batch)
    with betahook.attach(build("llama"), controller=Watch()) as hook:
        hook.load_state_dict(state)
        scaled_step(hook.model, torch.optim.SGD(hook.model.parameters(), lr=0.1), scaler, hook, batch)
        assert hook.steps == 3
    assert seen == [0, 0, 0, 0]


def test_a_skipped_step_is_no_reason_to_warn(caplog):
    model, batch, scaler = build("llama"), inputs("llama"), make_scaler(scale=2.0**127)
    with attach(model) as hook:
        scaled_step(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler, hook, batch)
        assert hook.metrics()[f"nonfinite/{LAYER}"] == 1
    assert not caplog.records


def test_the_trainer_finds_the_scaler(tmp_path):
    """Accelerate refuses float16 on a CPU, but its optimizer takes a scaler; the Trainer gives that to callbacks."""
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    Accelerator(cpu=True)
    model, batch, scaler = build("llama"), inputs("llama"), make_scaler(scale=2.0**30)
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
    callback = BetaHookCallback(hook=attach(model))
    events = (arguments, TrainerState(is_world_process_zero=False), TrainerControl())
    callback.on_train_begin(*events, model=model)
    moved = []
    for overflows in (False, True):
        if overflows:
            model.lm_head.weight.register_post_accumulate_grad_hook(overflow)
        before = betas(callback.hook)
        scaler.scale(model(**batch).loss).backward()
        optimizer.step()
        callback.on_step_end(*events, optimizer=optimizer)
        assert optimizer.step_was_skipped is overflows
        moved.append(betas(callback.hook) != before)
    assert moved == [True, False]
    callback.hook.detach()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """Statistics and sensitivities under autocast are those of float32, as near as the dtype allows."""
    reference, model, batch = build("llama"), build("llama"), inputs("llama")
    with betahook.attach(reference, controller="monitor") as a, betahook.attach(model, controller="monitor") as b:
        reference(**batch).loss.backward()
        with torch.autocast("cpu", dtype=dtype):
            loss = model(**batch).loss
        loss.backward()
        for name in a.layers:
            expected, seen = a.layers[name].statistics, b.layers[name].statistics
            for quantity in ("std", "entropy", "max_score"):
                assert float(getattr(seen, quantity)) == pytest.approx(float(getattr(expected, quantity)), rel=2e-2)
            assert float(seen.sensitivity) == pytest.approx(float(expected.sensitivity), rel=0.1, abs=1e-4)


def test_accumulation_is_one_update_and_clipping_leaves_it_alone():
    """Two half batches, clipped, against the joined batch."""
    batch = inputs("llama", padded=False)
    said = []
    for rows in ([slice(0, 2)], [slice(0, 1), slice(1, 2)]):
        model = build("llama")
        with attach(model) as hook:
            for row in rows:
                (model(**{name: x[row] for name, x in batch.items()}).loss / len(rows)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            hook.step()
            said.append(sensitivities(hook))
            assert memory(hook)["direction"].abs().tolist() == [1, 1]
    assert said[0] == pytest.approx(said[1], rel=1e-4)


def test_two_models_in_one_process_know_nothing_of_each_other():
    first, second, plain = build("llama"), build("gpt2"), build("llama")
    expected = plain(**inputs("llama")).logits
    with attach(second) as other:
        with attach(first) as hook:
            for model, name in ((first, "llama"), (second, "gpt2")):
                model(**inputs(name)).loss.backward()
            hook.step()
            assert all(layer.beta == layer.beta_default for layer in other.layers.values())
            assert all(layer.beta != layer.beta_default for layer in hook.layers.values())
            assert float(other.layers["transformer.h.0.attn"].statistics.count) > 0
        assert torch.equal(plain(**inputs("llama")).logits, expected)
        other.step()
        assert all(layer.beta != layer.beta_default for layer in other.layers.values())
    assert torch.equal(first(**inputs("llama")).logits, expected)


@pytest.mark.oldest_skips("T5 writes its attention by hand")
def test_an_encoder_decoder_adapts_all_three_kinds_of_attention():
    model, batch = build("t5"), inputs("t5")
    with attach(model) as hook:
        model(**batch).loss.backward()
        hook.step()
        kinds = {"encoder.block.0.layer.0", "decoder.block.0.layer.0", "decoder.block.0.layer.1"}
        for kind in kinds:
            (layer,) = (layer for name, layer in hook.layers.items() if name.startswith(kind))
            assert layer.beta != layer.beta_default


@pytest.mark.oldest_skips("T5 writes its attention by hand, and has no sdpa", family="t5")
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "mistral"])
def test_generation_with_a_cache_uses_beta(family):
    model, batch = build(family, "sdpa").eval(), inputs(family, padded=False)
    batch.pop("labels")
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    plain = model.generate(**batch, **options)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        assert torch.equal(model.generate(**batch, **options), plain)
        for layer in hook.layers.values():
            layer.beta = 3 * layer.beta_default
        adapted = model.generate(**batch, **options, use_cache=True)
        assert torch.equal(adapted, model.generate(**batch, **options, use_cache=False))
        assert not torch.equal(adapted, plain)
        assert all(value == value for value in hook.metrics().values())
    assert torch.equal(model.generate(**batch, **options), plain)


def test_an_evaluation_in_between_changes_nothing():
    def run(evaluate):
        model, batch = build("llama"), inputs("llama")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attach(model) as hook:
            for _ in range(3):
                model(**batch).loss.backward()
                if evaluate:
                    model.eval()
                    with torch.no_grad():
                        model(**inputs("llama", 7))
                    model.train()
                optimizer.step()
                optimizer.zero_grad()
                hook.step()
            return hook.metrics()

    assert run(evaluate=True) == run(evaluate=False)


@pytest.mark.parametrize("second", ["cpu", "disk"])
def test_a_model_split_by_a_device_map(tmp_path, second):
    """Offloaded weights are on the meta device outside the forward: the scores are measured, they are not."""
    model, batch = build("llama").eval(), inputs("llama")
    expected = model(**batch).logits
    modules = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu", "model.rotary_emb": "cpu"}
    split = modules | {"model.layers.0": "cpu", "model.layers.1": second}
    model = dispatch_model(model, split, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        assert torch.equal(model(**batch).logits, expected)
        hook.step()
        metrics = hook.metrics()
    for name in ("model.layers.0.self_attn", "model.layers.1.self_attn"):
        assert metrics[f"score_std/{name}"] > 0
    assert f"weight_std_q/{LAYER}" in metrics
    assert ("weight_std_q/model.layers.1.self_attn" in metrics) is (second == "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_under_autocast_are_measured_in_float32(dtype):
    """In float16 the sums would be infinite."""
    torch.manual_seed(0)
    model, x, seen = nn.Sequential(nn.Linear(WIDTH, WIDTH), FusedAttention()), torch.randn(2, 512, WIDTH), []
    with torch.no_grad():
        for projection in (model[1].q_proj, model[1].k_proj):
            projection.bias += 5
            projection.register_forward_hook(lambda module, args, output: seen.append(model[1].split(output)))
    with betahook.attach(model, controller="monitor") as hook, torch.autocast("cpu", dtype=dtype):
        model(x)
        measured = hook.layers["1"].head_statistics
    allowed = torch.ones(512, 512, dtype=torch.bool).tril()
    scores = full(*(part.detach() for part in seen))[:, :, allowed].transpose(0, 1).flatten(1)
    torch.testing.assert_close(measured.mean, scores.mean(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(measured.std, scores.std(1, correction=0), rtol=1e-5, atol=0)


def test_the_sensitivity_of_half_precision_is_summed_in_float32():
    query = torch.full((1, 2, 3, 1), 200.0, dtype=torch.float16, requires_grad=True)
    probe = torch.zeros(2, requires_grad=True)
    scaled = ScaleQuery.apply(query, torch.ones(1, 2, 1, 1), probe, 1, True)
    scaled.backward(torch.full_like(scaled, 400.0))
    assert query.grad.isfinite().all()
    assert probe.grad.tolist() == [3 * 200 * 400] * 2
