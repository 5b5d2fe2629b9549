"""What a hook does from step to step."""

import contextlib
import copy
import gc
import math
import pickle
import weakref

import pytest
import torch
from accelerate import cpu_offload
from torch import nn

import betahook
from betahook.measure import weights
from betahook.report.audit import _closest
from support.attention import WIDTH, FusedAttention
from support.models import build, inputs
from support.training import enable_checkpointing, train

LAYER = "model.layers.0.self_attn"


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


def test_a_controller_serves_several_hooks():
    controller, paths = betahook.Gradient(), []
    for _ in range(2):
        model = build("llama")
        with betahook.attach(model, controller=controller) as hook:
            paths.append(train(model, hook, 3))
    assert paths[0] == paths[1]


def test_step_and_audit_say_when_they_cannot():
    model = build("llama")
    with betahook.attach(model) as hook, pytest.raises(RuntimeError, match="run a forward first"):
        hook.audit()
    with pytest.raises(RuntimeError, match="detached hook: attach to the model again"):
        hook.step()


def test_beta_set_before_the_first_forward_acts():
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model, controller="monitor") as hook:
        assert math.isnan(hook.layers[LAYER].beta)
        hook.layers[LAYER].beta = 0.5
        early = model(**batch).logits
        assert hook.layers[LAYER].beta == 0.5
        assert hook.layers[LAYER].beta_default == pytest.approx(8**-0.5)
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        hook.layers[LAYER].beta = 0.5
        assert torch.equal(early, model(**batch).logits)


def test_per_head_beta_acts_on_its_head_alone():
    model, batch = build("llama"), inputs("llama")
    heads = torch.tensor([0.1, 0.2, 0.3, 0.4])
    with betahook.attach(model, controller="monitor") as hook:
        hook.layers[LAYER].head_beta = heads
        acted = model(**batch).logits
        assert torch.equal(hook.layers[LAYER].head_beta, heads)
        hook.step()  # a monitor leaves it
        assert torch.equal(hook.layers[LAYER].head_beta, heads)
    with torch.no_grad():
        factor = (heads / 8**-0.5).repeat_interleave(8)[:, None]
        model.get_submodule(LAYER).q_proj.weight.mul_(factor)
    torch.testing.assert_close(acted, model(**batch).logits, rtol=1e-5, atol=1e-5)


def test_per_head_controllers_move_heads_apart_and_per_layer_ones_do_not():
    for per_head in (False, True):
        model = build("llama")
        with betahook.attach(model, controller=betahook.Variance(smoothing=0.0), per_head=per_head) as hook:
            model(**inputs("llama"))
            layer = hook.layers[LAYER]
            std = layer.head_statistics.std if per_head else layer.statistics.std.expand(layer.heads)
            hook.step()
            torch.testing.assert_close(layer.head_beta, (1 / std).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("learned", [False, True])
def test_search_looks_at_the_weights_of_all_layers_to_begin_below_and_to_wait(learned):
    model = build("llama")
    if learned:  # one layer is enough
        weight = model.model.layers[1].self_attn.k_proj.weight
        torch.nn.init.uniform_(weight.data[:, :1], 1, 2)
    with betahook.attach(model, controller=betahook.Search(warmup=2, plateau_batches=3)) as hook:
        path = train(model, hook, 4)
        own = hook.layers[LAYER].beta_default
        below = [own / 10**0.5] * 2 + [own / 100] * 2
        assert path == ([[own] * 2] * 4 if learned else [[pytest.approx(beta)] * 2 for beta in below])


def test_weights_that_are_not_found_are_no_reason_to_rise(monkeypatch):
    model = build("llama")
    with betahook.attach(model, controller=betahook.Search(warmup=0)) as hook:
        monkeypatch.setattr(betahook.layer, "locate", lambda *arguments: None)
        assert train(model, hook, 1) == [[hook.layers[LAYER].beta_default] * 2]


def test_weights_are_read_when_somebody_asks_and_not_in_every_step(monkeypatch):
    reads = []
    entry_sums = weights.entry_sums
    monkeypatch.setattr(weights, "entry_sums", lambda weight: reads.append(1) or entry_sums(weight))
    model = build("llama")
    with betahook.attach(model) as hook:
        train(model, hook, 2)
        assert not reads
        weight = model.get_submodule(LAYER).q_proj.weight
        weight.data.mul_(2)
        assert hook.metrics()[f"weight_std_q/{LAYER}"] == pytest.approx(weight.std(correction=0).item(), rel=1e-5)
        assert len(reads) == 4  # W_q and W_k of two layers


def test_interval_measures_every_nth_step_and_keeps_the_rest():
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model, controller="monitor", interval=3) as hook:
        counts = []
        for _ in range(7):
            counts.append(counts_by_layer(hook, model, batch)[0])
            assert float(hook.layers[LAYER].statistics.sensitivity) != 0
            hook.step()
            assert f"score_std/{LAYER}" in hook.metrics()
        assert counts == [True, False, False, True, False, False, True]


def counts_by_layer(hook, model, batch):
    """Which layers the forward of a step measures."""
    before = [float(layer.statistics.count) for layer in hook.layers.values()]
    model(**batch).loss.backward()
    return [layer.statistics.count > count for layer, count in zip(hook.layers.values(), before, strict=True)]


def counts_by_step(hook, model, batch, steps):
    """The layers that each of some steps measures."""
    measured = []
    for _ in range(steps):
        measured.append([index for index, counts in enumerate(counts_by_layer(hook, model, batch)) if counts])
        hook.step()
    return measured


def test_layers_are_measured_in_turn():
    model, batch = build("llama", num_hidden_layers=4), inputs("llama")
    with betahook.attach(model, controller="monitor") as hook:
        measured = counts_by_step(hook, model, batch, 12)
        assert measured == [[0, 1, 2, 3], [], [], [], [], [2, 3], [], [], [], [], [0, 1], []]
        assert hook.settings.interval == 10
        state = hook.state_dict()
    with betahook.attach(model, controller="monitor") as resumed:
        resumed.load_state_dict(state)
        assert counts_by_step(resumed, model, batch, 9) == [[], [], [], [2, 3], [], [], [], [], [0, 1]]


def test_every_layer_is_measured_in_an_opening():
    model, batch = build("llama", num_hidden_layers=4), inputs("llama")
    search = betahook.Search(warmup=1, plateau_batches=1, rise_batches=2)
    with betahook.attach(model, controller=search, interval=2) as hook:
        assert counts_by_step(hook, model, batch, 7) == [[0, 1, 2, 3]] * 4 + [[0, 1], [2, 3], [0, 1]]
    with betahook.attach(model, controller=betahook.Search(rise=False), interval=2) as hook:
        assert counts_by_step(hook, model, batch, 3) == [[0, 1, 2, 3], [2, 3], [0, 1]]


@pytest.mark.parametrize(
    ("options", "interval"),
    [
        ({}, 10),
        ({"controller": [betahook.Search(), betahook.Cap()]}, 1),
        ({"alerts": betahook.Alerts(print, max_logit=50)}, 1),
        ({"alerts": betahook.Alerts(print, entropy=0.1)}, 10),
        ({"controller": betahook.Cap(), "interval": 3}, 3),
    ],
    ids=str,
)
def test_what_goes_by_the_scores_of_every_step_has_them(options, interval):
    with betahook.attach(build("llama"), **options) as hook:
        assert hook.settings.interval == interval


def test_evaluation_is_measured_on_request():
    model, batch = build("llama").eval(), inputs("llama")
    for when, measured in (("training", False), ("always", True)):
        with betahook.attach(model, controller="monitor", when=when) as hook:
            model(**batch)
            assert (float(hook.layers[LAYER].statistics.count) > 0) is measured


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_what_has_no_gradient_is_measured_on_request(without):
    """As the generation of a GRPO step, which runs in training mode."""
    model, batch = build("llama").train(), inputs("llama")
    counts = {}
    for when in ("training", "always"):
        with betahook.attach(model, controller="monitor", when=when) as hook:
            with without():
                model(**batch)
            counts[when] = float(hook.layers[LAYER].statistics.count)
            model(**batch).loss.backward()
            counts[f"{when}, with gradients"] = float(hook.layers[LAYER].statistics.count)
    pairs = counts["training, with gradients"]
    expected = {"training": 0, "training, with gradients": pairs, "always": pairs, "always, with gradients": 2 * pairs}
    assert counts == expected
    assert pairs > 0


def test_frozen_layers_are_measured():
    """The mode decides, not whether a query has a gradient."""
    model = build("llama").train().requires_grad_(False)
    model.lm_head.requires_grad_()
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama")).loss.backward()
        assert all(layer.statistics.count > 0 for layer in hook.layers.values())


def test_statistics_pool_over_forwards_as_over_a_joined_batch():
    model = build("llama")
    batch = inputs("llama")
    halves = [{name: x[row : row + 1] for name, x in batch.items()} for row in range(2)]
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(**batch)
        joined = hook.layers[LAYER].statistics
        hook.step()
        for half in halves:
            model(**half)
        pooled = hook.layers[LAYER].statistics
    for name in ("count", "mean", "std", "max_score", "entropy", "input_std_q"):
        assert float(getattr(pooled, name)) == pytest.approx(float(getattr(joined, name)), rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("when", ["training", "always"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_counts_once(reentrant, when):
    results = []
    for checkpointing in (False, True):
        model, batch = build("llama").train(), inputs("llama")
        if checkpointing:
            enable_checkpointing(model, reentrant)
            model.enable_input_require_grads()
        with betahook.attach(model, controller="monitor", when=when) as hook:
            model(**batch).loss.backward()
            results.append(hook.layers[LAYER].statistics)
    plain, checkpointed = results
    assert float(checkpointed.count) == float(plain.count)
    assert float(checkpointed.std) == pytest.approx(float(plain.std), rel=1e-6)
    assert float(checkpointed.sensitivity) == pytest.approx(float(plain.sensitivity), rel=1e-6)


def test_a_frozen_model_below_costs_no_backward():
    """Sensitivities are asked for only where the query itself requires a gradient."""
    model = build("llama")
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama")).loss.backward()
        assert float(hook.layers[LAYER].statistics.sensitivity) == 0
        assert float(hook.layers["model.layers.1.self_attn"].statistics.sensitivity) != 0


def test_half_precision_is_measured_in_float32():
    batch = inputs("llama")
    reference, model = build("llama"), build("llama", dtype=torch.bfloat16)
    with betahook.attach(reference, controller="monitor") as a, betahook.attach(model, controller="monitor") as b:
        reference(**batch)
        model(**batch)
        for name in a.layers:
            for quantity in ("std", "entropy"):
                expected = float(getattr(a.layers[name].statistics, quantity))
                assert float(getattr(b.layers[name].statistics, quantity)) == pytest.approx(expected, rel=1e-2)
            assert b.layers[name].weight_std_q == pytest.approx(a.layers[name].weight_std_q, rel=1e-2)


def test_a_nan_holds_beta_and_raises_a_flag():
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model, controller=betahook.Search(window=1, warmup=0, rise=False)) as hook:
        train(model, hook, 2)
        before = [layer.beta for layer in hook.layers.values()]
        state = hook.state_dict()["controllers"][0]["state"]
        with torch.no_grad():
            model.get_submodule("model.layers.1.self_attn").q_proj.weight[0, 0] = torch.nan
        model(**batch).loss.backward()
        hook.step()
        assert [layer.beta for layer in hook.layers.values()] == before
        now = hook.state_dict()["controllers"][0]["state"]
        assert all(torch.equal(value, now[name]) for name, value in state.items())
        assert hook.metrics()["nonfinite/model.layers.1.self_attn"] == 1


def test_state_dict_goes_on_bit_identically():
    model = build("llama")
    hook = betahook.attach(
        model, controller=[betahook.Search(window=2, warmup=0, rise=False), betahook.Cap(2.0)], interval=2
    )
    train(model, hook, 3)
    model(**inputs("llama"))  # in the middle of a step
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(hook.state_dict())
    expected = train(model, hook, 5)
    hook.detach()

    model.load_state_dict(weights)
    again = betahook.attach(
        model, controller=[betahook.Search(window=2, warmup=0, rise=False), betahook.Cap(2.0)], interval=2
    )
    again.load_state_dict(state)
    assert train(model, again, 5) == expected
    again.detach()


def test_foreign_states_are_refused_and_change_nothing():
    with betahook.attach(build("llama")) as hook, betahook.attach(build("gpt2")) as other:
        state = hook.state_dict()
        for foreign, message in (
            ({**state, "version": 99}, "expected a betahook state of version 3, got 99"),
            ([], "expected a betahook state of version 3, got 'list'"),
            (
                hook.model.state_dict(),
                r"a dictionary without a version: give what hook.state_dict\(\) returned",
            ),
            (other.state_dict(), f"other layers; these differ: {LAYER}.*transformer.h.0.attn"),
            ({**state, "controllers": []}, "belongs to other controllers: expected .*Search"),
        ):
            with pytest.raises(ValueError, match=message):
                hook.load_state_dict(foreign)
        assert repr(hook.state_dict()) == repr(state)


def test_metrics_are_flat_numbers_per_layer():
    model = build("llama")
    with betahook.attach(model) as hook:
        train(model, hook, 1)
        metrics = hook.metrics()
        heads = hook.head_metrics()
    assert all(type(value) is float for value in metrics.values())
    quantities = {key.split("/")[0] for key in metrics}
    assert {"beta", "score_std", "predicted_std", "max_logit", "entropy", "sensitivity", "weight_std_q"} <= quantities
    assert {key for key in metrics if not key.startswith(("phase/", "last_move/"))} == {
        key
        for key in heads
        if not key.startswith("clips/")  # nothing was clipped
    }
    assert all(value.shape == (4,) for value in heads.values())
    assert metrics[f"sensitivity/{LAYER}"] == pytest.approx(float(heads[f"sensitivity/{LAYER}"].sum()))


def test_what_was_not_measured_is_no_metric():
    model = build("llama")
    with betahook.attach(model) as hook:
        model(**inputs("llama")).loss.backward()
        quantities = {key.split("/")[0] for key in hook.metrics()}  # step() was forgotten
    assert quantities == {"beta", "classic_std", "at_bound", "weight_std_q", "weight_std_k"}


def test_training_in_evaluation_mode_leaves_beta_alone_and_says_so(caplog):
    """`from_pretrained` returns a model in that mode."""
    model = build("llama").eval()
    with betahook.attach(model, controller=betahook.Search(window=1, warmup=0)) as hook:
        train(model, hook, 3)
        assert all(layer.beta == layer.beta_default for layer in hook.layers.values())
    (record,) = caplog.records
    assert "the hooked layers ran in evaluation mode or under torch.no_grad only" in record.message
    assert "Call model.train() and run the forward with gradients" in record.message


def test_a_low_default_precision_is_not_that_of_beta():
    model = build("llama")
    torch.set_default_dtype(torch.bfloat16)
    try:
        hook = betahook.attach(model, controller=betahook.Gradient(learning_rate=1e-3))
    finally:
        torch.set_default_dtype(torch.float32)
    with hook:
        train(model, hook, 1)
        layer = hook.layers[LAYER]
        assert abs(math.log(layer.beta / layer.beta_default)) == pytest.approx(1e-3, rel=1e-3)


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


def test_with_a_beta_a_head_metrics_are_of_the_head_where_it_matters():
    """The largest logit is of the head with the largest beta, whose scores need not be the largest."""
    model, heard = build("llama"), []
    alerts = betahook.Alerts(heard.append, max_logit=1.0, at_bound=True)
    with betahook.attach(model, controller="monitor", per_head=True, alerts=alerts) as hook:
        train(model, hook, 1)
        layer = hook.layers[LAYER]
        layer.head_beta = torch.tensor([1.0, 1.0, 1.0, 1000.0]) * layer.beta_default
        train(model, hook, 1)
        metrics, heads = hook.metrics(), hook.head_metrics()
        assert metrics[f"max_logit/{LAYER}"] == float(heads[f"max_logit/{LAYER}"].max())
        assert int(heads[f"max_logit/{LAYER}"].argmax()) == 3
        assert metrics[f"at_bound/{LAYER}"] == 1
        assert metrics[f"beta/{LAYER}"] == pytest.approx(1000**0.25 * layer.beta_default)  # the geometric mean
        assert {(alert.quantity, alert.layer) for alert in heard} >= {("max_logit", LAYER), ("at_bound", LAYER)}


def test_the_largest_logit_is_one_that_a_forward_had():
    """In steps that are not measured beta moves on, and with it what the largest score would give now."""
    model = build("llama")
    with betahook.attach(model, controller=betahook.Search(window=1, warmup=0, rise=False), interval=3) as hook:
        model(**inputs("llama")).loss.backward()
        layer = hook.layers[LAYER]
        expected = layer.beta_default * float(layer.statistics.max_score)
        hook.step()
        assert layer.beta != layer.beta_default
        measured = hook.metrics()[f"max_logit/{LAYER}"]
        assert measured == pytest.approx(expected, rel=1e-5)
        train(model, hook, 1)
        assert hook.metrics()[f"max_logit/{LAYER}"] == measured
        hook.load_state_dict(hook.state_dict())
        assert hook.metrics()[f"max_logit/{LAYER}"] == measured


@pytest.fixture
def with_outlier():
    """An attention over 200 tokens, an input whose second token, which is not sampled, has by far the largest q, and a
    function that returns the largest score."""
    torch.manual_seed(0)
    model, x = FusedAttention(), torch.randn(1, 200, WIDTH)
    x[:, 1] *= 30

    def largest():
        q, k = (model.split(projection(x)).double() for projection in (model.q_proj, model.k_proj))
        return (q @ k.mT).tril().abs().max().item()

    return model, x, largest


def test_a_cap_holds_for_rows_that_are_not_sampled(with_outlier):
    model, x, largest_score = with_outlier
    largest = largest_score()
    with betahook.attach(model, controller=betahook.Cap(5.0)) as hook:
        model(x).sum().backward()
        hook.step()
        (layer,) = hook.layers.values()
        metrics = hook.metrics()
        assert metrics[f"max_logit/{layer.name}"] == pytest.approx(largest * layer.beta_default, rel=1e-5)
        assert layer.beta * largest == pytest.approx(5.0, rel=1e-5)
    with betahook.attach(model, controller="monitor") as hook:
        model(x).sum().backward()
        (layer,) = hook.layers.values()
        assert layer.statistics.max_score < 0.5 * largest < largest < layer.statistics.max_score_bound


def test_a_clip_holds_for_rows_that_are_not_sampled(with_outlier):
    model, x, largest_score = with_outlier
    with betahook.attach(model, controller=betahook.Clip(5.0)) as hook:
        model(x).sum().backward()
        hook.step()
        (layer,) = hook.layers.values()
        assert layer.beta_default * largest_score() == pytest.approx(5.0, rel=1e-4)


@pytest.mark.parametrize(
    ("asked", "exact"),
    [
        ({"exact_max_logit": True}, True),
        ({"controller": [betahook.Search(), betahook.Cap()]}, True),
        ({"alerts": betahook.Alerts(print, max_logit=50.0)}, True),
        ({"alerts": betahook.Alerts(print, entropy=0.1)}, False),
        ({"controller": betahook.Search()}, False),
    ],
    ids=str,
)
def test_what_limits_the_largest_logit_asks_for_that_of_all_pairs(with_outlier, asked, exact):
    model, x, largest_score = with_outlier
    largest = largest_score()
    with betahook.attach(model, **asked) as hook:
        model(x).sum().backward()
        (layer,) = hook.layers.values()
        assert (layer.statistics.max_score.item() == pytest.approx(largest, rel=1e-5)) is exact
        assert bool(layer.statistics.max_score == layer.statistics.max_score_bound) is exact


def test_audit_of_a_fresh_model_follows_the_weights():
    """Fresh layer-normed inputs and random weights: the formula from W_q and W_k is within a few per cent."""
    torch.manual_seed(0)
    model = build("llama", hidden_size=128)
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama", 128))
        audit = hook.audit()
    first = audit[0]
    assert first.name == LAYER
    assert first.head_dim == 32
    assert first.query_width == 128
    assert first.predicted["classic"] == pytest.approx(32**0.5)
    assert first.predicted["weights"] == pytest.approx(first.score_std, rel=0.15)
    assert first.projected_variance_q == pytest.approx(1.0, rel=0.1)  # weights of variance 1 / d_x
    assert LAYER in str(audit)
    assert str(audit).count("\n") == 2 * len(audit) + 5  # two tables, one with the numbers assumed


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_hooked_model_is_not_copied_without_its_beta(duplicate):
    model = build("llama")
    with betahook.attach(model), pytest.raises(TypeError, match=r"cannot be copied or pickled: fold\(\) or detach\(\)"):
        duplicate(model)
    duplicate(model)


def test_a_state_in_the_middle_of_a_step_has_its_sensitivity():
    model = build("llama")
    hook = betahook.attach(model, controller=betahook.Gradient())
    train(model, hook, 3)
    model(**inputs("llama")).loss.backward()
    model.zero_grad()
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(hook.state_dict())
    expected = train(model, hook, 5)
    hook.detach()
    model.load_state_dict(weights)
    with betahook.attach(model, controller=betahook.Gradient()) as again:
        again.load_state_dict(state)
        assert train(model, again, 5) == expected


def test_a_forward_with_a_cache_is_not_the_one_to_check_on():
    model, ids = build("llama").eval(), inputs("llama")["input_ids"]
    with betahook.attach(model, controller="monitor") as hook:
        cache = model(input_ids=ids, use_cache=True).past_key_values
        model(input_ids=ids[:, :1], past_key_values=cache)
        assert torch.equal(hook.last_call.input[1]["input_ids"], ids)


def test_the_last_batch_holds_no_graph():
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model(inputs_embeds=model.get_input_embeddings()(inputs("llama")["input_ids"])).logits.sum().backward()
        hook.step()
        assert hook.last_call.input[1]["inputs_embeds"].grad_fn is None


def test_the_first_of_several_bad_steps_is_named(caplog):
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        train(model, hook, 1)
        for _ in range(2):
            (model(**inputs("llama")).loss * torch.nan).backward()
            hook.step()
        hook.metrics()
    assert f"{LAYER} in step 2" in caplog.text


@pytest.mark.parametrize(
    ("predicted", "name"),
    [({"a": 0.5, "b": 3.0}, "a"), ({"a": 0.1, "b": 3.0}, "b"), ({"a": 0.0, "b": math.nan}, "none")],
)
def test_the_closest_formula_is_so_as_a_ratio(predicted, name):
    assert _closest(1.0, predicted) == name


def test_what_is_paused_is_in_no_statistic():
    """As with the loss of a generator, whose gradients in the discriminator are thrown away."""
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch).loss.backward()
        before = hook.layers[LAYER].statistics
        with hook.pause():
            loss = 100 * model(**batch).loss
        loss.backward()
        after = hook.layers[LAYER].statistics
        assert after.count == before.count > 0
        assert after.sensitivity == before.sensitivity != 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_pause_goes_with_gradient_checkpointing(reentrant):
    """Which counts what the forward saves and what its recomputation does, inside or outside of the pause."""
    model, batch = build("llama").train(), inputs("llama")
    enable_checkpointing(model, reentrant)
    with betahook.attach(model, controller="monitor") as hook:
        with hook.pause():
            loss = model(**batch).loss
            if reentrant:
                loss.backward()
        if not reentrant:
            loss.backward()
        assert hook.layers[LAYER].statistics.sensitivity == 0
        loss = model(**batch).loss
        with contextlib.nullcontext() if reentrant else hook.pause():
            loss.backward()
        assert hook.layers[LAYER].statistics.sensitivity != 0


def test_a_step_does_not_end_a_pause():
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(**batch)
        with hook.pause():
            hook.step()
            model(**batch)
            assert hook.layers[LAYER].statistics.count == 0
        model(**batch)
        assert hook.layers[LAYER].statistics.count > 0


def test_what_is_done_in_inference_mode_can_go_on_outside_of_it():
    model, batch = build("llama"), inputs("llama")
    with torch.inference_mode():
        hook = betahook.attach(model, controller="monitor", when="always")
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


def test_beta_is_read_on_the_cpu_whatever_the_default_device_is():
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama"))
        with torch.device("meta"):
            assert hook.layers[LAYER].beta == pytest.approx(8**-0.5)


def test_going_back_forgets_what_was_said_of_later_steps(caplog):
    model, batch, crossed = build("llama"), inputs("llama"), []
    alerts = betahook.Alerts(lambda alert: crossed.append(alert.step), max_logit=1e-9)
    with betahook.attach(model, controller="monitor", alerts=alerts) as hook:
        for step in range(3):
            if step == 1:
                state = hook.state_dict()
            model(**batch).loss.backward()
            if step == 2:
                hook._state.factors.set_sensitivity(torch.full_like(hook._state.beta, torch.nan))
            hook.step()
            hook.metrics()
        assert "in step 3" in caplog.text
        hook.load_state_dict(state)
        caplog.clear()
        model(**batch).loss.backward()
        hook.step()
        hook.metrics()
        assert crossed[-1] == 2
        assert not caplog.text
        crossed.clear()
        hook.load_state_dict(hook.state_dict())
        hook.metrics()
        assert not crossed


def test_a_move_multiplies_all_heads_of_a_layer_alike():
    """Their betas may differ by hand, or by temperatures that the model has learned."""
    model = build("llama")
    with betahook.attach(model, controller=betahook.Gradient()) as hook:
        train(model, hook, 1)
        layer = hook.layers[LAYER]
        layer.head_beta = before = layer.beta_default * torch.tensor([0.5, 1.0, 2.0, 4.0])
        middle = layer.beta
        train(model, hook, 3)
        assert layer.beta != pytest.approx(middle)
        torch.testing.assert_close(layer.head_beta, before * (layer.beta / middle), rtol=1e-5, atol=0)


def test_layers_that_no_forward_reaches_say_so(caplog):
    """One that was replaced after attach, and one that the model has and does not use."""
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        assert "not reached" not in repr(hook)
        train(model, hook, 1)
        assert f"score_std/{LAYER}" in hook.metrics()
        model.model.layers[0].self_attn = copy.deepcopy(build("llama").model.layers[0].self_attn)
        train(model, hook, 1)
        for _ in range(2):
            assert not [key for key in hook.metrics() if key.endswith(LAYER)]
        (record,) = caplog.records
        assert f"{LAYER}, it is no longer part of the model: detach, and attach again" in record.message
        assert f"  not reached: {LAYER}, it is no longer part" in repr(hook)

    model = nn.ModuleList([build("llama"), build("llama")])
    hook = betahook.attach(model, controller="monitor")
    model[1](**inputs("llama")).loss.backward()
    hook.step()
    hook.metrics()
    assert f"0.{LAYER}, no forward has come to its attention yet" in caplog.records[-1].message
    assert f"  not reached: 0.{LAYER}, no forward" in repr(hook)
    hook.detach()


def test_a_beta_that_nobody_moved_stays_the_models_own():
    """Also where the model changes its scale while it trains, after steps of a controller that left beta alone."""
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        train(model, hook, 2)
        layer = hook.layers[LAYER]
        layer.module.scaling *= 2
        model(**inputs("llama"))
        assert layer.beta == layer.beta_default == pytest.approx(2 * 8**-0.5)
        assert layer.current_gain.tolist() == [1.0] * 4
