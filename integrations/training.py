"""Facts that the Trainer keeps from its callbacks: over how many ranks its loss adds up, and a batch if no step ran.

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
    """Return over how many ranks the loss of a step adds up, if a forward is given `num_items_in_batch`."""
    # As in `Trainer.compute_loss`: the items are those of all ranks, and tensor-parallel ranks share a batch.
    return args.world_size // (getattr(model, "tp_size", None) or 1) if args.average_tokens_across_devices else 1


def provide_input(hook: Hook, batches: Iterable[Any] | None) -> None:
    """Give `fold` a batch to check itself on if no step was left to train, as in a finished run that is resumed."""
    if hook.last_call.input is not None or batches is None:
        return
    with suppress(Exception):  # an error of the user's data; `fold` says that it had no input
        if isinstance(batch := next(iter(batches), None), Mapping):
            hook.last_call.input = (), dict(batch)
