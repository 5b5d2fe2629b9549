"""What a hook measures and when: layers in turn, evaluation, frozen layers, checkpointing and pauses."""

import contextlib
import math

import pytest
import torch

import betahook
from betahook.measure import weights
from betahook.measure.statistics import ROW
from support.attention import LENGTH, WIDTH, Block, padded_encoder
from support.models import build, inputs
from support.training import LAYER, enable_checkpointing, train


class Unmasked(Block):
    def mix(self, q, k, v):
        return (q @ k.mT / math.sqrt(self.head_dim)).softmax(-1) @ v


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
    before = pairs_by_layer(hook)
    model(**batch).loss.backward()
    return [count > old for count, old in zip(pairs_by_layer(hook), before, strict=True)]


def pairs_by_layer(hook):
    """Pairs that were measured since the last pooling; `statistics` shows those of before it until there are any."""
    heads = [layer.heads for layer in hook.layers.values()]
    return [int(part.sum()) for part in hook._state.collect()[ROW["pairs"]].split(heads)]


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


class Tower(torch.nn.Module):
    """Layers by hand, of which the second gets larger inputs."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Unmasked(), Unmasked()])

    def forward(self, x):
        return self.layers[0](x).sum() + self.layers[1](9 * x).sum()


@pytest.mark.parametrize("names", [["q_proj"], ["q_proj", "k_proj"]])
@pytest.mark.parametrize("layers", ["*", "*0*"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_the_input_of_projections_that_layers_share_is_left_out(names, layers, by_hand):
    """It was that of all layers, also of one that is not hooked, and predicted a std of none."""
    model, batch = (Tower(), {"x": torch.randn(2, LENGTH, WIDTH)}) if by_hand else (build("llama"), inputs("llama"))
    attention = [module for module in model.modules() if hasattr(module, "q_proj")]
    for name in names:
        setattr(attention[1], name, getattr(attention[0], name))
    with betahook.attach(model, controller="monitor", layers=layers) as hook:
        output = model(**batch)
        (output if by_hand else output.loss).backward()
        hook.step()
        assert all(not key.startswith("predicted_std") for key in hook.metrics())
        for layer in hook.layers.values():
            assert layer.weight_std_q > 0
            assert layer.remarks == [
                "the input of W_q and W_k is not measured, since other layers pass theirs through the same modules, "
                "and the score std that it predicts is not known"
            ]


def test_the_input_of_a_layer_that_runs_twice_is_measured():
    """A module may have several names."""
    model = torch.nn.ModuleList([layer := Unmasked(), layer])
    with betahook.attach(model, controller="monitor") as hook:
        (model[0](torch.randn(2, LENGTH, WIDTH)).sum() + model[1](torch.randn(2, LENGTH, WIDTH)).sum()).backward()
        hook.step()
        assert hook.metrics()["predicted_std/0"] > 0


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


def test_pauses_may_cross():
    model = build("llama")
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        first, second = hook.pause(), hook.pause()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        model(**inputs("llama"))
        assert not hook._state.recorded
        second.__exit__(None, None, None)
        model(**inputs("llama"))
        assert hook._state.recorded


def test_a_step_does_not_end_a_pause():
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(**batch)
        with hook.pause():
            hook.step()
            model(**batch)
            assert pairs_by_layer(hook)[0] == 0
        model(**batch)
        assert pairs_by_layer(hook)[0] > 0


@pytest.mark.parametrize("controller", ["monitor", "default"])
def test_statistics_are_those_of_the_last_pooling_until_a_forward_is_measured(controller):
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model, controller) as hook:
        layer = hook.layers[LAYER]
        assert math.isnan(layer.statistics.std)
        assert layer.statistics.count == 0
        for step in range(12):
            model(**batch).loss.backward()
            before, heads = layer.statistics, layer.head_statistics
            hook.step()
            after = layer.statistics
            assert after.count > 0
            assert torch.equal(layer.head_statistics.std, heads.std)
            for name in ("std", "mean", "entropy", "row_std", "max_score", "independent_std", "count", "input_std_q"):
                assert getattr(after, name) == getattr(before, name), (step, name)
            if step == 0:
                assert after.sensitivity == pytest.approx(float(before.sensitivity), rel=1e-6)
                assert after.sensitivity != 0
        with torch.no_grad():
            layer.module.q_proj.weight.mul_(2)
        assert not counts_by_layer(hook, model, batch)[0] or layer.statistics.std > 1.5 * after.std


def test_the_statistics_of_a_resumed_run_are_those_of_its_last_pooling():
    model = build("llama")
    with betahook.attach(model, "monitor") as hook:
        model(**inputs("llama")).loss.backward()
        hook.step()
        expected, state = hook.layers[LAYER].statistics.std, hook.state_dict()
    with betahook.attach(model, "monitor") as hook:
        hook.load_state_dict(state)
        assert hook.layers[LAYER].statistics.std == expected


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda: build("llama"), marks=pytest.mark.oldest_skips("its Llama does not run on the meta device")
        ),
        padded_encoder,
        lambda: torch.nn.Sequential(Unmasked()),
    ],
)
def test_a_look_at_shapes_leaves_no_trace(make, seen):
    """On the meta device; then the weights come back, and training goes on."""
    model = make()

    def call(device):
        if hasattr(model, "config"):
            return model(**{name: value.to(device) for name, value in inputs("llama").items()}).logits
        return model(torch.ones(2, LENGTH, WIDTH, device=device))

    weights = {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        if seen:
            call("cpu")
        before = [layer.statistics.count.item() for layer in hook.layers.values()]
        model.to("meta")
        assert call("meta").is_meta
        assert [layer.statistics.count.item() for layer in hook.layers.values()] == before
        model.to_empty(device="cpu")
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.data.copy_(weights[name])
        call("cpu").sum().backward()
        hook.step()
        assert not any(layer.refusal for layer in hook.layers.values())
        assert all(math.isfinite(value) for value in hook.metrics().values())


def test_the_default_device_is_not_that_of_the_hook():
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model) as hook:
        model(**batch).loss.backward()
        with torch.device("meta"):
            hook.step()
            hook.load_state_dict(hook.state_dict())
            assert all(math.isfinite(value) for value in hook.metrics().values())
            assert len(hook.findings()) == len(hook.audit()) == 2
