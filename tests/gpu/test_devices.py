"""Models that move to a GPU, lie on two devices, or train by the Trainer, DDP and FSDP on one."""

import pytest
import torch
import torch.distributed as dist
from accelerate import dispatch_model
from torch.nn.parallel import DistributedDataParallel

import betahook
from betahook.integrations.trainer import BetaHookCallback
from support.gpu import llama
from support.models import build, inputs
from support.processes import shard
from support.trainer import make_trainer


def attach(model):
    return betahook.attach(model, controller=betahook.Search(warmup=0, window=1, rise=False))


def train(network, hook, batch, steps=4):
    """Losses, and in the end all metrics and betas."""
    losses = []
    for _ in range(steps):
        loss = network(**batch).loss
        loss.backward()
        network.zero_grad()
        hook.step()
        losses.append(loss.item())
    return losses, hook.metrics(), [layer.beta for layer in hook.layers.values()]


def assert_same(a, b):
    for one, other in zip(a, b, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)


def on(device, family="llama"):
    return {name: x.to(device) for name, x in inputs(family, padded=False).items()}


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_a_model_that_moves_while_it_is_hooked_trains_as_on_the_cpu(family):
    said = []
    for before, after in (("cpu", "cpu"), ("cpu", "cuda"), ("cuda", "cpu")):
        model = build(family, "sdpa").to(before)
        with attach(model) as hook:
            first, *_ = train(model, hook, on(before, family), 2)
            second, *rest = train(model.to(after), hook, on(after, family), 2)
            said.append((first + second, *rest))
    assert_same(said[1], said[0])
    assert_same(said[2], said[0])


def test_a_state_goes_from_a_gpu_to_the_cpu_and_back(tmp_path):
    model = build("llama", "sdpa").cuda()
    with attach(model) as hook:
        train(model, hook, on("cuda"))
        torch.save(hook.state_dict(), tmp_path / "hook.pt")
        expected = train(model, hook, on("cuda"), 2)
    for device in ("cpu", "cuda"):
        fresh = build("llama", "sdpa").to(device)
        with attach(fresh) as hook:
            hook.load_state_dict(torch.load(tmp_path / "hook.pt", map_location=device))
            assert_same(train(fresh, hook, on(device), 2), expected)


def test_a_model_on_two_devices():
    """As `device_map` spreads one; what lies on the CPU comes to the GPU for its forward alone."""
    said = []
    for spread in (False, True):
        model = build("llama", "sdpa")
        if spread:
            places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"), 0)
            places |= {"model.layers.1": "cpu", "lm_head": 0}
            model = dispatch_model(model, places, main_device=0).train()
        with attach(model) as hook:
            losses, metrics, betas = train(model, hook, on("cuda" if spread else "cpu"))
        of_weights = ("weight_std", "predicted_std")  # which are away between the steps
        said.append((losses, {x: y for x, y in metrics.items() if not x.startswith(of_weights)}, betas))
    assert_same(*said)


@pytest.fixture
def _world(tmp_path):
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/world", rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize(
    "wrap", [lambda model: DistributedDataParallel(model, device_ids=[0]), shard], ids=["DDP", "FSDP"]
)
def test_one_rank_over_nccl_trains_as_no_rank(wrap):
    said = []
    for network_of in (lambda model: model, wrap):
        model, batch = llama(torch.float32)
        with attach(model) as hook:
            said.append(train(network_of(model), hook, batch))
    assert_same(*said)


@pytest.mark.parametrize(
    ("options", "error"),
    [({}, 1e-3), ({"bf16": True}, 0.1), ({"fp16": True}, 0.1), ({"torch_compile": True}, 0.02)],
    ids=["float32", "bfloat16", "float16", "compiled, in TF32"],
)
def test_the_trainer_adapts_and_the_model_folds(tmp_path, options, error):
    callback = BetaHookCallback(betahook.Search(warmup=0, window=1, rise=False), on_end="keep")
    trainer = make_trainer(tmp_path, callback, use_cpu=False, **options)
    trainer.train()
    assert callback.hook.steps == 6
    model, batch = trainer.model.eval(), on("cuda")
    assert next(model.parameters()).is_cuda
    with torch.no_grad():
        adapted = model(**batch).logits
        betahook.fold(model)
        torch.testing.assert_close(model(**batch).logits, adapted, rtol=0, atol=error)
