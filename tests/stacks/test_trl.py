"""TRL: packed documents, reference models, generation. The blocks are those of docs/STACKS.md, section TRL."""

import random

import peft
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import betahook
from betahook.integrations.trainer import BetaHookCallback
from support.models import build
from support.pages import blocks, run

# By default TRL trains in bfloat16 and wants a GPU for it.
SFT, DPO, GRPO = (
    code.replace('"runs"', '"runs", use_cpu=True, bf16=False') for code in blocks("docs/STACKS.md", "TRL")
)
OPTIONS = dict(report_to=[], use_cpu=True, bf16=False, save_strategy="no", logging_steps=1, disable_tqdm=True)


def words(count, seed):
    generator = random.Random(seed)
    return " ".join(f"w{generator.randrange(61)}" for _ in range(count))


TEXTS = Dataset.from_list([{"text": words(2 + number % 9, number)} for number in range(24)])
PREFERENCES = Dataset.from_list(
    [{"prompt": words(4, n), "chosen": " " + words(5, 100 + n), "rejected": " " + words(5, 200 + n)} for n in range(8)]
)
PROMPTS = Dataset.from_list([{"prompt": words(4, number)} for number in range(8)])


def search():
    return betahook.Search(window=1, warmup=0, rise=False)


class Statistics(TrainerCallback):
    """Notes what was measured of each step before the hook starts the next one."""

    def __init__(self, callback):
        self.callback, self.steps = callback, []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.steps.append({name: layer.head_statistics for name, layer in self.callback.hook.layers.items()})


# As on the page, where the callback watches, and without "monitor", where beta adapts.
watching_or_adapting = pytest.mark.parametrize("controller", ['"monitor"', ""])


@watching_or_adapting
def test_sft(tokenizer, controller):
    code = SFT.replace('"monitor"', controller)
    names = run(code, model=build("llama", "sdpa"), texts=TEXTS, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="not hooked"):
        betahook.fold(names["model"])


def test_packed_documents_count_one_by_one(tokenizer, tmp_path):
    callback = BetaHookCallback("monitor", on_end="keep")
    noted = Statistics(callback)
    options = dict(packing=True, max_length=32, per_device_train_batch_size=2, max_steps=1, **OPTIONS)
    trainer = SFTTrainer(
        model=build("llama", "sdpa").double(),
        args=SFTConfig(str(tmp_path), **options),
        train_dataset=TEXTS,
        processing_class=tokenizer,
        callbacks=[callback, noted],
    )
    batches = []
    fit = trainer.training_step
    trainer.training_step = lambda model, inputs, *rest, **named: (
        batches.append({name: value for name, value in inputs.items()}) or fit(model, inputs, *rest, **named)
    )
    trainer.train()
    callback.hook.detach()
    ids, positions = batches[0]["input_ids"][0], batches[0]["position_ids"][0]
    starts = (positions == 0).nonzero().flatten().tolist()
    assert len(starts) > 3
    model = build("llama", "sdpa").double().train()
    with betahook.attach(model, controller="monitor") as hook:
        for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
            model(input_ids=ids[None, start:stop])
        for name, layer in hook.layers.items():
            packed, apart = noted.steps[0][name], layer.head_statistics
            assert torch.equal(packed.count, apart.count)
            torch.testing.assert_close(packed.std, apart.std, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(packed.mean, apart.mean, rtol=1e-5, atol=1e-5)


@watching_or_adapting
@pytest.mark.parametrize("given", [True, False])
def test_dpo(tokenizer, saved, given, controller):
    model = AutoModelForCausalLM.from_pretrained(saved)
    reference = AutoModelForCausalLM.from_pretrained(saved) if given else None
    code = DPO.replace('"monitor"', controller)
    names = run(code, model=model, reference=reference, preferences=PREFERENCES, tokenizer=tokenizer)
    reference = names["trainer"].ref_model
    before = AutoModelForCausalLM.from_pretrained(saved).state_dict()
    assert all(torch.equal(value, before[name]) for name, value in reference.state_dict().items())
    assert not hasattr(reference.config, "betahook_folded")
    if controller:
        assert not hasattr(model.config, "betahook_folded")
    else:
        assert model.config.betahook_folded["steps"] == 2


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_the_reference_of_dpo_has_no_beta(tokenizer, saved, tmp_path, kind):
    """Beta is far from the model's own, and the weights stay: only beta tells policy and reference apart."""
    callback = BetaHookCallback("monitor", on_end="keep")

    class Sharpen(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            for layer in callback.hook.layers.values():
                layer.beta = 3 * layer.beta_default

    config = peft.LoraConfig(r=2, target_modules=["q_proj"]) if kind == "adapter" else None
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(saved),
        args=DPOConfig(str(tmp_path), max_steps=2, learning_rate=0.0, per_device_train_batch_size=2, **OPTIONS),
        train_dataset=PREFERENCES,
        processing_class=tokenizer,
        callbacks=[callback, Sharpen()],
        peft_config=config,
    )
    trainer.train()
    callback.hook.detach()
    rewards = [entry["rewards/chosen"] for entry in trainer.state.log_history if "rewards/chosen" in entry]
    assert rewards[0] == pytest.approx(0.0, abs=1e-6)
    assert abs(rewards[1]) > 1e-3


def reward(completions, **kwargs):
    return [float(len(set(text.split()))) for text in completions]


@watching_or_adapting
def test_grpo(tokenizer, saved, controller):
    model = AutoModelForCausalLM.from_pretrained(saved)
    run(GRPO.replace('"monitor"', controller), model=model, reward=reward, prompts=PROMPTS, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="not hooked"):
        betahook.fold(model)


def test_the_generation_of_grpo_is_measured_only_on_request(tokenizer, saved, tmp_path):
    counts = {}
    for when in ("training", "always", "paused"):
        callback = BetaHookCallback("monitor", on_end="keep", when="training" if when == "training" else "always")
        noted = Statistics(callback)
        options = dict(num_generations=2, max_completion_length=6, max_steps=1, per_device_train_batch_size=2)
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(saved),
            reward_funcs=reward,
            args=GRPOConfig(str(tmp_path), seed=1, **options, **OPTIONS),
            train_dataset=PROMPTS,
            processing_class=tokenizer,
            callbacks=[callback, noted],
        )
        if when == "paused":
            generate = trainer.model.generate

            def paused(*args, callback=callback, generate=generate, **kwargs):
                with callback.hook.pause():
                    return generate(*args, **kwargs)

            trainer.model.generate = paused
        trainer.train()
        callback.hook.detach()
        counts[when] = [statistics.count.sum().item() for statistics in noted.steps[0].values()]
    assert counts["training"] == counts["paused"]
    assert counts["always"] > counts["training"]
