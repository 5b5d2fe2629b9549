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
    inspect.add_argument(
        "model", help="a folder with a config.json, or a name on the Hugging Face Hub; weights are not read"
    )
    options = parser.parse_args(arguments)
    try:
        print(report(options.model))
    except (OSError, ValueError) as error:
        print(f"betahook inspect: {error}", file=sys.stderr)
        return 1
    return 0


def report(name: str) -> str:
    """Report what `attach` finds in the model that a config describes, of a folder or of a name on the Hub.

    Raises:
        OSError: there is no config.
        ValueError: betahook cannot attach; the message says why.
    """
    if (reason := obstacle(name)) is not None:
        raise FileNotFoundError(f"{name} {reason}")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        architecture = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            model: PreTrainedModel = (
                architecture(config) if architecture else AutoModel.from_config(config, trust_remote_code=False)
            )
    except OSError as error:
        if Path(name).exists():
            raise
        raise OSError(
            f"{name} is no folder on this machine, and no config of it could be read from the Hugging Face Hub. {error}"
        ) from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{name} needs code of its own (auto_map in config.json), which inspect does not run; load the model in "
            'Python and print(betahook.attach(model, controller="monitor"))'
        ) from error
    marked = checkpoint.is_marked(model)
    has_state = Path(name, checkpoint.FILE).exists()
    steps = f" after {checkpoint.read(name)['steps']} steps" if has_state else ""
    if has_state:
        checkpoint.check(name)  # with the weights beside it
    with checkpoint.unmarked(model), betahook.attach(model, controller="monitor") as hook:
        layers = "1 attention layer" if len(hook.layers) == 1 else f"{len(hook.layers)} attention layers"
        lines = [f"{type(model).__name__}: betahook attaches to {layers}"]
        if marked:
            lines.append(f"  saved with beta beside the weights{steps}: load it with betahook.restore(model, folder)")
        for layer in hook.layers.values():
            lines.append(f"  {layer.name}: {layer.heads} heads of {layer.head_dim}{places(layer)}")
            lines += [f"    {remark}" for remark in layer.remarks]
        lines += [f"  not reached: {name}, {reason}" for name, reason in hook.not_reached.items()]
    return "\n".join(lines)


def places(layer: betahook.AttentionLayer) -> str:
    """Name the places of W_q and W_k relative to the attention module; empty if they are not known."""
    if layer.projections is None:
        return ""
    names = {module: name for name, module in layer.module.named_modules()}
    # nn.MultiheadAttention holds them itself.
    query, key = (names[projection.module] or f"{projection.prefix}weight" for projection in layer.projections)
    return f"; W_q and W_k in {query}" if query == key else f"; W_q in {query}, W_k in {key}"


def obstacle(name: str) -> str | None:
    """Say why no config can be read from there, and what to do; None for a folder with one, or a name on the Hub."""
    folder = Path(name)
    if (folder / "config.json").is_file():
        return None
    if not folder.exists():
        is_path = folder.is_absolute() or name.startswith((".", "~")) or name.endswith("/") or len(folder.parts) > 2
        if is_path or (len(folder.parts) == 2 and folder.parent.is_dir()):
            return "does not exist; give the folder of a model, or a name on the Hugging Face Hub"
        return None
    if folder.is_file():
        return "is a file; give the folder of the model"
    if (folder / "adapter_config.json").is_file():
        return "holds an adapter and no model; give the folder of its base model"
    return "has no config.json; give the folder of a model saved by save_pretrained()"
