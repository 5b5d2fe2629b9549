"""`restore`: bring back a model that was saved while it was hooked.

`restore` checks the model's config, reads the state, attaches, and loads the state into the hook. It never touches the
weights. The command line calls its two halves, `read_for` and `restore_saved`.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers.utils import CONFIG_NAME

from betahook import checkpoint
from betahook.hook import Hook, attach, hooks_of
from betahook.keep.folding import FOLDED_KEY
from betahook.models.discovery import named_modules
from betahook.options import ControllerChoice, Settings
from betahook.version import __version__


def restore(model: nn.Module, folder: str | os.PathLike[str], *, controller: ControllerChoice | None = None) -> Hook:
    """Attach to a model whose checkpoint needs betahook, with the beta that was saved beside the weights.

        model = AutoModelForCausalLM.from_pretrained(folder)  # attention with the model's own beta
        hook = betahook.restore(model, folder)  # the model as trained; after a forward, fold(model) makes it plain

    The layers, `per_head`, `interval`, `when` and `exact_max_logit` are those of the saved hook.

    Args:
        model: the model, with the weights of the folder; for a hooked base model, its `PeftModel` will do too.
        folder: the folder to which `save_pretrained` of the hooked model, or the Trainer, saved weights and
            `betahook.safetensors`; or the subfolder of a named adapter. For weights merged from shards, the folder of
            the shards.
        controller: None keeps beta where it is; the controllers of the saved hook continue from their saved state.

    Raises:
        FileNotFoundError: the folder has no state of betahook.
        ValueError: the model was not loaded from a checkpoint that needs betahook; or the file is damaged, belongs to
            another model or other controllers, or was saved with other weights than those of the model.
        RuntimeError: the model is hooked already.
        TypeError: `folder` is not a path.
    """
    return restore_saved(model, read_for(model, folder), controller)


def restore_saved(model: nn.Module, saved: checkpoint.Saved, controller: ControllerChoice | None = None) -> Hook:
    """Attach to a model and load a state that `read_for` returned; arguments and errors as for `restore`."""
    place, state = saved.place, dict(saved.state)
    names, known = list(state["layers"]), {field.name for field in fields(Settings)}
    if unknown := sorted(state["options"].keys() - known):
        raise ValueError(
            f"{place}: betahook {__version__} does not know its option {', '.join(unknown)}; restore it with the "
            "version that wrote it, or a newer one"
        )
    try:
        chosen = asdict(Settings(**state["options"]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place} is not the state of a hook: {error}") from error
    model = _model_with(names, model, saved)
    with checkpoint.unmarked(model):
        used = "monitor" if controller is None else controller
        hook = attach(model, controller=used, layers=lambda name, module: name in names, **chosen)
        if controller is None:
            state["trained_by"] = checkpoint.makers(state)
            state["controllers"] = hook.state_dict()["controllers"]
        with ExitStack() as undo:
            undo.callback(hook.detach)
            with checkpoint.naming_place(place):
                hook.load_state_dict(state)
            saved.check(model)
            undo.pop_all()
    return hook


def _model_with(names: list[str], model: nn.Module, saved: checkpoint.Saved) -> nn.Module:
    """Return the model that has layers of these names: the given one, or the base model of a PEFT model.

    Raises:
        ValueError: neither has them.
    """
    missing = sorted(set(names) - {name for name, _ in named_modules(model)})
    if not missing:
        return model
    base: Any = getattr(model, "get_base_model", None)
    if base is not None and set(names) <= {name for name, _ in named_modules(base())}:
        return cast(nn.Module, base())
    raise ValueError(
        f"{saved.place}: the state has layers that this model lacks: {', '.join(missing)}. Restore its own model"
        f"{checkpoint.other_names(saved.state)}"
    )


def _is_merged(model: Any, path: Path) -> bool:
    """Return True if the weights may have been merged from shards beside the file at `path`, and so have no mark."""
    is_bare = checkpoint.has_fsdp_shards(path.parent) or not (path.parent / CONFIG_NAME).exists()
    return path.exists() and is_bare and not hasattr(model.config, FOLDED_KEY)


def read_for(model: nn.Module, folder: str | os.PathLike[str]) -> checkpoint.Saved:
    """Read the state in a folder for a model, unless the model is hooked or its config says that it is plain."""
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"restore(model, folder) takes a folder second; got {type(folder).__name__}")
    path = Path(folder, checkpoint.FILE)
    if isinstance(model, nn.Module) and hooks_of(model):
        raise RuntimeError(
            f"this {type(model).__name__} is hooked already, perhaps by an earlier restore(): go on with that hook, or "
            f"load the weights of {path.parent} into a new model and restore that"
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"there is no folder {path.parent}: name the one that the hooked model was saved to, with {checkpoint.FILE}"
        )
    marked = checkpoint.is_marked(model)
    # An adapter is saved with a config of its own: that of the model then has no mark.
    may_be_plain = (
        checkpoint.has_transformers_config(model) and not hasattr(model, "peft_config") and not _is_merged(model, path)
    )
    if may_be_plain and not marked:
        load = f"; for a new model, load the weights of {path.parent} first, with from_pretrained"
        raise ValueError(
            f"this {type(model).__name__} was not loaded from a checkpoint that needs betahook: its beta is in the "
            f"weights already, or is the model's own{load if path.exists() else f', and there is no {path}'}"
        )
    if not path.exists() and checkpoint.is_marked_folder(path.parent):
        marked, above = True, path.parent.absolute().parent / checkpoint.FILE
        # PEFT saves a named adapter in a subfolder.
        path = above if above.exists() and Path(folder, checkpoint.ADAPTER_CONFIG).exists() else path
    if marked and not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist, but the beta of this model is in that file: the folder was copied without it. "
            "Name the folder that the hooked model was saved to"
        )
    return checkpoint.read(path.parent)
