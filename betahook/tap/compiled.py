"""The tap in a compiled graph, for user-defined attention that is `F.scaled_dot_product_attention` and no more.

The compiler cannot trace through all that `watching` does to follow scores, so attention by hand runs outside of its
graphs. Once forwards have shown that a module's only attention is that function, on a query
`[batch, heads, queries, d_k]` that carries no factor, there is nothing to follow. While such a forward is compiled,
`watching` enters `FusedAttention`, which puts the gain on the query and the operations of `opaque` into the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from betahook import compat
from betahook.measure.masks import Band, GivenMask
from betahook.models.code import SOFTMAXES
from betahook.tap import kernels, opaque
from betahook.tap.gain import scale_query
from betahook.tap.recorder import Recorder

UNFOLLOWED = SOFTMAXES | kernels.KERNELS.keys()
OF_TORCH = compat.multi_head_attention_forward()


class FusedAttention(TorchFunctionMode):
    """Function mode that scales and records the fused attention in one forward of one module while it is compiled.

    It appends the names of softmaxes and kernels that it cannot follow to `unfollowed`.
    """

    def __init__(self, recorder: Recorder, band: Band, unfollowed: list[str]) -> None:
        super().__init__()
        self._recorder = recorder
        self._band = band
        self._unfollowed = unfollowed

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and fits(self._recorder, *args, **kwargs):
            return _attend(self._recorder, self._band, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return OF_TORCH(*args, **kwargs)
        if func.__name__ in UNFOLLOWED:
            self._unfollowed.append(func.__name__)
        if func is Tensor.unflatten:
            return args[0].unflatten(*args[1:], **kwargs)
        return func(*args, **kwargs)


def fits(recorder: Recorder, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return True if q and k have the layer's shapes, `[batch, heads, tokens, d_k]`; ignore further arguments."""
    return query.dim() == key.dim() == 4 and query.shape[1] == recorder.heads


def _attend(
    recorder: Recorder,
    band: Band,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **options: Any,
) -> Tensor:
    """Run `F.scaled_dot_product_attention` with the beta of a layer."""
    default = query.shape[-1] ** -0.5 if scale is None else scale
    if recorder.is_recording:
        opaque.record_call(recorder, query, key, _pairs(attn_mask, is_causal, band), default)
    else:
        opaque.note_default(recorder, default)
    query = scale_query(recorder, query, (key, value), default)
    return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)


def _pairs(mask: Any, is_causal: bool, expected: Band) -> GivenMask:
    if (band := kernels.band_of_torch(mask, is_causal)) is not None:
        return GivenMask("none", band=band)
    return GivenMask("pairs", mask[(None,) * (4 - mask.dim())], expected)
