"""The `betahook` command, for those who do not want to write Python."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModel, PreTrainedModel

import betahook
from betahook import checkpoint


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="betahook", description=betahook.__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {betahook.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser(
        "inspect", help="say where betahook would attach to a model, and where W_q and W_k are"
    )
    inspect.add_argument("model", type=Path, help="a saved model, a folder with a config.json; weights are not read")
    options = parser.parse_args(arguments)
    try:
        print(report(options.model))
    except (OSError, ValueError) as error:
        print(f"betahook inspect: {error}", file=sys.stderr)
        return 1
    return 0


def report(folder: Path) -> str:
    """What `attach` finds in the model that a folder's config describes.

    Raises:
        OSError: there is no config.
        ValueError: betahook cannot attach; the message says why.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} {obstacle(folder)}")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        architecture = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            model: PreTrainedModel = (
                architecture(config) if architecture else AutoModel.from_config(config, trust_remote_code=False)
            )
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{folder} needs code of its own (auto_map in config.json), which inspect does not run; load the model in "
            'Python and print(betahook.attach(model, controller="monitor"))'
        ) from error
    marked = checkpoint.is_marked(model)
    with checkpoint.unmarked(model), betahook.attach(model, controller="monitor") as hook:
        lines = [f"{type(model).__name__}: betahook attaches to {len(hook.layers)} attention layers"]
        if marked:
            lines.append("  saved with beta beside the weights: load it with betahook.restore(model, folder)")
        for layer in hook.layers.values():
            lines.append(f"  {layer.name}: {layer.heads} heads of {layer.head_dim}{places(layer)}")
            lines += [f"    {remark}" for remark in layer.remarks]
        lines += [f"  not reached: {name}, {reason}" for name, reason in hook.not_reached.items()]
    return "\n".join(lines)


def places(layer: betahook.AttentionLayer) -> str:
    """Where W_q and W_k are, in names relative to the attention module; nothing where that is not known."""
    if layer.projections is None:
        return ""
    names = {module: name for name, module in layer.module.named_modules()}
    # nn.MultiheadAttention holds them itself.
    query, key = (names[projection.module] or f"{projection.prefix}weight" for projection in layer.projections)
    return f"; W_q and W_k in {query}" if query == key else f"; W_q in {query}, W_k in {key}"


def obstacle(folder: Path) -> str:
    """Why no config can be read from there, and what to do."""
    if folder.is_file():
        return "is a file; give the folder of the model"
    if not folder.exists():
        return "does not exist; give a folder on this machine, names on the Hugging Face Hub are not looked up"
    if (folder / "adapter_config.json").is_file():
        return "holds an adapter and no model; give the folder of its base model"
    return "has no config.json; give the folder of a model saved by save_pretrained()"
