"""The fingerprint of a model's weights: a few entries of every parameter, saved with the state of its hook.

It lets `restore` and a resumed run check that weights and beta were saved together: a process that is killed in the
middle of a save leaves one of them new and the other one old. Its cost grows with the number of parameter tensors, not
with their sizes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_NAME

from betahook import compat
from betahook.models import materialise
from betahook.models.discovery import named_modules

ENTRIES = 16
"""Number of entries that are taken from each parameter, evenly spaced from the first to the last."""


def take(weights: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return some entries of every parameter by its name, each `[ENTRIES]` on the CPU in the parameter's own dtype.

    Quantised, offloaded and sharded parameters are left out, since their entries are unavailable or differ between
    ranks. So are the parameters from which PEFT computes prompts.

    Args:
        weights: a model, or the tensors of a saved one by name.
    """
    named = _parameters(weights) if isinstance(weights, nn.Module) else weights.items()
    return {name: _entries(weight) for name, weight in named if _is_at_hand(weight)}


def refuse_other_weights(fingerprint: Mapping[str, Tensor], model: nn.Module) -> None:
    """Refuse a model whose weights do not match a fingerprint.

    Raises:
        ValueError: parameters in both differ by more than their rounding to the dtype of the model.
    """
    others = _adapters_among_others(fingerprint, model)
    compared = {name: entries for name, entries in fingerprint.items() if name not in others}
    if different := _differences(compared, take(model).get):
        raise ValueError(
            f"its beta belongs to other weights than those of this {type(model).__name__}: {different}. Load those of "
            "the same folder, with from_pretrained, and change them only then: a resuming Trainer does not load what "
            "transformers saves under other names, as of ViT and Mixtral. If they are of it, its last save was "
            "interrupted: take another checkpoint"
        )


def refuse_other_files(fingerprint: Mapping[str, Tensor], folder: Path) -> None:
    """Refuse a folder whose files of weights do not match a fingerprint.

    Raises:
        ValueError: parameters in both differ.
        safetensors.SafetensorError: a file is damaged.
    """
    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(path, "pt")) for path in _weight_files(folder)]
        holders = {name: file for file in files for name in file.keys()}  # noqa: SIM118, it is not a dict

        def read(name: str) -> Tensor | None:
            # The file is memory-mapped: only these entries are read.
            return _entries(holders[name].get_tensor(name)) if name in holders else None

        if different := _differences(fingerprint, read):
            raise ValueError(
                f"its beta does not belong to the weights beside it: {different}. The last save was interrupted: take "
                "another checkpoint"
            )


def _parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    left_out = {part for module in model.modules() if _computes_prompts(module) for part in module.modules()}
    for path, module in named_modules(model):
        if module not in left_out:
            yield from module.named_parameters(path, recurse=False)


def _computes_prompts(module: nn.Module) -> bool:
    """Return True for P-tuning and prefix projection of PEFT, which saves prompts under the name of their embedding."""
    return hasattr(module, "total_virtual_tokens") or getattr(module, "prefix_projection", False)


def _adapters_among_others(fingerprint: Mapping[str, Tensor], model: nn.Module) -> set[str]:
    """Return the adapter parameters that cannot be compared, since other adapters were saved than the model has.

    PEFT saves each of several adapters in a folder of its own, and loads any of them as `default`: equal names may
    belong to different adapters.
    """
    of_adapters, own, saved = compat.parameters_of_adapters(model), defaultdict(set), defaultdict(set)
    adapters = {name: of_adapters[id(p)] for name, p in _parameters(model) if id(p) in of_adapters}
    if not adapters:
        return set()
    for name in fingerprint:
        for place, part in _split_at_each_part(name):
            saved[place].add(part)
    places = {
        name: [p for p, part in _split_at_each_part(name) if part == adapter][-1] for name, adapter in adapters.items()
    }
    for name, place in places.items():
        own[place].add(adapters[name])
    return {name for name, place in places.items() if own[place] != saved[place]}


def _split_at_each_part(name: str) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield, for each part of a dotted name, what comes before and after it, and the part itself.

    `a.b.c` gives `(("", "b.c"), "a")`, `(("a", "c"), "b")` and `(("a.b", ""), "c")`.
    """
    parts = name.split(".")
    for index, part in enumerate(parts):
        yield (".".join(parts[:index]), ".".join(parts[index + 1 :])), part


def _is_at_hand(weight: Tensor) -> bool:
    plain = type(weight.data) is Tensor and weight.is_floating_point() and not weight.is_meta
    return plain and weight.numel() > 0 and not materialise.is_in_parts(weight)


def _entries(weight: Tensor) -> Tensor:
    last = weight.numel() - 1
    places = torch.tensor([last * index // (ENTRIES - 1) for index in range(ENTRIES)], device="cpu")
    weight = torch.atleast_1d(weight.detach())  # flattening a transposed weight would copy it
    return weight[torch.unravel_index(places, weight.shape)].to("cpu", copy=True)


def _differences(expected: Mapping[str, Tensor], read: Callable[[str], Tensor | None]) -> str:
    """Describe which weights differ; empty if none does. Weights missing on one side, e.g. renamed, are skipped."""
    pairs = {name: (entries, got) for name, entries in expected.items() if (got := read(name)) is not None}
    # A weight that was loaded in another dtype is the saved one, rounded.
    found = {name: _first_difference(entries.to(got.dtype), got) for name, (entries, got) in pairs.items()}
    different = {name: numbers for name, numbers in found.items() if numbers is not None}
    if not different:
        return ""
    name, (wanted, actual) = next(iter(different.items()))
    return f"{len(different)} of {len(pairs)} differ, {name} first, expected {wanted:.9g} got {actual:.9g}"


def _first_difference(expected: Tensor, got: Tensor) -> tuple[float, float] | None:
    pairs = zip(expected.tolist(), got.tolist(), strict=True)
    return next(((a, b) for a, b in pairs if a != b and not (math.isnan(a) and math.isnan(b))), None)


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers loads: a single one, or else its shards."""
    whole, suffix = folder / SAFE_WEIGHTS_NAME, Path(SAFE_WEIGHTS_NAME).suffix
    return [whole] if whole.exists() else sorted(folder.glob(f"{whole.stem}-*-of-*{suffix}"))
