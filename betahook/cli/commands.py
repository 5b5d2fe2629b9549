"""The functions of the commands: each takes its command-line arguments and returns a document to show.

`betahook.cli` calls them. They raise an OSError or a ValueError that says what to do if they cannot go on.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from contextlib import suppress
from fnmatch import fnmatchcase
from inspect import signature
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import CONFIG_NAME

import betahook
from betahook import checkpoint
from betahook.cli import models, pages, runs
from betahook.examination import examine_hooked
from betahook.keep.refusals import foresee
from betahook.keep.restoring import read_for, restore_saved
from betahook.report.document import Block, Document, Table, Text
from betahook.report.names import format_factor, grouped

LEFT_BEHIND = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.ckpt*", "*.ot", "*.onnx", "*.gguf"),  # weights
    *("*.index.json", f"{Path(checkpoint.FILE).stem}.*"),
    *("trainer_state.json", "events.out.tfevents.*", "latest", "zero_to_fp32.py", ".*"),  # of the training
)
"""Files of a checkpoint that a folded model does not need. All others are copied: tokenizers may use any name."""

FOLDERS_KEPT = ("additional_chat_templates", "[0-9]_*")
"""Folders that it does need: chat templates, and the further modules of a Sentence Transformers model."""

MERGE_FIRST = (
    "in Python, load its base model and the adapter, then betahook.restore(model, folder), "
    "merged = model.merge_and_unload(), one forward of it, betahook.fold(merged)"
)
"""Advice on folding the beta of a saved adapter."""

STOPPED_EARLY = (
    "When the checkpoint was saved, beta was still on its way. If the model is worse for it, take the model's own: "
    "betahook.restore(model, folder).detach(), then model.save_pretrained(...)."
)
"""Warning after folding a beta that a controller was still moving."""


def inspect(name: str) -> Document:
    """Show what `attach` finds in the model that a config describes, and what prevents a fold; no weights are read."""
    model = models.without_weights(name)
    marked, state = checkpoint.is_marked(model), models.state(name)
    with checkpoint.unmarked(model), betahook.attach(model, controller="monitor") as hook:
        with hook.pause():
            _run_on_meta(model)
        layers, obstacles = list(hook.layers.values()), foresee(hook, from_weights=False)
        count = "1 attention layer" if len(layers) == 1 else f"{len(layers)} attention layers"
        steps = f" at step {state['steps']}" if state else ""
        saved = f"Saved with beta beside the weights{steps}: load it with betahook.restore(model, folder)"
        blocks: list[Block] = [Text(saved, strong=True)] if marked else []
        rows = [
            [
                layer.name,
                str(layer.heads),
                str(layer.head_dim),
                pages.number(layer.beta_default) or "unknown",
                *_projection_names(layer),
                obstacles.get(layer, "possible"),
            ]
            for layer in layers
        ]
        header = ["layer", "heads", "d_k", "own beta", "W_q", "W_k", "fold"]
        note = "fold checks itself on a forward: an obstacle may show only there."
        blocks.append(Table(header, rows, note=note))
        remarks = [f"{name}: {text}" for name, text in grouped((x.name, text) for x in layers for text in x.remarks)]
        remarks += [f"not reached: {path}, {reason}" for path, reason in grouped(hook.not_reached.items())]
        blocks += [Text("\n".join(remarks))] if remarks else []
    return Document(f"{type(model).__name__}: betahook attaches to {count}", blocks)


def show(folder: str) -> Document:
    """Show the beta of each layer of a checkpoint; only the state of the hook is read."""
    _check_state(folder)
    saved = checkpoint.read(folder)
    if _is_left_over(saved):
        raise ValueError(
            f"{folder}: {checkpoint.FILE} is left from an earlier save, the model is plain: beta is in the weights "
            "already, or was never changed"
        )
    state = saved.state
    made = Text(f"From {', '.join(checkpoint.makers(state))}{', and still on its way' * pages.is_on_its_way(state)}")
    return Document(f"{folder}: beta at step {state['steps']}", [pages.betas(state), made])


def report(folder: str) -> Document:
    """Show what the files of a run contain."""
    run = runs.read(folder)
    return pages.run(folder, run, runs.judge(run))


def fold(folder: str, out: str) -> Document:
    """Fold the beta of a checkpoint into its weights, and save the plain model with its tokenizer to a new folder."""
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{out} exists already; give a new folder for the plain model")
    _check_state(folder)  # first: for the folder of a run, it lists the checkpoints
    if (reason := models.obstacle(folder, for_adapter=MERGE_FIRST)) is not None:
        raise FileNotFoundError(f"{folder} {reason}")
    if not checkpoint.is_marked_folder(Path(folder)):
        raise ValueError(f"{folder} is a plain model already: beta is in the weights, or was never changed")
    model = models.with_weights(folder)
    saved = read_for(model, folder)
    hook = restore_saved(model, saved)
    gains = [layer.current_gain for layer in hook.layers.values() if not math.isnan(layer.beta)]
    with torch.no_grad():
        model(**models.an_input(model))
    betahook.fold(hook)
    _save(model, target, Path(folder))
    changed = sum(bool((gain != 1).any()) for gain in gains)
    low, high = (format_factor(float(end), 3) for end in torch.cat(gains).aminmax())
    said = (
        f"Beta, {low if low == high else f'{low} to {high}'} times the model's own, is in the weights of {changed} of "
        f"{len(hook.layers)} layers. The outputs before and after agree; the model no longer needs betahook."
    )
    blocks = [Text(said), *([Text(STOPPED_EARLY)] if pages.is_on_its_way(saved.state) else [])]
    return Document(f"{out}: a plain {type(model).__name__}", blocks)


def _save(model: PreTrainedModel, target: Path, source: Path) -> None:
    """Save a model to a new folder, with the files it needs from `source`; the folder appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as unfinished:
        made = Path(unfinished) / target.name
        with models.quiet():
            model.save_pretrained(made)
        for path in source.iterdir():
            if (made / path.name).exists():
                continue
            if path.is_file() and not _is_named(path, LEFT_BEHIND):
                shutil.copy2(path, made)
            elif path.is_dir() and _is_named(path, FOLDERS_KEPT):
                shutil.copytree(path, made / path.name)
        if target.exists():  # and is empty
            target.rmdir()
        made.rename(target)


def _is_named(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(path.name, pattern) for pattern in patterns)


def examine(name: str, text: str, *, length: int, batch: int, batches: int, pictured: bool) -> Document:
    """Run the model of a folder on windows of a text, and judge its attention."""
    if not Path(text).is_file():
        raise FileNotFoundError(f"{text} is not a file; give a file of plain text with --text")
    state = models.state(name)
    model = models.with_weights(name)
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"{type(model).__name__} reads {model.main_input_name} and no text; in Python, betahook.examine(model, "
            "batches) takes batches of any kind"
        )
    names = ["input_ids"]
    if (
        getattr(model.config, "is_encoder_decoder", False)
        and "decoder_input_ids" in signature(model.forward).parameters
    ):
        names.append("decoder_input_ids")  # few models make the decoder's input from that of the encoder
    windows = _windows(name, text, min(length, models.longest(model) or length), batch * batches)
    highest, known = int(windows.max()), models.vocabulary(model)
    if known is not None and highest >= known:
        raise ValueError(
            f"{name}: token {highest} of the tokenizer, but the model has {known}: call "
            "model.resize_token_embeddings(len(tokenizer)), or is it the tokenizer of another model?"
        )
    layers = None if state is None else lambda layer, module: layer in state["layers"]
    with checkpoint.unmarked(model), betahook.attach(model, "monitor", layers=layers, when="always") as hook:
        if state is not None:
            if state["layers"].keys() != hook.layers.keys():
                raise ValueError(f"{name}: the state of the hook belongs to other layers than those of the model")
            fresh = hook.state_dict()
            hook.load_state_dict({**fresh, "beta": state["beta"], "beta_default": state["beta_default"]})
        found = examine_hooked(hook, (dict.fromkeys(names, ids) for ids in windows.split(min(batch, len(windows)))))
    forwards = f"{found.batches} forward{'s' * (found.batches > 1)} of up to {batch} x {windows.shape[1]}"
    source = f"{windows.numel():,} tokens of {Path(text).name}, in {forwards}"
    return pages.examination(f"{name}: {type(model).__name__}", source, found, pictured=pictured)


def _windows(name: str, text: str, length: int, count: int) -> torch.Tensor:
    """Return up to `count` windows of a text, `[windows, length]` tokens; the text may be larger than the memory."""
    try:
        with models.quiet():
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name} has no tokenizer that can be loaded; save it there with tokenizer.save_pretrained(), or in Python "
            f"give betahook.examine(model, batches) tokens of your own. transformers says: {error}"
        ) from error
    # Enough to fill the windows with any tokenizer, but no more than there is: Python allocates all it is asked for.
    characters = min(16 * length * count, Path(text).stat().st_size)
    with Path(text).open(encoding="utf-8", errors="replace") as file:
        content = file.read(characters)
    if "\0" in content or content.count("\ufffd") > len(content) / 100:
        raise ValueError(f"{text} is no text in UTF-8; give a file of plain text with --text")
    ids = torch.tensor(tokenizer(content, truncation=False, verbose=False)["input_ids"])
    if len(ids) < 2:
        missing = f"has {name} a tokenizer? tokenizer.save_pretrained(folder) writes one"
        remedy = "give a longer text" if len(content) < 100 else missing
        raise ValueError(f"{text}: {len(ids)} tokens from {len(content)} characters; {remedy}")
    length = min(length, len(ids))
    return ids[: len(ids) // length * length].view(-1, length)[:count]


def _run_on_meta(model: PreTrainedModel) -> None:
    """Run a forward on the meta device, which shows the own beta of each layer that it reaches before it fails."""
    # With a cache, transformers does not search the positions for packed sequences, which needs their values.
    cached = {"use_cache": True} if "use_cache" in signature(model.forward).parameters else {}
    with suppress(Exception), torch.no_grad():  # the model's code may raise anything there
        model.eval()(**models.an_input(model), **cached)


def _projection_names(layer: betahook.AttentionLayer) -> list[str]:
    """Return the names of W_q and W_k relative to the attention module; empty if they are not known."""
    if layer.projections is None:
        return ["", ""]
    names = {module: name for name, module in layer.module.named_modules()}
    # nn.MultiheadAttention holds them itself.
    return [names[projection.module] or projection.weight for projection in layer.projections]


def _is_left_over(saved: checkpoint.Saved) -> bool:
    """Return True if the state in a folder is not that of the model there, which has no mark and other weights."""
    if not (saved.folder / CONFIG_NAME).is_file() or checkpoint.is_marked_folder(saved.folder):
        return False
    try:
        saved.check_files()
    except ValueError:
        return True
    return False


def _check_state(folder: str) -> None:
    """Refuse a folder without the state of a hook; the error lists checkpoints inside it that have one."""
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; give a checkpoint of a run with betahook")
    if (path / checkpoint.FILE).is_file():
        return
    names = (found.name for found in checkpoint.finished(path))
    inside = sorted(names, key=lambda name: (len(name), name))  # checkpoint-10 after checkpoint-9
    if inside:
        where = f"; name one of its checkpoints: {', '.join(inside)}"
    elif any((path / config).is_file() for config in (CONFIG_NAME, checkpoint.ADAPTER_CONFIG)):
        where = ": beta is in the weights already, or was never changed"
    else:
        where = f" and no {CONFIG_NAME}; give a checkpoint of a run with betahook"
    raise FileNotFoundError(f"{folder} has no {checkpoint.FILE}{where}")
