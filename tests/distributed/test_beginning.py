"""The first step of two ranks that have seen different things: they begin alike, or both raise and none waits."""

import logging
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import betahook
from betahook.step import checks
from support.attention import LengthDependent
from support.models import build, inputs
from support.processes import run_ranks

WIDTH, STEPS = 24, 4
LAYER = "model.layers.0.self_attn"


class Shown(nn.Module):
    """Attention on which no trial runs: only its first forward shows W_q and W_k."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = 4, 6
        self.ask, self.say, self.tell = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, given):
        q, k, v = (f(x).unflatten(-1, (4, 6)).transpose(1, 2) for f in (self.ask, self.say, self.tell))
        return ((q @ k.mT / 6**0.5 + given["bias"]).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Branched(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.at_times = Shown(), Shown()

    def forward(self, x, branches):
        given = {"bias": torch.zeros(())}
        x = x + self.always(x, given)
        return x + self.at_times(x, given) if branches else x


def unused(rank):
    """The second rank does not use a layer in the first step, so that it does not know its W_q and W_k."""
    torch.manual_seed(0)
    model, said = Branched(), []
    hook, network = betahook.attach(model), DistributedDataParallel(model, find_unused_parameters=True)
    assert all(layer.projections is None for layer in hook.layers.values())
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        network(torch.randn(2, 9, WIDTH), not (rank == 1 and step == 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        hook.step()
        said.append(hook.state_dict()["beta"])
    return said


def idle(rank):
    """The second rank has no batch in the first step, whose update leaves nothing random in W_q and W_k."""
    model = build("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    hook, optimizer = betahook.attach(model), torch.optim.Adam(model.parameters(), lr=0.1)
    if rank == 0:
        model(**inputs("llama")).loss.backward()
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.broadcast(gradient, 0)
        parameter.grad = gradient
    optimizer.step()
    hook.step()
    return [hook.state_dict()["beta"]]


def left_alone(rank):
    """The second rank leaves a layer alone that the first one has given another beta: no reason to raise."""
    torch.manual_seed(0)
    model = nn.Sequential(LengthDependent(), LengthDependent())
    with betahook.attach(model, "monitor") as hook:
        model(torch.randn(2, 5, 32)).sum().backward()
        for layer in hook.layers.values():
            layer.beta = 2 * layer.beta_default
        if rank == 1:
            model(torch.randn(2, 8, 32))
        hook.step()
        return [hook.state_dict()["beta"]]


def alerted(rank):
    """The first rank alone has alerts, and looks at all pairs for them; the interval is that of the other rank."""
    model, calls = build("llama"), []
    alerts = None if rank else betahook.Alerts(calls.append, max_logit=1e-9)
    with betahook.attach(model, betahook.Search(window=1, warmup=1), interval=2, alerts=alerts) as hook:
        for _ in range(2 * STEPS):
            model(**inputs("llama")).loss.backward()
            hook.step()
            if rank == 0:
                hook.metrics()
        assert bool(calls) is (rank == 0)
        return [hook.state_dict()["beta"]]


def refused(controller="default", prepare=lambda hook: None, options=None, **changes):
    """What `step` raises on this rank, twice, after one forward or none; and what it warns of."""
    model = build("llama")
    hook = betahook.attach(model, controller, **options or {})
    with hook, mock.patch.object(checks.logger, "warning") as warning:
        prepare(hook)
        before = hook.steps
        if not changes.pop("never_runs", False):
            model.train(not changes.pop("evaluates", False))
            model(**inputs("llama") | changes)
        found = []
        for _ in range(2):
            try:
                hook.step()
            except RuntimeError as error:
                found.append(str(error))
        assert hook.steps == before + 2 - len(found)
        return [*found, *(call.args[0] for call in warning.call_args_list)]


def loaded(rank):
    """One rank alone goes on with the state of a run, whose next step is not pooled."""
    model = build("llama")
    with betahook.attach(model, "monitor", interval=5) as hook:
        hook._state.is_local = True
        for _ in range(2):
            model(**inputs("llama")).loss.backward()
            hook.step()
        state = hook.state_dict()
    return refused("monitor", lambda hook: rank or hook.load_state_dict(state))


def set_on_one(rank):
    return refused("monitor", lambda hook: rank or setattr(hook.layers[LAYER], "beta", 1.0))


REFUSED = {
    "never ran": (lambda rank: refused(never_runs=True), "no forward has reached a hooked layer"),
    "no loss": (lambda rank: refused(betahook.Decades(), labels=None), "and the model returned none"),
    "loaded": (loaded, "all ranks must begin with the same beta and the same step"),
    "set": (set_on_one, "all ranks must begin with the same beta and the same step"),
    "alerts": (
        lambda rank: refused(options={} if rank else {"alerts": betahook.Alerts(print, max_logit=50)}),
        "Alerts may stand on one rank alone if every rank is given the same interval=",
    ),
    "threshold": (lambda rank: refused(betahook.Clip(50 + rank)), "Clip(threshold=5"),
    "controllers": (lambda rank: refused("monitor" if rank else "default"), "this one has controller="),
    "heads": (lambda rank: refused(options={"per_head": bool(rank)}), "this one has per_head="),
}
BEGUN = [unused, idle, left_alone, alerted]


def run(rank, folder):
    logging.getLogger("betahook").addHandler(logging.NullHandler())
    found = {begin.__name__: begin(rank) for begin in BEGUN} | {name: case(rank) for name, (case, _) in REFUSED.items()}
    found["measured by one"] = refused("monitor", evaluates=rank == 1)
    found["measured by none"] = refused("monitor", evaluates=True)
    found["one has a loss"] = refused(betahook.Decades(), labels=None if rank else inputs("llama")["labels"])
    torch.save(found, f"{folder}/{rank}")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(run, 2, str(folder), str(folder))
    return [torch.load(folder / str(rank)) for rank in range(2)]


@pytest.mark.parametrize("begin", [begin.__name__ for begin in BEGUN])
def test_ranks_that_saw_different_things_choose_the_same_beta(results, begin):
    first, second = (result[begin] for result in results)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_weights_that_one_rank_saw_random_count_for_all(results):
    assert (results[1]["unused"][0] < 6**-0.5).all()  # in its warm-up
    assert (results[1]["idle"][0] < 8**-0.5).all()


@pytest.mark.parametrize("case", REFUSED)
def test_all_ranks_raise_what_one_process_would(results, case):
    for result in results:
        assert len(result[case]) == 2  # in a second try too
        assert all(REFUSED[case][1] in message for message in result[case])


def test_a_first_step_is_only_warned_of_where_no_rank_measured(results):
    for result in results:
        assert result["measured by one"] == []
        (warning,) = result["measured by none"]
        assert "no attention was measured" in warning


def test_one_rank_with_a_loss_is_enough(results):
    assert [result["one has a loss"] for result in results] == [[], []]
