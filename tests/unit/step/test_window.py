"""Steps after which nothing is due: they add up, and a window that they made is that of steps that are all pooled."""

import math
from dataclasses import dataclass

import pytest
import torch

import betahook
from betahook import Cap, Clip, Controller, Decades, Gradient, Monitor, Search, Variance
from betahook.measure import statistics
from betahook.step import stages
from support.models import build, inputs
from support.training import LAYER, train

WINDOW = 4
OPENING = dict(warmup=1, plateau_batches=0, rise_batches=1)
"""Of two batches: from batch 4 on, all units search."""


def search(**changes):
    return Search(**{"window": WINDOW, **OPENING, **changes})


@dataclass(frozen=True)
class EveryStep(Controller):
    """Moves nothing, and makes every step be pooled."""

    def update(self, beta, observation, state):
        return beta, state


@dataclass(frozen=True)
class Probe(Controller):
    """Steps and batches that it is updated after, of which it wants every third."""

    def is_due(self, step):
        return step % 3 == 2

    def start(self, beta):
        return {"steps": torch.zeros_like(beta), "batches": torch.zeros_like(beta)}

    def update(self, beta, observation, state):
        return beta, {
            "steps": state["steps"] * 100 + observation.step,
            "batches": state["batches"] + observation.batches,
        }


def test_a_search_is_due_in_its_opening_and_at_the_ends_of_windows():
    assert [step for step in range(20) if search().is_due(step)] == [0, 1, 2, 3, 7, 11, 15, 19]
    assert all(map(Search().is_due, range(400)))
    assert [step for step in range(400, 430) if Search().is_due(step)] == [409, 419, 429]


def test_other_rules_are_due_after_every_batch_and_a_monitor_never():
    for rule in (Variance(), Gradient(), Cap(), Clip(), Decades(), EveryStep()):
        assert all(map(rule.is_due, range(30)))
    assert not any(map(Monitor().is_due, range(30)))


def test_a_controller_that_is_judged_by_the_loss_is_updated_in_every_step():
    @dataclass(frozen=True)
    class Judged(Probe):
        uses_loss = True

    model = build("llama")
    with betahook.attach(model, controller=Judged()) as hook:
        train(model, hook, 4)
        assert hook._state.memories[0]["steps"].tolist() == [10203.0] * len(hook.layers)


def test_beta_moves_as_if_every_step_were_pooled():
    """Whether metrics are asked for in between, and whatever is measured in which step."""
    paths = []
    for controller, interval in ((search(), 10), ([search(), EveryStep()], 10), (search(), 3), (search(), 1)):
        model = build("llama")
        with betahook.attach(model, controller=controller, interval=interval) as hook:
            path = train(model, hook, 10)
            hook.metrics()
            paths.append(path + train(model, hook, 7))
    assert paths[1:] == paths[:1] * 3
    moves = [step for step in range(4, 17) if paths[0][step] != paths[0][step - 1]]
    assert moves == [7, 11, 15]


def test_a_controller_is_updated_when_any_is_due():
    """Or when metrics are, in the first step and in every tenth."""
    model = build("llama")
    with betahook.attach(model, controller=Probe()) as hook:
        train(model, hook, 12)
        memory = hook.state_dict()["controllers"][0]["state"]
        assert memory["batches"].tolist() == [12, 12]
        assert memory["steps"].tolist() == [int("02050809 11".replace(" ", ""))] * 2
    with betahook.attach(model, controller=[Probe(), EveryStep()]) as hook:
        train(model, hook, 3)
        assert hook.state_dict()["controllers"][0]["state"]["steps"].tolist() == [102, 102]


def test_metrics_between_two_poolings_are_of_all_steps_since_the_last():
    """The sensitivity is their mean; who asks adds nothing."""
    said = []
    for interval in (1, 10):
        model, batch = build("llama"), inputs("llama")
        with betahook.attach(model, controller="monitor", interval=interval) as hook:
            hook.layers[LAYER].beta = 0.5
            for step in range(4):
                (2**step * model(**batch).loss).backward()
                hook.step()
                said.append([hook.head_metrics()[f"sensitivity/{LAYER}"].sum(), hook.metrics()[f"sensitivity/{LAYER}"]])
    of_step, of_window = torch.tensor(said, dtype=torch.float64).unflatten(0, (2, 4)).unbind()
    after_first = of_step[1:].cumsum(0) / torch.tensor([[1.0], [2.0], [3.0]])
    torch.testing.assert_close(of_window, torch.cat([of_step[:1], after_first]))


def test_where_no_beta_acts_the_sensitivity_is_that_of_the_turn_of_a_layer():
    """Here of one pair of layers in even steps, and of the other in odd ones, but for the first."""
    said = {}
    for interval in (1, 2):
        for last in range(5):
            model, batch = build("llama", num_hidden_layers=4), inputs("llama")
            with betahook.attach(model, controller="monitor", interval=interval) as hook:
                for step in range(last + 1):
                    (2**step * model(**batch).loss).backward()
                    hook.step()
                metrics = hook.metrics()
                said[interval, last] = [metrics[f"sensitivity/{name}"] for name in hook.layers]
    for last, (even, odd) in enumerate([(0, 0), (0, 1), (2, 1), (2, 3), (4, 3)]):
        assert said[2, last] == pytest.approx(said[1, even][:2] + said[1, odd][2:], rel=1e-6)


@pytest.mark.parametrize("when", ["after backward", "after an evaluation"])
def test_a_layer_in_the_midst_of_its_step_keeps_the_sensitivity_of_its_last_one(when):
    """It has none of this step yet, which is no sign of a NaN."""
    model, batch = build("llama", num_hidden_layers=4), inputs("llama")
    with betahook.attach(model, controller="monitor", interval=10, when="always") as hook:
        for _ in range(10):
            train(model, hook, 1)
            before = hook.metrics()
            if when == "after backward":
                model(**batch).loss.backward()
            else:
                with torch.no_grad():
                    model.eval()(**batch)
                model.train()
            between = hook.metrics()
            for name in hook.layers:
                assert between[f"sensitivity/{name}"] == before[f"sensitivity/{name}"]
                assert between[f"nonfinite/{name}"] == 0
            assert betahook.Condition.NONFINITE not in hook.findings().counts


def test_a_beta_that_is_set_between_steps_leaves_the_numbers_finite():
    """Layers out of their turn had no sensitivity to watch until then."""
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model, controller="monitor", interval=10) as hook:
        for _ in range(3):
            model(**batch).loss.backward()
            hook.step()
        before = hook.metrics()
        for layer in hook.layers.values():
            layer.beta = 1.5 * layer.beta_default
        between = hook.metrics()
        for name, layer in hook.layers.items():
            assert between[f"nonfinite/{name}"] == 0
            assert between[f"sensitivity/{name}"] == before[f"sensitivity/{name}"]
            assert layer.statistics.finite.all()
        model(**batch).loss.backward()
        hook.step()
        assert all(hook.metrics()[f"nonfinite/{name}"] == 0 for name in hook.layers)


@pytest.mark.parametrize(
    ("controller", "expected"), [("monitor", [0, 9]), (search(), [0, 0, 1, 1, 2, 3, 7, 9, 11])], ids=str
)
def test_ranks_exchange_sums_only_where_they_are_pooled(controller, expected, monkeypatch):
    """Counted with a second rank that is the mirror of this one; metrics exchange nothing.

    A search asks for W_q and W_k in its first batch and in the last of its warm-up.
    """
    exchanged = []
    pair = dict(is_initialized=lambda: True, get_world_size=lambda: 2, get_rank=lambda: 0)
    model = build("llama")
    with betahook.attach(model, controller=controller) as hook:
        for name, value in {
            **pair,
            "all_reduce": lambda sums, *_: (exchanged.append(hook.steps), sums.mul_(2)),
        }.items():
            monkeypatch.setattr(torch.distributed, name, value)
        for _ in range(12):
            train(model, hook, 1)
            hook.metrics()
    assert exchanged == [0, 0, *expected]  # at first if they have the same layers, and begin alike


def pool_as_a_rank(hook, monkeypatch):
    """Pool with ranks that have nothing to add."""
    monkeypatch.setattr(stages, "is_pooled", lambda state: True)
    monkeypatch.setattr(statistics, "all_reduce", lambda *sums: sums)
    stages.pool(hook._state)


def test_pooling_keeps_the_step_of_the_first_nan(monkeypatch):
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        train(model, hook, 3)
        since = hook._state.nonfinite_since
        since[:2] = torch.tensor([1, 4])  # an early step, and that which is being pooled
        expected = since.tolist()
        pool_as_a_rank(hook, monkeypatch)
        assert since.tolist() == expected


def test_pooling_forgets_the_numbers_of_heads_that_a_rank_leaves_alone(monkeypatch):
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        train(model, hook, 1)
        first, second = (each.heads for each in hook._state.ranges)
        hook._state.left_alone[first] = True
        pool_as_a_rank(hook, monkeypatch)
        assert not hook._state.recent[:, first].any()
        assert hook._state.recent[:, second].any()


def spoil(hook, value):
    """Make the sensitivity of one head what it should not be."""
    sensitivity = hook._state.gains.sensitivity()
    sensitivity[1] = value
    hook._state.gains.set_sensitivity(sensitivity)


def window_of(hook):
    return hook.state_dict()["window"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_batch_that_is_not_finite_is_left_out_alone(value, caplog):
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model, controller=search()) as hook:
        train(model, hook, 5)
        sums = []
        for step in range(2):
            model(**batch).loss.backward()
            if step == 0:
                spoil(hook, value)
            hook.step()
            sums.append(window_of(hook))
        before = hook.layers[LAYER].beta
        train(model, hook, 1)
        assert hook.layers[LAYER].beta != before
        assert hook.metrics()[f"nonfinite/{LAYER}"] == 0
    heads = sums[0].shape[1]
    assert sums[0][1].tolist() == [2, 1] + [2] * (heads - 2)
    assert sums[1][1].tolist() == [3, 2] + [3] * (heads - 2)
    assert sums[1].isfinite().all()
    assert hook._state.nonfinite_since.tolist() == [0, 6] + [0] * (heads - 2)
    assert f"scores or gradients of {LAYER} in step 6" in caplog.text


@pytest.mark.parametrize(("interval", "late"), [(4, True), (1, False)])
def test_the_warning_of_a_nan_says_how_late_it_may_be(interval, late, caplog):
    model = build("llama")
    with betahook.attach(model, controller="monitor", interval=interval) as hook:
        train(model, hook, 1)
        torch.nn.init.constant_(hook.layers[LAYER].module.q_proj.weight, math.nan)
        train(model, hook, 4)
        hook.metrics()
    assert f"NaN or infinity in the scores or gradients of {LAYER} in step" in caplog.text
    said = ". A layer is measured once in 4 steps: the first may be up to 3 steps older"
    assert (said in caplog.text) is late


def test_a_nan_of_the_first_step_is_not_late_though_others_came_later(caplog):
    """All layers are measured in it, so the first NaN is no older."""
    with betahook.attach(build("llama"), controller="monitor", interval=4) as hook:
        hook._state.nonfinite_since[0], hook._state.nonfinite_since[-1] = 5, 1
        hook.metrics()
    first, last = hook.layers
    assert caplog.text.strip().endswith(f"of {last} in step 1 and {first} in step 5: beta stays where it was")


def test_scores_that_are_not_finite_are_noted_at_once_and_hold_beta_until_they_are_pooled():
    model = build("llama")
    with betahook.attach(model, controller=search(), interval=4) as hook:
        train(model, hook, 5)
        hook._state.table[:, 0] = torch.inf
        held, moved = (layer.beta for layer in hook.layers.values())
        train(model, hook, 3)
        assert hook._state.nonfinite_since.tolist()[:2] == [6, 0]
        first, second = hook.layers.values()
        assert first.beta == held
        assert second.beta != moved
        train(model, hook, 4)
        assert first.beta != held


def scaled_step(model, hook, optimizer, scaler, *, overflows):
    factor = -0.5 if hook._state.batch == 3 * WINDOW - 1 else 1.0  # the last batch of a window contradicts the others
    scaler.scale(factor * model(**inputs("llama")).loss).backward()
    if overflows:
        model.lm_head.weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    hook.step(scaler)


@pytest.mark.parametrize("skips", [10, 11], ids=["in a window", "at its end"])
def test_a_skipped_step_is_no_batch_of_a_window(skips):
    """The model stays as it is, so does the sensitivity: beta moves a step later, and as it would have."""
    paths = []
    for skipped in (None, skips):
        model = build("llama")
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu", init_scale=8.0)
        path = []
        with betahook.attach(model, controller=search(), interval=20) as hook:
            for step in range(14 if skipped is None else 15):
                scaled_step(model, hook, optimizer, scaler, overflows=step == skipped)
                path.append([layer.beta for layer in hook.layers.values()])
            assert not hook._state.nonfinite_since.any()
        paths.append(path)
    plain, skipping = paths
    assert skipping[skips] == skipping[skips - 1]
    del skipping[skips]
    assert skipping == plain


def test_scores_of_a_skipped_step_that_are_not_finite_are_forgotten():
    """As where float16 overflows in the forward: the window goes on without them, and nothing is warned about."""
    paths = []
    for broken in (False, True):
        model = build("llama")
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu", init_scale=8.0)
        with betahook.attach(model, controller=search(), interval=20) as hook:
            for step in range(15):
                if broken and step == 10:
                    hook._state.table[:, 0] = hook._state.moments[:, 0] = torch.inf
                scaled_step(model, hook, optimizer, scaler, overflows=step == 10)
            paths.append([layer.beta for layer in hook.layers.values()])
            assert not hook._state.nonfinite_since.any()
            assert hook.head_metrics()[f"independent_std/{LAYER}"].isfinite().all()
    assert paths[0] == paths[1]


def test_a_skipped_step_forgets_no_other_heads():
    model = build("llama")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu", init_scale=8.0)
    with betahook.attach(model, controller="monitor", interval=20) as hook:
        scaled_step(model, hook, optimizer, scaler, overflows=False)
        table, moments = hook._state.table, hook._state.moments
        table[:], moments[:] = 1.0, 2.0
        table[0, 0] = torch.nan
        scaled_step(model, hook, optimizer, scaler, overflows=True)
        size = moments.shape[1] // table.shape[1]
        assert not table[:, 0].any()
        assert not moments[:, :size].any()
        assert (table[:, 1:] == 1).all()
        assert (moments[:, size:] == 2).all()


@pytest.mark.parametrize("stop", [5, 6, 7, 8])
def test_a_run_that_stops_in_a_window_goes_on_with_every_bit(stop):
    """With what was measured in it, and a skipped step."""
    model = build("llama")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    with betahook.attach(model, controller=search(), interval=4) as hook:
        for step in range(stop):
            scaled_step(model, hook, optimizer, scaler, overflows=step == 5)
        with betahook.attach(other := build("llama"), controller=search(), interval=4) as resumed:
            other.load_state_dict(model.state_dict())
            resumed.load_state_dict(hook.state_dict())
            own = torch.optim.SGD(other.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
            own[1].load_state_dict(scaler.state_dict())
            for step in range(stop, 14):
                scaled_step(model, hook, optimizer, scaler, overflows=step == 5)
                scaled_step(other, resumed, *own, overflows=step == 5)
                here, there = hook.state_dict(), resumed.state_dict()
                assert here["batches"] == there["batches"]
                for name in ("beta", "window", "table", "moments", "recent", "nonfinite_since"):
                    torch.testing.assert_close(here[name], there[name], rtol=0, atol=0, equal_nan=True)


def test_a_state_without_a_window_loads():
    """One of an earlier day, when every step was pooled: nothing is left of the steps before."""
    model = build("llama")
    with betahook.attach(model, controller=search()) as hook:
        train(model, hook, 6)
        state = hook.state_dict()
        for name in ("window", "batches"):
            del state[name]
        del state["rows"]["window"]
        hook.load_state_dict(state)
        assert not window_of(hook).any()
        assert hook._state.batches == 0
        train(model, hook, 2)
        assert hook.metrics()[f"nonfinite/{LAYER}"] == 0


def test_a_layer_that_is_left_out_of_a_batch_has_a_sensitivity_of_zero_in_it():
    """As with LayerDrop."""
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model, controller=search()) as hook:
        train(model, hook, 5)
        before = window_of(hook)
        layer = model.model.layers[1]
        forward, layer.forward = layer.forward, lambda hidden_states, *args, **kwargs: hidden_states
        model(**batch).loss.backward()
        hook.step()
        layer.forward = forward
        after = window_of(hook)
    heads = hook.layers[LAYER].heads
    assert torch.equal(after[0, heads:], before[0, heads:])
    assert (after[0, :heads] != before[0, :heads]).all()
    assert (after[1] == 2).all()


def test_micro_batches_are_one_batch_of_a_window():
    """Two halves of a batch, with half of the loss each, have the window of the whole."""
    batch, windows = inputs("llama", padded=False), []
    for halves in (1, 2):
        model = build("llama")
        with betahook.attach(model, controller=search()) as hook:
            for _ in range(6):
                for some in range(halves):
                    part = {name: values.chunk(halves)[some] for name, values in batch.items()}
                    (model(**part).loss / halves).backward()
                model.zero_grad()
                hook.step()
            windows.append((window_of(hook), hook._state.table[statistics.ROW["pairs"]].clone()))
    (whole, pairs), (parts, pairs_of_parts) = windows
    assert parts[1].tolist() == whole[1].tolist() == [2] * len(whole[1])
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-4, atol=1e-7)
    assert torch.equal(pairs_of_parts, pairs)


def test_a_pause_in_a_window_leaves_no_trace_in_it():
    paths = []
    for pauses in (False, True):
        model, path = build("llama"), []
        with betahook.attach(model, controller=search()) as hook:
            for _ in range(9):
                if pauses:
                    with hook.pause():
                        (3 * model(**inputs("llama")).loss).backward()
                    model.zero_grad()
                path += train(model, hook, 1)
            path.append(window_of(hook).tolist())
        paths.append(path)
    assert paths[0] == paths[1]


def test_a_hook_that_goes_in_a_window_leaves_the_model_and_takes_nothing_along():
    model = build("llama")
    alone = model(**inputs("llama")).loss.item()
    hook = betahook.attach(model, controller=search())
    for _ in range(6):
        model(**inputs("llama")).loss.backward()
        model.zero_grad()
        hook.step()
    model(**inputs("llama")).loss.backward()
    seen = window_of(hook)
    hook.detach()
    model(**inputs("llama")).loss.backward()
    assert torch.equal(window_of(hook), seen)
    assert model(**inputs("llama")).loss.item() == alone
    with betahook.attach(model, controller=search()) as other:
        assert not window_of(other).any()


class NativeScaler:
    """As those of timm and MAE, which hold a `GradScaler`."""


def test_a_scaler_before_its_update_is_refused():
    """It does not tell yet that it skipped the step, in which beta would move."""
    model, batch, scaler = build("llama"), inputs("llama"), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with betahook.attach(model) as hook:
        scaler.scale(model(**batch).loss).backward()
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"came before scaler\.update\(\): call it after that"):
            hook.step(scaler)
        scaler.update()
        hook.step(scaler)
        assert hook.steps == 1


def test_what_is_no_scaler_is_refused():
    model = build("llama")
    with betahook.attach(model) as hook:
        loss = model(**inputs("llama")).loss
        with pytest.raises(TypeError, match=r"takes a GradScaler or None; got Tensor. .* by name, step\(loss=loss\)"):
            hook.step(loss)
        with pytest.raises(TypeError, match=r"got NativeScaler. If it wraps a scaler, give that one"):
            hook.step(NativeScaler())
        assert hook.steps == 0
