"""Watching on a GPU: no bit changes, the host never waits, and what is measured is right in every precision."""

import functools
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

import betahook
from support.gpu import HEAD_DIM, HEADS, LENGTH, WIDTH, ByHand, Fused, components, expected, llama, network
from support.training import CONTROLLERS, float32_precision

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]


def trained(model, batch):
    """Loss, logits, gradients and random state of one forward and backward."""
    torch.manual_seed(3)
    output = model(**batch)
    output.loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return [output.loss.detach(), output.logits.detach(), *gradients, torch.cuda.get_rng_state()]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_monitoring_changes_no_bit(kernel):
    model, batch = llama(key_heads=HEADS)
    with sdpa_kernel(kernel):
        alone = trained(model, batch)
        with betahook.attach(model, controller="monitor", interval=1) as hook:
            for _ in range(2):
                assert all(torch.equal(a, b) for a, b in zip(alone, trained(model, batch), strict=True))
                hook.step()
            assert all(layer.statistics.count > 0 for layer in hook.layers.values())


PRECISIONS = {
    "float32": (torch.float32, "highest", 1e-5),
    "TF32": (torch.float32, "high", 1e-3),
    "bfloat16": (torch.bfloat16, "highest", 1e-5),
    "bfloat16 and TF32": (torch.bfloat16, "high", 1e-4),
    "float16": (torch.float16, "highest", 1e-5),
}
"""The dtype of a model, the precision of float32 products, and the relative error that is allowed."""


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("length", [100, 900])
@pytest.mark.parametrize("kind", [Fused, ByHand])
def test_statistics_equal_those_of_the_score_matrix(kind, length, precision):
    dtype, products, error = PRECISIONS[precision]
    if kind is ByHand and dtype in (torch.float16, torch.bfloat16):
        error = 1e-2  # of the scores that the model itself made
    model, _ = network(kind, dtype)
    x = torch.randn(2, length, WIDTH, device="cuda", dtype=dtype) + 0.5
    with float32_precision(products), betahook.attach(model, controller="monitor", interval=1) as hook:
        model(x).float().square().mean().backward()
        measured = hook.layers["1"].head_statistics
        q, k = components(model, x)
    allowed = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
    for name, value in expected(q, k, allowed, HEAD_DIM**-0.5).items():
        if length == 100 or name not in ("max_logit", "entropy"):  # of 32 rows
            off = float((getattr(measured, name) - value).abs().max() / value.abs().max())
            assert off < error, f"{name} off by {off:.1e}"


def of_transformers(backend):
    model, batch = llama(torch.float32, backend)
    return model, lambda: model(**batch).loss


def by_hand(kind, padding=None):
    model, x = network(kind)
    return model, lambda: model[1](model[0](x), padding).square().mean()


def of_torch():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda()
    x = torch.randn(2, 40, WIDTH, device="cuda")
    return model, lambda: model(x).square().mean()


MODELS = {
    "llama, sdpa": lambda: of_transformers("sdpa"),
    "llama, eager": lambda: of_transformers("eager"),
    "by hand": lambda: by_hand(ByHand),
    "by hand, padded": lambda: by_hand(ByHand, torch.arange(LENGTH, device="cuda").expand(2, -1) >= LENGTH - 10),
    "fused": lambda: by_hand(Fused),
    "nn.TransformerEncoder": of_torch,
}
"""Map a name to a function that makes a model, and one that returns its loss."""


ATEN = torch.ops.aten
SAVED = [ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default, ATEN._softmax.default, ATEN.mul.Tensor, ATEN.add.Tensor]
SAVED += [ATEN._scaled_dot_product_flash_attention.default, ATEN._scaled_dot_product_efficient_attention.default]
"""Operations of models, and of betahook, whose outputs a checkpoint saves."""


@pytest.mark.parametrize("model", MODELS)
def test_monitoring_changes_no_bit_in_a_selective_checkpoint(model):
    model, loss = MODELS[model]()
    contexts = functools.partial(create_selective_checkpoint_contexts, SAVED)

    def trained():
        with set_checkpoint_early_stop(False):
            value = checkpoint(loss, use_reentrant=False, context_fn=contexts)
        value.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return [value.detach(), *gradients]

    alone = trained()
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(alone, trained(), strict=True))
            assert all(layer.statistics.count > 0 for layer in hook.layers.values())
            hook.step()


@contextmanager
def noticing_waits():
    """Give a list that holds, in the end, what torch said wherever the host waited for the GPU."""
    said = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
    finally:
        torch.cuda.set_sync_debug_mode("default")
        said += [str(each.message) for each in caught if "synchronizing" in str(each.message)]


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("scaled", [False, True], ids=["float32", "float16"])
def test_the_host_never_waits(model, controller, scaled):
    """Not in a forward, a backward, a clipping of gradients or a step of the hook."""
    model, loss = MODELS[model]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=scaled)

    def backward():
        with torch.autocast("cuda", torch.float16, enabled=scaled):
            value = loss()
        scaler.scale(value).backward()

    def step(hook):
        backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        if not scaled:  # the scaler itself asks if gradients overflowed
            optimizer.step()
        optimizer.zero_grad()
        hook.step(loss=torch.ones((), device="cuda"))

    backward()
    with noticing_waits() as alone:  # transformers waits as it makes the mask of eager attention
        backward()
    with betahook.attach(model, controller=CONTROLLERS[controller](), interval=2) as hook:
        for _ in range(3):
            step(hook)
        for _ in range(24):
            with noticing_waits() as said:
                step(hook)
            assert said == alone
        assert hook.metrics()


def test_a_loss_scale_is_taken_out_of_the_sensitivity():
    model, batch = llama(torch.float32)
    found = []
    for scale in (1.0, 2.0**10):
        scaler = torch.amp.GradScaler("cuda", init_scale=scale)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with betahook.attach(model, controller="monitor", interval=1) as hook:
            scaler.scale(model(**batch).loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            hook.step(scaler)
            found.append(torch.stack([layer.statistics.sensitivity for layer in hook.layers.values()]))
    torch.testing.assert_close(*found, rtol=1e-3, atol=0)


def test_peak_memory_grows_by_less_than_a_score_matrix():
    tokens = 8192
    model, _ = llama(layers=4)
    ids = torch.randint(0, 128, (1, tokens), device="cuda")

    def peak():
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            model(input_ids=ids, labels=ids).loss.backward()
            model.zero_grad()
        return torch.cuda.max_memory_allocated()

    alone = peak()
    with betahook.attach(model, interval=1):
        assert peak() - alone < 2 * tokens**2  # of one head, in bfloat16


class Convolved(ByHand):
    """With projections that are convolutions, which torch computes in TF32 unless it is told otherwise."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = (nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(2))

    def forward(self, x, padding=None):
        q, k, v = (self.split(y) for y in (self.q_proj(x.mT).mT, self.k_proj(x.mT).mT, self.v_proj(x)))
        return self.mix(q, k, v, padding).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("kind", [ByHand, Fused, Convolved])
def test_beta_folds_where_the_model_computes_in_tf32(kind):
    model, x = network(kind)
    with float32_precision("high"):
        with betahook.attach(model, controller="monitor") as hook:
            model(x)
            hook.layers["1"].beta = 1.7 * hook.layers["1"].beta
            adapted = model(x)
            betahook.fold(model)
        assert float((model(x) - adapted).norm() / adapted.norm()) < 1e-2
