"""A layer that one rank meets data of, on which it cannot be followed: all ranks leave it alone, and none waits."""

import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import betahook
from betahook.models.scaling import NoScalingError
from support.attention import WIDTH, Block, LengthDependent
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


def attend(module, q, k, v):
    return (q @ k.mT / 3).softmax(-1) @ v


class Plain:
    __call__ = staticmethod(attend)


class Sorting:
    """Not followed."""

    def __call__(self, module, q, k, v):
        return torch.sort(q @ k.mT / 3, -1).values.softmax(-1) @ v


class WithProcessor(Block):
    def __init__(self):
        super().__init__()
        self.processor = Plain()

    def mix(self, q, k, v):
        return self.processor(self, q, k, v)


def validate_on_the_first_rank(rank, until):
    """Beta and refusal of a layer for whose validation, after two steps, the first rank has a processor of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(WithProcessor(), WithProcessor())
    hook = betahook.attach(model, "monitor", interval=1)
    network, layer = DistributedDataParallel(model), hook.layers["0"]
    for step in range(STEPS):
        if step == 2 and rank == 0:
            model[0].processor = Sorting()
            model(torch.randn(2, 5, WIDTH))
        if step == until and rank == 0:
            model[0].processor = Plain()
        network(torch.randn(2, 5, WIDTH)).square().mean().backward()
        hook.step()
        if step == 1:
            layer.beta = 2.0
    return hook.state_dict()["beta"][0].item(), layer.refusal


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
    found["validated"] = [validate_on_the_first_rank(rank, until) for until in (2, 4)]
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


def test_beta_acts_again_on_all_ranks_after_a_validation_on_one(results):
    for result in results:
        assert result["validated"][0] == (2.0, None)


def test_all_ranks_go_on_without_a_beta_that_one_has_trained_without(results):
    for result in results:
        beta, refusal = result["validated"][1]
        assert math.isnan(beta)
        assert refusal == "as another rank does, whose log says why"


def test_no_rank_waits_for_one_that_has_nothing_to_clip(results):
    assert [bool(result["at once"][0]) for result in results] == [True, True]


def test_all_ranks_raise_where_one_cannot_clip(results):
    assert results[0]["unable"] == "cannot clip on another rank, whose error says why"
    assert "cannot clip 0 (LengthDependent): of a reason" in results[1]["unable"]
