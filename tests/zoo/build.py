"""Tiny models of every model type that transformers knows, and inputs for them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from zoo import facts, shrink

MODEL_TYPES = list(CONFIG_MAPPING_NAMES)
BATCH, LENGTH = 2, 12
FEATURES = (
    "num_mel_bins",
    "feature_size",
    "input_dim",
    "n_mels",
    "input_feat_per_channel",
    "feature_projection_input_dim",
)


class NoBackendError(ValueError):
    """transformers has no such attention for a model."""


def build(model_type: str, backend: str = "eager") -> PreTrainedModel:
    """The tiny model of a type, in evaluation mode, with weights that spread the scores; always the same.

    Raises:
        NoBackendError: transformers has no such attention for it.
    """
    cls = model_class(model_type)
    config = shrink.config(CONFIG_MAPPING[model_type], model_type, narrow=model_type not in facts.WIDE)
    torch.manual_seed(0)
    try:
        model = cls._from_config(config, attn_implementation=backend)
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        raise NoBackendError(f"{model_type} has no {backend} attention") from error
    strengthen(model)
    return model.eval()


def model_class(model_type: str) -> type[PreTrainedModel]:
    """The model without a head, or else the one with the shortest name."""
    kind = CONFIG_MAPPING[model_type]
    package = importlib.import_module(kind.__module__.rpartition(".")[0])
    modules = [
        importlib.import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
        if module.name.startswith("modeling_")
    ]
    classes = {
        name: cls
        for module in modules
        for name, cls in vars(module).items()
        if inspect.isclass(cls) and issubclass(cls, PreTrainedModel) and cls.__module__ == module.__name__
    }
    name = facts.CLASSES.get(model_type) or MODEL_MAPPING_NAMES.get(model_type)
    if name is not None:
        name = name if isinstance(name, str) else name[0]
        return classes.get(name) or getattr(transformers, name)
    own = [n for n, cls in classes.items() if cls.config_class is kind and not n.endswith("PreTrainedModel")]
    if not own:
        raise LookupError(f"no model has the config {kind.__name__}")

    def rank(name: str) -> tuple[bool, bool, bool, int]:
        return not name.endswith("Model"), "Backbone" in name, "For" not in name, len(name)

    return classes[min(own, key=rank)]


@torch.no_grad()
def strengthen(model: nn.Module) -> None:
    """Draw the weights anew, so that scores spread over a few units and no two heads, norms or biases are alike."""
    generator = torch.Generator().manual_seed(0)

    def noise(tensor: Tensor, scale: float) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float32).mul_(scale).to(tensor.dtype)

    embeddings = {id(m.weight): m for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or not parameter.numel():
            continue
        if id(parameter) in embeddings:
            parameter.copy_(noise(parameter, 0.5))
            if embeddings[id(parameter)].padding_idx is not None:
                parameter[embeddings[id(parameter)].padding_idx] = 0
        elif parameter.dim() >= 2:
            fan = parameter[0].numel()
            parameter.copy_(noise(parameter, fan**-0.5))
        elif name.endswith("bias"):
            parameter.copy_(noise(parameter, 0.1))
        elif not bool(parameter.isfinite().all()):
            parameter.fill_(0.5)
    for buffer in model.buffers():
        if buffer.is_floating_point() and bool(buffer.isnan().any()):
            buffer.zero_()


def inputs(model_type: str, model: PreTrainedModel) -> dict[str, Any]:
    """A batch for the model, always the same; where there is a padding mask, the second row ends in padding."""
    generator = torch.Generator().manual_seed(1234)
    given = facts.INPUTS.get(model_type)
    batch = {} if given is not None else _usual_inputs(model, generator)
    made = {**(given or {}), **facts.MORE_INPUTS.get(model_type, {})}
    return {**batch, **{name: make(generator) if callable(make) else make for name, make in made.items()}}


def _setting(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields that the config, or one of its parts, has."""
    parts = ("text_config", "vision_config", "audio_config", "encoder", "decoder", "backbone_config", "encoder_config")
    found = [config, *(part for name in parts if hasattr(part := getattr(config, name, None), "to_dict"))]
    values = (getattr(owner, name, None) for owner in found for name in names)
    return next((value for value in values if value is not None), default)


def _ids(config: Any, length: int, generator: torch.Generator) -> Tensor:
    """Above the special tokens of common vocabularies, below those of `shrink`."""
    vocabulary = _setting(config, "vocab_size", "n_vocab", default=shrink.VOCABULARY)
    high = min(vocabulary - 1, 190)
    low = 110 if high > 150 else (5 if high > 8 else 0)
    return torch.randint(low, max(high, low + 1), (BATCH, length), generator=generator)


def _image(config: Any) -> tuple[int, int, int]:
    """Channels, height and width."""
    size = _setting(config, "image_size", "img_size", "input_size", default=64)
    size = (size["height"], size["width"]) if isinstance(size, dict) else size
    height, width = (size[0], size[-1]) if isinstance(size, (list, tuple)) else (size, size)
    channels = _setting(config, "num_channels", "in_channels", "in_chans", default=3)
    return channels if isinstance(channels, int) else 3, height, width


def _features(config: Any, asked: set[str], generator: torch.Generator) -> dict[str, Tensor]:
    """Images, videos, sound and embedded tokens, as many of them as are `asked` for."""
    batch = {}

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if "pixel_values" in asked:
        batch["pixel_values"] = normal(BATCH, *_image(config))
    if "pixel_values_videos" in asked:
        frames = _setting(config, "num_frames", "frames_per_clip", default=4)
        batch["pixel_values_videos"] = normal(BATCH, 1, *_image(config)).repeat(1, frames, 1, 1, 1)
    if "input_features" in asked:
        batch["input_features"] = normal(BATCH, 64, _setting(config, *FEATURES, default=80))
    if "input_values" in asked:
        batch["input_values"] = normal(BATCH, 8000) / 2
    width = _setting(config, "hidden_size", "d_model", "dim", default=shrink.WIDTH)
    for name in ("inputs_embeds", "hidden_states", "encoder_hidden_states"):
        if name in asked:
            batch[name] = normal(BATCH, LENGTH, width if isinstance(width, int) else shrink.WIDTH)
    return batch


def _usual_inputs(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    """What the signature of the model asks for."""
    config, main = model.config, model.main_input_name
    parameters = inspect.signature(model.forward).parameters
    required = {
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    open_ended = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    asked = {main, *required}
    batch: dict[str, Any] = {}
    if "input_ids" in parameters and ("input_ids" in asked or main not in parameters):
        batch["input_ids"] = _ids(config, LENGTH, generator)
        if "attention_mask" in parameters or open_ended:
            batch["attention_mask"] = facts.padded(BATCH, LENGTH)
    batch |= _features(config, asked, generator)
    if "attention_mask" in parameters and asked & {"inputs_embeds", "hidden_states", "encoder_hidden_states"}:
        batch.setdefault("attention_mask", facts.padded(BATCH, LENGTH))
    if "decoder_input_ids" in parameters:
        batch["decoder_input_ids"] = _ids(config, 8, generator)
    if "bbox" in parameters and "input_ids" in parameters:
        corners = torch.randint(0, 50, (BATCH, LENGTH, 4), generator=generator)
        corners[..., 2:] += corners[..., :2]
        batch["bbox"] = corners
    if "use_cache" in parameters:
        batch["use_cache"] = False
    if "attention_mask" in required:
        batch.setdefault("attention_mask", torch.ones(BATCH, LENGTH, dtype=torch.long))
    return batch
