"""Many processes against one on the joined batch."""

import os
import shutil
import signal
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from filelock import FileLock
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM, TrainerControl, TrainerState

import betahook
from betahook import checkpoint
from betahook.keep import folding
from betahook.step import training_loss
from support.models import build, inputs
from support.processes import run_ranks, shard, tensor_parallel

pytestmark = pytest.mark.oldest_skips("FSDP 2 does not run on a CPU")

LAYERS = ("model.layers.0.self_attn", "model.layers.1.self_attn")


def attach(model, **options):
    search = betahook.Search(window=1, warmup=0, rise=False, opening=0.3, largest=1.0)
    return betahook.attach(model, controller=[search, betahook.Cap(1.5)], **options)


def train(network, hook, batches, rate=0.1):
    """One step of SGD for each batch; what the hook says after each."""
    optimizer = torch.optim.SGD(network.parameters(), lr=rate)
    said = []
    for batch in batches:
        network(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hook.step()
        said.append((hook.metrics(), hook.state_dict()["beta"]))
    return said


def rows(start, stop):
    return {name: x[start:stop] for name, x in inputs("llama", padded=False).items()}


def skip(layer):
    """The decoder layer does nothing, as an expert that gets no token."""
    layer.forward = lambda hidden_states, *args, **kwargs: hidden_states


def check_spectral_ratio(model, hook):
    """That of weights in shards is that of the whole ones; every rank must take part."""
    whole = build("llama")
    with torch.no_grad():
        for own, part in zip(whole.parameters(), model.parameters(), strict=True):
            own.copy_(part.full_tensor() if hasattr(part, "full_tensor") else part)
    with betahook.attach(whole) as alone:
        for name in LAYERS:
            expected = alone.layers[name].spectral_ratio().item()
            assert hook.layers[name].spectral_ratio().item() == pytest.approx(expected, rel=1e-5)


def even(rank, steps, **options):
    """One row of the batch per rank, or both without ranks."""
    model = build("llama")
    hook = attach(model, **options)
    network = model if rank is None else DistributedDataParallel(model)
    batch = rows(0, 2) if rank is None else rows(rank % 2, rank % 2 + 1)
    return train(network, hook, [batch] * steps)


def uneven(rank, steps):
    """The last batch of the first rank has twice the tokens of the others'; the weights stay."""
    model = build("llama")
    hook = attach(model)
    long, short = inputs("llama", 24, padded=False), inputs("llama", 12, padded=False)
    return train(DistributedDataParallel(model), hook, [long] * (steps - 1) + [short if rank else long], rate=0.0)


def idle(rank, steps):
    """The second rank never uses the second layer."""
    model = build("llama")
    hook = attach(model)
    if rank:
        skip(model.model.layers[1])
    return train(DistributedDataParallel(model, find_unused_parameters=True), hook, [rows(0, 2)] * steps)


def judged(rank, steps):
    """Decades, by the loss of all rows."""
    model = build("llama")
    hook = betahook.attach(model, controller=betahook.Decades(window=1))
    network = model if rank is None else DistributedDataParallel(model)
    batch = rows(0, 2) if rank is None else rows(rank % 2, rank % 2 + 1)
    *said, (metrics, beta) = train(network, hook, [batch] * steps, rate=0.0)
    return [*said, (metrics | {"loss": training_loss.pooled(hook._state).item()}, beta)]


def sharded(rank, steps, attach_first):
    """FSDP 2."""
    model = build("llama")
    hook = attach(model) if attach_first else None
    shard(model)
    hook = hook or attach(model)
    said = train(model, hook, [rows(rank % 2, rank % 2 + 1)] * steps)
    layer = hook.layers[LAYERS[0]]
    assert layer.weight_std_q > 0  # as the last step read it: one rank alone must not wait for the others
    check_spectral_ratio(model, hook)
    return said


def sharded_first(rank, steps):
    return sharded(rank, steps, attach_first=False)


def sharded_last(rank, steps):
    return sharded(rank, steps, attach_first=True)


def sharded_old(rank, steps, use_orig_params):
    """FSDP 1, whose weights are out of reach outside the forward."""
    model = build("llama")
    hook = attach(model)
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    network = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    said = train(network, hook, [rows(rank % 2, rank % 2 + 1)] * steps)
    assert hook.layers[LAYERS[0]].spectral_ratio().isnan()
    with pytest.raises(betahook.FoldError, match="its weights are sharded over ranks"):
        betahook.fold(hook)
    assert "sharded outside the forward" in repr(hook)
    end_of_training(hook)
    return said


def sharded_flat(rank, steps):
    return sharded_old(rank, steps, use_orig_params=False)


def sharded_views(rank, steps):
    return sharded_old(rank, steps, use_orig_params=True)


def divided(rank, folder, steps):
    """Tensor parallelism: two of the four heads on each rank, which have the same batch."""
    model = tensor_parallel(rank, folder)
    hook = attach(model, per_head=True)
    said = train(model, hook, [rows(0, 2)] * steps)
    check_spectral_ratio(model, hook)
    here = hook.layers[LAYERS[0]]
    model(**rows(0, 2))
    assert here.head_statistics.count.gt(0).tolist() == [rank == 0] * 2 + [rank == 1] * 2
    save(model.eval(), folder, rank)
    fold(model, hook, folder)
    return said


def save_sharded(rank, folder, whole):
    """The end of training under FSDP 2; sharded as one unit (`whole`), the weights are not sharded after a forward."""
    model = build("llama")
    hook = attach(model)
    shard(model, by_layer=not whole)
    train(model, hook, [rows(rank, rank + 1)] * 2)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    save(model.eval(), folder, rank, state_dict=state)
    with torch.no_grad():
        model(**rows(rank, rank + 1))  # the check runs on another batch on each rank
    fold(model, hook, folder)


def save_wrapped(rank, folder):
    """A hook on FSDP 1, as the Trainer's callback attaches it, while the Trainer saves by the model inside."""
    model = build("llama")
    network = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    hook = attach(network)
    train(network, hook, [rows(rank, rank + 1)] * 2)
    with FullyShardedDataParallel.state_dict_type(network, StateDictType.FULL_STATE_DICT):
        state = network.state_dict()
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)
        torch.save(hook.state_dict()["beta"], f"{folder}/beta.pt")


def fold(model, hook, folder):
    """Fold what lies in parts on all ranks; the weights as a whole."""
    betahook.fold(hook)
    assert not hook.attached
    with torch.no_grad():
        torch.testing.assert_close(model(**rows(0, 2)).logits, torch.load(f"{folder}/logits.pt"), rtol=1e-5, atol=1e-5)
    whole = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save({name: x.detach() for name, x in whole.items()}, f"{folder}/folded.pt")


def save(model, folder, rank, **options):
    """The hooked model as it stands, and what it computes."""
    with torch.no_grad():
        logits = model(**rows(0, 2)).logits
    model.save_pretrained(folder, is_main_process=rank == 0, **options)
    if rank == 0:
        torch.save(logits, f"{folder}/logits.pt")


def end_of_training(hook):
    """The callback warns and leaves the hook, beta and all."""
    from betahook.integrations.trainer import BetaHookCallback

    before, callback = hook.state_dict()["beta"], BetaHookCallback(hook=hook)
    with mock.patch.object(folding.logger, "warning") as warning:
        callback.on_train_end(SimpleNamespace(load_best_model_at_end=False), TrainerState(), TrainerControl())
    assert hook.attached
    assert torch.equal(hook.state_dict()["beta"], before)
    assert "betahook.restore(model, folder), run a forward and fold. Or keep the hook" in str(warning.call_args.args[1])


SCENARIOS = [even, judged, uneven, idle, sharded_first, sharded_last, sharded_flat, sharded_views]


def run(rank, folder, steps):
    """Every scenario in the same processes, which take longer to start than to train."""
    for scenario in SCENARIOS:
        torch.save(scenario(rank, steps), f"{folder}/{scenario.__name__}-{rank}")
    if dist.get_world_size() == 2:
        save_wrapped(rank, f"{folder}/wrapped")
        torch.save(divided(rank, f"{folder}/divided", steps), f"{folder}/divided-{rank}")
        for whole in (False, True):
            save_sharded(rank, f"{folder}/{'one unit' if whole else 'by layer'}", whole)


RUNS = [(2, 4), *(pytest.param((world, 60), marks=pytest.mark.slow) for world in (2, 4))]
"""Ranks and steps: after 50, the search goes to and fro by its smallest step, and the trials of Decades have ended."""


@pytest.fixture(scope="module", params=RUNS, ids=str)
def results(request, tmp_path_factory):
    """Scenario to what each rank said, and the number of steps."""
    world, steps = request.param
    base = tmp_path_factory.getbasetemp()
    # Side by side, processes of pytest-xdist would each run the ranks: they share the folder above theirs.
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"ranks-{world}-{steps}"
    with FileLock(f"{folder}.lock"):
        if not (ended := folder / "ended").exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a run that failed
            folder.mkdir()
            run_ranks(run, world, str(folder), str(folder), steps, limit=60 + 5 * steps)
            ended.touch()
    names = [scenario.__name__ for scenario in SCENARIOS]
    results = {name: [torch.load(folder / f"{name}-{rank}") for rank in range(world)] for name in names}
    return results, steps, folder


@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
def test_all_ranks_have_the_same_beta_at_every_step(results, scenario):
    first, *others = results[0][scenario]
    assert len(first) == results[1]
    assert len({tuple(beta.tolist()) for _, beta in first}) > 1
    for other in others:
        for (metrics, beta), (metrics_other, beta_other) in zip(first, other, strict=True):
            assert torch.equal(beta, beta_other)
            assert metrics == metrics_other


@pytest.mark.parametrize(
    "scenario", ["even", "judged", "sharded_first", "sharded_last", "sharded_flat", "sharded_views"]
)
def test_ranks_measure_what_one_process_does_on_the_joined_batch(results, scenario):
    """In the first steps: later ones are those of another model, as rounding errors grow."""
    alone = judged(None, results[1])[:4] if scenario == "judged" else even(None, 4)
    hidden = ("weight_std", "predicted_std") if scenario in ("sharded_flat", "sharded_views") else ("no metric",)
    for (metrics, _), (expected, _) in zip(results[0][scenario][0], alone, strict=False):
        expected = {key: value for key, value in expected.items() if not key.startswith(hidden)}
        assert metrics.keys() == expected.keys()
        for key, value in expected.items():
            assert metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-5), key


def test_uneven_batches_are_pooled_by_their_pairs(results):
    said = results[0]["uneven"]
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        for length in [24] + [12] * (len(said) - 1):
            model(**inputs("llama", length, padded=False))
        hook.step()
        expected = hook.metrics()
    (before, _), (metrics, _) = said[0][0], said[0][-1]
    for key in (f"score_mean/{LAYERS[0]}", f"score_std/{LAYERS[0]}"):  # beta acts on what the second layer sees
        assert metrics[key] == pytest.approx(expected[key], rel=1e-5)
        assert metrics[key] != pytest.approx(before[key], rel=1e-3)


def test_a_layer_that_one_rank_never_used_has_the_statistics_of_the_other(results):
    said = results[0]
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model(**rows(0, 2)).loss.backward()
        hook.step()
        expected = hook.metrics()
    for rank in said["idle"]:
        key = f"score_std/{LAYERS[1]}"
        assert rank[0][0][key] == pytest.approx(expected[key], rel=1e-5)


def test_tensor_parallel_ranks_measure_what_one_process_does(results):
    """Head by head, since each has a beta of its own."""
    folder = results[2]
    if not (folder / "divided").exists():
        pytest.skip("by two ranks")
    first, second = (torch.load(folder / f"divided-{rank}") for rank in range(2))
    assert len(set(first[-1][1].tolist())) == 8
    for (metrics, beta), (metrics_other, beta_other) in zip(first, second, strict=True):
        assert metrics == metrics_other
        assert torch.equal(beta, beta_other)
    for (metrics, beta), (expected, beta_alone) in zip(first, even(None, 4, per_head=True), strict=False):
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-5)
        torch.testing.assert_close(beta, beta_alone, rtol=1e-5, atol=0)


@pytest.mark.parametrize("how", ["by layer", "one unit", "divided"])
def test_what_was_trained_in_shards_is_folded_there_and_in_one_process(results, how):
    folder = results[2] / how
    if not folder.exists():
        pytest.skip("saved by two ranks")
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    assert hasattr(model.config, checkpoint.MARK)
    expected = torch.load(folder / "logits.pt")
    with torch.no_grad():
        assert (model(**rows(0, 2)).logits - expected).abs().max() > 1e-3
        betahook.restore(model, folder)
        torch.testing.assert_close(model(**rows(0, 2)).logits, expected, rtol=1e-5, atol=1e-5)
        betahook.fold(model)
        torch.testing.assert_close(model(**rows(0, 2)).logits, expected, rtol=1e-5, atol=1e-5)
    assert not hasattr(model.config, checkpoint.MARK)
    in_shards = torch.load(folder / "folded.pt")
    assert all(torch.equal(in_shards[name], value) for name, value in model.named_parameters())


def test_the_model_in_fsdp_1_saves_the_beta_of_a_hook_around_it(results):
    folder = results[2] / "wrapped"
    if not folder.exists():
        pytest.skip("saved by two ranks")
    with betahook.restore(LlamaForCausalLM.from_pretrained(folder), folder) as hook:
        assert torch.equal(hook.state_dict()["beta"], torch.load(folder / "beta.pt"))


def die(rank):
    model = build("llama")
    hook = attach(model)
    network = DistributedDataParallel(model)
    for step in range(4):
        network(**rows(0, 2)).loss.backward()
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        hook.step()


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_job(tmp_path):
    with pytest.raises((mp.ProcessExitedException, mp.ProcessRaisedException)):
        run_ranks(die, 2, str(tmp_path))
