"""Kernels that an attention calls by name: flex attention itself, and stand-ins with the signatures of the others."""

import functools
import gc
import inspect
import itertools
import sys
import types
import weakref
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import betahook
from betahook.measure.masks import Band
from betahook.models import classifiers
from betahook.models.torch_calls import Call
from betahook.tap import kernels
from support.attention import HEADS, WIDTH, Block

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
BATCH, LENGTH = 2, 10
ENDS = torch.tensor([0, 4, LENGTH], dtype=torch.int32)
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
WINDOW = CAUSAL & ~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-4)
PACKED = CAUSAL & ((torch.arange(LENGTH) < 4) == (torch.arange(LENGTH) < 4)[:, None])
BLOCK_MASK = create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, device="cpu")


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None
):
    left, right = (LENGTH if side < 0 else side for side in window_size)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(0 if causal else right).triu(-left)
    with torch._C.DisableTorchFunction():  # as the kernel, it shows no mode what it does
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale, enable_gqa=True).transpose(1, 2)


def third_flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, window_size=(-1, -1), attention_chunk=0):
    return flash_attn_func(q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False, seqused_k=None
):
    parts = [slice(*ends) for ends in itertools.pairwise(cu_seqlens_q.tolist())]
    split = ([x[part].transpose(0, 1) for x in (q, k, v)] for part in parts)
    made = [F.scaled_dot_product_attention(*each, is_causal=causal, scale=softmax_scale) for each in split]
    return torch.cat(made, 1).transpose(0, 1)


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), seqused_k=None
):
    last, right = (LENGTH if side < 0 else side for side in window_size)
    of_document = torch.bucketize(torch.arange(LENGTH), cu_seq_q[1:], right=True)
    pairs = (of_document == of_document[:, None]).triu(-last).tril(right)
    made = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (query, key, value)), pairs, scale=scale)
    return made.transpose(0, 1)


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None):
    causal = isinstance(attn_bias, LowerTriangularMask)
    mask = None if causal else attn_bias
    with torch._C.DisableTorchFunction():
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale).transpose(1, 2)


class LowerTriangularMask:
    """As in xformers."""


flash_attn_func.__module__ = flash_attn_varlen_func.__module__ = "flash_attn.flash_attn_interface"
third_flash_attn_func.__name__, third_flash_attn_func.__module__ = "flash_attn_func", "flash_attn_interface"
memory_efficient_attention.__module__ = "xformers.ops.fmha"
varlen_attn.__module__ = "torch.nn.attention.varlen"  # torch's own runs on a GPU alone, and torch 2.6 has none
compiled_flex_attention = torch.compile(flex_attention, backend="eager")
xops = types.ModuleType("xformers.ops")
xops.memory_efficient_attention = memory_efficient_attention
xformers = types.ModuleType("xformers")
xformers.ops = xops
flash_attn_3 = types.ModuleType("flash_attn_interface")
flash_attn_3.flash_attn_func = third_flash_attn_func
loaded = types.SimpleNamespace(flash_attn_func=flash_attn_func, xformers=xformers)
xformers.loaded = loaded  # which hold one another, as modules may


class Kernel(Block):
    """By a kernel that takes heads before tokens."""

    def mix(self, q, k, v):
        return flex_attention(q, k, v, block_mask=BLOCK_MASK, scale=0.5)


class Compiled(Block):
    def mix(self, q, k, v):
        return compiled_flex_attention(q, k, v, block_mask=BLOCK_MASK, scale=0.5)


class OfModule(Block):
    def mix(self, q, k, v):
        return flex.flex_attention(q, k, v, scale=0.5)


class Flash(Block):
    def mix(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attn_func(q, k, v, softmax_scale=0.5, causal=True).transpose(1, 2)


class Flash3(Block):
    """By a function whose scale comes fourth, as in the third version of flash-attn."""

    def mix(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attn_3.flash_attn_func(q, k, v, 0.5, True, attention_chunk=0).transpose(1, 2)


class FlashWindow(Block):
    def mix(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attn_func(q=q, k=k, v=v, softmax_scale=0.5, causal=True, window_size=(3, 0)).transpose(1, 2)


class FlashUnmasked(Block):
    def mix(self, q, k, v):
        return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=0.5).transpose(1, 2)


class FlashBothWays(Block):
    def mix(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attn_func(q, k, v, softmax_scale=0.5, window_size=(2, 1)).transpose(1, 2)


class Varlen(Block):
    def mix(self, q, k, v):
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out = flash_attn_varlen_func(q, k, v, ENDS, ENDS, 6, 6, softmax_scale=0.5, causal=True)
        return out.transpose(0, 1)[None]


class VarlenOfTorch(Block):
    def mix(self, q, k, v):
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return varlen_attn(q, k, v, ENDS, ENDS, 6, 6, scale=0.5, window_size=(-1, 0)).transpose(0, 1)[None]


class VarlenWindow(Block):
    def mix(self, q, k, v):
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return varlen_attn(q, k, v, ENDS, ENDS, 6, 6, scale=0.5, window_size=(3, 0)).transpose(0, 1)[None]


class Xformers(Block):
    def mix(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return xops.memory_efficient_attention(q, k, v, LowerTriangularMask(), scale=0.5).transpose(1, 2)


class OfPackage(Block):
    """As in PixArt."""

    def mix(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return xformers.ops.memory_efficient_attention(q, k, v, LowerTriangularMask(), scale=0.5).transpose(1, 2)


class OfNamespace(Block):
    """As in nanochat, in a function of a function."""

    def mix(self, q, k, v):
        def attend(q, k, v):
            return loaded.flash_attn_func(q, k, v, softmax_scale=0.5, causal=True)

        return attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


class OfItsClass(Block):
    """As in torchtitan."""

    _compiled_flex_attn = compiled_flex_attention

    def mix(self, q, k, v):
        return OfItsClass._compiled_flex_attn(q, k, v, block_mask=BLOCK_MASK, scale=0.5)


class Kernels:
    flash = staticmethod(flash_attn_func)


class OfOtherClass(Block):
    def mix(self, q, k, v):
        return Kernels.flash(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=0.5, causal=True).transpose(1, 2)


class Static(Block):
    flex = staticmethod(flex_attention)

    def mix(self, q, k, v):
        return self.flex(q, k, v, block_mask=BLOCK_MASK, scale=0.5)


class OfBaseClass(Static):
    pass


class Partial(Block):
    def __init__(self):
        super().__init__()
        self.flex = functools.partial(flex_attention, block_mask=BLOCK_MASK, scale=0.5)

    def mix(self, q, k, v):
        return self.flex(q, k, v)


class PartialOfCompiled(Block):
    flex = functools.partial(compiled_flex_attention, block_mask=BLOCK_MASK, scale=0.5)

    def mix(self, q, k, v):
        return self.flex(q, k, v)


class XformersBias(Block):
    def mix(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        bias = torch.zeros(LENGTH, LENGTH).masked_fill(~WINDOW, -torch.inf).expand(len(q), HEADS, -1, -1)
        return memory_efficient_attention(q, k, v, attn_bias=bias, scale=0.5).transpose(1, 2)


class Reference(Block):
    """By torch, with a mask and the same scale."""

    pairs = CAUSAL

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, self.pairs, scale=0.5)


def called():
    """The kernels by the names under which the modules find them."""
    own = flex_attention, compiled_flex_attention, flash_attn_func, flash_attn_varlen_func, memory_efficient_attention
    of_classes = (vars(kind)["flex"] for kind in (Static, PartialOfCompiled))
    own = *own, OfItsClass._compiled_flex_attn, vars(Kernels)["flash"], *of_classes
    return *own, varlen_attn, xops.memory_efficient_attention, loaded.flash_attn_func, flex.flex_attention


def run(model, x, factor):
    """The output, statistics and the sensitivity of a model, whose beta is `factor` times its own."""
    model.zero_grad()
    with betahook.attach(model, controller="monitor", when="always", interval=1) as hook:
        (layer,) = hook.layers.values()
        model(x)
        hook.step()
        layer.beta = factor * layer.beta_default
        output = model(x)
        if output.requires_grad:
            output.square().sum().backward()
        measured = layer.head_statistics
        names = "std", "mean", "entropy", "sensitivity"
        return output.detach(), layer.beta_default, torch.stack([getattr(measured, name).double() for name in names])


CASES = {
    Kernel: CAUSAL,
    Compiled: CAUSAL,
    OfModule: torch.ones_like(CAUSAL),
    Flash: CAUSAL,
    Flash3: CAUSAL,
    FlashWindow: WINDOW,
    FlashUnmasked: torch.ones_like(CAUSAL),
    FlashBothWays: torch.ones_like(CAUSAL).tril(1).triu(-2),
    Varlen: PACKED,
    VarlenOfTorch: PACKED,
    VarlenWindow: PACKED & WINDOW,
    Xformers: CAUSAL,
    OfPackage: CAUSAL,
    OfNamespace: CAUSAL,
    OfItsClass: CAUSAL,
    OfBaseClass: CAUSAL,
    OfOtherClass: CAUSAL,
    Static: CAUSAL,
    Partial: CAUSAL,
    PartialOfCompiled: CAUSAL,
    XformersBias: WINDOW,
}


@pytest.mark.parametrize("kind", CASES)
def test_a_kernel_called_by_name_is_measured_and_scaled_as_that_of_torch(kind):
    torch.manual_seed(0)
    model, reference = kind(), Reference()
    reference.load_state_dict(model.state_dict())
    reference.pairs = CASES[kind]
    x = torch.randn(1 if "Varlen" in kind.__name__ else BATCH, LENGTH, WIDTH)
    for each in (model, reference):
        each.requires_grad_("flex" not in str(kind.mix.__code__.co_names))  # it has no backward on a CPU
    before = called()
    plain = model(x)
    with betahook.attach(model, controller="monitor"):
        assert torch.equal(model(x), plain)
    (output, own, found), (same, default, expected) = run(model, x, 1.5), run(reference, x, 1.5)
    torch.testing.assert_close(output, same)
    assert own == default == 0.5
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(output, plain, atol=1e-3)
    assert called() == before


@pytest.mark.parametrize("kernel", [flex_attention, compiled_flex_attention], ids=["plain", "compiled"])
def test_a_kernel_that_is_not_found_is_left_alone_and_runs_as_without_a_hook(kernel):
    """In a forward that calls another one, and is therefore not run without the compiler."""

    class UnseenAttention(Block):
        def mix(self, q, k, v, kernels=(kernel,)):
            if v is None:
                return flex_attention(q, k, k)
            return kernels[0](q, k, v, scale=0.5)

    model, x = UnseenAttention().requires_grad_(False), torch.randn(BATCH, LENGTH, WIDTH)
    plain = model(x)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        assert torch.equal(model(x), plain)
        assert hook.layers[""].refusal is not None


def test_two_hooks_need_a_kernel():
    first, second = Flash(), Flash()
    hooks = [betahook.attach(model) for model in (first, second)]
    assert flash_attn_func.__wrapped__.__module__ == "flash_attn.flash_attn_interface"
    hooks[0].detach()
    assert hasattr(flash_attn_func, "__wrapped__")
    second(torch.randn(BATCH, LENGTH, WIDTH))
    assert hooks[1].layers[""].beta_default == 0.5
    hooks[1].detach()
    assert not hasattr(flash_attn_func, "__wrapped__")


class Held(Block):
    """Its kernel is an attribute of the module."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def mix(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return self.attend(q, k, v, softmax_scale=0.5, causal=True).transpose(1, 2)


@pytest.mark.parametrize("loaded_as", ["flash_attn2_1a2b", "vllm_flash_attn3_1a2b", "flash_attention_3_1a2b", "1a2b"])
def test_flash_attention_of_the_kernels_hub_is_seen(loaded_as):
    kernel = flash_attn_func
    attend = types.FunctionType(kernel.__code__, kernel.__globals__, kernel.__name__, kernel.__defaults__)
    attend.__module__ = f"{loaded_as}.flash_attn_interface"
    model = Held(attend)
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(BATCH, LENGTH, WIDTH))
        assert hook.layers[""].beta_default == 0.5


def test_a_function_of_the_name_of_a_kernel_from_elsewhere_is_none():
    def attend(q, k, v):
        return v

    attend.__name__, attend.__module__ = "flash_attn_func", "my.layers"
    model = Held(attend)
    with betahook.attach(nn.Sequential(model, Flash()), controller="monitor"):
        assert model.attend is attend


def test_hooks_that_are_dropped_without_detach_leave_nothing_to_later_ones():
    gc.freeze()  # what other tests have left takes long to look at
    for _ in range(20):  # some get the addresses of earlier ones
        model = Held(flash_attn_func)
        betahook.attach(model)
        assert model.attend is not flash_attn_func
        gone = weakref.ref(model.attend)
        del model
        gc.collect()
        assert gone() is None


def test_a_kernel_that_was_imported_from_where_a_hook_is_at_work_is_measured_too():
    first, second = Held(flash_attn_func), Held(flash_attn_func)
    hooks = [betahook.attach(first)]
    second.attend = imported = first.attend
    hooks.append(betahook.attach(second))
    hooks[0].detach()
    assert first.attend is not imported
    second(torch.randn(BATCH, LENGTH, WIDTH)).sum().backward()
    assert hooks[1].layers[""].statistics.count > 0
    hooks[1].detach()
    assert second.attend is imported


def test_a_kernel_that_was_replaced_meanwhile_stays_replaced():
    model = Held(flash_attn_func)
    hook = betahook.attach(model)
    model.attend = replacement = functools.wraps(flash_attn_func)(
        lambda *args, **kwargs: flash_attn_func(*args, **kwargs)
    )
    hook.detach()
    assert model.attend is replacement


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(alibi_slopes=torch.ones(HEADS)),
            r"flash_attn_func at test_kernels.py:\d+ gets alibi_slopes, which is not",
        ),
        (
            dict(score_mod=lambda score, b, h, q, k: score + q),
            "flex_attention at .* gets score_mod, which is not followed",
        ),
        (dict(attention_chunk=4), "flash_attn_func at .* gets attention_chunk, which is not followed"),
        (dict(cu=ENDS, seqused_k=ENDS.diff()), "flash_attn_varlen_func at .* gets seqused_k, which is not followed"),
        (dict(cu=ENDS.clone()), "gets two tensors as cu_seqlens_q and cu_seqlens_k: give it one, as both"),
        (dict(cu_seq_k=ENDS.clone()), "varlen_attn at .* gets two tensors as cu_seq_q and cu_seq_k: give it one"),
        (dict(seqused_k=ENDS.diff()), "varlen_attn at .* gets seqused_k, which is not followed"),
    ],
)
def test_what_is_not_followed_is_left_alone_by_name(arguments, message):
    class Own(Block):
        def mix(self, q, k, v):
            if "score_mod" in arguments:
                return flex_attention(q, k, v, **arguments)
            if "cu" in arguments:
                q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
                further = {name: value for name, value in arguments.items() if name != "cu"}
                return flash_attn_varlen_func(q, k, v, ENDS, arguments["cu"], 6, 6, **further).transpose(0, 1)[None]
            if arguments.keys() & {"cu_seq_k", "seqused_k"}:
                q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
                packed = dict(cu_seq_q=ENDS, cu_seq_k=ENDS, max_q=6, max_k=6) | arguments
                return varlen_attn(q, k, v, **packed).transpose(0, 1)[None]
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            flash = flash_attn_3.flash_attn_func if "attention_chunk" in arguments else flash_attn_func
            return flash(q, k, v, **arguments).transpose(1, 2)

    model = Own().requires_grad_(False)
    with betahook.attach(model, when="always") as hook:
        model(torch.randn(1, LENGTH, WIDTH))
        (layer,) = hook.layers.values()
        with pytest.raises(RuntimeError, match=message):
            layer.beta = 1.0


@pytest.mark.oldest_skips("flex attention has no auxiliary outputs")
def test_flex_attention_returns_no_maxima_on_a_cpu():
    """If it ever does, docs/LIMITATIONS.md has one reason less not to use them."""
    q = torch.randn(1, 1, LENGTH, 8)
    with pytest.raises(NotImplementedError, match="max scores is not supported on CPU"):
        flex_attention(q, q, q, return_aux=flex.AuxRequest(max_scores=True))


@pytest.mark.needs_torch("2.12", "varlen_attn had other arguments, or was not there")
@pytest.mark.oldest_skips("torch has no attention of packed sequences")
def test_torch_names_the_arguments_of_packed_sequences_so():
    from torch.nn.attention import varlen

    kernel, names = kernels.KERNELS["varlen_attn"], list(inspect.signature(varlen.varlen_attn).parameters)
    positional = kernel.names[: kernel.names.index("is_causal")]
    assert tuple(names[: len(positional)]) == positional
    followed = {"scale", "window_size", "return_aux", "enable_gqa", "num_splits"}
    assert {*names[len(positional) :]} == followed | {*kernel.unknown}
    assert kernels._is_kernel(varlen.varlen_attn)


def test_torch_2_10_says_by_position_that_packed_sequences_are_causal():
    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        raise NotImplementedError

    kernel, q = kernels.KERNELS["varlen_attn"], torch.randn(HEADS, LENGTH, 8)
    packed = q, q, q, ENDS, ENDS, 6, 6
    calls = [Call(older, (*packed, True), {}), Call(varlen_attn, packed, {"window_size": (-1, 0)})]
    bands = [kernel.describe(kernel.read(call), q, q, lambda pairs: pairs).band for call in calls]
    assert bands == [Band(None, 0)] * 2


def test_a_block_mask_is_made_dense_once_in_a_forward():
    """Also in the first one, which finds the band of the mask."""
    model = nn.Sequential(Kernel(), Kernel())
    with betahook.attach(model, controller="monitor", when="always") as hook:
        with torch.no_grad(), mock.patch.object(kernels, "dense", wraps=kernels.dense) as dense:
            model(torch.randn(BATCH, LENGTH, WIDTH))
        assert dense.call_count == len(hook.layers) == 2


LISTS = torch.tensor([[[[2, 0, 0], [0, 1, 7], [1, 2, 0]]], [[[0, 0, 0], [2, 1, 0], [0, 0, 0]]]])
"""Blocks of keys for each block of queries, in two sequences: those behind the counts may be anything."""


def block_mask(partial, full=None, mask_mod=None):
    """A mask of blocks of 4 queries and 4 keys, by how many of `LISTS` are listed."""
    indices = LISTS.int()
    lists = [
        x for counts in (partial, full) if counts is not None for x in (torch.tensor(counts).int()[:, None], indices)
    ]
    return flex.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=4, mask_mod=mask_mod, seq_lengths=(LENGTH, LENGTH))


def listed(counts):
    """The pairs in these blocks, one by one."""
    pairs = torch.zeros(len(counts), 1, LENGTH, LENGTH, dtype=torch.bool)
    for sequence, rows in enumerate(counts):
        for row, count in enumerate(rows):
            for column in LISTS[sequence, 0, row, :count].tolist():
                pairs[sequence, 0, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = True
    return pairs


PARTIAL, FULL = [[1, 2, 2], [1, 0, 1]], [[0, 0, 1], [0, 2, 0]]


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        (block_mask(PARTIAL), listed(PARTIAL)),
        (block_mask(PARTIAL, mask_mod=lambda b, h, q, k: q >= k), listed(PARTIAL) & CAUSAL),
        (block_mask(PARTIAL, FULL, lambda b, h, q, k: q >= k), (listed(PARTIAL) & CAUSAL) | listed(FULL)),
        (BLOCK_MASK, CAUSAL),
    ],
    ids=["listed", "with a function", "and full ones", "by a function alone"],
)
def test_a_block_mask_has_the_pairs_of_its_blocks(mask, pairs):
    assert torch.equal(kernels.dense(mask, LENGTH, LENGTH, torch.device("cpu")), pairs.expand(*mask.shape))


def test_a_part_of_a_block_mask_has_its_own_blocks():
    mask, rows = block_mask(PARTIAL), torch.tensor([1], dtype=torch.int32)
    part = mask[:, :, rows]
    part.mask_mod = mask.mask_mod  # as one has to
    assert torch.equal(kernels.dense(part, 4, 7, torch.device("cpu")), listed(PARTIAL)[:, :, 4:8, :7])


def test_blocks_alone_are_measured():
    torch.manual_seed(0)
    mask, pairs = block_mask(PARTIAL), listed(PARTIAL)
    model, reference = Kernel(lambda q, k, v: flex_attention(q, k, v, block_mask=mask, scale=0.5)), Reference()
    reference.load_state_dict(model.state_dict())
    reference.pairs = pairs
    x, found = torch.randn(BATCH, LENGTH, WIDTH), []
    with torch.no_grad():
        for each in (model, reference):
            with betahook.attach(each, controller="monitor", when="always") as hook:
                each(x)
                measured = hook.layers[""].head_statistics
                found.append(torch.stack([measured.count, measured.std, measured.entropy]))
    assert torch.equal(found[0][0], pairs.sum().double().expand(HEADS))
    torch.testing.assert_close(*found)


def test_the_table_holds_what_discovery_finds():
    assert set(kernels.KERNELS) == classifiers.NAMED_KERNELS | {"scaled_dot_product_attention"}
    assert sys.modules[flex_attention.__module__] is flex


@pytest.mark.parametrize("batch", [BATCH, HEADS])
def test_a_kernel_that_gets_other_heads_than_the_module_states_is_left_alone(batch):
    model = Kernel(lambda q, k, v: flex_attention(*(x[:, :2] for x in (q, k, v))))
    with betahook.attach(model, controller="monitor") as hook, torch.no_grad():
        model(torch.randn(batch, LENGTH, WIDTH))
        (layer,) = hook.layers.values()
        assert f"expected an axis of {HEADS} heads before the last two, got axes of [{batch}, 2]" in layer.refusal
