"""W_q and W_k are judged as they were before the first update."""

import gc
import math
import sys
import threading
import weakref
from functools import partial

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

import betahook
from betahook.control.opening import Phase
from betahook.measure import ranks
from betahook.step import first_look, stages
from support.models import build, inputs


def fresh():
    model = build("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight.normal_(std=0.02)
    return model


def phases(hook):
    return {Phase(int(phase)) for phase in hook._state.memories[0]["phase"].tolist()}


def first_step(model, hook, rate, optimizer=torch.optim.Adam):
    optimizer = optimizer(model.parameters(), lr=rate)
    model(**inputs("llama")).loss.backward()
    optimizer.step()
    hook.step()


def step_with_closure(model, hook, rate, *, named=False, optimizer=torch.optim.Adam):
    """The first forward runs inside the optimizer's step."""

    def closure():
        optimizer.zero_grad()
        loss = model(**inputs("llama")).loss
        loss.backward()
        losses.append(loss)
        return loss

    optimizer, losses = optimizer(model.parameters(), lr=rate), []
    assert (optimizer.step(closure=closure) if named else optimizer.step(closure)) is losses[0]
    hook.step()


STEPS = pytest.mark.parametrize(
    "step",
    [
        first_step,
        step_with_closure,
        partial(step_with_closure, named=True),
        partial(step_with_closure, optimizer=torch.optim.LBFGS),  # runs its closure many times
    ],
    ids=["plain", "closure", "closure by name", "L-BFGS"],
)


@STEPS
def test_a_fresh_model_is_fresh_at_any_learning_rate(step):
    for rate in (1e-5, 0.1):
        model = fresh()
        with betahook.attach(model) as hook:
            step(model, hook, rate)
            assert Phase.WAIT not in phases(hook)


@STEPS
def test_a_trained_model_is_trained(step):
    model = fresh()
    first_step(model, betahook.attach(model, "monitor"), 0.1)
    betahook.detach(model)
    with betahook.attach(model) as hook:
        step(model, hook, 1e-5)
        assert phases(hook) == {Phase.WAIT}


@pytest.mark.parametrize("known", [True, False])
def test_a_trained_tower_that_is_frozen_does_not_make_a_fresh_one_trained(known):
    """As where a text tower learns from a frozen image tower, whose W_q and W_k may not be known."""
    model = fresh()
    frozen = model.model.layers[0].self_attn
    frozen.q_proj.weight.data += 0.1  # something that is not random
    if not known:
        frozen.a_proj, frozen.q_proj = frozen.q_proj, torch.nn.Sequential(frozen.q_proj, torch.nn.Identity())
    for is_frozen, expected in ((False, False), (True, True)):
        frozen.requires_grad_(not is_frozen)
        with betahook.attach(model) as hook:
            assert (hook.layers["model.layers.0.self_attn"].projections is not None) is known
            first_step(model, hook, 1e-5)
            assert (Phase.WAIT not in phases(hook)) is expected


def test_a_model_that_is_frozen_as_a_whole_is_looked_at():
    model = fresh().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    with betahook.attach(model) as hook:
        first_step(model, hook, 1e-5)
        assert Phase.WAIT not in phases(hook)
    model.load_state_dict(trained())
    with betahook.attach(model) as hook:
        first_step(model, hook, 1e-5)
        assert phases(hook) == {Phase.WAIT}


@pytest.mark.parametrize("closure", [None, lambda: None])
@STEPS
def test_the_optimizer_of_another_model_shows_nothing(step, closure):
    """As that of a GAN's discriminator, which steps first."""
    model, other = fresh(), torch.nn.Linear(2, 2)
    with betahook.attach(model) as hook:
        other(torch.ones(2)).sum().backward()
        torch.optim.Adam(other.parameters()).step(closure)
        model.load_state_dict(trained())
        step(model, hook, 1e-5)
        assert phases(hook) == {Phase.WAIT}


def test_a_step_before_any_forward_shows_nothing():
    """As torch.distributed.checkpoint makes one, of rate 0, before it loads the states of model and optimizer."""
    model = fresh()
    with betahook.attach(model) as hook:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.optim.Adam(model.parameters(), lr=0.0).step()
        model.load_state_dict(trained())
        first_step(model, hook, 1e-5)
        assert phases(hook) == {Phase.WAIT}


def test_closures_are_left_as_they_are_once_the_weights_were_looked_at():
    given = []

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            given.append(closure)
            return super().step(closure)

    def closure():
        model(**inputs("llama")).loss.backward()

    model = fresh()
    optimizer = Optimizer(model.parameters(), lr=1e-3)
    with betahook.attach(model):
        for _ in range(2):
            optimizer.step(closure)
    assert given[0].__name__ == "closure"
    assert given[0] is not closure
    assert given[1] is closure


def trained():
    model = fresh()
    first_step(model, betahook.attach(model, "monitor"), 0.1)
    return model.state_dict()


def test_a_state_that_is_loaded_forgets_the_weights_that_were_looked_at_before():
    """As where one hook, which begins again, serves several runs."""
    model, pretrained = fresh(), trained()
    with betahook.attach(model) as hook:
        initial = hook.state_dict()
        first_step(model, hook, 1e-5)
        model.load_state_dict(pretrained)
        hook.load_state_dict(initial)
        first_step(model, hook, 1e-5)
        assert phases(hook) == {Phase.WAIT}


@pytest.mark.parametrize("controller", ["default", "monitor"])
def test_optimizers_keep_no_model_and_no_hook(controller):
    betahook.attach(fresh()).detach()
    before, waiting = list(hooks), len(first_look._waiting)
    hook = betahook.attach(fresh(), controller)
    assert len(first_look._waiting) == waiting + (controller == "default")
    hook.detach()
    assert len(first_look._waiting) == waiting
    model = weakref.ref(betahook.attach(hook.model, controller).model)
    del hook
    gc.collect()
    assert model() is None
    assert len(first_look._waiting) == waiting
    assert list(hooks) == before


def test_models_are_attached_and_detached_while_the_optimizers_of_other_threads_run():
    """As the trials of a search that runs in threads."""
    reached, go_on = threading.Event(), threading.Event()

    def step():
        optimizer.step()
        finished.append(True)

    def wait(*call):
        reached.set()
        go_on.wait(10)

    betahook.attach(fresh()).detach()  # the first one of a process watches the optimizers
    optimizer, finished = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), []
    handle = register_optimizer_step_pre_hook(wait)
    thread = threading.Thread(target=step)
    thread.start()
    reached.wait(10)
    model = fresh()
    with betahook.attach(model):
        go_on.set()
        thread.join()
    handle.remove()
    assert finished


def test_models_may_come_and_go_while_an_optimizer_looks(monkeypatch):
    models = [fresh(), fresh(), fresh()]
    with betahook.attach(models[0]) as hook:
        going = betahook.attach(models[1])
        monkeypatch.setattr(hook.layers, "spectral_ratio", lambda: going.detach() or torch.ones(()))
        first_step(models[0], hook, 1e-5)
        assert not going.attached


def test_what_another_thread_saw_first_stands(monkeypatch):
    """It may have begun its update since."""
    model = fresh()
    with betahook.attach(model) as hook:

        def look():
            hook._state.first_spectral_ratio = torch.ones(())
            return torch.full((), 2.0)

        monkeypatch.setattr(hook.layers, "spectral_ratio", look)
        model(**inputs("llama")).loss.backward()
        torch.optim.Adam(model.parameters()).step()
        assert hook._state.first_spectral_ratio == 1


def test_two_models_are_looked_at_in_one_step():
    models = fresh(), fresh()
    attached = [betahook.attach(model) for model in models]
    optimizer = torch.optim.Adam([parameter for model in models for parameter in model.parameters()], lr=0.1)
    sum(model(**inputs("llama")).loss for model in models).backward()
    optimizer.step()
    for hook in attached:
        hook.step()
        assert Phase.WAIT not in phases(hook)
        hook.detach()


def test_weights_are_looked_at_once(monkeypatch):
    model, looks = fresh(), []
    with betahook.attach(model) as hook:
        monkeypatch.setattr(hook.layers, "spectral_ratio", lambda: looks.append(1) or torch.ones(()))
        optimizer = torch.optim.Adam(model.parameters())
        model(**inputs("llama")).loss.backward()
        for _ in range(3):
            optimizer.step()
        assert len(looks) == 1


def test_weights_are_not_looked_at_after_a_resume(monkeypatch):
    model, looks = fresh(), []
    with betahook.attach(model) as hook:
        model(**inputs("llama")).loss.backward()
        hook.step()
        state = hook.state_dict()
    with betahook.attach(model) as hook:
        hook.load_state_dict(state)
        monkeypatch.setattr(hook.layers, "spectral_ratio", lambda: looks.append(1) or torch.ones(()))
        model(**inputs("llama")).loss.backward()
        torch.optim.Adam(model.parameters()).step()
        assert not looks


@pytest.mark.parametrize(("looked", "saw"), [(True, True), (False, True), (False, False)])
def test_a_rank_that_was_idle_leaves_the_first_look_to_the_others(monkeypatch, looked, saw):
    with betahook.attach(fresh()) as hook:
        state, given = hook._state, []
        state.first_spectral_ratio = torch.ones(()) if looked else None
        state.seen = saw
        monkeypatch.setattr(hook.layers, "spectral_ratio", lambda: torch.full((), 2.0))
        monkeypatch.setattr(stages, "is_pooled", lambda _: True)
        monkeypatch.setattr(ranks, "largest_over_ranks", lambda value, like: given.append(value.item()) or value)
        _, observation = stages.observe(state, hook.layers)
        observation.spectral_ratio()
        assert str(given) == str([1.0 if looked else 2.0 if saw else math.nan])


def test_without_an_optimizer_of_torch_the_weights_are_looked_at_in_the_step():
    model = fresh()
    with betahook.attach(model) as hook:
        model(**inputs("llama")).loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad.sign())
        hook.step()
        assert phases(hook) == {Phase.WAIT}


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="torch 2.14 runs the step of an optimizer uncompiled there")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_optimizer_has_no_code_of_ours():
    model = fresh()
    with betahook.attach(model) as hook:
        model(**inputs("llama")).loss.backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        torch.compile(optimizer.step, backend="eager")()
        assert hook._state.first_spectral_ratio is None
