"""Kernels that compute a whole attention from q, k and v: their signatures, and how the tap sees their calls.

`softmaxes.fused` runs them. A torch function mode sees `scaled_dot_product_attention`, but not the others, which user
code calls by name: `connect` replaces each by a wrapper that function modes see, like functions of torch.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from betahook.measure import masks
from betahook.measure.masks import Band, GivenMask
from betahook.models import selective, stand_ins
from betahook.models.code import functions_of, is_user_class, names_in, namespaces, without_partial
from betahook.models.torch_calls import Call, is_causal_bias
from betahook.tap.recorder import Recorder

Arguments = Mapping[str, Any]
Batched = Callable[[Tensor], Tensor]
"""Reshapes a tensor, whose heads lie where a query has them, to `[batch, heads, queries, keys]`."""


@dataclass(frozen=True)
class Kernel:
    """The signature of a kernel.

    Attributes:
        names: names of its arguments, in order; the first three are q, k and v. Versions differ in the others, so
            these are used only if the function has no Python signature.
        scale: the argument that holds the model's own beta; its value None stands for `1/sqrt(d_k)`.
        heads: the axis of the heads in a query; None if it must be inferred from labels.
        describe: returns the pairs that a call uses, from its arguments, q and k `[..., heads, tokens, d_k]`, and a
            function that reshapes masks.
        modules: regular expression for the module that defines it.
        unknown: arguments whose effect on the logits is not followed.
        dims: number of dimensions from which on `heads` holds; with fewer, the axis is inferred from labels.
    """

    names: tuple[str, ...]
    scale: str
    heads: int | None
    describe: Callable[[Arguments, Tensor, Tensor, Batched], GivenMask]
    modules: str
    unknown: tuple[str, ...] = ()
    dims: int = 4

    def read(self, call: Call) -> dict[str, Any]:
        """Map names to the arguments of a call; after v, by the signature of the installed version."""
        behind = _parameters(inspect.unwrap(call.function))[3:] if len(call.args) > 3 else ()
        names = (*self.names[:3], *behind) if behind else self.names
        return {**dict(zip(names, call.args, strict=False)), **call.kwargs}

    def obstacle(self, given: Arguments) -> str | None:
        """The reason why a call is not followed; None if it is."""
        for name in self.unknown:
            value = given.get(name)
            if isinstance(value, Tensor) or value:  # 0 is the default of attention_chunk
                return f"{name}, which is not followed"
        for of_queries, of_keys in ENDS.items():
            if given.get(of_queries) is not given.get(of_keys):
                return f"two tensors as {of_queries} and {of_keys}: give it one, as both"
        return None

    def run(self, call: Call, query: Tensor) -> Any:
        """Call the kernel with another query."""
        with selective.counted():
            if call.args:
                return call.function(query, *call.args[1:], **call.kwargs)
            return call.function(**{**call.kwargs, self.names[0]: query})

    def heads_before_tokens(self, tensor: Tensor) -> Tensor:
        """An operand as `[..., heads, tokens, d_k]`, if the kernel states its heads axis; a second call undoes it."""
        return tensor.movedim(self.heads, -3) if self.states_heads(tensor) else tensor  # type: ignore[arg-type]

    def states_heads(self, tensor: Tensor) -> bool:
        """Return True if the kernel states the heads axis of such an operand."""
        return self.heads is not None and tensor.dim() >= self.dims


@functools.cache  # called in every forward
def _parameters(kernel: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters of a kernel; empty for one written in C++."""
    try:
        return tuple(inspect.signature(kernel).parameters)
    except (TypeError, ValueError):
        return ()


def band_of_torch(mask: Any, is_causal: bool) -> Band | None:
    """The band of a call of `F.scaled_dot_product_attention`; None if its mask is a tensor of pairs."""
    if mask is None:
        return Band(None, 0 if is_causal else None)
    if not is_causal_bias(mask):
        return None
    return Band(None, 0 if mask.variant.name == "UPPER_LEFT" else mask.seq_len_kv - mask.seq_len_q)


def _of_torch(given: Arguments, query: Tensor, key: Tensor, batched: Batched) -> GivenMask:
    mask: Any = given.get("attn_mask")
    if (band := band_of_torch(mask, bool(given.get("is_causal")))) is not None:
        return GivenMask("none", band=band)
    pairs = mask.expand(max(len(query), len(key)), *query.shape[1:-1], key.shape[-2])
    return GivenMask("pairs", batched(pairs))


def _of_flex(given: Arguments, query: Tensor, key: Tensor, batched: Batched) -> GivenMask:
    mask = given.get("block_mask")
    if mask is None:
        return GivenMask("none")
    return GivenMask("pairs", dense(mask, query.shape[-2], key.shape[-2], query.device))


def _of_flash(given: Arguments, query: Tensor, key: Tensor, batched: Batched) -> GivenMask:
    """Describe the pairs of flash attention: queries align with the end of the keys, and -1 is an open side."""
    left, right = given.get("window_size") or (-1, -1)
    last, right = key.shape[-2] - query.shape[-2], 0 if given.get("causal") or given.get("is_causal") else right
    band = Band(last - left - 1 if left >= 0 else None, last + right if right >= 0 else None)
    ends = next((given[name] for name in ENDS if name in given), None)
    if ends is None:
        return GivenMask("none", band=band)
    return GivenMask("documents", documents(ends, query.shape[-2]), band)


def _of_xformers(given: Arguments, query: Tensor, key: Tensor, batched: Batched) -> GivenMask:
    bias = given.get("attn_bias")
    if bias is None:
        return GivenMask("none")
    if type(bias).__name__ == "LowerTriangularMask":
        return GivenMask("none", band=Band(None, 0))
    if not isinstance(bias, Tensor):
        bias = bias.materialize((*query.shape[:-1], key.shape[-2]), device=query.device)
    return GivenMask("pairs", batched(bias.expand(*query.shape[:-1], key.shape[-2])))


def find_band(mask: Tensor) -> Band:
    """Find the band of a mask (see `masks.from_tensor`): full, causal or a window. Reads it back to the host."""
    pairs = masks.from_tensor(mask, Band()).pairs
    assert pairs is not None
    queries, keys = pairs.shape[-2:]
    positions = [torch.arange(size, device=pairs.device) for size in (queries, keys)]
    distances = (positions[1] - positions[0][:, None])[pairs.flatten(0, 1).any(0)]
    low, high = (int(distances.min()) - 1, int(distances.max())) if distances.numel() else (0, 0)
    window = Band(low if low > -queries else None, high if high < keys - 1 else None)
    bands = (Band(), Band(None, 0), Band(None, keys - queries), window)
    return next((band for band in bands if masks.from_tensor(pairs, band).structured), Band())


def documents(ends: Tensor, tokens: int) -> Tensor:
    """The document of each token of a packed sequence, `[1, tokens]`, from the cumulative lengths `ends`.

    For example, the ends `[0, 2, 5]` give `[[0, 0, 1, 1, 1]]`.
    """
    return torch.bucketize(torch.arange(tokens, device=ends.device), ends[1:], right=True)[None]


def dense(mask: Any, queries: int, keys: int, device: torch.device) -> Tensor:
    """The pairs of a `BlockMask` of flex attention, boolean `[batch, heads, queries, keys]`.

    Compiled flex attention skips blocks that are not listed, and calls the mask function only in those not full.
    """
    from torch.nn.attention.flex_attention import create_mask

    batch, heads = mask.shape[:2]
    sizes = queries, keys
    pairs = create_mask(mask.mask_mod, batch, heads, *sizes, device=str(device))
    pairs = pairs & _listed(mask.kv_num_blocks, mask.kv_indices, mask.BLOCK_SIZE, *sizes)
    if mask.full_kv_num_blocks is not None:
        pairs |= _listed(mask.full_kv_num_blocks, mask.full_kv_indices, mask.BLOCK_SIZE, *sizes)
    return pairs


def _listed(counts: Tensor, indices: Tensor, block: tuple[int, int], queries: int, keys: int) -> Tensor:
    """The pairs in listed blocks, boolean `[batch, heads, queries, keys]`.

    Args:
        counts: number of key blocks listed for each block of queries, `[batch, heads, blocks]`.
        indices: the key blocks, `[batch, heads, blocks, at most]`; those that are listed come first.
        block: numbers of queries and keys in a block.
        queries: number of queries in the call; the last block may extend beyond it.
        keys: likewise.
    """
    columns = -(-keys // block[1])
    is_listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    places = indices.where(is_listed, columns).clamp(max=columns).long()  # the others go to an extra column
    blocks = is_listed.new_zeros(*counts.shape, columns + 1).scatter_(-1, places, True)
    of_query, of_key = (torch.arange(n, device=indices.device) for n in (queries, keys))
    return blocks[..., of_query // block[0], :][..., of_key // block[1]]


ENDS = {"cu_seqlens_q": "cu_seqlens_k", "cu_seq_q": "cu_seq_k"}
"""Arguments with the cumulative lengths of packed queries, each mapped to that of the keys."""
FLASH_OPTIONS = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes")
FLASH = Kernel(
    names=("q", "k", "v", *FLASH_OPTIONS),
    scale="softmax_scale",
    heads=-2,
    describe=_of_flash,
    modules=r"\w*flash_att|.*\.flash_attn_interface$",  # the library `kernels` loads it under names with a hash
    unknown=("alibi_slopes", "qv", "learnable_sink", "attention_chunk"),
)
KERNELS = {
    "scaled_dot_product_attention": Kernel(
        names=("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
        scale="scale",
        heads=None,
        describe=_of_torch,
        modules="torch",
    ),
    "flex_attention": Kernel(
        names=("query", "key", "value", "score_mod", "block_mask", "scale"),
        scale="scale",
        heads=-3,
        describe=_of_flex,
        modules="torch",
        unknown=("score_mod",),
    ),
    "flash_attn_func": FLASH,
    "flash_attn_varlen_func": replace(
        FLASH,
        names=("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", *FLASH_OPTIONS),
        unknown=(*FLASH.unknown, "block_table", "seqused_q", "seqused_k"),
        dims=3,
    ),
    "varlen_attn": Kernel(
        names=("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal"),  # the last until 2.10
        scale="scale",
        heads=-2,
        describe=_of_flash,
        modules="torch",
        unknown=("seqused_k", "block_table"),
        dims=3,
    ),
    "memory_efficient_attention": Kernel(
        names=("query", "key", "value", "attn_bias", "p", "scale"),
        scale="scale",
        heads=-2,
        describe=_of_xformers,
        modules="xformers",
    ),
}
"""Signature of each kernel, by name."""


def connect(recorders: Iterable[Recorder], undo: ExitStack) -> None:
    """Let the tap see the kernels that the code of these layers calls by name, until `undo` is closed."""
    for recorder in recorders:
        for namespace, name in _bindings(recorder):
            undo.enter_context(stand_ins.put(namespace, name, _visible))


def are_called(recorder: Recorder) -> bool:
    """Return True if the code of a layer calls a kernel by name."""
    return next(_bindings(recorder), None) is not None


def _bindings(recorder: Recorder) -> Iterator[tuple[stand_ins.Namespace, str]]:
    """Yield namespace and name of each kernel that a layer looks up: in globals, other modules, classes or itself."""
    for namespace, names in list(_names_looked_up(recorder.module)):  # list: stand-ins will change the namespaces
        for name in names:
            if _is_kernel(stand_ins.find(namespace, name)):
                yield namespace, name


def _names_looked_up(module: nn.Module) -> Iterator[tuple[stand_ins.Namespace, Iterable[str]]]:
    """Yield the namespaces in which the code of a module may look up names, each with those names."""
    parts = list(module.modules())
    for part in parts:
        yield vars(part), list(vars(part))
    for kind in dict.fromkeys(kind for part in parts for kind in type(part).__mro__ if is_user_class(kind)):
        yield kind, list(vars(kind))
    for function in functions_of(module):
        names = names_in(function)
        for namespace in namespaces(names, function.__globals__):
            yield namespace, names
            for value in map(namespace.get, names):
                if isinstance(value, type):
                    yield value, names


def _is_kernel(value: Any) -> bool:
    """Return True for a kernel, including a static method or a partial of one."""
    value = without_partial(value.__func__ if isinstance(value, staticmethod) else value)
    name = getattr(value, "__name__", None)
    kernel = KERNELS.get(name) if isinstance(name, str) and callable(value) else None
    if kernel is None or name == "scaled_dot_product_attention":
        return False
    return re.match(kernel.modules, str(getattr(value, "__module__", ""))) is not None


def _visible(kernel: Any) -> Any:
    """Wrap a kernel so that function modes see its calls, with all arguments."""
    if isinstance(kernel, staticmethod):
        return staticmethod(_visible(kernel.__func__))
    if isinstance(kernel, functools.partial):
        return functools.partial(_visible(kernel.func), *kernel.args, **kernel.keywords)

    @functools.wraps(kernel)
    def visible(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if has_torch_function(tensors):
            return handle_torch_function(visible, tensors, *args, **kwargs)
        return kernel(*args, **kwargs)

    return visible
