"""Attention whose heads a trial finds: saved, resumed, compiled, folded and detached as that which states them."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import betahook
from betahook.integrations.trainer import BetaHookCallback
from support import undeclared
from support.training import fingerprint
from support.undeclared import HEAD_DIM, HEADS, LENGTH, WIDTH, Model

KINDS = [undeclared.InterfaceAttention, undeclared.SdpaAttention, undeclared.CausalByHandAttention]


def stating(kind):
    """The same attention, which states its heads."""

    class Stating(kind):
        num_heads, head_dim = HEADS, HEAD_DIM

    return Stating


def adding(kind):
    """The same attention, with a second projection that adds to what the first one makes."""

    class Adding(kind):
        def __init__(self):
            super().__init__()
            self.second = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x):
            q, k, v = (undeclared.split(part) for part in (self.projection(x) + self.second(x)).chunk(3, -1))
            return self.mix(q, k, v).transpose(1, 2).flatten(2)

    return Adding


class Points(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        x = torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x[:, :1]}


BATCH = {name: torch.stack([Points()[index][name] for index in range(4)]) for name in ("x", "labels")}


def build(kind):
    torch.manual_seed(0)
    return Model(kind)


def train(model, hook, steps, run=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        (model if run is None else run)(**BATCH)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        hook.step()


def quick():
    return betahook.Search(window=1, warmup=0, rise=False, opening=0.1, growth=1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_and_metrics_are_those_of_a_module_that_states_its_heads(kind):
    seen = []
    for each in (kind, stating(kind)):
        model = build(each)
        with betahook.attach(model, controller=quick(), per_head=True) as hook:
            assert list(hook.layers) == ["layer"]
            train(model, hook, 4)
            seen.append((hook.metrics(), hook.layers["layer"].head_beta.tolist()))
            assert len(set(seen[-1][1])) > 1
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_goes_on_with_the_same_bits(kind):
    model, reference = build(kind), build(kind)
    with betahook.attach(reference, controller=quick()) as hook:
        train(reference, hook, 6)
        expected = hook.layers["layer"].beta
    with betahook.attach(model, controller=quick()) as hook:
        train(model, hook, 3)
        state, weights = hook.state_dict(), model.state_dict()
    again = build(kind)
    again.load_state_dict(weights)
    with betahook.attach(again, controller=quick()) as hook:
        hook.load_state_dict(state)
        train(again, hook, 3)
        assert hook.layers["layer"].beta == expected
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in reference.state_dict().items())


def make_trainer(folder, kind):
    settings = dict(max_steps=4, save_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True)
    settings |= dict(disable_tqdm=True, dataloader_pin_memory=False, learning_rate=1e-2)
    return Trainer(
        model=build(kind),
        args=TrainingArguments(str(folder), **settings),
        train_dataset=Points(),
        callbacks=[BetaHookCallback(quick())],
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_the_trainer_is_resumed_with_the_same_bits(kind, tmp_path):
    whole = make_trainer(tmp_path / "whole", kind)
    whole.train()
    resumed = make_trainer(tmp_path / "resumed", kind)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.model.state_dict().items())


@pytest.mark.oldest_skips("torch cannot trace the models at all")
@pytest.mark.filterwarnings("ignore")  # of torch's own tracing
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_model_has_the_same_beta(kind):
    betas = []
    for compiled in (False, True):
        model = build(kind)
        with betahook.attach(model, controller=quick()) as hook:
            train(model, hook, 4, torch.compile(model, backend="eager") if compiled else None)
            betas.append(hook.layers["layer"].beta)
    assert betas[1] == pytest.approx(betas[0], rel=1e-5)
    assert betas[0] != pytest.approx(HEAD_DIM**-0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_beta_is_folded_whatever_the_projection_is_called(kind):
    model = build(kind).eval()
    for parameter in model.layer.parameters():
        parameter.data *= 4
    with betahook.attach(model, controller="monitor") as hook:
        plain = model(BATCH["x"])
        hook.layers["layer"].head_beta = torch.linspace(0.5, 2, HEADS)
        expected = model(BATCH["x"])
        betahook.fold(model)
    torch.testing.assert_close(model(BATCH["x"]), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain, expected, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_folded_says_which_names_would_help_and_detaches(kind):
    model = build(adding(kind))
    before, expected = fingerprint(model), model(BATCH["x"])
    hook = betahook.attach(model, controller="monitor")
    model(BATCH["x"])
    hook.layers["layer"].beta = 2.0
    assert not torch.equal(model(BATCH["x"]), expected)
    with pytest.raises(betahook.FoldError, match="Known are linear modules called q_proj and k_proj, or qkv"):
        betahook.fold(model)
    betahook.detach(model)
    assert fingerprint(model) == before
    assert torch.equal(model(BATCH["x"]), expected)


class Layers(nn.Module):
    """Attention of several sizes, which states none of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([kind() for kind in undeclared.CLASSES[:-1]])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_layers_of_different_sizes_share_one_state():
    model = build(Layers)
    with betahook.attach(model, controller=quick(), per_head=True) as hook:
        train(model, hook, 3)
        heads = [layer.heads for layer in hook.layers.values()]
        assert heads == [1 if kind is undeclared.OneHead else HEADS for kind in undeclared.CLASSES[:-1]]
        assert sum(value > 0 for name, value in hook.metrics().items() if name.startswith("score_std/")) == len(heads)
        state = hook.state_dict()
    with betahook.attach(model, controller=quick(), per_head=True) as hook:
        hook.load_state_dict(state)
        assert len(hook.layers) == len(undeclared.CLASSES) - 1
