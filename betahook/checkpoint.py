"""A hook's state in a folder: safetensors with a JSON header, never pickle, and a mark in the model's config.

While a model is hooked, its `save_pretrained` also writes the state; where beta acts, config.json says so.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from betahook.tap.override import Override

if TYPE_CHECKING:
    from betahook.hook import Hook

FILE = "betahook.safetensors"
"""Name of the file in a checkpoint folder."""
HEADER = "betahook"
TENSORS = ("beta", "beta_default", "table", "moments", "recent")
"""The tensors of a state; those of the controllers come on top."""
MARK = "betahook"
"""Config key that marks a saved model whose beta is not in its weights but in `FILE`."""
NOTE = f"beta is in {FILE}: load the model, then call betahook.restore(model, folder)"


def save(hook: Hook, folder: str | os.PathLike[str]) -> Path:
    """Write the hook's state to `FILE` in an existing folder; the file appears whole or not at all."""
    state = hook.state_dict()
    tensors = {name: state.pop(name) for name in TENSORS}
    for index, controller in enumerate(state["controllers"]):
        for name, value in controller.pop("state").items():
            tensors[f"controllers.{index}.{name}"] = value
    tensors = {name: value.contiguous().cpu() for name, value in tensors.items()}
    header = json.dumps({"state": state, "sha256": _checksum(state, tensors)})
    path = Path(folder, FILE)
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    save_file(tensors, unfinished, {HEADER: header})
    with unfinished.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    return path


def read(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What `save` wrote to a folder, as from `Hook.state_dict`; its form is checked by `Hook.load_state_dict`.

    Raises:
        FileNotFoundError: the folder has no such file.
        ValueError: the file is damaged or not betahook's; the message names it.
    """
    path = Path(folder, FILE)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: the checkpoint was saved without betahook. Load its model and begin a new run"
        )
    try:
        with safe_open(path, "pt") as file:
            header = (file.metadata() or {}).get(HEADER)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        content = None if header is None else json.loads(header)
    except (SafetensorError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); resume from an older checkpoint") from error
    if not isinstance(content, dict) or not isinstance(content.get("state"), dict):
        raise ValueError(f"{path} is no state of a hook: its header has no entry {HEADER!r} with a state")
    state: dict[str, Any] = content["state"]
    if content.get("sha256") != _checksum(state, tensors):
        raise ValueError(f"{path} is damaged (its checksum does not match); resume from an older checkpoint")
    for index, controller in enumerate(state.get("controllers", ())):
        prefix = f"controllers.{index}."
        names = [name for name in tensors if name.startswith(prefix)]
        controller["state"] = {name.removeprefix(prefix): tensors.pop(name) for name in names}
    return {**state, **tensors}


def is_begun(folder: str | os.PathLike[str]) -> bool:
    """Whether `save` was called for a folder, also if it was not finished."""
    return any(Path(folder).glob(f"{Path(FILE).stem}.*"))


def _checksum(state: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(state).encode())
    for name in sorted(tensors):
        digest.update(f"{name}{tensors[name].dtype}{list(tensors[name].shape)}".encode())
        digest.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check(state: object, own: dict[str, Any]) -> None:
    """Refuse a state that a hook cannot continue from.

    Args:
        state: anything.
        own: what the `state_dict` of the hook is, or would be after its first step.

    Raises:
        ValueError: the state has another form, or is of another version, model or controllers; the message says where.
    """
    version = state.get("version") if isinstance(state, dict) else type(state).__name__
    if not isinstance(state, dict) or type(version) is not int or version != own["version"]:
        raise ValueError(f"expected a betahook state of version {own['version']}, got {version!r}")
    for name, like in own.items():
        if not isinstance(state.get(name), type(like)) or isinstance(state[name], bool):
            found = type(state[name]).__name__ if name in state else "nothing"
            raise ValueError(f"the state is incomplete: {name} should be a {type(like).__name__}, got {found}")
    here, there = own["layers"], state["layers"]
    different = [
        name
        for name in sorted({**there, **here}, key=str)
        if name not in here or type(there.get(name)) is not int or there[name] != here[name]
    ]
    if different:
        raise ValueError(
            f"the state belongs to a model with other layers; these differ: {', '.join(map(str, different))}"
        )
    if state["options"].get("per_head") is not own["options"]["per_head"]:
        raise ValueError(f"the state belongs to a hook with {state['options']}, this one has {own['options']}")
    if not 0 <= state["skipped_steps"] <= state["steps"] < 2**53:
        raise ValueError(f"the state is damaged: {state['steps']} steps, {state['skipped_steps']} of them skipped")
    for name in TENSORS:
        _check_shape(name, state[name], own[name])
    for name in ("beta", "beta_default"):
        if not bool((state[name].isnan() | (state[name].isfinite() & (state[name] > 0))).all()):
            raise ValueError(f"the state is damaged: {name} has entries that are not positive and finite")
    rules = [controller["rule"] for controller in own["controllers"]]
    entries = [entry if isinstance(entry, dict) else {} for entry in state["controllers"]]
    given = [entry.get("rule") for entry in entries]
    if given != rules:
        raise ValueError(
            f"the state belongs to other controllers: expected {rules}, got {given}. Go on with those, or begin with "
            "others on the folded model: betahook.fold(betahook.restore(model, folder))"
        )
    for rule, entry, like in zip(rules, entries, own["controllers"], strict=True):
        memory = entry.get("state")
        if not isinstance(memory, dict) or (memory and memory.keys() != like["state"].keys()):
            raise ValueError(f"the state is damaged: the memory of {rule} is not that of {', '.join(like['state'])}")
        for name, value in memory.items():
            _check_shape(f"{name} of {rule}", value, like["state"][name])


def _check_shape(name: str, value: object, like: Tensor) -> None:
    shape = list(value.shape) if isinstance(value, Tensor) and value.is_floating_point() else None
    if shape != list(like.shape):
        raise ValueError(f"the state is incomplete: {name} should have the shape {list(like.shape)}, got {shape}")


def load(hook: Hook, folder: str | os.PathLike[str]) -> None:
    """Continue from what `save` wrote to a folder; on an error the hook is left as it was.

    Raises:
        FileNotFoundError: the folder has no such file.
        ValueError: the file is damaged, not betahook's, or of another model or other controllers; it is named.
    """
    state = read(folder)
    try:
        hook.load_state_dict(state)
    except ValueError as error:
        raise ValueError(f"{Path(folder, FILE)}: {error}") from error


def is_marked(model: nn.Module) -> bool:
    """Whether the config of a model says that its beta is in a file."""
    return hasattr(getattr(model, "config", None), MARK)


@contextmanager
def unmarked(model: nn.Module) -> Iterator[None]:
    """Take the mark from the config of a model; on an error it is put back."""
    marked = is_marked(model)
    if marked:
        delattr(model.config, MARK)
    try:
        yield
    except BaseException:
        if marked:
            setattr(model.config, MARK, NOTE)
        raise


def connect(hook: Hook, undo: ExitStack) -> None:
    """Let `save_pretrained` of the hooked model write the hook's state too, until `undo` is closed."""
    original = getattr(hook.model, "save_pretrained", None)
    if original is None:
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        if not override.active:  # a wrapper that came later goes on calling this
            return original(save_directory, *args, **kwargs)
        bound = signature.bind(save_directory, *args, **kwargs).arguments
        options = {**bound, **bound.get("kwargs", {})}
        if options.get("push_to_hub"):
            raise ValueError(
                "save_pretrained(push_to_hub=True) of a hooked model would leave beta behind: fold() it first, or use "
                "model.push_to_hub(name)"
            )
        if options.get("is_main_process", True):
            # First, so that no folder ever has the weights alone.
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            save(hook, save_directory)
        with _marked(hook):
            return original(save_directory, *args, **kwargs)

    override = Override(hook.model, "save_pretrained", save_pretrained)
    undo.callback(override.remove)


@contextmanager
def _marked(hook: Hook) -> Iterator[None]:
    """The config of the model carries the mark, if beta acts."""
    config = getattr(hook.model, "config", None)
    acts = any(bool((layer.current_gain != 1).any()) for layer in hook.layers.values())
    marks = acts and hasattr(config, "to_json_file")  # it is a config of transformers
    if marks:
        setattr(config, MARK, NOTE)
    try:
        yield
    finally:
        if marks:
            delattr(config, MARK)
