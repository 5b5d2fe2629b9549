"""The file of a hook's state: safetensors with a JSON header and a checksum, never pickle.

This module handles nested dictionaries and lists with tensors in them; `betahook.checkpoint.schema` defines what they
mean. Beside the state, the file holds a fingerprint of the weights that were saved with it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as tensors_of_bytes
from safetensors.torch import save as bytes_of_tensors
from safetensors.torch import save_file
from torch import Tensor, nn

from betahook.checkpoint import fingerprint, schema
from betahook.control.memory import SEPARATOR
from betahook.measure.ranks import is_distributed

FILE = "betahook.safetensors"
"""Name of the file in a checkpoint folder."""
UNFINISHED = "unfinished-"
"""Prefix of a checkpoint folder that was never finished and that betahook has set aside."""
SHARDS = "pytorch_model_fsdp_*"
"""Glob for the names under which Accelerate saves the shards of FSDP, which have no room for a mark."""
HEADER = "betahook"
FINGERPRINT = f"fingerprint{SEPARATOR}"
"""Prefix of the tensors of the fingerprint; the name of a parameter follows."""


class ForeignStateError(ValueError):
    """The file is intact, but it holds no state that this version can read."""


class Savable(Protocol):
    """The part of a `Hook`, or of its stand-in for a part of a model, that writing the file needs."""

    model: nn.Module

    def state_dict(self) -> dict[str, Any]: ...


class Stateful(Savable, Protocol):
    """The part of a `Hook` that reading and writing the file needs."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Saved:
    """The content of a file.

    Attributes:
        place: the file, or a description of where else the state was found.
        state: as `Hook.state_dict` returns it.
        entries: the fingerprint of the weights that were saved with it; empty in a file of version 0.1.
    """

    place: str | Path
    state: dict[str, Any]
    entries: dict[str, Tensor]

    @property
    def folder(self) -> Path:
        """The folder that holds the file."""
        return Path(self.place).parent

    def fits(self, model: nn.Module) -> bool:
        """Return True if the weights of a model match the fingerprint, see `check`."""
        try:
            self.check(model)
        except ValueError:
            return False
        return True

    def check(self, model: nn.Module) -> None:
        """Check that the weights of a model match the fingerprint; only parameters in both are compared.

        Raises:
            ValueError: the weights differ.
        """
        with naming_place(self.place):
            fingerprint.refuse_other_weights(self.entries, model)

    def check_files(self) -> None:
        """Check that the files of weights beside this one match the fingerprint, as in `check`.

        Raises:
            ValueError: the weights differ, or their files are damaged.
        """
        try:
            with naming_place(self.place):
                fingerprint.refuse_other_files(self.entries, self.folder)
        except SafetensorError as error:
            raise ValueError(
                f"{self.place}: the weights beside it are damaged ({error}); take another checkpoint"
            ) from error

    def load(self, hook: Stateful) -> None:
        """Load the state into a hook; on an error, the hook does not change.

        Raises:
            ValueError: the state belongs to another model or other controllers, or was saved with other weights.
        """
        self.check(hook.model)
        with naming_place(self.place):
            hook.load_state_dict(self.state)


def save(hook: Savable, folder: str | os.PathLike[str], weights: Mapping[str, Tensor] | None = None) -> Path:
    """Write the hook's state to `FILE` in an existing folder, atomically.

    The fingerprint is that of `weights`, the saved tensors by name, or of the hook's model if `weights` is None.
    """
    header, tensors = _take_apart(hook, weights)
    path, rank = Path(folder, FILE), torch.distributed.get_rank() if is_distributed() else 0
    # One name per rank: all may save to one folder at once, and the next save of a rank replaces what a crash left.
    unfinished = path.with_suffix(f".unfinished{rank or ''}")
    save_file(tensors, unfinished, {HEADER: header})
    with unfinished.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    return path


def read(folder: str | os.PathLike[str]) -> Saved:
    """Read what `save` wrote to a folder, and convert states of older versions.

    Raises:
        FileNotFoundError: the folder has no such file.
        ValueError: the file is damaged, or not betahook's; the message names it.
        ForeignStateError: the file is intact, but of a version that this one cannot read.
    """
    path = Path(folder, FILE)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: the checkpoint was saved without betahook. Load its model and begin a new run"
        )
    with reporting_damage(path, SafetensorError), safe_open(path, "pt") as file:
        header = (file.metadata() or {}).get(HEADER)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is not a dict
    return _put_together(header, tensors, path)


def export(hook: Stateful) -> dict[str, str]:
    """Return what `save` would write, as text, for embedding in a file of another library."""
    header, tensors = _take_apart(hook)
    return {"header": header, "tensors": base64.b64encode(bytes_of_tensors(tensors)).decode("ascii")}


def read_exported(exported: dict[str, str], place: str) -> Saved:
    """Read what `export` returned; `place` says where it was found.

    Raises:
        ValueError: it is damaged, or not betahook's; the message names the place.
    """
    with reporting_damage(place, SafetensorError, KeyError, TypeError, ValueError):
        tensors = tensors_of_bytes(base64.b64decode(exported["tensors"], validate=True))
    return _put_together(exported.get("header"), tensors, place)


def finished(run: Path) -> list[Path]:
    """Return the folders inside that of a run that hold the state of a hook, except those set aside as unfinished."""
    folders = (file.parent for file in run.glob(f"*/{FILE}"))
    return [folder for folder in folders if not folder.name.startswith(UNFINISHED)]


def was_save_started(folder: str | os.PathLike[str]) -> bool:
    """Return True if `save` was called for a folder, even if it did not finish."""
    return any(Path(folder).glob(f"{Path(FILE).stem}.*"))


def has_fingerprint(folder: str | os.PathLike[str]) -> bool:
    """Return True if the file in a folder has a fingerprint of its weights, as since version 0.2.0."""
    try:
        with safe_open(Path(folder, FILE), "pt") as file:
            return any(name.startswith(FINGERPRINT) for name in file.keys())  # noqa: SIM118, it is not a dict
    except (OSError, SafetensorError):
        return False


def has_fsdp_shards(folder: Path) -> bool:
    """Return True if a checkpoint holds FSDP shards, which can be merged or loaded without a warning about beta."""
    return any(folder.glob(SHARDS))


@contextmanager
def naming_place(place: object, kind: type[ValueError] = ValueError) -> Iterator[None]:
    """Raise a ValueError again as one of this kind, with the place where the state was found in its message."""
    try:
        yield
    except ValueError as error:
        raise kind(f"{place}: {error}") from error


@contextmanager
def reporting_damage(
    place: object, *errors: type[Exception], remedy: str = "resume from an older checkpoint"
) -> Iterator[None]:
    """Raise these errors again as a ValueError that says that the file is damaged, and what to do."""
    try:
        yield
    except errors as error:
        raise ValueError(f"{place} is damaged ({error}); {remedy}") from error


def _take_apart(hook: Savable, weights: Mapping[str, Tensor] | None = None) -> tuple[str, dict[str, Tensor]]:
    """Split the state and the fingerprint into JSON, with a checksum, and tensors by name."""
    state = hook.state_dict()
    tensors = {name: value.contiguous().cpu() for name, value in _take_tensors(state, "")}
    taken = fingerprint.take(hook.model if weights is None else weights)
    tensors |= {f"{FINGERPRINT}{name}": entries for name, entries in taken.items()}
    return json.dumps({"state": state, "sha256": _checksum(state, tensors)}), tensors


def _put_together(header: str | None, tensors: dict[str, Tensor], place: str | Path) -> Saved:
    """Return what `_take_apart` split; `place` says where it was found, for messages."""
    with reporting_damage(place, ValueError, RecursionError):  # of json, or of int for too many digits
        content = None if header is None else json.loads(header)
    if not isinstance(content, dict) or not isinstance(content.get("state"), dict):
        raise ValueError(f"{place} is not the state of a hook: its header has no entry {HEADER!r} with a state")
    state: dict[str, Any] = content["state"]
    if content.get("sha256") != _checksum(state, tensors):
        raise ValueError(f"{place} is damaged (its checksum does not match); resume from an older checkpoint")
    entries = {name: tensors.pop(name) for name in list(tensors) if name.startswith(FINGERPRINT)}
    with naming_place(place, ForeignStateError):
        for name, tensor in tensors.items():
            _put_tensor(state, name, tensor)
        return Saved(place, schema.parse(state), {n.removeprefix(FINGERPRINT): x for n, x in entries.items()})


def _take_tensors(nested: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Remove the tensors from nested dictionaries and lists, and yield them with their names.

    A name is the joined keys that lead to the tensor: `controllers/0/state/NAME` for
    `state["controllers"][0]["state"][NAME]`.
    """
    for key, value in list(nested.items() if isinstance(nested, dict) else enumerate(nested)):
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
            del nested[key]
        elif isinstance(value, dict | list):
            yield from _take_tensors(value, f"{prefix}{key}{SEPARATOR}")


def _put_tensor(state: dict[str, Any], name: str, tensor: Tensor) -> None:
    """Put a tensor back where it was: its name gives the keys, see `_take_tensors`."""
    *parents, last = name.split(SEPARATOR)
    place: Any = state
    for key in parents:
        if isinstance(place, list) and key.isdecimal() and int(key) < len(place):
            place = place[int(key)]
        else:
            place = place.get(key) if isinstance(place, dict) else None
    if not isinstance(place, dict) or last in place:
        raise ValueError(f"the state is damaged: it has no place for a tensor called {name!r}")
    place[last] = tensor


def _checksum(state: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(state).encode())
    for name in sorted(tensors):
        digest.update(f"{name}{tensors[name].dtype}{list(tensors[name].shape)}".encode())
        digest.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
