"""`examine`: look at the attention of a model that is not in training, with forward passes alone.

It builds on `betahook.hook`, and the command `betahook examine` calls it. The model is left as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from betahook.hook import Hook, attach, hooks_of
from betahook.models import materialise
from betahook.models.discovery import shown_name
from betahook.models.modes import RandomState, evaluating
from betahook.options import LayerChoice
from betahook.report import precision
from betahook.report.audit import Audit
from betahook.report.findings import NAMED, Findings
from betahook.report.names import listed
from betahook.report.precision import Precision


@dataclass(frozen=True)
class Examination:
    """Everything that forward passes show about the attention of a model; prints as text.

    Attributes:
        batches: number of forward passes.
        findings: the condition of each layer in words, and of heads that differ from their layer.
        metrics: as from `Hook.metrics`, over all batches; without the sensitivity, which needs a backward pass.
        head_metrics: the same for each head, as tensors `[heads]` on the CPU.
        audit: the paper's assumptions behind 1/sqrt(d_k).
        precision: the effect of float16, bfloat16 and float8 on the scores, three entries per layer.
    """

    batches: int
    findings: Findings
    metrics: dict[str, float]
    head_metrics: dict[str, Tensor]
    audit: Audit
    precision: tuple[Precision, ...]

    def __str__(self) -> str:
        concerns = []
        for name in dict.fromkeys(each.name for each in self.precision):
            if found := [each for each in self.precision if each.name == name and each.is_concern]:
                worst = max(found, key=lambda each: each.gravity)
                layers = f"{len(found)} of {len(self.findings)} layers"
                concerns.append(f"{name}: {layers}, the worst {worst.verdict} ({shown_name(worst.layer)})")
        unknown = list(dict.fromkeys(shown_name(each.layer) for each in self.precision if each.unmeasured))
        if not concerns and len(unknown) < len(self.findings):
            concerns = [f"float16, bfloat16 and float8 would all be precise enough{' elsewhere' * bool(unknown)}"]
        if unknown:
            concerns.append(f"NaN, or not measured: {listed(unknown, NAMED)}")
        return "\n".join([str(self.findings), "", *concerns])


def examine(
    model: nn.Module, batches: Iterable[Mapping[str, Any] | Tensor], *, layers: LayerChoice | None = None
) -> Examination:
    """Look at the attention of a trained model, with forward passes in evaluation mode and without gradients.

        print(betahook.examine(model, batches))

    The largest logit is taken over all pairs. Memory does not grow with the number of batches. Afterwards the model,
    its modes and the random state are as before. One process of several may examine its model alone, on its own
    batches; but if weights are sharded, all processes must call, and each gets the statistics of all batches.

    Args:
        model: any model that `attach` accepts, not hooked.
        batches: inputs of the model, on its device: each a mapping of keyword arguments, or one tensor.
        layers: as for `attach`.

    Raises:
        ValueError: there is no batch, or as for `attach`.
        TypeError: a batch is neither a mapping nor a tensor, or `batches` is a single batch.
        RuntimeError: the model is hooked already.
    """
    if isinstance(model, nn.Module) and hooks_of(model):
        raise RuntimeError(
            f"examine() takes a model without a hook, but this {type(model).__name__} is hooked already: "
            "call findings() on its hook, or remove the hook: betahook.fold(model) keeps beta, "
            "betahook.detach(model) drops it"
        )
    with attach(model, controller="monitor", layers=layers, when="always") as hook:
        return examine_hooked(hook, batches)


@torch.no_grad()
def examine_hooked(hook: Hook, batches: Iterable[Mapping[str, Any] | Tensor]) -> Examination:
    """Examine a hooked model as it is; its hook must measure in evaluation mode and leave beta where it is."""
    if isinstance(batches, Mapping | Tensor):
        raise TypeError(f"examine() takes an iterable of batches; got one {type(batches).__name__}: put it into a list")
    count = 0
    hook._state.exact_max_logit = True  # sampled rows are the same in every batch: some positions would be in none
    hook._state.is_local = not any(map(_is_in_shards, hook.model.parameters()))
    with evaluating(hook.model), RandomState(hook.model).preserved():
        for batch in _each(batches):
            _call(hook.model, batch)
            count += 1
    if not count:
        raise ValueError("examine() got no batch: give at least one, as keyword arguments of the model or as a tensor")
    audit = hook.audit()
    hook.step()
    heads = hook.head_metrics()
    metrics = {key: value for key, value in hook.metrics().items() if not key.startswith("sensitivity/")}
    return Examination(count, hook.findings(), metrics, heads, audit, tuple(precision.judge(heads)))


def _is_in_shards(parameter: Tensor) -> bool:
    """Return whether a forward pass needs other processes for a parameter."""
    return materialise.is_sharded(parameter) or materialise.is_in_parts(parameter)


def _each(batches: Iterable[Mapping[str, Any] | Tensor]) -> Iterator[Mapping[str, Any] | Tensor]:
    try:
        return iter(batches)
    except TypeError as error:
        raise TypeError(
            f"examine(model, batches) takes an iterable of batches, such as a list or a DataLoader; got {batches!r}"
        ) from error


def _call(model: nn.Module, batch: Mapping[str, Any] | Tensor) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, Tensor):
        model(batch)
    else:
        raise TypeError(
            f"a batch must be a mapping of keyword arguments of the model, or one tensor; got {type(batch).__name__}"
        )
