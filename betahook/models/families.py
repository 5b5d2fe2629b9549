"""Facts about model families that betahook cannot derive from a module: names of attributes, and facts about classes.

This is the only file to edit for a new family. Classes are identified by name, since importing them would load every
model of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from betahook.models import layouts
from betahook.models.layouts import Layout, Select, Selections

HEADS = (
    *("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads", "attention_heads", "heads"),
    *("nb_heads", "no_heads", "head_count", "head_num", "heads_num", "num_head"),
    "num_attention_heads_per_partition",
)
"""Attributes that hold the number of query heads."""
HEAD_DIM = (
    *("qk_head_dim", "head_dim", "attention_head_size", "attention_head_dim", "key_value_proj_dim", "head_size"),
    *("key_dim", "dim_head", "d_head", "d_k", "d_qk", "dim_per_head", "query_head_dim"),
    "hidden_size_per_attention_head",
)
"""Attributes that hold d_k."""
SEPARATE = (
    *(("q_proj", "k_proj"), ("query", "key"), ("q", "k"), ("q_lin", "k_lin"), ("linear_q", "linear_k"), ("Wq", "Wk")),
    *(("wq", "wk"), ("to_q", "to_k"), ("query_proj", "key_proj"), ("project_q", "project_k")),
    *(("projection_query", "projection_key"), ("query_projection", "key_projection"), ("q_head", "k_head")),
    *(("c_q", "c_k"), ("W_query", "W_key")),
)
"""Pairs of attributes that hold separate projections for q and k."""
FUSED = (
    *("c_attn", "qkv_proj", "qkv", "Wqkv", "wqkv", "query_key_value", "in_proj", "att_proj", "to_qkv"),
    "img_qkv_proj",
)
"""Attributes that hold one projection for q, k and v."""
WRAPPED = ("linear", "base_layer")
"""Attributes under which a wrapper keeps the linear module that owns the weight; the second is an adapter's."""
TRANSPOSED = {"Conv1D"}
"""Classes of linear modules that store their weight as `[in, out]`."""
QUERY_NORMS = (
    *("q_norm", "q_layernorm", "q_b_norm", "query_layernorm", "query_norm", "norm_q"),
    *("q_layer_norm", "q_ln", "query_ln", "q_rms_norm"),
)
"""Attributes that hold a norm of the query between its projection and the scores."""
KEY_NORMS = (
    *("k_norm", "k_layernorm", "k_b_norm", "key_layernorm", "key_norm", "norm_k"),
    *("k_layer_norm", "k_ln", "key_ln", "k_rms_norm"),
)
"""Attributes that hold the norm of the key, in the same order."""
ADDED_QUERIES, ADDED_QUERY_NORMS = ("add_q_proj",), ("norm_added_q", "q_rms_norm_t")
"""Attributes that hold the same for a second sequence, appended to the first in diffusers' joint attention."""
QUERY_BIASES = ("q_bias",)
"""Parameters of the attention itself that are the bias of its query, as in BEiT, whose `qkv` has none."""
QUERY_CLIPS = ("clip_qkv",)
"""Attributes that bound the entries of q; a test input that stays within the bounds would not reveal them."""


@dataclass(frozen=True)
class Facts:
    """Facts about one class.

    Attributes:
        not_attention: the reason why a class is not attention with scores `q . k`, although it looks like it.
        bypasses_interface: returns True for a module that computes its scores by hand although its code calls the
            attention interface.
        prescale: returns the factor that the module applies to the query before it calls its attention function; this
            factor is part of its beta.
        remark: a caveat for users about what betahook measures in this class.
        heads: number of heads, if the module does not state it.
        fused: layout of the rows of a fused projection.
    """

    not_attention: str | None = None
    bypasses_interface: Callable[[Any], bool] | None = None
    prescale: Callable[[Any], float] | None = None
    remark: str | None = None
    heads: int | None = None
    fused: Layout = layouts.usual


def facts(module: nn.Module) -> Facts:
    """Look up the facts about a module's class, or about the nearest base class that has any."""
    for name in (kind.__name__ for kind in type(module).__mro__):
        if name in FACTS:
            return FACTS[name]
        if name.endswith("Indexer"):
            return _INDEXER
    return _DEFAULTS


def _codegen(module: Any, heads: int, head_dim: int, rows: int) -> Selections:
    """CodeGen: four shards, each with all of q, then v, then k of its heads."""

    def select(part: int) -> Select:
        return lambda weight: weight.unflatten(0, (4, 3, heads // 4, head_dim))[:, part].flatten(0, 1)

    return select(0), select(2)


def _multi_query(module: Any, *sizes: int) -> Selections | None:
    """GPT BigCode, older Falcon: after all queries, one key for all heads; without multi-query, head by head."""
    return (layouts.stacked if module.multi_query else layouts.head_by_head)(module, *sizes)


def _falcon(module: Any, *sizes: int) -> Selections | None:
    """Falcon: in the newer architecture, in groups of heads."""
    grouped = module.new_decoder_architecture
    return layouts.grouped(module.num_kv_heads, *sizes) if grouped else _multi_query(module, *sizes)


_PRESCALED = Facts(prescale=lambda module: module.scaling)
_NOT_BETA = ", a part of the scores and not of beta"
_ROTATED = Facts(remark="the factor of its rotary embedding (YaRN) is in q and k" + _NOT_BETA)
_NORMED = Facts(remark="q carries a constant factor behind its norm" + _NOT_BETA)
_POSITIONAL = Facts(remark="q carries a factor that grows with the position" + _NOT_BETA)
_LEARNED = Facts(remark="q carries a learned factor for each component" + _NOT_BETA)
_SPARSE = Facts(remark="short inputs make the model replace it by full attention, which is not hooked")
_BY_HEAD = Facts(fused=layouts.head_by_head)
_UPCAST = Facts(bypasses_interface=lambda module: getattr(module, "reorder_and_upcast_attn", False))  # in eager
_MAP = Facts(not_attention="it makes a map for segmentation, not weights for values")
_ADDITIVE = Facts(not_attention="its scores are additive, not products")
_INDEXER = Facts(not_attention="it picks the keys of another attention, without a softmax")
_OF_LAYERS = Facts(not_attention="it mixes layers, not tokens")
_DEFAULTS = Facts()

FACTS = {
    "AudioFlamingo3Attention": _PRESCALED,
    "BigBirdBlockSparseAttention": _SPARSE,
    "BigBirdPegasusBlockSparseAttention": _SPARSE,
    "BloomAttention": _BY_HEAD,
    "CodeGenAttention": Facts(fused=_codegen),
    "ConditionalDetrMHAttentionMap": _MAP,
    "DabDetrMHAttentionMap": _MAP,
    "DecisionTransformerGPT2Attention": _UPCAST,
    "DetrMHAttentionMap": _MAP,
    "DisentangledSelfAttention": _BY_HEAD,
    "DogeCDMoE": Facts(not_attention="it routes tokens to experts"),
    "EsmFold2RowAttentionPooling": Facts(not_attention="it pools with learned weights, without queries"),
    "EsmSelfAttention": Facts(prescale=lambda module: module.attention_head_size**-0.5),
    "FalconAttention": Facts(fused=_falcon),
    "Gemma3nAudioAttention": _LEARNED,
    "Gemma4AudioAttention": _LEARNED,
    "GPT2Attention": _UPCAST,
    "GPTBigCodeAttention": Facts(fused=_multi_query),
    "GPTNeoXAttention": _BY_HEAD,
    "GPTNeoXJapaneseAttention": _BY_HEAD,
    "GptOssAttention": _ROTATED,
    "GroupViTAssignAttention": Facts(heads=1),
    "ImageGPTAttention": _UPCAST,
    "Inkling2BlockAttentionResidual": _OF_LAYERS,
    "Inkling2FullAttention": _POSITIONAL,
    "Inkling2LoopBlockAttentionResidual": _OF_LAYERS,
    "Inkling2LoopFullAttention": _POSITIONAL,
    "Inkling2LoopMessageAttentionResidual": _OF_LAYERS,
    "InklingAttention": _POSITIONAL,
    "Kosmos2_5TextAttention": _PRESCALED,
    "LiltSelfAttention": Facts(
        remark="text and layout scale their common scores differently, beta is that of one of them"
    ),
    "Llama4TextAttention": _POSITIONAL,
    "LongcatFlashMLA": _NORMED,
    "MaskFormerDetrMHAttentionMap": _MAP,
    "MgpstrA3Module": Facts(not_attention="it pools tokens with learned weights, without queries"),
    "Ministral3Attention": _POSITIONAL,
    "Mistral4Attention": _POSITIONAL,
    "MossTranscribeDiarizeAudioAttention": _PRESCALED,
    "MuseGlimmerTextAttention": _NORMED,
    "MuseSparkTextAttention": _NORMED,
    "NystromformerSelfAttention": Facts(not_attention="it approximates the softmax by landmarks"),
    "OpenAIPrivacyFilterAttention": Facts(prescale=lambda module: module.scaling**2, remark=_ROTATED.remark),
    "OPTAttention": _PRESCALED,
    "PersimmonAttention": _BY_HEAD,
    "Qwen2AudioAttention": _PRESCALED,
    "SLANetAttentionGRUCell": _ADDITIVE,
    "SLANeXtAttentionGRUCell": _ADDITIVE,
    "SwiftFormerEfficientAdditiveAttention": _ADDITIVE,
    "TimesFm2_5Attention": _LEARNED,
    "TimesFmAttention": _LEARNED,
    "VideoPrismMultiheadAttentionPoolingHead": _LEARNED,
    "VoxtralAttention": _PRESCALED,
    "WavTokenizerVocosAttention": Facts(heads=1),
    "WhisperAttention": _PRESCALED,
}
"""Facts by class name. A class that is not listed applies no factor to q and has the usual fused layout."""
