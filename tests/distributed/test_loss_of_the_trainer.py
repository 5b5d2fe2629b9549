"""The loss that controllers get in a Trainer of two ranks is that which the Trainer logs."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch.distributed as dist

import betahook
from betahook.integrations.trainer import BetaHookCallback
from support.processes import run_ranks
from support.trainer import make_trainer


@dataclass
class Watch(betahook.Controller):
    uses_loss = True
    seen: ClassVar[list] = []

    def update(self, beta, observation, state):
        self.seen.append(observation.loss().item())
        return beta, state


def train(rank, folder):
    with pytest.MonkeyPatch.context() as patch:
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}  # which nobody needs
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": dist.get_world_size(), **address}.items():
            patch.setenv(name, str(value))
        for average in (True, False):
            Watch.seen.clear()
            trainer = make_trainer(
                folder,
                BetaHookCallback(Watch(), on_end="keep"),
                max_steps=3,
                logging_steps=1,
                gradient_accumulation_steps=2,
                average_tokens_across_devices=average,
            )
            trainer.train()
            if rank == 0:
                logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
                assert Watch.seen == pytest.approx(logged, rel=1e-5)


def test_controllers_get_the_loss_that_is_logged(tmp_path):
    run_ranks(train, 2, str(tmp_path), str(tmp_path))
