"""A layer that one rank meets data of, on which it cannot be followed: all ranks leave it alone, and none waits."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import betahook
from betahook.models.scaling import NoScalingError
from support.attention import WIDTH, LengthDependent
from support.processes import run_ranks

STEPS, MET = 6, 4
"""Steps, and the one in which the second rank has long sequences."""
CONTROLLERS = {
    "gradient": lambda: betahook.Gradient(0.1),
    "search": lambda: betahook.Search(window=1, warmup=0, rise=False, opening=0.3, largest=1.0),
    "decades": lambda: betahook.Decades(window=1),
    "monitor": betahook.Monitor,
    "clip": lambda: betahook.Clip(1e-3),
}


def build():
    torch.manual_seed(0)
    return nn.Sequential(LengthDependent(), LengthDependent())


def only_in_the_first(model):
    """Let the second layer always see short sequences."""
    model[1].register_forward_pre_hook(lambda module, given: (given[0][:, :4],))


def train(rank, controller, met=MET):
    """Beta, the memories and the reason for each layer after each step."""
    model = build()
    only_in_the_first(model)
    hook = betahook.attach(model, CONTROLLERS[controller](), interval=2)
    network, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for step in range(STEPS):
        torch.manual_seed(10 * step + rank)
        if step == 1 and controller == "monitor":
            hook.layers["0"].beta = 2.0
        loss = network(torch.randn(2, 8 if (rank, step) == (1, met) else 5, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hook.step(loss=loss)
        state = hook.state_dict()
        found.append((state["beta"], [entry["state"] for entry in state["controllers"]]))
    kept = [layer.beta == layer.beta_default for layer in hook.layers.values()]
    counts = [float(layer.statistics.count) for layer in hook.layers.values()]
    metrics = sorted(hook.metrics())
    return found, kept, counts, [layer.refusal for layer in hook.layers.values()], metrics, hook.findings()


def clip_in_the_first_step(rank):
    """The ranks do not know yet that the layer can be clipped."""
    return train(rank, "clip", met=0)[-3]


def clip_what_one_rank_cannot(rank):
    model = build()
    hook = betahook.attach(model, betahook.Clip(1e-3))
    model(torch.randn(2, 5, WIDTH)).sum().backward()
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            refuse = lambda *given: (_ for _ in ()).throw(NoScalingError("of a reason"))  # noqa: E731
            patch.setattr("betahook.step.clipping.find_scalings", refuse)
        with pytest.raises(betahook.UnsupportedModelError) as caught:
            hook.step()
    return str(caught.value)


def run(rank, folder):
    found = {name: train(rank, name) for name in CONTROLLERS}
    found["at once"] = clip_in_the_first_step(rank)
    found["unable"] = clip_what_one_rank_cannot(rank)
    torch.save(found, f"{folder}/{rank}")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(run, 2, str(folder), str(folder))
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_what_one_rank_leaves_alone_all_do(results, controller):
    one, other = (result[controller] for result in results)
    for step, (mine, others) in enumerate(zip(one[0], other[0], strict=True)):
        if step != MET:  # between two poolings no rank knows of another
            assert torch.equal(mine[0].nan_to_num(), others[0].nan_to_num()), step
        assert repr(mine[1]) == repr(others[1])
    for _, kept, counts, reasons, _, findings in (one, other):
        assert kept[0]
        assert counts[0] == 0
        assert counts[1] > 0
        assert reasons[1] is None
        assert "left alone" in str(findings)
    assert one[3][0] == "as another rank does, whose log says why"
    assert "sort" in other[3][0]
    assert one[4] == other[4]


def test_no_rank_waits_for_one_that_has_nothing_to_clip(results):
    assert [bool(result["at once"][0]) for result in results] == [True, True]


def test_all_ranks_raise_where_one_cannot_clip(results):
    assert results[0]["unable"] == "cannot clip on another rank, whose error says why"
    assert "cannot clip 0 (LengthDependent): of a reason" in results[1]["unable"]
