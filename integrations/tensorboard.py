"""TensorBoard pages of a hook: scalars by layer, histograms over heads, and a layout that puts together what belongs
together."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from betahook.hook import Hook

HISTOGRAMS = ("beta", "score_std", "max_logit", "entropy", "sensitivity")
"""Quantities that are also shown over the heads of a layer, as `quantity_by_head/layer`, where the heads differ."""


class TensorBoardWriter:
    """Writes what a hook measured to a TensorBoard run; also a context manager that closes at its end.

    Scalars are called `quantity/layer` (`score_std/model.layers.0.self_attn`), so that TensorBoard groups them by
    quantity; the custom-scalars tab shows them in the groups of `layout`.

    Args:
        logdir: folder of the run. It may be one that another writer uses: TensorBoard joins the files of a folder.

    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, logdir: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard is not installed: pip install tensorboard") from error
        self.writer: Any = SummaryWriter(logdir, filename_suffix=".betahook")
        self._has_layout = False

    def write(self, hook: Hook, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Write the metrics of the hook's last step as those of `step`; `metrics`, if they were read already."""
        if not self._has_layout:
            self.writer.add_custom_scalars(layout(hook.layers))
            self._has_layout = True
        for tag, value in (hook.metrics() if metrics is None else metrics).items():
            self.writer.add_scalar(tag, value, step)
        for tag, values in hook.head_metrics().items():
            quantity, layer = tag.split("/", 1)
            if quantity in HISTOGRAMS and math.isfinite(values.sum()) and values.min() < values.max():
                # A name of its own: TensorBoard shows a tag either as a scalar or as a histogram.
                self.writer.add_histogram(f"{quantity}_by_head/{layer}", values, step)
        self.writer.flush()

    def close(self) -> None:
        """Finish the file."""
        self.writer.close()

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def layout(layers: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    """The custom-scalars layout: category to chart to `["Multiline", [tag pattern, ...]]`.

    TensorBoard matches the patterns as regular expressions, from the start of a tag.
    """

    def every_layer(*quantities: str) -> list[Any]:
        return ["Multiline", [f"{quantity}/.*" for quantity in quantities]]

    measured_against_predicted = ("score_std", "predicted_std", "independent_std", "classic_std")
    return {
        "beta": {"beta by layer": every_layer("beta")},
        "score std: measured against predicted": {
            name: ["Multiline", [f"{quantity}/{re.escape(name)}$" for quantity in measured_against_predicted]]
            for name in layers
        },
        "std of W_q and W_k": {
            "std of W_q by layer": every_layer("weight_std_q"),
            "std of W_k by layer": every_layer("weight_std_k"),
        },
        "logits and attention": {
            "logit std by layer": every_layer("logit_std"),
            "max logit by layer": every_layer("max_logit"),
            "entropy by layer (nats)": every_layer("entropy"),
        },
        "sensitivity": {"dL / d log beta by layer": every_layer("sensitivity")},
    }
