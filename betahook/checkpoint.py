"""A hook's state in a file: safetensors with a JSON header, never pickle."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from betahook.hook import Hook

FILE = "betahook.safetensors"
"""Name of the file in a checkpoint folder."""
HEADER = "betahook"


def save(hook: Hook, folder: str | os.PathLike[str]) -> Path:
    """Write the hook's state to `FILE` in an existing folder; the file appears whole or not at all."""
    state = hook.state_dict()
    tensors = {name: state.pop(name) for name in ("beta", "beta_default", "sums", "recent")}
    for index, controller in enumerate(state["controllers"]):
        for name, value in controller.pop("state").items():
            tensors[f"controllers.{index}.{name}"] = value
    path = Path(folder, FILE)
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    save_file(
        {name: value.contiguous().cpu() for name, value in tensors.items()}, unfinished, {HEADER: json.dumps(state)}
    )
    os.replace(unfinished, path)
    return path


def load(hook: Hook, folder: str | os.PathLike[str]) -> None:
    """Continue from what `save` wrote to a folder; on an error the hook is left as it was.

    Raises:
        FileNotFoundError: the folder has no such file.
        ValueError: the file is damaged, not betahook's, or of another model or other controllers.
    """
    path = Path(folder, FILE)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: the checkpoint was saved without betahook")
    try:
        with safe_open(path, "pt") as file:
            header = (file.metadata() or {}).get(HEADER)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        state: dict[str, Any] = json.loads(header) if header is not None else {}
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}); resume from an older checkpoint") from error
    if not state:
        raise ValueError(f"{path} is no state of a hook: its header has no entry {HEADER!r}")
    try:
        for index, controller in enumerate(state.get("controllers", [])):
            prefix = f"controllers.{index}."
            controller["state"] = {
                name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)
            }
        hook.load_state_dict({**state, **tensors})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
