"""`attach` and the `Hook` it returns, which ties the packages together.

`attach` checks its arguments with `betahook.options`, which finds the attention modules with `betahook.models`. A
`Hook` creates a `betahook.state`, installs the `betahook.tap` on the modules, and runs the stages of `betahook.step` in
`Hook.step`. This file only defines the order of these calls and returns the results.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from betahook import options
from betahook.checkpoint import pretrained, schema
from betahook.control.base import Controller
from betahook.layer import AttentionLayer, Layers, size_of
from betahook.models.discovery import Survey, shown_name
from betahook.options import ControllerChoice, LayerChoice, Settings
from betahook.report import findings, metrics, warnings
from betahook.report.alerts import Alerts
from betahook.report.audit import Audit
from betahook.report.findings import Findings
from betahook.report.names import grouped
from betahook.state.state import State
from betahook.step import checks, first_look, stages, training_loss
from betahook.step.clipping import Clipping
from betahook.step.loss_scale import LossScale
from betahook.tap import adapters, install
from betahook.tap.copies import Uncopied
from betahook.tap.last_call import LastCall
from betahook.tap.recorder import ATTRIBUTE, Recorder


def attach(
    model: nn.Module,
    controller: ControllerChoice = "default",
    *,
    layers: LayerChoice | None = None,
    per_head: bool = False,
    interval: int | None = None,
    when: Literal["training", "always"] = "training",
    exact_max_logit: bool = False,
    alerts: Alerts | None = None,
) -> Hook:
    """Measure the attention scores of a model from now on, and let a controller adapt beta as it trains.

    Only the inverse temperature of the attention changes, and with `controller="monitor"` not even that: outputs,
    gradients and random state are then bit-identical to those without a hook. (One exception: in evaluation mode,
    `nn.MultiheadAttention` and encoders built from it lose torch's fast path, so outputs differ by rounding.)

    Args:
        model: any model with softmax attention over q . k: from transformers, written by hand with torch's products, or
            torch's own. Attach before wrapping it (`DistributedDataParallel`) and before compiling it.
        controller: "default", a `Search`; "monitor", beta stays; a controller; or a list of them, applied in order.
        layers: the attention layers to hook: a glob over module names, a list of globs, or a predicate `(name, module)
            -> bool`; None for all.
        per_head: use one beta per head instead of one per layer.
        interval: measure the scores of each layer once every `interval` steps, taking the layers in turn, and pool the
            sums at least that often; 1 does both in every step. In the first step and during a controller's opening,
            all layers are measured. The sensitivity is measured in every step, unless no beta was set and no controller
            moves one; a layer then runs as if unhooked in steps that are not its turn. Default 10, or 1 for `Variance`,
            `Cap`, `Clip` and `Alerts(max_logit=...)`, which need the scores of every step. Use the same on all ranks.
        when: "training" measures forward passes in training mode with gradients enabled, frozen layers included;
            "always" also those in evaluation mode and under `torch.no_grad`, such as the generation of a GRPO step.
        exact_max_logit: measure the largest logit over all pairs instead of over 32 query rows of a sequence, adding
            about half the cost of an attention forward pass. `Cap`, `Clip` and `Alerts(max_logit=...)` switch it on.
        alerts: limits on the metrics, with a callback; one rank alone may have alerts if all ranks pass `interval`.

    Returns:
        The hook. Call its `step()` once per optimizer step, and `detach()` at the end.

    Raises:
        UnsupportedModelError: nothing in the model can be hooked; the model is tensor-parallel and its attention does
            not use the attention interface; or a layer has no weights that a `Clip` could scale.
        ValueError: an option has an invalid value; the model is already wrapped or compiled, or was saved while hooked
            and has to be loaded with `betahook.restore`.
        RuntimeError: the model is hooked already.
        TypeError: `model` is not a module, or an option has the wrong type.
    """
    chain, settings = options.resolve(controller, per_head, interval, when, exact_max_logit, alerts)
    options.check_model(model)
    survey = options.find_layers(model, layers)
    return Hook(survey, chain, settings, alerts)


def check_options(**given: Any) -> dict[str, Any]:
    """Check options of `attach` as far as possible without a model, for callbacks; return them with all defaults.

    Raises:
        TypeError: there is no such option, or it has the wrong type.
        ValueError: an option has an invalid value.
    """
    bound = inspect.signature(attach).bind(None, **given)
    bound.apply_defaults()
    every = bound.arguments
    del every["model"]
    options.resolve(**{name: value for name, value in every.items() if name != "layers"})
    options.predicate(every["layers"])
    return every


def detach(model: nn.Module) -> None:
    """Detach every hook of a model and its parts, without needing the `Hook` objects; do nothing if there is none.

    Raises:
        TypeError: `model` is not a module.
    """
    for hook in hooks_of(model):
        hook.detach()


def hooks_of(model: nn.Module) -> set[Hook]:
    """Return the hooks attached to a model or to its parts.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model, a torch module; got {type(model).__name__}")
    owners = (getattr(getattr(module, ATTRIBUTE, None), "owner", None) for module in model.modules())
    return {owner for owner in owners if isinstance(owner, Hook)}


class Hook(Uncopied):
    """A hooked model, created by `attach`; as a context manager, it detaches on exit.

    Attributes:
        model: the hooked model.
        layers: the hooked attention layers by module name.
        controllers: the rules that adapt beta, in order.
        settings: `per_head`, `interval`, `when` and `exact_max_logit`, see `attach`.
        last_call: the last call of the model, or of the part of it that you call; `fold` verifies itself on it. It
            keeps that batch in memory; set `hook.last_call.input` to None to free it. `detach` frees it, too.
        not_reached: modules that look like attention but cannot be hooked: name to reason.
        trained_by: after `betahook.restore`, the controllers that trained this beta, in words; otherwise empty.
    """

    @torch.inference_mode(False)  # tensors created in inference mode could not be written to outside it
    def __init__(
        self, survey: Survey, controllers: Sequence[Controller], settings: Settings, alerts: Alerts | None
    ) -> None:
        self.model = model = survey.model
        self.controllers = list(controllers)
        self.settings = settings
        self.not_reached, self.trained_by = survey.not_reached, list[str]()
        self._alerts = alerts
        self._state = _new_state(survey, settings, controllers)
        named = zip(survey.found.items(), self._state.ranges, strict=True)
        parts = [(name, found, self._state, head_range) for (name, found), head_range in named]
        self.layers = Layers([AttentionLayer(*each) for each in parts])
        recorders = [Recorder(*each, owner=self, when=settings.when) for each in parts]

        with ExitStack() as undo:  # undoes everything if something below fails
            # Called once: by `detach`, or when the hook is garbage-collected together with its model.
            undo.callback(weakref.finalize(self, install.acquire(recorders)))
            install.connect(model, recorders, undo)
            adapters.connect(model, self._state, undo)
            training_loss.connect(model, self._state, controllers, undo)
            first_look.connect(self._state, self.layers, controllers, undo)
            pretrained.connect(model, self, self.layers, undo)
            self.last_call = LastCall(model, [layer.module for layer in self.layers.values()], undo)
            self._clipping = Clipping(self.layers, self._state, self.controllers)
            self._undo = undo.pop_all()

    def detach(self) -> None:
        """Remove everything that `attach` added to the model, which then applies its own beta again."""
        if self.attached:
            self._state.is_detached = True
            self._undo.close()
            self.last_call.input = None

    def pause(self) -> AbstractContextManager[None]:
        """Return a context manager in which neither forward nor backward passes are measured; beta acts as before.

        Use it for losses whose gradients you discard, such as those that a GAN's generator loss leaves in the
        discriminator: the sensitivity adds up over all backward passes of a step, and `zero_grad` does not reset it.
        Reentrant gradient checkpointing runs the measured forward pass inside the backward pass: pause that, too.
        """
        return self._state.pause()

    @property
    def attached(self) -> bool:
        """True until the hook is detached."""
        return not self._state.is_detached

    @property
    def steps(self) -> int:
        """Number of calls of `step`, including those before a resume."""
        return self._state.steps

    @property
    def moving(self) -> list[Controller]:
        """The controllers that are still moving beta to an intended value. Synchronises with the device."""
        memories = zip(self.controllers, self._state.memories, strict=True)
        return [controller for controller, memory in memories if memory and controller.is_in_transition(memory)]

    def __enter__(self) -> Hook:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        state = "" if self.attached else ", detached"
        count = f"{len(self.layers)} layer{'s' * (len(self.layers) > 1)}"
        makers = f", beta trained by {', '.join(self.trained_by)}" if self.trained_by else ""
        lines = [f"Hook({type(self.model).__name__}, {count}, {self.controllers}{makers}{state})"]
        named = [(shown_name(layer.name), layer) for layer in self.layers.values()]
        heads = [(name, f"{layer.heads} head{'s' * (layer.heads > 1)} of {layer.head_dim}") for name, layer in named]
        remarks = [(name, remark) for name, layer in named for remark in layer.remarks + layer.obstacles]
        missed = {**self.not_reached, **warnings.find_unreached(self._state, self.layers, self.model)}
        lines += [f"  {name}: {text}" for texts in (heads, remarks) for name, text in grouped(texts)]
        lines += [f"  not reached: {shown_name(name)}, {reason}" for name, reason in grouped(missed.items())]
        return "\n".join(lines)

    def step(self, scaler: GradScaler | None = None, *, loss: Tensor | float | None = None) -> None:
        """Pool the statistics over ranks, run the controllers and write beta; call it after each optimizer step.

        Sums are pooled in the first step, every `interval` steps, and whenever a controller is due; all other steps
        only add up sensitivities.

        Args:
            scaler: the gradient scaler of float16 training, after its `update()`. The sensitivities are divided by its
                scale. If it skipped the optimizer step (on all ranks alike), beta stays too, unless the loss is not
                finite and a controller judges by it. The scale is read back to the host, as the scaler itself does.
            loss: the training loss, for controllers that use it; by default the mean `loss` of the model's outputs.

        Raises:
            RuntimeError: the hook is detached; the scaler's `update()` was not called yet; no attention was seen before
                the first step, or no loss that a controller needs; or ranks differ in layers, options or beta.
            TypeError: the scaler is not a `GradScaler`, or the loss is neither a tensor nor a number.
            UnsupportedModelError: scaling a layer's weights does not act like beta, which `Clip` requires.
            Exception: any exception of a controller; beta stays as it was, and the step is counted.
        """
        state = self._state
        if not self.attached:
            raise RuntimeError("step() on a detached hook: attach to the model again")
        pretrained.follow_adapters(self.model, self, self.layers, self._undo)
        adapters.follow(self.model, state, self._undo)
        loss_scale = LossScale.read(scaler, state.loss_scale)
        training_loss.take(state, self.controllers, loss)
        checks.check(state, self.layers, self.controllers, self.settings)
        stages.add(state, self.layers, loss_scale)
        try:
            if stages.is_due(state, self.controllers, self.settings.interval, loss_scale):
                with torch.inference_mode(False), torch.no_grad(), stages.pooling(state, loss_scale) as measured:
                    stages.control(state, self.layers, self.controllers)
                    self._clipping.step(self, measured)
        finally:  # even if a controller raises, so that the next step counts nothing twice
            stages.finish(state, self.controllers, loss_scale, self.settings.interval)
            self.last_call.release_graph()

    def metrics(self) -> dict[str, float]:
        """Return what the last steps measured, with the current beta, W_q and W_k: `quantity/layer` to a number.

        `MetricName` in `betahook/report/metrics.py` lists and explains the quantities; those that were not measured are
        left out. This synchronises with the device, so call it when you log, not in every step. The first call after a
        NaN or an infinity logs a single warning, which names the layers and the steps.
        """
        state = stages.refreshed(self._state, self.layers)
        unreached = warnings.find_unreached(state, self.layers, self.model)
        values = metrics.by_layer(state, self.layers, stages.explain(state, self.layers, self.controllers))
        values = {key: value for key, value in values.items() if key.split("/", 1)[1] not in unreached}
        warnings.warn_of_steps(state, "metrics()", unreached, self.settings.interval)
        warnings.warn_of_unreached(state, unreached)
        warnings.warn_of_nonfinite(state, self.layers, self.settings.interval)
        if self._alerts is not None and state.reported.alerts_step < state.steps:
            state.reported.alerts_step = state.steps
            self._alerts.check(values, state.steps, self.layers)
        return values

    def head_metrics(self) -> dict[str, Tensor]:
        """Return the metrics of each head: `quantity/layer` to a tensor `[heads]` on the CPU; NaN if not measured."""
        state = stages.refreshed(self._state, self.layers)
        unreached = warnings.find_unreached(state, self.layers, self.model)
        return metrics.by_head(state, self.layers, unreached)

    def findings(self) -> Findings:
        """Describe the condition of each layer's attention in words, since when it holds, and what to do.

        `help(betahook.Condition)` lists the conditions and their limits. If a condition began, the first call after a
        step logs one line, as a warning if the condition is worrying. Like `metrics`, it synchronises with the device.
        """
        state = stages.refreshed(self._state, self.layers)
        notes = stages.explain(state, self.layers, self.controllers)
        unreached = warnings.find_unreached(state, self.layers, self.model)
        warnings.warn_of_steps(state, "findings()", unreached, self.settings.interval)
        return findings.observe(state, self.layers, notes, unreached)

    def audit(self) -> Audit:
        """Compare the assumptions (i)-(iv) behind `beta = 1/sqrt(d_k)` with what was measured, layer by layer.

        The correlations take another run of the model on its last input; they are skipped if it has none, and in
        multi-process runs.

        Raises:
            RuntimeError: nothing was measured yet, or every layer is left alone.
        """
        return Audit.of(self, self.layers, self._state)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that `step` depends on, as tensors, numbers and strings only, ready for `torch.save`.

        A hook with the same architecture and controllers that loads it continues bit-identically.
        """
        heads = {name: layer.heads for name, layer in self.layers.items()}
        return schema.dump(self._state, heads, asdict(self.settings), self.controllers, self.trained_by)

    @torch.inference_mode(False)
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict` of this version or an older one; if it raises, nothing has changed.

        Raises:
            ValueError: the state is damaged, of an unknown version or of other layers, or other controllers moved beta.
            RuntimeError: the hook is detached.
        """
        if not self.attached:
            raise RuntimeError("load_state_dict() on a detached hook: attach to the model again")
        own, parsed = self._state, schema.parse(state)
        with pretrained.unmarked(self.model):  # scripts of diffusers also load the saved config when they resume
            schema.restore(own, schema.match(parsed, self.state_dict(), own.ranges, self.controllers))
        self.trained_by = list(parsed["trained_by"])
        own.layers_due = stages.layers_due(own, self.controllers, self.settings.interval)


def _new_state(survey: Survey, settings: Settings, controllers: Sequence[Controller]) -> State:
    """Create the state of a hook on the device of its model."""
    # Weights that are offloaded or not loaded yet are on the meta device, where nothing can be computed.
    devices = (parameter.device for parameter in survey.model.parameters() if not parameter.is_meta)
    state = State(
        [size_of(attention) for attention in survey.found.values()],
        per_head=settings.per_head,
        controllers=len(controllers),
        device=next(devices, torch.device("cpu")),
        dtype=next((parameter.dtype for parameter in survey.model.parameters()), torch.float32),
    )
    state.exact_max_logit = settings.exact_max_logit
    state.beta_acts = any(controller.moves_beta for controller in controllers)
    return state
