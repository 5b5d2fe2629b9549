"""A tiny config for every config class of transformers, found from the names of its fields.

Names repeat over the families: some hundred of them, with one small value each, make nearly every model a few thousand
parameters large. What does not fit this is in `facts.CONFIGS`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedConfig

from zoo import facts

WIDTH, HEADS, LAYERS, VOCABULARY = 64, 4, 2, 384

KEEP = object()


def _each(value: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


FEWER = {
    **_each(
        LAYERS,
        """num_hidden_layers encoder_layers decoder_layers num_layers n_layer n_layers depth num_decoder_layers
        num_encoder_layers decoder_num_hidden_layers encoder_num_hidden_layers decoder_num_layers encoder_num_layers
        num_blocks text_layers qformer_layers resampler_depth n_local_layers num_local_layers num_global_layers""",
    ),
    **_each(4, "num_experts num_local_experts n_routed_experts moe_num_experts num_moe_experts"),
    **_each(2, "num_experts_per_tok moe_topk moe_top_k top_k_experts num_selected_experts moe_k"),
    **_each(1, "n_group topk_group num_expert_group num_expert_groups first_k_dense_replace"),
}
"""Numbers of things: the value is the largest that is left."""

NARROWER = {
    **_each(
        WIDTH,
        """hidden_size d_model n_embd embed_dim dim width hidden_dim embedding_size projection_dim decoder_hidden_size
        encoder_hidden_size text_hidden_size out_hidden_size projector_hidden_size model_dim decoder_hidden_dim
        output_hidden_size projection_hidden_dim emb_dim text_embed_dim vision_embed_dim backbone_hidden_size
        fusion_hidden_size hidden_channels classifier_proj_size head_hidden_size encoder_dim decoder_dim
        word_embed_proj_dim embedding_dim pooler_output_size cross_attention_hidden_size output_dim encoder_hidden_dim
        lm_hidden_size vision_hidden_size d_embed pooler_hidden_size attention_hidden_size mm_hidden_size project_dim
        memory_attention_hidden_size pair_hidden_size
        intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff mlp_dim moe_intermediate_size n_inner
        shared_expert_intermediate_size decoder_intermediate_size ffn_hidden_size shared_intermediate_size
        dense_intermediate_size expert_ffn_hidden_size encoder_intermediate_size feed_forward_size inner_dim
        mlp_hidden_size ff_dim intermediate_size_mlp moe_shared_expert_intermediate_size expert_intermediate_size""",
    ),
    **_each(
        HEADS,
        """num_attention_heads encoder_attention_heads decoder_attention_heads num_heads n_head n_heads attention_heads
        decoder_num_attention_heads encoder_num_attention_heads num_attn_heads nhead heads""",
    ),
    **_each(
        WIDTH // HEADS,
        """head_dim d_kv attention_head_dim global_head_dim dim_head head_size kv_channels qk_rope_head_dim
        qk_nope_head_dim v_head_dim""",
    ),
    **_each(32, "kv_lora_rank q_lora_rank index_head_dim o_lora_rank"),
    **_each(2, "index_n_heads"),
    **_each(8, "index_topk rotary_dim"),
}
"""Widths, set whenever they are numbers above one."""

SHORTER = {
    **_each(
        512,
        """max_position_embeddings n_positions max_source_positions max_target_positions n_ctx seq_length max_seq_len
        max_seq_length max_sequence_length""",
    ),
    "sliding_window": 8,
}
"""Lengths: the value is the largest that is left."""

KEY_HEADS = {
    "num_key_value_heads",
    "encoder_num_key_value_heads",
    "decoder_num_key_value_heads",
    "num_global_key_value_heads",
}


def config(kind: type[PreTrainedConfig], model_type: str, *, narrow: bool = True) -> PreTrainedConfig:
    """The tiny config of a model type; without `narrow`, only what is easily large is reduced."""
    return _with_all_layers(kind, _values(kind, model_type, narrow, ()), model_type)


def _defaults(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    return {
        f.name: f.default_factory() if f.default is dataclasses.MISSING else f.default
        for f in dataclasses.fields(kind)
        if f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
    }


def _values(kind: type[PreTrainedConfig], model_type: str, narrow: bool, above: tuple[type, ...]) -> dict[str, Any]:
    """The arguments that make a config of this class tiny."""
    defaults = _defaults(kind)
    values = {name: _small(name, value, defaults, narrow) for name, value in defaults.items()}
    values = {name: value for name, value in values.items() if value is not KEEP}
    given = {**facts.CONFIGS.get(kind.__name__, {}), **facts.CONFIGS.get(model_type, {})}
    whole = kind() if set(kind.sub_configs) - set(given) else None
    for name in kind.sub_configs:
        part = getattr(whole, name, None)
        if name not in given and isinstance(part, PreTrainedConfig) and type(part) not in above:
            values[name] = _part(part, narrow, (*above, kind))
    return {**values, **{name: make() if callable(make) else make for name, make in given.items()}}


def _part(part: PreTrainedConfig, narrow: bool, above: tuple[type, ...]) -> PreTrainedConfig:
    """A tiny config like `part`, keeping what the config above gave it."""
    kind = type(part)
    values, defaults = _values(kind, kind.model_type, narrow, above), _defaults(kind)
    kept = {
        name: value
        for name, default in defaults.items()
        if name not in ("id2label", "label2id", "num_labels", "layer_types", "mlp_layer_types", *kind.sub_configs)
        and not name.startswith("_")
        and default is not None
        and isinstance(value := vars(part).get(name, default), (int, float, str, list, tuple))
        and value != default
        and _small(name, value, defaults, narrow) is _small(name, default, defaults, narrow) is KEEP
    }
    try:
        return _with_all_layers(kind, {**values, **kept}, kind.model_type)
    except ValueError:  # what was kept contradicts what was made small
        return _with_all_layers(kind, values, kind.model_type)


def _small(name: str, value: Any, fields: dict[str, Any], narrow: bool) -> Any:
    """The small value of a field, or `KEEP`."""
    if name == "image_size":
        return _small_image(value, fields.get("patch_size"))
    if not isinstance(value, int) or isinstance(value, bool) or name.startswith("_"):
        return KEEP
    if name.endswith(("_token_id", "token_index", "_token_ids")):
        # An id of its own for each kind of token, among those that no input uses.
        return 200 + sum(map(ord, name)) * 7 % 100 if not 0 <= value < VOCABULARY else KEEP
    if "vocab_size" in name:
        return VOCABULARY if value > 1200 else KEEP
    if name in FEWER:
        return FEWER[name] if value > FEWER[name] else KEEP
    if not narrow or value <= 1:
        return KEEP
    if name in KEY_HEADS:
        heads = next((fields[n] for n, size in NARROWER.items() if size == HEADS and type(fields.get(n)) is int), None)
        return HEADS if value == heads else HEADS // 2
    if name in SHORTER:
        return SHORTER[name] if value > SHORTER[name] else KEEP
    return NARROWER.get(name, KEEP)


def _small_image(size: Any, patch: Any) -> Any:
    """A small image of whole patches, as a number or a pair like `size`; `KEEP` where it is small already."""
    if isinstance(size, (list, tuple)):
        pairs = zip(size, patch if isinstance(patch, (list, tuple)) else [patch] * len(size), strict=True)
        sides = [_small_image(*pair) for pair in pairs]
        return KEEP if KEEP in sides else type(size)(sides)
    if not isinstance(size, int) or size <= 64:
        return KEEP
    return 64 if not isinstance(patch, int) or patch <= 1 else patch * (4 if patch >= 8 else 16)


def _with_all_layers(kind: type[PreTrainedConfig], values: dict[str, Any], model_type: str) -> PreTrainedConfig:
    """The config with these values, but with one layer of each kind where it is a hybrid and two do not show all."""
    small = kind(**values)
    there = getattr(small, "layer_types", None)
    if not isinstance(there, (list, tuple)) or "layer_types" in facts.CONFIGS.get(model_type, {}):
        return small
    kinds = list(dict.fromkeys(getattr(kind(), "layer_types", None) or []))
    if set(kinds) <= set(there) or len(kinds) > 6:
        return small
    kinds = kinds if len(kinds) > 1 else kinds * 2
    return kind(**{**values, "layer_types": kinds, "num_hidden_layers": len(kinds)})
