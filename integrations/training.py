"""Facts that the Trainer keeps from its callbacks: over how many ranks its loss adds up, and a batch without a step.

`betahook.integrations.trainer` calls this; nothing here trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from torch import nn
from transformers import TrainingArguments

from betahook.hook import Hook


def ranks_of_a_loss(args: TrainingArguments, model: nn.Module) -> int:
    """Return how many ranks add up to the loss of a step where a forward is told the number of items in the batch."""
    # As in `Trainer.compute_loss`: the items are those of all ranks, of which some have the same batch.
    return args.world_size // (getattr(model, "tp_size", None) or 1) if args.average_tokens_across_devices else 1


def provide_input(hook: Hook, batches: Iterable[Any] | None) -> None:
    """Let `fold` check itself on a batch where no step was left to train, as in a finished run that is resumed."""
    if hook.last_call.input is not None or batches is None:
        return
    with suppress(Exception):  # of the user's data; `fold` says that it had no input
        if isinstance(batch := next(iter(batches), None), Mapping):
            hook.last_call.input = (), dict(batch)
