"""`attach` and the `Hook` it returns: the adapter between a model and the pure functions below it."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from betahook import checkpoint, options, theory
from betahook.control import controllers as rules
from betahook.control.controllers import Controller, Observation
from betahook.groups import HeadGroups
from betahook.layers import AttentionLayer, Layers, State
from betahook.measure import components, scores, statistics
from betahook.models.discovery import Found
from betahook.options import ControllerChoice, LayerChoice
from betahook.report.alerts import Alerts
from betahook.report.audit import Audit
from betahook.tap import install, interface

logger = logging.getLogger(__name__)

STATE_VERSION = 2


def attach(
    model: nn.Module,
    *,
    controller: ControllerChoice = "default",
    layers: LayerChoice | None = None,
    per_head: bool = False,
    interval: int = 1,
    when: Literal["training", "always"] = "training",
    alerts: Alerts | None = None,
) -> Hook:
    """Measure the attention scores of a model from now on, and let a controller adapt beta after every step.

    Nothing about the model changes but the inverse temperature of its attention, and with `controller="monitor"` not
    even that: outputs, gradients and random state are then bit-identical to those of the model alone. (One exception:
    in evaluation `nn.TransformerEncoder` loses torch's fast path, and its outputs differ by rounding.)

    Args:
        model: any model with softmax attention over q . k: that of transformers, written by hand with torch's products,
            or torch's own. Attach before wrapping it (`DistributedDataParallel`) and before compiling it.
        controller: "default", a `Search` for beta; "monitor", beta stays; a controller; or a list of
            controllers, applied in order.
        layers: which attention layers: a glob over module names, a list of globs, or a predicate `(name, module) ->
            bool`; None for all.
        per_head: one beta for each head instead of one for each layer.
        interval: measure the scores every n-th step; the sensitivity is known in every step all the same.
        when: "training" measures forwards in training mode only, "always" those in evaluation mode too.
        alerts: limits, and what to call where the metrics cross them.

    Returns:
        The hook. Call its `step()` once per optimizer step, `detach()` at the end.

    Raises:
        UnsupportedModelError: nothing in the model can be hooked, or it is tensor-parallel and its attention does not
            go through the attention interface.
        ValueError: an option has a value that makes no sense; the model is wrapped or compiled already, or was saved
            while hooked and waits for `betahook.restore`.
        RuntimeError: the model is hooked already.
        TypeError: `model` is no module, or an option has the wrong type.
    """
    options.check_model(model)
    chain = options.controllers(controller)
    options.check_settings(per_head=per_head, interval=interval, when=when, alerts=alerts)
    seen = options.find_layers(model, layers)
    return Hook(
        model, chain, seen.found, seen.not_reached, per_head=per_head, interval=interval, when=when, alerts=alerts
    )


class Hook:
    """A hooked model. Made by `attach`; as a context manager it detaches at the end.

    Attributes:
        model: the hooked model.
        layers: the hooked attention layers by module name.
        controllers: the rules that adapt beta, in order.
        steps: how often `step` was called, before a resume too.
        last_input: positional and keyword arguments of the model's last forward without a cache, on which `fold` checks
            itself; None before, and after `detach`. So that batch stays in memory; set it to None to let it go.
        not_reached: names of the modules that look like attention but are not reached, with the reason.
    """

    @torch.inference_mode(False)  # what is made in it could never be written to outside of it
    def __init__(
        self,
        model: nn.Module,
        controllers: list[Controller],
        modules: dict[str, Found],
        not_reached: dict[str, str],
        *,
        per_head: bool,
        interval: int,
        when: str,
        alerts: Alerts | None,
    ) -> None:
        # Weights that are offloaded, or not there yet, are on the meta device, where nothing can be computed.
        devices = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
        device = next(devices, torch.device("cpu"))
        widths = [found.head_dim for found in modules.values() for _ in range(found.heads)]
        state = State.create(widths, device, in_evaluation=when == "always")
        layers, start, component = [], 0, 0
        for name, found in modules.items():
            layers.append(AttentionLayer(name, found, state, start, component))
            start += found.heads
            component += found.heads * found.head_dim
        self.model = model
        self.layers = Layers(layers)
        self.controllers = controllers
        self.last_input: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.not_reached = not_reached
        self._state = state
        self._per_head = per_head
        self._interval = interval
        self._alerts = alerts
        self.steps = 0
        self._nonfinite_since = torch.zeros_like(state.beta)  # the step, from 1 on; 0 for never
        self._has_warned = False
        self._alerts_seen = 0
        self._unit_cache: dict[tuple[bool, torch.device], HeadGroups] = {}
        self._recent = torch.zeros_like(state.table)
        self._skipped_steps = 0  # of these steps, by the optimizer
        self._loss_scale = 0.0  # of the next backward; 0 for unknown
        self._overflow = scores.overflow_logit(next((p.dtype for p in model.parameters()), torch.float32))

        for layer in layers:
            layer.hook = self
        interface.acquire()
        # Called once, by detach or when the hook is collected together with its model.
        self._release = weakref.finalize(self, interface.release)
        with ExitStack() as undo:  # also where something below fails
            undo.callback(self._release)
            install.connect(model, layers, undo)
            undo.callback(model.register_forward_pre_hook(self._remember, with_kwargs=True).remove)
            checkpoint.connect(self, undo)
            self._undo = undo.pop_all()

    def detach(self) -> None:
        """Leave the model exactly as it was before `attach`; beta is the model's own again."""
        if self.attached:
            self._undo.close()
            self.last_input = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Measure no forward that runs in it, nor its backward; beta acts as before.

        For a loss whose gradients are thrown away, as those of a generator in its discriminator: the sensitivity of a
        step is that of all its backwards, and `zero_grad` takes nothing from it. Reentrant gradient checkpointing runs
        the forward that counts in the backward, which then must be in the pause too.
        """
        paused, self._state.paused = self._state.paused, True
        try:
            yield
        finally:
            self._state.paused = paused

    @property
    def attached(self) -> bool:
        """Whether the hook still acts on the model."""
        return self._release.alive

    def __enter__(self) -> Hook:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def __repr__(self) -> str:
        state = "" if self.attached else ", detached"
        lines = [f"Hook({type(self.model).__name__}, {len(self.layers)} layers, {self.controllers}{state})"]
        lines += [f"  {layer.name}: {layer.heads} heads of {layer.head_dim}" for layer in self.layers.values()]
        for layer in self.layers.values():
            lines += [f"  {layer.name}: {remark}" for remark in layer.remarks + layer.obstacles]
        lines += [f"  not reached: {name}, {reason}" for name, reason in self.not_reached.items()]
        return "\n".join(lines)

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, scaler: GradScaler | None = None) -> None:
        """Pool the statistics over ranks, run the controllers and write beta: once per optimizer step, after it.

        Args:
            scaler: the scaler of the loss in float16 training, after its `update()`. The sensitivities are divided by
                its scale; where it skipped the optimizer step, on any rank, beta stays too. It is read back to the
                host, as it does itself in every step.

        Raises:
            RuntimeError: the hook is detached, or no attention was seen before the first step.
        """
        if not self.attached:
            raise RuntimeError("step() on a detached hook: attach to the model again")
        state = self._state
        # A rank may be idle in the first step; alone, it is a sign that the tap is passed by.
        if self.steps == 0 and not (state.seen or statistics.is_distributed()):
            raise RuntimeError(
                "step() before any attention of the hooked layers was seen: run a forward of the model first. If one "
                f"ran, {interface.UNKNOWN}"
            )
        if self.steps == 0 and state.seen and state.measuring and not state.recorded:
            logger.warning(
                "no attention was measured before the first step(): the hooked layers ran in evaluation mode only, and "
                'beta stays where it is. Call model.train(), or attach(..., when="always")'
            )
        collected = state.collect()
        scale = 1.0 if scaler is None else self._scale_of_backward(scaler)
        if scale != 1:
            collected[statistics.ROW["sensitivity"]] /= scale
        *pooled, beta_default = statistics.all_reduce(collected, state.moments, state.beta_default)
        state.beta_default.copy_(beta_default)
        self._recent = table = self._latest(*pooled)
        for layer in self.layers.values() if state.measuring else ():
            layer.write_weight_sums(table, sharded=True)

        units = self._units(self._per_head)
        beta = units.first(state.current_beta)
        observed = units.observe(table)
        observation = Observation(
            beta_default=units.first(state.beta_default),
            statistics=observed,
            predicted_std=lambda: units.predicted_std(units.observe(self._with_weights(table))),
            overflow=self._overflow,
            step=self.steps - self._skipped_steps,
            spectral_ratio=lambda: torch.stack([x.spectral_ratio().to(beta) for x in self.layers.values()]).max(),
        )
        new = rules.apply(self.controllers, beta, observation)
        # Only where it moved: a beta that was set for one head survives a controller that leaves its layer alone.
        state.beta.copy_(torch.where(units.spread(new != beta), units.spread(new), state.beta))
        state.reset()
        self.last_input = _detached(self.last_input)
        self.steps += 1
        if math.isnan(scale):
            self._skipped_steps += 1
        else:  # a skipped step is nothing to warn about
            since = self._nonfinite_since.to(table.device)
            broken = units.spread(~observed.finite) & (since == 0)
            self._nonfinite_since = torch.where(broken, self.steps, since)
        state.measuring = self.steps % self._interval == 0

    def metrics(self) -> dict[str, float]:
        """What the last step measured, and beta, W_q and W_k as they are now: flat, `quantity/layer` to a number.

        Quantities: beta (the geometric mean where heads differ), score_mean, score_std, predicted_std (from W_q and
        W_k), independent_std (from the moments of q and k), classic_std (`sqrt(d_k)`), weight_std_q, weight_std_k,
        max_logit, entropy (nats), sensitivity, nonfinite (1 where a NaN, an infinity or a skipped optimizer step held
        the controllers), at_bound (1 where a beta is as far from the model's own as controllers may take it), exact (0
        where mean and std are of sampled rows).
        What was not measured is left out. Reads the device back, so call it when you log, not in every step.

        The first call after a NaN or an infinity logs a warning, the only one, with the layers and their steps.
        """
        values = self._quantities(self._units(per_head=False))
        table = torch.stack([column.double() for column in values.values()]).tolist()
        metrics = {
            f"{quantity}/{name}": number
            for quantity, row in zip(values, table, strict=True)
            for name, number in zip(self.layers, row, strict=True)
            if number == number
        }
        self._warn_of_nonfinite()
        if self._alerts is not None and self._alerts_seen < self.steps:
            self._alerts_seen = self.steps
            self._alerts.check(metrics, self.steps)
        return metrics

    def head_metrics(self) -> dict[str, Tensor]:
        """The same for each head: `quantity/layer` to a tensor `[heads]` on the CPU; NaN where nothing was measured."""
        values = self._quantities(self._units(per_head=True))
        table = torch.stack([column.double() for column in values.values()]).cpu()
        lengths = [layer.heads for layer in self.layers.values()]
        return {
            f"{quantity}/{name}": part
            for quantity, row in zip(values, table, strict=True)
            for name, part in zip(self.layers, row.split(lengths), strict=True)
        }

    def audit(self) -> Audit:
        """The assumptions (i)-(iv) behind `beta = 1/sqrt(d_k)`, layer by layer, measured against predicted.

        Raises:
            RuntimeError: nothing was measured yet.
        """
        units = self._units(per_head=False)
        table = self._latest(self._state.collect(), self._state.moments)
        if not bool((table[statistics.ROW["pairs"]] > 0).any()):
            raise RuntimeError(
                'audit() before any measurement: run a forward first (in training mode, or attach with when="always")'
            )
        return Audit.of(self.layers, units, units.observe(self._with_weights(table)))

    def state_dict(self) -> dict[str, Any]:
        """Everything that `step` depends on: tensors, numbers and strings only, ready for `torch.save`.

        A hook on the same architecture with the same controllers that loads it goes on bit-identically.
        """
        state = self._state
        return {
            "version": STATE_VERSION,
            "layers": {name: layer.heads for name, layer in self.layers.items()},
            "options": {
                "per_head": self._per_head,
                "interval": self._interval,
                "when": "always" if state.in_evaluation else "training",
            },
            "steps": self.steps,
            "skipped_steps": self._skipped_steps,
            "loss_scale": self._loss_scale,
            "beta": state.beta.clone(),
            "beta_default": state.beta_default.clone(),
            "table": state.collect(),
            "moments": state.moments.clone(),
            "recent": self._recent.clone(),
            "controllers": [
                {"rule": repr(controller), "state": {name: value.clone() for name, value in controller.state.items()}}
                for controller in self.controllers
            ],
        }

    @torch.inference_mode(False)
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned; on an error nothing is changed.

        Raises:
            ValueError: the state is damaged, or of another version, other layers or other controllers; the message says
                which.
        """
        own, like = self._state, self.state_dict()
        start = self._units(self._per_head).first(own.current_beta)
        for controller, entry in zip(self.controllers, like["controllers"], strict=True):
            entry["state"] = entry["state"] or controller.start(start)
        checkpoint.check(state, like)

        tensors = (own.beta, own.beta_default, own.table, own.moments, self._recent)
        for tensor, name in zip(tensors, checkpoint.TENSORS, strict=True):
            tensor.copy_(state[name])
        own.probe.grad = own.table[statistics.ROW["sensitivity"]].to(own.probe)
        for controller, entry, known in zip(self.controllers, state["controllers"], like["controllers"], strict=True):
            memory = entry["state"]
            controller.state = {name: memory[name].to(start.device, copy=True) for name in known["state"] if memory}
        self.steps, self._skipped_steps, self._loss_scale = state["steps"], state["skipped_steps"], state["loss_scale"]
        # What is known of steps that now lie ahead again says nothing of them.
        forgotten = self._nonfinite_since > self.steps
        self._nonfinite_since.masked_fill_(forgotten, 0)
        self._has_warned = self._has_warned and not bool(forgotten.any())
        self._alerts_seen = min(self._alerts_seen, self.steps)
        own.measuring = self.steps % self._interval == 0

    def _latest(self, table: Tensor, component_sums: Tensor) -> Tensor:
        """`table` with what the moments of q and k say, and what was last measured of idle heads."""
        components.describe(table, component_sums, self._state.widths)
        return statistics.keep_measured(table, self._recent.to(table))

    def _with_weights(self, table: Tensor) -> Tensor:
        """`table` with W_q and W_k as they are now; the sharded ones are in it since the step, where all ranks met."""
        table = table.clone()
        for layer in self.layers.values():
            layer.write_weight_sums(table)
        return table

    def _scale_of_backward(self, scaler: GradScaler) -> float:
        """What the loss of this step was multiplied by; NaN if the optimizer step was skipped."""
        state = scaler.state_dict()
        if not state:
            return 1.0  # disabled
        before, self._loss_scale = self._loss_scale, float(state["scale"])
        if state["_growth_tracker"] > 0:
            return self._loss_scale
        # The scaler counts anew: its scale fell as it skipped a step, or grew as it skipped none for long.
        return before if 0 < before <= self._loss_scale else math.nan

    def _remember(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("past_key_values") is None:  # a cache has moved on when it is used again
            self.last_input = args, kwargs

    def _warn_of_nonfinite(self) -> None:
        if self._has_warned:
            return
        heads = self._nonfinite_since.cpu().split([layer.heads for layer in self.layers.values()])
        first = {
            name: int(since[since > 0].min()) for name, since in zip(self.layers, heads, strict=True) if since.any()
        }
        if first:
            self._has_warned = True
            places = [f"{name} in step {first[name]}" for name in sorted(first, key=first.__getitem__)]
            others = f" and {len(places) - 3} other layers" if len(places) > 3 else ""
            logger.warning(
                "NaN or infinity in the scores or gradients of %s%s: beta stays where it was",
                ", ".join(places[:3]),
                others,
            )

    def _units(self, per_head: bool) -> HeadGroups:
        key = (per_head, self._state.table.device)
        if key not in self._unit_cache:
            self._unit_cache[key] = HeadGroups.of(self.layers, per_head=per_head, device=key[1])
        return self._unit_cache[key]

    def _quantities(self, units: HeadGroups) -> dict[str, Tensor]:
        """What `metrics` reports, `[units]` each."""
        table = self._with_weights(self._recent.to(self._state.table))
        observed = units.observe(table)
        beta = self._state.current_beta

        def measured(values: Tensor) -> Tensor:
            return values.to(table).masked_fill(observed.count == 0, torch.nan)

        return {
            "beta": units.geometric_mean(beta),
            "score_mean": observed.mean,
            "score_std": observed.std,
            "predicted_std": units.predicted_std(observed),
            "independent_std": observed.independent_std,
            "classic_std": theory.classic_std(units.head_dim),
            "weight_std_q": observed.weight_std_q,
            "weight_std_k": observed.weight_std_k,
            "max_logit": observed.max_logit,
            "entropy": observed.entropy,
            "sensitivity": measured(observed.sensitivity),
            "nonfinite": measured(~observed.finite),
            "at_bound": units.largest(rules.at_bound(beta, self._state.beta_default).to(table)),
            "exact": measured(observed.exact),
        }


def _detached(nested: Any) -> Any:
    """The same arguments without the graphs of their tensors."""
    if isinstance(nested, Tensor):
        return nested.detach()
    if type(nested) is dict:
        return {name: _detached(item) for name, item in nested.items()}
    return tuple(_detached(item) for item in nested) if type(nested) is tuple else nested
