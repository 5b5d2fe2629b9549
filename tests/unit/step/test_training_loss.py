"""The training loss on its way to a controller that is judged by it, and nothing of it without one."""

import copy
import math
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import numpy
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from transformers import TrainerCallback

import betahook
from betahook.control.decades import Phase
from betahook.integrations.trainer import BetaHookCallback
from betahook.measure.statistics import ROW
from betahook.step import training_loss
from support.models import build, inputs
from support.trainer import make_trainer
from support.training import LAYER, train

DECADES = betahook.Decades(window=1)


def pooled(hook):
    return training_loss.pooled(hook._state).item()


def test_the_loss_is_that_of_the_outputs_of_the_step_and_of_no_other():
    model = build("llama")
    with betahook.attach(model, controller=DECADES) as hook:
        model.eval()
        with torch.no_grad():
            model(**inputs("llama"))
        model.train()
        with hook.pause():
            model(**inputs("llama"))
        losses = [model(**inputs("llama", length)).loss for length in (24, 12)]
        sum(losses).backward()
        hook.step()
        assert pooled(hook) == pytest.approx(sum(loss.item() for loss in losses) / 2)
        last = model(**inputs("llama", 12)).loss
        hook.step()
        assert pooled(hook) == pytest.approx(last.item())


def test_shares_of_a_loss_add_up_to_that_of_the_step():
    """As the Trainer accumulates gradients: whatever the number of forwards, it is the mean over all tokens."""
    model, lengths = build("llama"), (24, 12, 20)
    with betahook.attach(model, controller=DECADES) as hook:
        for count in (3, 1, 2):  # the last steps of epochs that do not divide evenly
            batches = [inputs("llama", length) for length in lengths[:count]]
            items = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
            tokens = []
            for batch in batches:
                output = model(**batch, num_items_in_batch=items)
                output.loss.backward()
                scores, labels = output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
                tokens.append(torch.nn.functional.cross_entropy(scores, labels, reduction="none")[labels != -100])
            hook.step()
            assert pooled(hook) == pytest.approx(torch.cat(tokens).mean().item())


def test_a_share_of_the_loss_of_several_ranks_counts_for_each_of_them():
    model = build("llama")
    with betahook.attach(model, controller=DECADES) as hook:
        hook._state.loss_ranks = 3
        for options, factor in (({"num_items_in_batch": 46}, 3), ({}, 1)):
            loss = model(**inputs("llama"), **options).loss
            hook.step()
            assert pooled(hook) == pytest.approx(factor * loss.item())


@pytest.mark.parametrize(
    ("loss", "mean"),
    [(0.25, 0.25), (2, 2.0), (torch.tensor([0.0, 0.5], requires_grad=True), 0.25), (torch.tensor([1, 2]), 1.5)],
    ids=["number", "whole number", "tensor", "whole numbers"],
)
def test_a_loss_that_is_given_takes_the_place_of_that_of_the_outputs(loss, mean):
    model = build("llama")
    with betahook.attach(model, controller=DECADES) as hook:
        model(**inputs("llama")).loss.backward()
        hook.step(loss=loss)
        assert pooled(hook) == mean


def test_a_loss_that_is_given_is_recorded_for_the_default_in_its_warmup_where_it_is_finite():
    model = build("llama")
    with betahook.attach(model, controller=betahook.Search(warmup=2)) as hook:
        for loss in (1.0, math.nan, 3.0, 4.0):
            model(**inputs("llama")).loss.backward()
            hook.step(loss=loss)
            assert pooled(hook) == pytest.approx(math.nan if loss == 4 else loss, nan_ok=True)
            assert hook._state.recent.isfinite().all()  # else beta would be held


def test_what_is_no_loss_is_refused_and_the_step_can_be_repeated():
    model = build("llama")
    with betahook.attach(model, controller=DECADES) as hook:
        outputs = model(**inputs("llama"))
        outputs.loss.backward()
        with pytest.raises(
            TypeError, match=r"step\(loss=...\) takes the loss, a tensor or a number; got CausalLMOutput"
        ):
            hook.step(loss=outputs)
        assert hook.steps == 0
        hook.step(loss=numpy.float32(0.25))
        assert pooled(hook) == 0.25


def test_without_a_controller_that_looks_at_it_nothing_is_recorded():
    model = build("llama")
    before = len(model._forward_hooks)
    with betahook.attach(model, controller=betahook.Search(rise=False)) as hook:
        assert len(model._forward_hooks) == before
        model(**inputs("llama")).loss.backward()
        assert not hook._state.table[ROW["losses"]].any()
        assert math.isnan(pooled(hook))
    with betahook.attach(model, controller=[betahook.Monitor(), DECADES]):
        assert len(model._forward_hooks) == before + 1
    assert len(model._forward_hooks) == before


def test_the_default_records_it_in_the_warmup_of_a_fresh_model():
    """And needs none: nothing is refused in a model without."""
    model = build("llama")
    with betahook.attach(model, controller=betahook.Search(warmup=2)) as hook:
        for step in range(5):
            loss = model(**inputs("llama")).loss
            loss.backward()
            hook.step()
            assert pooled(hook) == pytest.approx(loss.item() if step <= 2 else math.nan, nan_ok=True)
    with betahook.attach(model) as hook:
        model(input_ids=inputs("llama")["input_ids"]).logits.sum().backward()
        hook.step()
        assert math.isnan(pooled(hook))


@dataclass(frozen=True, repr=False)
class EveryThird(betahook.Controller):
    """Looks at the loss, but not in every step; `seen` is what it saw."""

    seen: ClassVar[list[tuple[int, float]]] = []
    loss_batches = 7

    def is_due(self, step):
        return step % 3 == 2

    def update(self, beta, observation, state):
        self.seen.append((observation.step, observation.loss().item()))
        return beta, state


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 46}], ids=["whole", "share"])
def test_the_loss_is_that_of_one_step_however_many_are_pooled(options):
    model, losses = build("llama"), []
    EveryThird.seen.clear()
    with betahook.attach(model, controller=EveryThird()) as hook:
        for length in (24, 12, 20, 16, 18, 22, 14, 10, 8):
            loss = model(**inputs("llama", length), **options).loss
            loss.backward()
            losses.append(loss.item())
            hook.step()
    expected = [(0, losses[0]), (2, losses[2]), (5, losses[5]), (8, math.nan)]
    assert EveryThird.seen == [(step, pytest.approx(loss, nan_ok=True)) for step, loss in expected]


@pytest.mark.oldest_skips("its Llama does not run on the meta device")
def test_a_loss_on_the_meta_device_is_none():
    model = build("llama")
    with betahook.attach(model) as hook:
        model.to("meta")
        loss = model(**{name: value.to("meta") for name, value in inputs("llama").items()}).loss
        assert loss.is_meta
        assert not hook._state.table[ROW["losses"]].any()


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 46}], ids=["whole", "share"])
def test_a_loss_that_is_not_finite_does_not_hold_beta_where_nothing_is_judged_by_it(options):
    """Of a model that is trained by another loss, say."""

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build("llama")

        def forward(self, num_items_in_batch=None, **batch):
            output = self.inner(**batch)
            return {"loss": output.loss * math.nan, "other": output.loss}

    model = Wrapped()
    with betahook.attach(model) as hook:
        model(**inputs("llama"), **options)["other"].backward()
        hook.step()
        layer = hook.layers[f"inner.{LAYER}"]
        assert layer.beta == pytest.approx(layer.beta_default / 10**0.5)
        assert math.isnan(pooled(hook))


def test_a_model_without_a_loss_is_refused_at_the_first_step():
    model = build("llama")
    with betahook.attach(model, controller=DECADES) as hook:
        model(input_ids=inputs("llama")["input_ids"])
        message = r"Decades\(window=1\) is judged by the training loss, and the model returned none: .*step\(loss=...\)"
        with pytest.raises(RuntimeError, match=rf"{message}\. .* label_smoothing_factor"):
            hook.step()


class Strict(UserDict):
    """Its keys are attributes too; one that is missing is a KeyError."""

    def __getattr__(self, name):
        return vars(self)["data"][name]


class Returning(torch.nn.Module):
    """A model that puts loss and scores into something else."""

    def __init__(self, put):
        super().__init__()
        self.inner, self.put, self.loss = build("llama"), put, None

    def forward(self, **batch):
        output = self.inner(**batch)
        self.loss = output.loss.item()
        return self.put(output.loss, output.logits)


@pytest.mark.parametrize(
    "put",
    [
        lambda loss, scores: {"loss": loss, "scale": loss + 1},
        lambda loss, scores: OrderedDict(scale=loss + 1, loss=loss),
        lambda loss, scores: UserDict(loss=loss, scale=loss + 1),
        lambda loss, scores: Strict(loss=loss, scale=loss + 1),
        lambda loss, scores: SimpleNamespace(loss=loss, scale=loss + 1),
        lambda loss, scores: (scores, loss),
        lambda loss, scores: [loss, scores],
        lambda loss, scores: (loss, None),
        lambda loss, scores: loss,
    ],
    ids=[
        "dictionary",
        "ordered",
        "mapping",
        "strict",
        "object",
        "scores and loss",
        "loss and scores",
        "loss and nothing",
        "loss alone",
    ],
)
def test_the_loss_is_found_in_what_models_of_users_return(put):
    model = Returning(put)
    with betahook.attach(model, controller=DECADES) as hook:
        model(**inputs("llama"))
        hook.step()
        assert pooled(hook) == pytest.approx(model.loss)


def test_a_loss_on_a_mesh_is_that_of_all_its_ranks(tmp_path):
    """As tensor parallelism may return it, also before it is summed over the ranks."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = Returning(lambda loss, scores: {"loss": DTensor.from_local(loss, mesh, [Partial()])})
        with betahook.attach(model, controller=DECADES) as hook:
            model(**inputs("llama"))
            hook.step()
            assert pooled(hook) == pytest.approx(model.loss)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    "put",
    [
        lambda loss, scores: (scores, scores, loss),  # CLIP returns the logarithm of a temperature like this
        lambda loss, scores: (loss, 2 * loss),
        lambda loss, scores: (scores, scores.argmax()),
        lambda loss, scores: {"scores": scores},
        lambda loss, scores: Strict(scores=scores, scale=loss),
        lambda loss, scores: SimpleNamespace(scores=scores, scale=loss),
        lambda loss, scores: scores,
    ],
    ids=[
        "one of three",
        "two scalars",
        "an index",
        "none by that name",
        "none in a strict one",
        "none in an object",
        "scores alone",
    ],
)
def test_what_may_be_something_else_is_not_taken_for_a_loss(put):
    model = Returning(put)
    with betahook.attach(model, controller=DECADES) as hook:
        model(**inputs("llama"))
        with pytest.raises(RuntimeError, match="the model returned none"):
            hook.step()


def test_a_step_without_a_loss_is_no_batch_of_a_trial():
    model, path = build("llama"), []
    with betahook.attach(model, controller=betahook.Decades(window=1, relative=True)) as hook:
        for loss in (1.0, 1.0, None, None, 2.0):
            model(input_ids=inputs("llama")["input_ids"])  # without labels
            hook.step(loss=loss)
            path.append(round(math.log10(hook.layers[LAYER].beta / hook.layers[LAYER].beta_default), 6))
    assert path == [0, 1, 1, 1, -1]


def test_a_loss_that_is_nan_is_a_failed_trial():
    model = build("llama")
    with betahook.attach(model, controller=betahook.Decades(window=1, relative=True)) as hook:
        path = []
        for loss in (1.0, 1.0, math.nan, 2.0, 0.5, 0.5):
            model(**inputs("llama"))
            hook.step(loss=loss)
            path.append(round(math.log10(hook.layers[LAYER].beta / hook.layers[LAYER].beta_default), 6))
        assert path == [0, 1, -1, 0, 0.5, -0.5]  # 10 fails and 0.1 is worse: on around 1


@pytest.mark.parametrize(
    ("controller", "message"),
    [
        (DECADES, "NaN or infinity in the loss, or in the scores or gradients of model.layers.0.self_attn in step 1"),
        ("default", "NaN or infinity in the scores or gradients of model.layers.0.self_attn in step 1 and "),
    ],
)
def test_the_warning_of_a_nan_names_the_loss_where_it_is_judged(controller, message, caplog):
    model = build("llama")
    if controller == "default":
        torch.nn.init.constant_(model.model.layers[0].self_attn.q_proj.weight, math.nan)
    with betahook.attach(model, controller=controller) as hook:
        model(**inputs("llama")).loss.backward()
        hook.step(loss=math.nan if controller is DECADES else None)
        hook.metrics()
    assert message in caplog.text
    assert ("beta stays" in caplog.text) is (controller == "default")


def test_decades_goes_on_bit_identically():
    model = build("llama")
    hook = betahook.attach(model, controller=betahook.Decades(window=2))
    train(model, hook, 7)
    model(**inputs("llama"))  # in the middle of a step, and of a window
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(hook.state_dict())
    expected = train(model, hook, 12)
    hook.detach()

    model.load_state_dict(weights)
    with betahook.attach(model, controller=betahook.Decades(window=2)) as again:
        again.load_state_dict(state)
        assert train(model, again, 12) == expected
        assert len({beta for beta, _ in expected}) > 3


def test_the_trainer_needs_no_further_line(tmp_path):
    callback = BetaHookCallback(DECADES, on_end="keep")
    trainer = make_trainer(tmp_path, callback)
    trainer.train()
    (memory,) = callback.hook._state.memories
    assert (memory["phase"] != Phase.UNSEEN).all()
    layer = callback.hook.layers[LAYER]
    assert layer.beta != layer.beta_default
    callback.hook.detach()


def test_accumulation_in_the_trainer_does_not_change_the_loss(tmp_path):
    """16 batches by 3 leave one for the last step of each epoch."""
    callback, seen = BetaHookCallback(DECADES, on_end="keep"), []

    class Spy(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            seen.append(pooled(callback.hook))

    options = dict(gradient_accumulation_steps=3, max_steps=-1, num_train_epochs=2, logging_steps=1, learning_rate=1e-9)
    trainer = make_trainer(tmp_path, callback, **options)
    trainer.add_callback(Spy())
    trainer.train()
    callback.hook.detach()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 12
    assert seen == pytest.approx(logged, rel=1e-3)


def test_the_loop_of_accelerate_needs_no_further_line():
    GradientState._reset_state()  # which runs before this one may have left at the end of their data
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = build("llama")
    with betahook.attach(model, controller=betahook.Decades(window=1, relative=True)) as hook:
        wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        losses, path = [], []
        for length in (24, 12) * 4:
            with accelerator.accumulate(wrapped):
                loss = wrapped(**inputs("llama", length)).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if accelerator.sync_gradients:
                hook.step(accelerator.scaler)
                assert pooled(hook) == pytest.approx(sum(losses[-2:]) / 2)
                path.append(hook.layers[LAYER].beta / hook.layers[LAYER].beta_default)
        assert path[:3] == pytest.approx([1, 10, 0.1])


@pytest.mark.oldest_skips("torch cannot trace the models at all")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the same
def test_a_compiled_model_tells_its_loss():
    model = build("llama", "sdpa")
    with betahook.attach(model, controller=DECADES) as hook:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(3):
            loss = compiled(**inputs("llama", padded=False)).loss
            loss.backward()
            hook.step()
            assert pooled(hook) == pytest.approx(loss.item())
