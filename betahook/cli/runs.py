"""Reader of a run's files: those of TensorBoard, and the checkpoints of the Trainer.

`betahook.cli.commands` calls this.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from betahook import checkpoint, compat
from betahook.cli import models
from betahook.keep.restoring import restore_saved
from betahook.report.audit import Audit
from betahook.report.findings import Findings
from betahook.report.glance import TAG
from betahook.report.summary import GROUP

FILES = "events.out.tfevents.*"
ALL = {"scalars": 0, "images": 1, "tensors": 0}
"""Sizes for TensorBoard's reader: every scalar and text, and the last picture."""

Points = list[tuple[float, float]]


@dataclass
class Run:
    """Everything found in the files of a run.

    Attributes:
        scalars: tag to points (step, value), in order of the steps: from TensorBoard, and from the Trainer's history
            for steps before the first one in TensorBoard, as after a resume.
        picture: the last picture of TensorBoard, a PNG; None without one.
        words: the last findings in words, as Markdown; empty without any.
        checkpoints: step to the state of the hook in a checkpoint, in order.
        logs: the sources of the scalars, in words.
        remarks: remarks on what could not be read.
    """

    scalars: dict[str, Points] = field(default_factory=dict)
    picture: bytes | None = None
    words: str = ""
    checkpoints: dict[int, checkpoint.Saved] = field(default_factory=dict)
    logs: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def curve(self, *tags: str) -> Points:
        """Return the points of the first of several tags that is there; empty if none is."""
        return next((self.scalars[tag] for tag in tags if tag in self.scalars), [])


def read(folder: str) -> Run:
    """Read a folder of event files, of checkpoints, of both, or a checkpoint itself.

    Raises:
        FileNotFoundError: there is no such folder, or nothing of betahook in it; or something beside TensorBoard files
            is named like one but is no file, such as a broken link.
        ValueError: its checkpoints are of models with different layers.
        ImportError: there are event files, but tensorboard is not installed.
    """
    root = Path(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; give that of a run, with TensorBoard files or checkpoints")
    run = Run()
    events = [path for path in root.rglob(FILES) if path.is_file()]
    place = _read_events(root, events, run) if events else root
    _read_checkpoints(_folder_of_checkpoints(root, place), run)
    if not run.checkpoints and not run.remarks and not any(tag.startswith(f"{GROUP}/") for tag in run.scalars):
        raise FileNotFoundError(
            f"{folder} holds nothing of betahook: neither TensorBoard files with its numbers nor {checkpoint.FILE}"
        )
    return run


def _read_events(root: Path, files: list[Path], run: Run) -> Path:
    """Read the newest TensorBoard run below `root` that has numbers of betahook; return its folder, or else `root`."""
    try:
        from tensorboard.backend.event_processing import event_accumulator
    except ImportError as error:
        raise ImportError("reading TensorBoard files needs tensorboard: pip install tensorboard") from error
    accumulate: Any = event_accumulator.EventAccumulator
    newest = sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True)
    places = list(dict.fromkeys(file.parent for file in newest))
    for place in places:
        if other := next((path for path in place.glob(FILES) if not path.is_file()), None):
            raise FileNotFoundError(f"{other} is no file, and TensorBoard reads none behind it: remove or rename it")
        events = accumulate(str(place), size_guidance=ALL)
        events.Reload()
        tags = events.Tags()
        if not any(tag.startswith(f"{GROUP}/") for tag in tags["scalars"]):
            continue
        run.scalars = {
            tag: _last_run((event.step, event.value) for event in events.Scalars(tag)) for tag in tags["scalars"]
        }
        run.logs.append("TensorBoard files")
        if TAG in tags["images"]:
            run.picture = events.Images(TAG)[-1].encoded_image_string
        for tag in (tag for tag in tags["tensors"] if tag.startswith(f"{GROUP}/findings")):
            run.words = events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        if len(places) > 1:
            run.remarks.append(
                f"of {len(places)} folders with TensorBoard files, the newest that has numbers of betahook is shown, "
                f"{place}: give another one to see it"
            )
        return place
    return root


def _last_run(written: Iterable[tuple[float, float]]) -> Points:
    """Leave out points that a later run in the same folder, restarted or resumed, replaces, as TensorBoard does.

    Of points written at the steps 1, 2, 3, 2, 4, these are the first 2 and the 3.
    """
    points: Points = []
    for step, value in written:
        while points and points[-1][0] >= step:
            points.pop()
        points.append((step, value))
    return points


def _folder_of_checkpoints(root: Path, place: Path) -> Path:
    """Return the folder of the checkpoints of a TensorBoard run: the nearest one around its `place` that has any."""
    within = [folder for folder in (place, *place.parents) if folder.is_relative_to(root)]
    return next((folder for folder in within if checkpoint.finished(folder)), root)


def _read_checkpoints(root: Path, run: Run) -> None:
    here = root / checkpoint.FILE
    for folder in [root] if here.is_file() else checkpoint.finished(root):
        try:
            saved = checkpoint.read(folder)
        except ValueError as error:
            if here.is_file():
                raise
            run.remarks.append(f"left out: {error}")
            continue
        run.checkpoints[saved.state["steps"]] = saved
    if len({tuple(saved.state["layers"].items()) for saved in run.checkpoints.values()}) > 1:
        raise ValueError(f"{root} holds checkpoints of different models; give the folder of one run")
    run.checkpoints = dict(sorted(run.checkpoints.items()))
    logs = root.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{compat.TRAINER_STATE}")
    files = [file for file in (*logs, root / compat.TRAINER_STATE) if file.is_file()]
    curves: dict[str, Points] = {}
    for entry in max(map(_history, files), key=len, default=[]):
        for name, value in _numbers(entry):
            curves.setdefault(_tag(name), []).append((entry["step"], value))
    run.logs += ["the Trainer's history"] if curves else []
    for tag, points in curves.items():
        logged = run.scalars.get(tag, [])  # may begin at a resume: the files of before are in another folder
        run.scalars[tag] = [point for point in points if not logged or point[0] < logged[0][0]] + logged


def _history(file: Path) -> list[dict[str, Any]]:
    """Return the entries of the history in a state of the Trainer; empty if its process ended while writing it.

    Entries without a step, which a user's callback may have added, are left out.
    """
    try:
        state = json.loads(file.read_bytes())
    except ValueError:
        return []
    history = state.get("log_history") if isinstance(state, dict) else None
    entries = history if isinstance(history, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("step"), int)]


def _numbers(entry: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the names and values of the numbers in an entry of the history: callbacks may have written anything."""
    for name, value in entry.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


def _tag(name: str) -> str:
    """Return the tag that TensorBoard has for a name in the Trainer's history."""
    if name.startswith(f"{GROUP}/"):
        return name
    return name.replace("_", "/", 1) if name.startswith("eval_") else f"train/{name}"


def judge(run: Run) -> tuple[Findings, Audit] | None:
    """Judge the newest checkpoint that has a complete config, by the state of its hook alone.

    Returns None if there is no such checkpoint, if its config is not that of the hooked model, or if nothing was
    measured.
    """
    newest = reversed(run.checkpoints.values())
    if (saved := next((each for each in newest if models.obstacle(str(each.folder)) is None), None)) is None:
        return None
    try:
        with restore_saved(models.without_weights(str(saved.folder)), saved) as hook:
            return hook.findings(), hook.audit()
    except (OSError, ValueError, RuntimeError):
        return None
