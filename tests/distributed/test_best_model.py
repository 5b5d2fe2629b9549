"""The end of a training on two ranks, of which one alone finds the best checkpoint."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState

import betahook
from betahook import checkpoint
from betahook.integrations import checkpoints
from betahook.integrations.trainer import BetaHookCallback
from support.models import build, inputs
from support.processes import run_ranks
from support.training import LAYER


def end(rank, folder, finder):
    """Beta was on its way in the best checkpoint, and is in the model that goes on with its last weights."""
    model, batch, best = build("llama").train(), inputs("llama", padded=False), Path(folder, f"best-{rank}")
    hook = betahook.attach(model)
    callback = BetaHookCallback(hook=hook)
    state, arguments = TrainerState(global_step=1, stateful_callbacks=[]), SimpleNamespace(load_best_model_at_end=True)
    for step in (1, 2):
        model(**batch).loss.backward()
        hook.step()
        hook.layers[LAYER].beta = 0.1 * step
        if step == 1 and rank == finder:
            best.mkdir()
            checkpoint.save(hook, best)
            checkpoints.add_to_state(hook, state, callback)
            state.save_to_json(str(best / "trainer_state.json"))
    if rank == finder or finder == 0:  # a resumed Trainer forgets a folder that it does not find
        state.best_model_checkpoint = str(best)
    query = model.model.layers[0].self_attn.q_proj.weight
    before, own = query.detach().clone(), hook.layers[LAYER].beta_default
    callback.on_train_end(arguments, state, TrainerControl())
    assert not hook.attached
    torch.testing.assert_close(query.detach(), before * ((0.1 if rank == finder else 0.2) / own))


@pytest.mark.parametrize("finder", [0, 1])
def test_no_rank_waits_for_one_that_compares_nothing(tmp_path, finder):
    run_ranks(end, 2, str(tmp_path), str(tmp_path), finder)
