"""Checkpoints of the Trainer: saving and loading the state of the hook, and setting unfinished folders aside.

`betahook.integrations.trainer` calls this; nothing here trains.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME

from betahook import checkpoint, compat
from betahook.hook import Hook
from betahook.measure.ranks import range_over_ranks

logger = logging.getLogger(__name__)

_KEY = "betahook"
"""Key of the hook's state among the states of callbacks in the Trainer's state.

It must not be the name of a class: if it were, `restore_callback_states_from_checkpoint` would replace the user's
callback by a new one without its options.
"""


def last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint in `output_dir` of a run with `BetaHookCallback`; None if there is none.

    For `trainer.train(resume_from_checkpoint=...)`.

    Raises:
        TypeError: `output_dir` is not a path.
    """
    if not isinstance(output_dir, str | os.PathLike):
        raise TypeError(f"last_checkpoint(output_dir) takes the folder of a run; got {output_dir!r}")
    begun = filter(checkpoint.was_save_started, _checkpoints(Path(output_dir)))
    whole = filter(_is_whole, begun)
    return next((str(folder) for folder in whole if not _was_saved_without_betahook(folder)), None)


def _checkpoints(run: Path) -> list[Path]:
    """Return the checkpoint folders of a run, the newest first."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    folders = [folder for folder in run.glob(f"{prefix}*/") if folder.name.removeprefix(prefix).isdecimal()]
    return sorted(folders, key=lambda folder: int(folder.name.removeprefix(prefix)), reverse=True)


def set_unfinished_aside(run: Path) -> None:
    """Rename the checkpoints of a run with betahook that are newer than its newest complete one."""
    folders = _checkpoints(run)
    if not any(checkpoint.was_save_started(folder) or not any(folder.iterdir()) for folder in folders):
        return  # nothing is known of a run without betahook
    unfinished = list(itertools.takewhile(lambda folder: not _is_whole(folder), folders))
    whole = next(iter(folders[len(unfinished) :]), "none")
    for folder in unfinished:
        names = (f"{checkpoint.UNFINISHED}{folder.name}.{number}" for number in itertools.count(1))
        aside = next(run / name for name in names if not (run / name).exists())
        try:
            folder.rename(aside)
        except OSError as error:  # only a warning, since an evaluation does not need the folder
            words = "%s was not finished, and cannot be renamed: %s. The newest whole one is %s"
            logger.warning(words, folder, error, whole)
            continue
        logger.warning(
            "%s was not finished, its process ended while it saved. It is called %s now; the newest whole one is %s",
            folder,
            aside.name,
            whole,
        )


def _is_whole(folder: Path) -> bool:
    """Return True if the Trainer's state, which is written last, and the hook's state, if saved, can be read."""
    try:
        if _was_saved_without_betahook(folder):
            return True
        config = checkpoint.read_config(folder / CONFIG_NAME) if (folder / CONFIG_NAME).exists() else None
        # A hooked transformers model saves the state of its hook before its config.
        if config is None or checkpoint.MARK in config or checkpoint.was_save_started(folder):
            checkpoint.read(folder).check_files()
    except checkpoint.ForeignStateError:
        return True  # e.g. of a newer betahook; resuming from it raises the error
    except (OSError, ValueError):
        return False
    return True


def save(hook: Hook, folder: Path) -> None:
    """Save the state of a hook to a checkpoint that the Trainer has written."""
    checkpoint.save(hook, folder)
    if checkpoint.has_fsdp_shards(folder) and hook.layers.are_adapted:
        _warn_of_shards(folder.parent)


@functools.cache
def _warn_of_shards(run: Path) -> None:
    """Warn, once per run, that weights merged from the shards in its checkpoints lack beta without saying so."""
    logger.warning(
        "the checkpoints in %s hold weights in shards: merged, they lack beta and do not say so. Load the merged "
        "weights, then call betahook.restore(model, folder) with the folder of the checkpoint",
        run,
    )


def folder_of_step(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder that the Trainer gives to the checkpoint of this step."""
    run, name = Path(args.output_dir or "."), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    if state.is_hyper_param_search:  # each trial has a folder, and callbacks do not know its name
        return max(run.glob(f"*/{name}"), key=lambda folder: folder.stat().st_mtime_ns, default=run / name)
    return run / name


def _holds(folder: Path, state: TrainerState) -> bool:
    """Return True if a folder holds the checkpoint that has this state."""
    try:
        there = TrainerState.load_from_json(str(folder / compat.TRAINER_STATE))
    except FileNotFoundError:
        return False
    # As text, since NaN != NaN.
    return there.global_step == state.global_step and json.dumps(there.log_history) == json.dumps(state.log_history)


def add_to_state(hook: Hook, state: TrainerState, owner: TrainerCallback) -> None:
    """Put the hook's state into the Trainer's state, and so into its checkpoints.

    The hook is not read now, but whenever the Trainer writes its state. `owner` is the callback with the hook.
    """
    _callback_states(state)[_KEY] = _Snapshot(hook, owner, state)


def owner_in(state: TrainerState) -> TrainerCallback | None:
    """Return the callback that has put its hook into this training; None if none has."""
    snapshot = _callback_states(state).get(_KEY)
    return snapshot.owner if isinstance(snapshot, _Snapshot) else None


def remove_from_state(state: TrainerState) -> None:
    """Remove the hook's state from the Trainer's state."""
    _callback_states(state).pop(_KEY, None)


def resume(hook: Hook, args: TrainingArguments, state: TrainerState) -> None:
    """Continue from the checkpoint that the Trainer has resumed from: from its file, or else from the Trainer's state.

    After a checkpoint that was saved without betahook, beta stays as it is in the hook, mostly the model's own, and a
    warning says so.

    Raises:
        FileNotFoundError: the checkpoint lacks its file, but was saved with betahook.
        ValueError: the folder of the checkpoint is unknown, and it was saved by an older version of betahook, or
            without.
    """
    # Callbacks do not get the folder: try the one that the arguments name, then that of this step in `output_dir`.
    named, last = args.resume_from_checkpoint, folder_of_step(args, state)
    places = [Path(named), last] if isinstance(named, str) else [last]
    saved = _saved_state(state)
    if (folder := next((place for place in places if _holds(place, state)), None)) is not None:
        if not _was_saved_without_betahook(folder):
            _continue(hook, checkpoint.read(folder))
            return
        begins = "stays as the hook that was given has it" if hook.layers.are_adapted else "begins as the model's own"
        logger.warning("%s was saved without betahook: beta %s", folder, begins)
    elif saved is not None:
        place = f"{compat.TRAINER_STATE} of the checkpoint to resume from"
        checkpoint.read_exported(saved, place).load(hook)
    else:
        raise ValueError(
            f"the checkpoint to resume from is not {' or '.join(map(str, places))}, and its "
            f"{compat.TRAINER_STATE} says nothing of betahook. Name it in the arguments too, "
            "TrainingArguments(resume_from_checkpoint=folder), for betahook to find its beta"
        )


def _continue(hook: Hook, saved: checkpoint.Saved) -> None:
    """Load a state into a hook; if all its betas are the model's own, skip the comparison of weights.

    The comparison would fail for ViT, Mixtral and others: transformers saves their weights under other names, and the
    Trainer does not load those back.
    """
    if bool(saved.state["beta"].isnan().all()):
        hook.load_state_dict(saved.state)
    else:
        saved.load(hook)


def load_best(hook: Hook, folder: str | None) -> bool:
    """Restore the beta of the best checkpoint, whose weights the Trainer has loaded; every rank must call this.

    Args:
        folder: the folder of the checkpoint; None if there is none. It may exist on the first node only.

    Returns:
        True, on all ranks, if any rank has found it; all of them then fold without comparing losses.
    """
    found = folder is not None and _load_found(hook, folder)
    device = next(iter(hook.layers.values())).current_gain.device
    _, on_any_rank = range_over_ranks(int(found), device)
    return bool(on_any_rank)


def _load_found(hook: Hook, folder: str) -> bool:
    """Restore the beta of the best checkpoint; warn and return False if the Trainer has not loaded its weights."""
    if not Path(folder).is_dir():
        logger.warning("the best checkpoint %s was deleted: beta stays that of the last step, as weights do", folder)
        return False
    if not _was_saved_without_betahook(Path(folder)):
        saved = checkpoint.read(folder)
        # They do not fit after a pruned trial of a search, or if the Trainer cannot load weights that were renamed.
        if not saved.fits(hook.model):
            if hook.layers.are_adapted:
                logger.warning("the weights of %s were not loaded: beta stays that of the last step", folder)
            return False
        saved.load(hook)
        return True
    state = hook.state_dict()
    state["beta"].fill_(math.nan)  # stands for the model's own
    hook.load_state_dict(state)
    return True


def _was_saved_without_betahook(folder: Path) -> bool:
    """Return True if a checkpoint was saved without betahook; a file of beta in it is then left from an earlier one."""
    state = TrainerState.load_from_json(str(folder / compat.TRAINER_STATE))
    if _saved_state(state) is not None or checkpoint.is_marked_folder(folder):
        return False
    # Version 0.1.0 put nothing into the Trainer's state, but its files have no fingerprint, which tells them apart.
    return not checkpoint.was_save_started(folder) or checkpoint.has_fingerprint(folder)


def _saved_state(state: TrainerState) -> Any:
    """Return the hook's state that the Trainer's state holds; None if there is none for its step.

    A training without betahook passes on the entry of the checkpoint that it resumed from, which is of an earlier step.
    """
    saved = _callback_states(state).get(_KEY)
    return saved if saved is not None and saved.get("step", state.global_step) == state.global_step else None


def _callback_states(state: TrainerState) -> dict[str, Any]:
    """Return the states of callbacks by name; `TrainerState` takes a list of callbacks and makes this dictionary."""
    states: Any = state.stateful_callbacks
    assert isinstance(states, dict)
    return states


class _Snapshot:
    """Entry among the states of callbacks that becomes the hook's current state when the Trainer writes its own."""

    def __init__(self, hook: Hook, owner: TrainerCallback, state: TrainerState) -> None:
        self._hook = hook
        self._state = state
        self.owner = owner

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """Return the hook's state: `dataclasses.asdict`, by which the Trainer writes its state, copies every entry."""
        return {**checkpoint.export(self._hook), "step": self._state.global_step}
