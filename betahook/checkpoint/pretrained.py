"""`save_pretrained` of a hooked model, which also saves the state of the hook and marks the weights if they lack beta.

The saved weights of a hooked model do not include beta. If beta is not the model's own, a mark in config.json lets
`attach` refuse the weights without their beta. A tensor beside the weights is a second mark, which libraries report as
unexpected when they load it without betahook.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.utils import CONFIG_NAME

from betahook import compat
from betahook.checkpoint.file import FILE, Savable, Stateful, reporting_damage, save
from betahook.checkpoint.order import is_in, of_part
from betahook.layer import Layers
from betahook.models.discovery import named_modules
from betahook.tap import copies
from betahook.tap.override import Override

MARK = "betahook"
"""Config key that marks a saved model whose beta is not in its weights but in `FILE`."""
ADAPTER_CONFIG = "adapter_config.json"
NEEDS_RESTORE = "needs_betahook_restore"
"""Name of the tensor beside the weights, and of a key in an adapter's config, of which any loader warns."""
RESTORE_HINT = f"beta is in {FILE}: load the model, then call betahook.restore(model, folder)"
"""Value of the mark in a config, for people who read it."""


def _refuse_copy(layers: Layers, attributes: copies.Attributes) -> None:
    """Refuse a shallow copy of a model, as by `copy.copy`, while beta acts: saving the copy would lose beta.

    Raises:
        TypeError: the beta of a layer is not the model's own.
    """
    if layers.are_adapted:
        copies.refuse_adapted("be saved without that beta")


@dataclass
class _Part:
    """Stand-in for the hook of a part of a model: the state of its layers, under their names in that part."""

    model: nn.Module
    path: str
    hook: Stateful
    layers: Layers

    def state_dict(self) -> dict[str, Any]:
        head_dims = {name: layer.head_dim for name, layer in self.layers.items()}
        return of_part(self.hook.state_dict(), self.path, head_dims)


@dataclass
class _Saves:
    """A flag that is set while a hooked model or a part of it is being saved, since that may save further parts."""

    are_running: bool = False

    @contextmanager
    def running(self) -> Iterator[None]:
        self.are_running = True
        try:
            yield
        finally:
            self.are_running = False


def connect(model: nn.Module, hook: Stateful, layers: Layers, undo: ExitStack) -> None:
    """Let `save_pretrained` of a hooked model also save the state of its hook, until `undo` is closed.

    `save_pretrained` of a part of the model, such as the one that PEFT's `merge_and_unload` returns, saves the state of
    the layers in that part.

    Args:
        model: the hooked model.
        hook: its hook.
        layers: its layers; if any beta is not the model's own, the saved weights get the mark.
        undo: reverts the changes.
    """
    saves = _Saves()
    for path, part in named_modules(model):
        held = Layers([layer for name, layer in layers.items() if is_in(name, path)])
        # For a part, ask its class: PEFT's wrappers pass on the attributes of the model inside, methods included.
        if held and hasattr(model if part is model else type(part), "save_pretrained"):
            _connect(part, hook if part is model else _Part(part, path, hook, layers), held, saves, undo)
            copies.keep_out(part, functools.partial(_refuse_copy, held), undo)


def _connect(model: nn.Module, hook: Savable, layers: Layers, saves: _Saves, undo: ExitStack) -> None:
    """Connect the saving methods of one module, or of the config of an adapter around it."""
    for name in _writers(model):
        _connect_method(name, model, hook, layers, saves, undo)
    if _is_of_transformers(model):
        copies.keep_hook(model, accept_marked_weights(model), undo)


def _writers(model: nn.Module) -> list[str]:
    """Return the names of the methods that write a model to a folder."""
    code = getattr(inspect.unwrap(model.save_pretrained), "__code__", None)  # type: ignore[arg-type]
    # In sentence-transformers, `save_pretrained` only calls `save`, which `push_to_hub` calls too.
    return ["save_pretrained", "save"] if getattr(code, "co_names", ()) == ("save",) else ["save_pretrained"]


def _connect_method(name: str, model: nn.Module, hook: Savable, layers: Layers, saves: _Saves, undo: ExitStack) -> None:
    original = getattr(model, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        # A wrapper that was put around this later still calls it after `undo`.
        if not override.active or saves.are_running:
            return original(*args, **kwargs)
        options = signature.bind(*args, **kwargs).arguments
        options |= options.pop("kwargs", {})
        folder = args[0] if args else next(iter(options.values()))
        acts = layers.are_adapted
        if options.get("push_to_hub") and acts:
            raise ValueError(
                "save_pretrained(push_to_hub=True) of a hooked model would leave beta behind: fold() it first, or use "
                "model.push_to_hub(name)"
            )
        if options.get("is_main_process", True):
            # Before the weights, so that no folder ever has them without beta.
            Path(folder).mkdir(parents=True, exist_ok=True)
            save(hook, folder, options.get("state_dict"))
        with saves.running(), _marked(model, options.get("state_dict")) if acts else nullcontext():
            saved = original(*args, **kwargs)
        if options.get("is_main_process", True) and acts:
            _mark_files(model, Path(folder))
        return saved

    override = Override(model, name, save_pretrained, undo)


def accept_marked_weights(model: nn.Module) -> RemovableHandle:
    """Let a model load marked weights as if they had no mark, until the handle is removed."""
    handle: RemovableHandle = model.register_load_state_dict_pre_hook(_take_off_mark)
    return handle


def _take_off_mark(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    state_dict.pop(prefix + NEEDS_RESTORE, None)


def _is_of_transformers(model: object) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")  # without importing it for other models
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


@contextmanager
def _marked(model: nn.Module, weights: dict[str, Any] | None) -> Iterator[None]:
    """Mark a model while it is saved, and also `weights` if these are saved instead of its own."""
    with ExitStack() as undo:
        if has_transformers_config(model):
            setattr(model.config, MARK, RESTORE_HINT)
            undo.callback(delattr, model.config, MARK)
        if _is_of_transformers(model):
            model.register_buffer(NEEDS_RESTORE, torch.ones(1))
            undo.callback(delattr, model, NEEDS_RESTORE)
            if weights is not None:
                weights[NEEDS_RESTORE] = model.get_buffer(NEEDS_RESTORE)
                undo.callback(weights.pop, NEEDS_RESTORE, None)
        yield


def is_marked(model: nn.Module) -> bool:
    """Return True if the config of a model says that its beta is in a file."""
    return hasattr(getattr(model, "config", None), MARK)


def has_transformers_config(model: nn.Module) -> bool:
    """Return True if a model has a transformers config, which saves any attribute that is set on it."""
    return hasattr(getattr(model, "config", None), "to_json_file")


def is_marked_folder(folder: Path) -> bool:
    """Return True if a config beside weights, or that of an adapter, says that beta is in a file.

    Raises:
        ValueError: a config is damaged; the message names it.
    """
    marks = {folder / CONFIG_NAME: MARK}
    marks |= {path: NEEDS_RESTORE for path in (*folder.glob(ADAPTER_CONFIG), *folder.glob(f"*/{ADAPTER_CONFIG}"))}
    return any(path.is_file() and mark in read_config(path) for path, mark in marks.items())


def read_config(path: Path) -> dict[str, Any]:
    """Read a config file.

    Raises:
        ValueError: it is damaged; the message names it.
    """
    with reporting_damage(path, ValueError, RecursionError, remedy="take another checkpoint"):
        config = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError(f"it holds {config!r:.20} in place of a dictionary")
    return config


@contextmanager
def unmarked(model: nn.Module) -> Iterator[None]:
    """Remove the mark from the config of a model, and of parts that have their own; put it back on an error."""
    with ExitStack() as undo:
        for part in filter(is_marked, model.modules()):
            if isinstance(part.config, dict):  # a config of diffusers, which is frozen
                undo.callback(compat.replace_config, part, part.config)
                compat.replace_config(part, {key: value for key, value in part.config.items() if key != MARK})
            else:
                undo.callback(setattr, part.config, MARK, RESTORE_HINT)
                delattr(part.config, MARK)
        yield
        undo.pop_all()


def _mark_files(model: nn.Module, folder: Path) -> None:
    """Mark configs saved by PEFT and diffusers with an unknown key, of which these libraries warn on loading."""
    adapters = getattr(model, "peft_config", ["default"])  # `model` may be the config of one
    in_folder = {"default"} if not compat.saves_adapters(model) else set(adapters)  # others have subfolders
    marks = {folder / ("" if name in in_folder else name) / ADAPTER_CONFIG: NEEDS_RESTORE for name in adapters}
    if hasattr(model, "register_to_config"):  # a model of diffusers
        marks[folder / CONFIG_NAME] = MARK
    for path, mark in marks.items():
        if path.is_file():
            path.write_text(json.dumps({**json.loads(path.read_bytes()), mark: RESTORE_HINT}, indent=2, sort_keys=True))


def follow_adapters(model: nn.Module, hook: Stateful, layers: Layers, undo: ExitStack) -> None:
    """Let adapters that were added after `attach` save the state of the hook too; arguments as in `connect`.

    Their `save_pretrained` does not call that of the model, but it calls the `save_pretrained` of each adapter's
    config.
    """
    configs = vars(model).get("peft_config")  # in a user-defined model, this may be something else
    if isinstance(configs, dict) and not compat.saves_adapters(model):
        for config in configs.values():
            if "save_pretrained" not in vars(config):
                _connect(config, hook, layers, _Saves(), undo)
