"""`attach` and the `Hook` it returns, which ties the packages together.

`attach` checks its arguments by `betahook.options`, which finds the attention modules by `betahook.models`. A `Hook`
makes a `betahook.state`, puts the `betahook.tap` on the modules, and runs the stages of `betahook.step` in `Hook.step`.
This file says in which order, and hands out the results.
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

    Nothing about the model changes but the inverse temperature of its attention, and with `controller="monitor"` not
    even that: outputs, gradients and random state are then bit-identical to those of the model alone. (One exception:
    in evaluation `nn.MultiheadAttention`, and encoders made of it, lose torch's fast path: outputs differ by rounding.)

    Args:
        model: any model with softmax attention over q . k: that of transformers, written by hand with torch's products,
            or torch's own. Attach before wrapping it (`DistributedDataParallel`) and before compiling it.
        controller: "default", a `Search`; "monitor", beta stays; a controller; or a list of them, applied in order.
        layers: which attention layers: a glob over module names, a list of globs, or a predicate `(name, module) ->
            bool`; None for all.
        per_head: one beta for each head instead of one for each layer.
        interval: measure the scores of each layer once every `interval` steps, the layers in turn, and pool the sums at
            least as often; 1 does both in every step. All layers are measured in the first step and during a
            controller's opening. The sensitivity is measured in every step, unless no beta was set and no controller
            moves one: a layer whose turn it is not then runs as if there were no hook. Default 10, or 1 for `Variance`,
            `Cap`, `Clip` and `Alerts(max_logit=...)`, which go by the scores of every step. All ranks need the same.
        when: "training" measures forwards in training mode that run with gradients, frozen layers included; "always"
            also those in evaluation mode and under `torch.no_grad`, such as the generation of a GRPO step.
        exact_max_logit: measure the largest logit of all pairs instead of 32 query rows of a sequence, adding
            about half the cost of an attention forward. `Cap`, `Clip` and `Alerts(max_logit=...)` switch it on.
        alerts: limits, and what to call when metrics cross them; one rank alone may have them if all get `interval=`.

    Returns:
        The hook. Call its `step()` once per optimizer step, `detach()` at the end.

    Raises:
        UnsupportedModelError: nothing in the model can be hooked; it is tensor-parallel and its attention does not go
            through the attention interface; or a layer has no weights that a `Clip` could scale.
        ValueError: an option has a value that makes no sense; the model is wrapped or compiled already, or was saved
            while hooked and waits for `betahook.restore`.
        RuntimeError: the model is hooked already.
        TypeError: `model` is not a module, or an option has the wrong type.
    """
    chain, settings = options.resolve(controller, per_head, interval, when, exact_max_logit, alerts)
    options.check_model(model)
    survey = options.find_layers(model, layers)
    return Hook(survey, chain, settings, alerts)


def check_options(**given: Any) -> dict[str, Any]:
    """Return options of `attach` with the defaults of the others, checked as far as that takes no model: for callbacks.

    Raises:
        TypeError: there is no such option, or it has the wrong type.
        ValueError: an option has a value that makes no sense.
    """
    bound = inspect.signature(attach).bind(None, **given)
    bound.apply_defaults()
    every = bound.arguments
    del every["model"]
    options.resolve(**{name: value for name, value in every.items() if name != "layers"})
    options.predicate(every["layers"])
    return every


def detach(model: nn.Module) -> None:
    """Detach every hook of a model, or of parts of it, without its handle; a model without a hook stays as it is.

    Raises:
        TypeError: `model` is not a module.
    """
    for hook in hooks_of(model):
        hook.detach()


def hooks_of(model: nn.Module) -> set[Hook]:
    """Find the hooks that act in a model.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model, a torch module; got {type(model).__name__}")
    owners = (getattr(getattr(module, ATTRIBUTE, None), "owner", None) for module in model.modules())
    return {owner for owner in owners if isinstance(owner, Hook)}


class Hook(Uncopied):
    """A hooked model. Made by `attach`; as a context manager it detaches at the end.

    Attributes:
        model: the hooked model.
        layers: the hooked attention layers by module name.
        controllers: the rules that adapt beta, in order.
        settings: `per_head`, `interval`, `when` and `exact_max_logit`, see `attach`.
        last_call: the last call of the model, or of the part of it that is called, on which `fold` checks itself. It
            keeps that batch in memory; set `hook.last_call.input` to None to free it. `detach` frees it, too.
        not_reached: the modules that look like attention and cannot be hooked: their names, each with the reason.
        trained_by: after `betahook.restore`, the controllers that made this beta, in words; else empty.
    """

    @torch.inference_mode(False)  # tensors made in it could never be written to outside of it
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

        with ExitStack() as undo:  # also if something below fails
            # Called once, by detach or when the hook is collected together with its model.
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
        """Leave the model exactly as it was before `attach`; beta is the model's own again."""
        if self.attached:
            self._state.is_detached = True
            self._undo.close()
            self.last_call.input = None

    def pause(self) -> AbstractContextManager[None]:
        """Return a context manager in which no forward is measured, nor its backward; beta acts as before.

        For losses whose gradients you discard, as those of a generator's loss in its discriminator: the sensitivity
        adds up over all backward passes of a step, and `zero_grad` does not reset it. Reentrant gradient checkpointing
        runs the forward that counts in the backward, which then must be in the pause too.
        """
        return self._state.pause()

    @property
    def attached(self) -> bool:
        """True while the hook acts on the model."""
        return not self._state.is_detached

    @property
    def steps(self) -> int:
        """How often `step` was called, before a resume too."""
        return self._state.steps

    @property
    def moving(self) -> list[Controller]:
        """The controllers that are bringing beta to where they want it. Reads the device back."""
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
        """Pool the statistics over ranks, run the controllers and write beta: once per optimizer step, after it.

        Sums are pooled in the first step, every `interval` steps and for a controller; others only add sensitivities.

        Args:
            scaler: the scaler of the loss in float16 training, after its `update()`. The sensitivities are divided by
                its scale; where it skipped the optimizer step, on all ranks alike, beta stays too, unless the loss is
                not finite and a controller goes by it. It is read back to the host, as it does itself in every step.
            loss: of the training, for controllers that look at it; by default the mean `loss` of the model's outputs.

        Raises:
            RuntimeError: the hook is detached; the scaler's `update()` is yet to come; no attention was seen before the
                first step, or no loss to judge by; or ranks have different layers or options, or another beta.
            TypeError: the scaler is not a `GradScaler`, or the loss is neither a tensor nor a number.
            UnsupportedModelError: the weights of a layer do not act as `Clip` needs them to.
            Exception: any that a controller raises; beta stays, and the step counts all the same.
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
        finally:  # also where a controller raises: the next step is not to count anything twice
            stages.finish(state, self.controllers, loss_scale, self.settings.interval)
            self.last_call.release_graph()

    def metrics(self) -> dict[str, float]:
        """Report what the last steps measured, and beta, W_q and W_k as they are now: `quantity/layer` to a number.

        `MetricName` in `betahook/report/metrics.py` lists and explains the quantities. What was not measured is left
        out. Reads the device back, so call it when you log, not in every step. The first call after a NaN or an
        infinity logs a single warning, which names the layers and the steps.
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
        """Report the numbers of each head: `quantity/layer` to a tensor `[heads]` on the CPU; NaN for missing ones."""
        state = stages.refreshed(self._state, self.layers)
        unreached = warnings.find_unreached(state, self.layers, self.model)
        return metrics.by_head(state, self.layers, unreached)

    def findings(self) -> Findings:
        """Report the condition of the attention of each layer in words, since when, and what to do.

        `help(betahook.Condition)` names the conditions and their limits. The first call after a step logs one line if a
        condition began, a warning if it asks for attention. Like `metrics`, it reads the device back.
        """
        state = stages.refreshed(self._state, self.layers)
        notes = stages.explain(state, self.layers, self.controllers)
        unreached = warnings.find_unreached(state, self.layers, self.model)
        warnings.warn_of_steps(state, "findings()", unreached, self.settings.interval)
        return findings.observe(state, self.layers, notes, unreached)

    def audit(self) -> Audit:
        """Compare the assumptions (i)-(iv) behind `beta = 1/sqrt(d_k)` with what was measured, layer by layer.

        For the correlations the model runs once more on its last input: skipped without one or in multi-process runs.

        Raises:
            RuntimeError: nothing was measured yet, or every layer is left alone.
        """
        return Audit.of(self, self.layers, self._state)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that `step` depends on: tensors, numbers and strings only, ready for `torch.save`.

        A hook on the same architecture with the same controllers that loads it goes on bit-identically.
        """
        heads = {name: layer.heads for name, layer in self.layers.items()}
        return schema.dump(self._state, heads, asdict(self.settings), self.controllers, self.trained_by)

    @torch.inference_mode(False)
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned, in this version or an older one; on an error nothing is changed.

        Raises:
            ValueError: the state is damaged, of another version or layers, or of other controllers, which moved beta.
            RuntimeError: the hook is detached.
        """
        if not self.attached:
            raise RuntimeError("load_state_dict() on a detached hook: attach to the model again")
        own, parsed = self._state, schema.parse(state)
        with pretrained.unmarked(self.model):  # scripts of diffusers take the saved config too when they resume
            schema.restore(own, schema.match(parsed, self.state_dict(), own.ranges, self.controllers))
        self.trained_by = list(parsed["trained_by"])
        own.turn = stages.turn(own, self.controllers, self.settings.interval)


def _new_state(survey: Survey, settings: Settings, controllers: Sequence[Controller]) -> State:
    """Make the state of a hook on the device of its model."""
    # Weights that are offloaded, or not there yet, are on the meta device, where nothing can be computed.
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
