"""Folding on two ranks: what FSDP 2 divides gets the weights that one process folds, or stays as it was."""

import logging
import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import betahook
from betahook.models import materialise
from betahook.rerun import ELSEWHERE
from support.models import build, inputs
from support.processes import run_ranks
from support.training import move

pytestmark = pytest.mark.oldest_skips("FSDP 2 does not run on a CPU")

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def rows(family, start, stop):
    return {name: x[start:stop] for name, x in inputs(family, padded=False).items()}


def attention_of(model):
    return [module for name, module in model.named_modules() if name.endswith(("self_attn", ".attn", "SelfAttention"))]


def as_one(model):
    return fully_shard(model)


def by_attention(model):
    for module in attention_of(model):
        fully_shard(module)
    return fully_shard(model)


def by_projection(model):
    for module in attention_of(model):
        fully_shard(module.q_proj)
    return fully_shard(model)


def in_half(model):
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=HALF)
    return fully_shard(model, mp_policy=HALF)


CASES = {
    "one unit": ("llama", as_one, True),
    "attention by attention": ("llama", by_attention, True),
    "projection by projection": ("llama", by_projection, True),
    "bfloat16": ("llama", in_half, False),
    "fused": ("gpt2", as_one, True),
    "norms": ("qwen3", by_attention, False),
    "norms that add 1": ("gemma3", as_one, False),
}
"""Family, how it is divided, and if heads have a beta each."""


def prepare(family):
    model = build(family).eval()
    for parameter in model.parameters():
        parameter.data *= 1.5
    return model


def whole(model):
    materialise.reshard(model)
    parameters = model.named_parameters()
    return {name: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone() for name, x in parameters}


def in_shards(rank, family, shard, per_head):
    model = prepare(family)
    with betahook.attach(model, controller="monitor") as hook, torch.no_grad():
        shard(model)
        batch = rows(family, rank, rank + 1)
        model(**batch)
        move(hook, per_head)
        expected = model(**batch).logits
        betahook.fold(hook)
        assert not hook.attached
        error = (model(**batch).logits - expected).norm() / expected.norm()
        assert error < (0.1 if expected.dtype == torch.bfloat16 else 1e-5)  # its weights round anew
        return whole(model)


class Users(nn.Module):
    """Attention by hand that says neither its size nor what makes q and k: its forward shows it."""

    def __init__(self):
        super().__init__()
        self.ask, self.tell = nn.Linear(24, 24), nn.Linear(24, 24)
        self.answer = nn.Parameter(0.2 * torch.randn(4, 24, 6))

    def forward(self, x):
        q, k = self.ask(x).unflatten(-1, (4, 6)), torch.einsum("bsd,ndh->bsnh", x, self.answer)
        weights = torch.einsum("bqnh,bknh->bnqk", q, k).div(6**0.5).softmax(-1)
        return (weights @ self.tell(x).unflatten(-1, (4, 6)).transpose(1, 2)).transpose(1, 2).flatten(2)


def not_divided(model):
    return model


def by_layer(model):
    fully_shard(model[1])
    return fully_shard(model)


def by_linear(model):
    fully_shard(model[1].ask)
    return by_layer(model)


DIVIDED = (as_one, by_layer, by_linear)


def of_a_user(shard):
    """The std of W_q and W_k, and the folded weights; attached to what is divided already."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(24, 24), Users()), torch.randn(2, 9, 24)
    shard(model)
    with betahook.attach(model, controller="monitor", per_head=True) as hook:
        model(x).sum().backward()
        hook.step()
        layer = hook.layers["1"]
        std = layer.weight_std_q, layer.weight_std_k
        layer.head_beta = layer.head_beta * torch.tensor([0.5, 1.3, 2, 3])
        betahook.fold(hook)
    return {"std": torch.tensor(std)} | whole(model)


def refused(rank):
    """On one rank alone a layer is not linear, or there was no forward: all refuse, and nothing changes."""
    for message in (
        "its output is not that of a scaled query",
        "the input of the model's last forward, but there was none",
    ):
        model, batch = prepare("llama"), rows("llama", rank, rank + 1)
        query = model.model.layers[1].self_attn.q_proj
        with betahook.attach(model, controller="monitor") as hook, torch.no_grad():
            fully_shard(model)
            model(**batch)
            if rank == 0 and "output" in message:
                query.register_forward_hook(lambda module, args, output: 10 * (output / 10).tanh())
            if rank == 0 and "input" in message:
                hook.last_call.input = None
            move(hook, per_head=False)
            before = whole(model)
            with pytest.raises(betahook.FoldError, match=message):
                betahook.fold(hook)
            assert hook.attached
            assert all(torch.equal(value, before[name]) for name, value in whole(model).items())


class Towers(nn.Module):
    """As many runs of the second one as a batch has images."""

    def __init__(self):
        super().__init__()
        self.text, self.image = build("llama"), build("llama")

    def forward(self, images=1, more=0, **batch):
        losses = [self.text(**batch).loss, *(self.image(**batch).loss for _ in range(images))]
        return [sum(losses), *losses[:more]]


class FromIterator(nn.Sequential):
    def forward(self, batches):
        return super().forward(next(batches))


class Tiring(Users):
    runs = 99

    def forward(self, x):
        self.runs -= 1
        if self.runs == 0:
            raise RuntimeError("no more")
        return super().forward(x)


def differ(rank):
    """The last forward of one rank is another than that of the other: all fold, or all refuse, and none waits."""
    for given, message in (
        ({"images": 1 - rank}, ": the last forward of the model did not use it, here or on another rank"),
        ({"images": 1 + rank}, None),
        ({"more": rank}, "holds other tensors on another rank"),
    ):
        towers = as_one(Towers())
        check_last(towers, lambda towers=towers, **given: towers(**rows("llama", 0, 2), **given), given, message)

    reader, x = as_one(FromIterator(Users())), torch.randn(2, 9, 24)
    message = ELSEWHERE if rank else "StopIteration"
    forward, last = lambda batches=1: reader(iter(batches * [x])), {"batches": 1 + 9 * rank}
    # After such an error FSDP 2 holds the whole weights on that rank.
    check_last(reader, forward, last, message, weights=lambda model: {})

    tiring = as_one(nn.Sequential(Tiring()))

    def run(runs=99):
        tiring(x)
        tiring[0].runs = runs

    message = rf"does not run twice on one input \({ELSEWHERE if rank else 'no more'}\)"
    check_last(tiring, run, {"runs": 99 if rank else 4}, message)


def check_last(model, forward, last, message, weights=whole):
    """Fold after a `forward` as it is, and one with what is given the `last` time."""
    with betahook.attach(model, controller="monitor") as hook, torch.no_grad():
        forward()
        for layer in hook.layers.values():
            layer.beta = 2 * layer.beta_default
        forward(**last)
        if message is None:
            betahook.fold(hook)
            return
        before = weights(model)
        with pytest.raises(betahook.FoldError, match=message):
            betahook.fold(hook)
        assert hook.attached
        assert all(torch.equal(value, before[name]) for name, value in weights(model).items())


def run(rank, folder):
    folded = {name: in_shards(rank, *case) for name, case in CASES.items()}
    torch.save(folded | {shard.__name__: of_a_user(shard) for shard in DIVIDED}, f"{folder}/{rank}")
    refused(rank)
    differ(rank)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(run, 2, str(folder), str(folder))
    return [torch.load(folder / str(rank)) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_ranks_fold_what_one_process_does(results, case):
    family, _, per_head = CASES[case]
    model = prepare(family)
    before = whole(model)
    with betahook.attach(model, controller="monitor") as hook:
        model(**rows(family, 0, 2))
        move(hook, per_head)
        betahook.fold(hook)
    expected = whole(model)
    assert any(not torch.equal(value, before[name]) for name, value in expected.items())
    for result in results:
        assert all(torch.equal(value, expected[name]) for name, value in result[case].items())


@pytest.mark.parametrize("shard", DIVIDED)
def test_attention_of_a_user_is_found_in_what_is_divided_already(results, shard):
    expected = of_a_user(not_divided)
    assert (expected["std"] > 0).all()
    for result in results:
        assert all(torch.allclose(value, expected[name], rtol=1e-6) for name, value in result[shard.__name__].items())


def unfinished(rank):
    """What `fold` says of the loss of a batch that both ranks have."""
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model) as hook:
        model(**batch).loss.backward()
        hook.step()
        loss = model(**batch).loss.item()
        said = []
        logging.getLogger("betahook").addHandler(Handler(said))
        betahook.fold(hook, unfinished="better")
    if rank > 0:
        assert not said
        return
    (shown,) = re.findall(r"loss of the last batch: ([\d.]+);", said[0])
    assert float(shown) == pytest.approx(loss, rel=0.05)


class Handler(logging.Handler):
    """Keep what is said."""

    def __init__(self, said):
        super().__init__()
        self.said = said

    def emit(self, record):
        self.said.append(record.getMessage())


def test_the_loss_that_is_said_is_a_mean_over_ranks(tmp_path):
    run_ranks(unfinished, 2, str(tmp_path))
