"""The first tap: attention that goes through the attention interface of transformers.

Models look up their attention function with `AttentionInterface.get_interface`, whatever the backend. While any model
is hooked, that one method is wrapped. For hooked modules the wrapper multiplies the query by `beta / beta_default` and
records the scores; then the model's own function runs, as it does for all other modules.

Importing this file loads the models of transformers, which takes seconds, so only hooks that need it import it.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

# Both names are documented, but not that every model calls `get_interface`, which the tap wraps.
# https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/modeling_utils.py
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from betahook.measure.masks import Band, GivenMask
from betahook.measure.rows import ScoreMod
from betahook.models import selective
from betahook.tap import kernels, opaque
from betahook.tap.gain import scale_query
from betahook.tap.recorder import ATTRIBUTE, Recorder

if len(inspect.signature(getattr(AttentionInterface, "get_interface", lambda: None)).parameters) != 3:
    raise ImportError(
        f"betahook needs transformers 5.1 or later, whose AttentionInterface has get_interface(name, default); found "
        f"transformers {transformers.__version__}, which lacks it: upgrade transformers, or betahook"
    )
UNKNOWN = (
    f"this version of betahook does not know how transformers {transformers.__version__} looks up its attention "
    "functions: upgrade one of the two"
)
"""Error message for a transformers whose attention bypasses the tap."""

_users = 0
_before: Any = None
"""`AttentionInterface.get_interface` as it was before the first user."""
_ours: Any = None
"""The method that replaces it; None without users."""


def acquire() -> None:
    """Register the tap, if this is its first user.

    Raises:
        RuntimeError: transformers does not look up its attention functions here.
    """
    global _users, _before, _ours
    if _users == 0:
        # Read anew: another library may have wrapped it since the last hook, and its wrapper must be called and kept.
        _before = AttentionInterface.get_interface
        _ours = _tapping(_before)
        AttentionInterface.get_interface = _ours  # type: ignore[method-assign]
        answer = ALL_ATTENTION_FUNCTIONS.get_interface("eager", acquire)
        if getattr(answer, "func", None) is not _attention:
            AttentionInterface.get_interface = _before  # type: ignore[method-assign]
            raise RuntimeError(UNKNOWN)
    _users += 1


def release() -> None:
    """Undo one `acquire`; the last one restores transformers, unless another library has wrapped the tap since."""
    global _users, _before, _ours
    _users -= 1
    if _users == 0:
        if AttentionInterface.get_interface is _ours:
            AttentionInterface.get_interface = _before  # type: ignore[method-assign]
        _before = _ours = None


def _tapping(original: Any) -> Any:
    """Make a `get_interface` that returns functions with the tap around them.

    Another library's wrapper may still call an earlier one of these, but `_attention` only acts in the outermost.
    """
    # Unwrap the tap of an earlier import of this file, which would apply beta twice; but not another library's wrapper
    # of it, to which `functools.wraps` copied the attribute.
    if not hasattr(original, "__wrapped__"):
        original = getattr(original, "betahook_original", original)

    def get_interface(self: AttentionInterface, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(self, implementation, default)
        return functools.partial(_attention, function, implementation)

    get_interface.betahook_original = original  # type: ignore[attr-defined]
    return get_interface


def _attention(function: Callable[..., Any], implementation: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    recorder: Recorder | None = getattr(module, ATTRIBUTE, None)
    if recorder is None or recorder.route != "interface" or _is_running(recorder, module):
        return function(module, *args, **kwargs)
    query = _tapped(recorder, implementation, module, *args, **kwargs)
    args, kwargs = ((query, *args[1:]), kwargs) if args else (args, {**kwargs, "query": query})
    return _run(recorder, function, module, args, kwargs)


_running: set[tuple[int, int]] = set()
"""Thread id and module id of each attention function that is running now, outside of compiled graphs."""


def _is_running(recorder: Recorder, module: nn.Module) -> bool:
    """Return True inside a module's attention function, where functions receive a query that is already scaled."""
    if torch.compiler.is_compiling():
        return recorder.in_function
    return (threading.get_ident(), id(module)) in _running  # threads of `nn.DataParallel` share the recorder


def _run(
    recorder: Recorder, function: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the attention function of a module, which may look up another one in the interface."""
    if not torch.compiler.is_compiling():  # in a checkpoint it can trace a changed attribute, but not a changed set
        _running.add(here := (threading.get_ident(), id(module)))
    recorder.in_function = True
    try:
        return function(module, *args, **kwargs)
    finally:
        recorder.in_function = False
        if not torch.compiler.is_compiling():
            _running.remove(here)


def _tapped(
    recorder: Recorder,
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any = None,
    *_: Any,
    **options: Any,
) -> Tensor:
    """Record a call, and return its query scaled by the gain; unchanged if the layer is idle or left alone."""
    mask = options.pop("attention_mask", mask)
    # A compiled graph runs in every step, and asks the recorder at run time.
    if (not torch.compiler.is_compiling() and recorder.is_idle) or _passes_by(recorder, query, options):
        return query
    with selective.uncounted():
        scaling = options.get("scaling")
        if scaling is None:
            scaling = query.shape[-1] ** -0.5  # the default of every backend
        prescale = 1.0 if recorder.attention.facts.prescale is None else recorder.attention.facts.prescale(module)
        default = scaling * prescale
        if recorder.is_recording:
            given = given_mask(implementation, module, query, key, mask, options)
            raw = query if prescale == 1 else query / prescale
            # The sdpa function of transformers has no soft cap: 5.1 ignores the argument, later versions refuse it.
            softcap = None if implementation == "sdpa" else options.get("softcap")
            score_mod = ScoreMod(options.get("position_bias"), softcap, _sinks(query, **options))
            opaque.record_call(recorder, raw, key, given, default, score_mod)
        else:
            opaque.note_default(recorder, default)
        return scale_query(recorder, query, (key, value), default)


def _passes_by(recorder: Recorder, query: Tensor, options: dict[str, Any]) -> bool:
    """Return True if the layer is left alone; leave it alone if a query lacks the heads that its module states.

    Sinks of an unknown shape are a reason too, since their contribution to the softmax is not known.
    """
    has_heads = query.dim() == 4 and recorder.select_local_heads(query.shape[1])
    sinks: Any = options.get("sinks") if options.get("s_aux") is None else options["s_aux"]
    fits = has_heads and (not isinstance(sinks, Tensor) or _sinks(query, **options) is not None)
    if torch.compiler.is_compiling():  # looking up the refusal would specialise the graph to this layer
        return not fits
    if not fits and recorder.refusal is None:
        recorder.leave_alone(
            f"its sinks are {list(sinks.shape)}, neither [heads] nor [batch, heads, queries, 1]"
            if has_heads
            else f"its query is {list(query.shape)}, not [batch, {recorder.heads}, queries, d_k]"
        )
    return recorder.refusal is not None


def _sinks(query: Tensor, s_aux: Any = None, sinks: Any = None, **_: Any) -> Tensor | None:
    """Logits that take part in the softmax without a key, `[batch or 1, heads, queries or 1]`; None without any.

    Args:
        query: the query of the call.
        s_aux: `[heads]`, learned, as in gpt-oss.
        sinks: `[batch, heads, queries, 1]`, one for each query, as in Inkling 2.
    """
    if isinstance(s_aux, Tensor) and s_aux.shape == query.shape[1:2]:
        return s_aux.detach().view(1, -1, 1)
    if isinstance(sinks, Tensor) and sinks.shape == (*query.shape[:3], 1):
        return sinks.detach().squeeze(-1)
    return None


def given_mask(
    implementation: str, module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]
) -> GivenMask:
    """Describe the pairs that the attention function called `implementation` will use, by its own rules.

    Args:
        mask: what the model passes as `attention_mask`: None, a 4-D tensor, a 2-D padding mask or a `BlockMask`.
        options: the other keyword arguments of the call.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    by_kernel = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)
    window = _window(implementation, module, options)
    band = _band(module, window, last=keys - queries, causal=causal, by_kernel=by_kernel)

    if mask is None:
        if implementation == "eager" or implementation == "flex_attention":
            return GivenMask("none")
        if "flash" in implementation:
            documents = _documents(queries, options) if len(query) == 1 and queries == keys else None
            return GivenMask("none" if documents is None else "documents", documents, band)
        return GivenMask("none", band=Band(None, 0) if causal and queries > 1 else Band())
    if not isinstance(mask, Tensor):
        mask = kernels.dense(mask, queries, keys, query.device)
    if mask.dim() == 2:
        return GivenMask("padding", mask, band)
    if implementation == "eager" and not mask.is_floating_point():
        mask = mask.float()  # eager attention adds any mask to the logits, so a boolean one masks nothing
    return GivenMask("pairs", mask, band)


def _window(implementation: str, module: nn.Module, options: dict[str, Any]) -> int | None:
    """Sliding window of a call, None without one: from its options if it is given there, or with flash attention.

    Else it is the module's, which may hold the window of its config even in layers that do not use one.
    """
    by_options = "sliding_window" in options or "flash" in implementation
    window = options.get("sliding_window") if by_options else getattr(module, "sliding_window", None)
    return window if isinstance(window, int) and window > 0 else None


def _band(module: nn.Module, window: int | None, *, last: int, causal: bool, by_kernel: bool) -> Band:
    """The band of an attention; if it is causal, its first query sees the keys up to position `last`.

    Masks align queries with the end of the keys, of which there are more if there is a cache.
    """
    if window is None:
        return Band(None, last) if causal else Band()
    if causal:
        return Band(last - window, last)
    # Kernels subtract 1 from the window. Masks use that of the config, to which most models add 1 for the kernels.
    of_config = getattr(getattr(module, "config", None), "__dict__", {}).get("sliding_window")
    reach = window if of_config == window and not by_kernel else window - 1
    return Band(-reach - 1, reach)


def _documents(tokens: int, options: dict[str, Any]) -> Tensor | None:
    """The document of each token of a packed sequence, `[1, tokens]`, as flash attention finds it; None if unknown."""
    ends: Tensor | None = options.get("cu_seq_lens_q")
    positions: Tensor | None = options.get("position_ids")
    if ends is not None:
        return kernels.documents(ends, tokens)
    if positions is not None and positions.shape == (1, tokens):
        return (positions == positions.min()).cumsum(-1)
    return None
