"""`Picture`: the picture at a glance of a run, drawn by `report.pictures` for notebooks, files and trackers."""

from __future__ import annotations

import io
import logging
import math
import operator
from typing import TYPE_CHECKING, Any

from betahook.report import pictures
from betahook.report.findings import Findings
from betahook.report.history import History
from betahook.report.summary import GROUP

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

TAG = f"{GROUP}/at a glance"
"""Name of the picture in every tracker."""
SPACING = 1.4
"""Factor by which the number of findings grows from one due picture to the next: some 25 pictures for 10,000."""


class Picture:
    """The picture at a glance of a run, for a notebook, a file, or any tracker that takes images. Needs matplotlib.

    Create one before the training loop and add findings in the loop::

        picture = betahook.Picture()
        for step, batch in enumerate(batches, 1):
            ...
            hook.step()
            if step % 10 == 0:
                picture.add(hook.findings(), step)
        picture  # shown if it is the last line of a notebook cell

    The picture is drawn on request, which takes a fifth of a second. However many findings it holds, it has at most 64
    columns; a column that stands for several findings shows the sharpest.

    Attributes:
        is_due: True when a tracker should draw it: after 1, 2, 3, 5, 7, 10, 14 ... findings if it always does so.
    """

    def __init__(self) -> None:
        self._history = History()
        self._drawn = 0

    @property
    def is_due(self) -> bool:
        return self._history.added >= max(1, math.ceil(self._drawn * SPACING))

    def add(self, findings: Findings, step: int | None = None) -> None:
        """Add the result of `hook.findings()` for a step of the run, by default the hook's own step.

        A step before the last one added starts the picture anew.

        Raises:
            TypeError: `findings` is not a `Findings`, or `step` is not a whole number.
        """
        if not isinstance(findings, Findings):
            raise TypeError(f"add(findings, step) takes what hook.findings() returned; got {type(findings).__name__}")
        number = findings.step if step is None else step
        self._history.add(findings, whole_number(number, "add(findings, step) takes a whole number as its step"))
        self._drawn = 0 if self._history.added == 1 else self._drawn

    def png(self) -> bytes:
        """Draw the picture as a PNG of 1200 x 760 pixels.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: no findings were added.
        """
        if self._history.latest is None:
            raise ValueError("the picture is empty: add(hook.findings()) first")
        self._drawn = self._history.added
        return pictures.draw(self._history)

    def image(self) -> Image:
        """Draw the picture as a Pillow image, which trackers accept: `wandb.Image(picture.image())`.

        Raises: as `png`.
        """
        return _decoded(self.png())

    def _repr_png_(self) -> bytes | None:
        """Show the picture in a notebook."""
        return None if self._history.latest is None else self.png()


class TrackedPicture(Picture):
    """The picture of a run that reports to a tracker; without matplotlib, it warns once instead of raising."""

    def __init__(self) -> None:
        super().__init__()
        self._has_warned = False

    def png_or_warn(self, where: str) -> bytes | None:
        """Draw the picture as a PNG; without matplotlib, return None and warn once, naming the tracker `where`."""
        try:
            return self.png()
        except ImportError as error:
            if not self._has_warned:
                logger.warning("no picture in %s: %s", where, error)
            self._has_warned = True
            return None

    def image_if_due(self, where: str) -> Image | None:
        """Draw the picture as a Pillow image if it is due, else return None; `where` is as for `png_or_warn`."""
        png = self.png_or_warn(where) if self.is_due else None
        return None if png is None else _decoded(png)


def whole_number(step: Any, wanted: str) -> int:
    """Return a step as a plain int; `wanted` begins the message of the TypeError for one that is not whole."""
    try:
        return operator.index(step)
    except TypeError as error:
        raise TypeError(f"{wanted}; got {step!r}") from error


def _decoded(png: bytes) -> Image:
    from PIL import Image

    return Image.open(io.BytesIO(png)).convert("RGB")
