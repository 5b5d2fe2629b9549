"""Models for the commands: built from a config without weights, or loaded from a folder; and inputs for them.

The commands of `betahook.cli` call this. Code that comes with a model is never run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.utils import CONFIG_NAME
from transformers.utils import logging as transformers_logging

from betahook import checkpoint


def without_weights(name: str) -> PreTrainedModel:
    """Build the model of a folder, or of a name on the Hub, on the meta device.

    Raises:
        OSError: there is no config.
        ValueError: the model needs code of its own, or its config has values that transformers rejects.
    """
    with _reading(name) as config:
        architecture = _architecture(config)
        with torch.device("meta"):
            model: PreTrainedModel = (
                AutoModel.from_config(config, trust_remote_code=False)
                if architecture is AutoModel
                else architecture(config)
            )
    return model


def with_weights(name: str) -> PreTrainedModel:
    """Load the model of a folder, or of a name on the Hub, in its own dtype and evaluation mode.

    Raises:
        OSError: there is no config, or there are no weights.
        ValueError: the model needs code of its own, or its config has values that transformers rejects.
    """
    with _reading(name) as config:
        model: PreTrainedModel = _architecture(config).from_pretrained(name, dtype="auto", trust_remote_code=False)
    model.eval()
    return model


def state(name: str) -> dict[str, Any] | None:
    """Read the hook's state beside the weights in a folder; None if there is none, or none that belongs to them.

    A plain model that is saved over a hooked one leaves the old file there, but its config has no mark.
    """
    folder = Path(name)
    if not (folder / checkpoint.FILE).exists() or not checkpoint.is_marked_folder(folder):
        return None
    saved = checkpoint.read(folder)
    saved.check_files()
    return saved.state


def an_input(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Make up an input, on the device of the model.

    Raises:
        ValueError: the model takes neither tokens nor images.
    """
    if model.main_input_name == "pixel_values" and hasattr(model.config, "image_size"):
        size = model.config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        channels = getattr(model.config, "num_channels", 3)
        return {"pixel_values": torch.zeros(1, channels, height, width, device=model.device)}
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"{type(model).__name__} reads {model.main_input_name}, of which no input can be made up here: do it in "
            "Python, with a batch of your own"
        )
    embeddings: Any = model.get_input_embeddings()
    size = len(embeddings.weight)
    # Without masks: transformers would look at their values, and on the meta device of `inspect` there are none.
    inputs = {name: tokens for name, tokens in model.dummy_inputs.items() if "mask" not in name}
    return {name: tokens.to(model.device) % size for name, tokens in inputs.items()}


def longest(model: PreTrainedModel) -> int | None:
    """Return the largest number of tokens that a model has positions for; None for no limit, or -1 as in XLNet."""
    limit: int = getattr(model.config, "max_position_embeddings", None) or -1
    tables = (table for path, table in model.named_modules() if path.endswith("position_embeddings"))
    paddings = (table.padding_idx for table in tables if getattr(table, "padding_idx", None) is not None)
    # RoBERTa and its relatives count positions from the padding index plus 1.
    return limit - next(paddings, -1) - 1 if limit > 0 else None


def vocabulary(model: PreTrainedModel) -> int | None:
    """Return the number of token embeddings of a model; None if it has no table of them, as CANINE, which hashes."""
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return getattr(embeddings, "num_embeddings", None)


def obstacle(name: str, *, for_adapter: str = "give the folder of its base model") -> str | None:
    """Return why no config can be read from `name`, and what to do; None for a folder with one, or a name on the Hub.

    `for_adapter` is what the command advises for the folder of an adapter.
    """
    folder = Path(name)
    if (folder / CONFIG_NAME).is_file():
        try:
            checkpoint.read_config(folder / CONFIG_NAME)
        except ValueError as error:
            return f"cannot be read: {error}"
        return None
    if not folder.exists():
        is_path = folder.is_absolute() or name.startswith((".", "~")) or name.endswith("/") or len(folder.parts) > 2
        if is_path or (len(folder.parts) == 2 and folder.parent.is_dir()):
            return "does not exist; give the folder of a model, or a name on the Hugging Face Hub"
        return None
    if folder.is_file():
        return "is a file; give the folder of the model"
    if (folder / checkpoint.ADAPTER_CONFIG).is_file():
        return f"holds an adapter and no model; {for_adapter}"
    return f"has no {CONFIG_NAME}; give the folder of a model saved by save_pretrained()"


def _architecture(config: Any) -> Any:
    """Return the class that the config names; `AutoModel` if it names none that transformers has."""
    return getattr(transformers, (config.architectures or [""])[0], AutoModel)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and progress bars of transformers."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def _reading(name: str) -> Iterator[Any]:
    """Yield the config of a model; replace transformers' errors about a model that cannot be read by clearer ones."""
    if (reason := obstacle(name)) is not None:
        raise FileNotFoundError(f"{name} {reason}")
    try:
        with quiet():
            yield AutoConfig.from_pretrained(name, trust_remote_code=False)
    except SafetensorError as error:
        raise ValueError(f"the weights in {name} cannot be read, a file is damaged: {error}") from error
    except OSError as error:
        if Path(name).exists():
            raise
        raise OSError(
            f"{name} is not a folder on this machine, and the Hugging Face Hub gave no config of it. {error}"
        ) from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{name} needs code of its own (auto_map in {CONFIG_NAME}), which this command does not run; load it in "
            'Python and print(betahook.attach(model, controller="monitor"))'
        ) from error
    except (RuntimeError, ImportError):
        raise
    except Exception as error:  # a wrong value may raise any error, wherever transformers uses it
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"transformers makes no model of {name}; correct its {CONFIG_NAME}: {reason}") from error
