"""The end of a training on two ranks: all fold, or all keep their hook for a next one."""

from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn
from transformers import TrainerControl, TrainerState

import betahook
from betahook.integrations.trainer import BetaHookCallback
from betahook.keep import folding
from support.models import build, inputs
from support.processes import run_ranks


class Towers(nn.Module):
    """The second one runs in batches with images only."""

    def __init__(self):
        super().__init__()
        self.text, self.image = build("llama"), build("llama")

    def forward(self, images, **batch):
        return self.text(**batch).loss + (self.image(**batch).loss if images else 0)


def end(rank):
    model, batch = Towers(), inputs("llama", padded=False)
    hook = betahook.attach(model, "monitor")
    callback = BetaHookCallback(hook=hook)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for images in (rank == 0, True):
        model(images=True, **batch).backward()
        hook.step()
        for layer in hook.layers.values():
            layer.beta = 2 * layer.beta_default
        model(images=images, **batch)
        with mock.patch.object(folding.logger, "warning") as warning:
            callback.on_train_end(SimpleNamespace(load_best_model_at_end=False), TrainerState(), TrainerControl())
        if not warning.called:
            break
        assert hook.attached
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        expected = "the last forward of the model did not use it" if rank else "another rank cannot, whose log says why"
        assert expected in str(warning.call_args.args[1])
    assert images
    assert not hook.attached
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_all_ranks_fold_or_none_does(tmp_path):
    run_ranks(end, 2, str(tmp_path))
