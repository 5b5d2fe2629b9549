"""What the names of fields and arguments do not tell: sizes, inputs and model classes of single families.

A value that is a function is called when it is needed: with nothing for a config, with a random generator for inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Dinov2Config, ResNetConfig, RTDetrResNetConfig, SwinConfig

Make = Callable[[torch.Generator], Tensor]


def normal(*shape: int) -> Make:
    return lambda generator: torch.randn(shape, generator=generator)


def uniform(*shape: int) -> Make:
    return lambda generator: torch.rand(shape, generator=generator)


def ids(*shape: int, low: int = 5, high: int = 100) -> Make:
    return lambda generator: torch.randint(low, high, shape, generator=generator)


def ones(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def padded(batch: int, length: int, padding: int = 4) -> Tensor:
    """A mask `[batch, length]` whose last row ends in padding."""
    mask = ones(batch, length)
    mask[-1, length - padding :] = 0
    return mask


def _all(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


def _rope(*sections: int, name: str = "mrope_section", **more: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, name: list(sections), **more}}


def _resnet(*stages: str) -> Callable[[], ResNetConfig]:
    return lambda: ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=list(stages)
    )


def _swin(*stages: str) -> Callable[[], SwinConfig]:
    return lambda: SwinConfig(
        image_size=64,
        patch_size=4,
        window_size=4,
        embed_dim=16,
        depths=[1, 1, 1, 1],
        num_heads=[2, 2, 4, 4],
        out_features=list(stages),
    )


def _dinov2() -> Dinov2Config:
    return Dinov2Config(
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=4,
        image_size=56,
        patch_size=14,
        out_features=["stage1", "stage2", "stage3", "stage4"],
        reshape_hidden_states=False,
    )


def _rt_detr_resnet() -> RTDetrResNetConfig:
    return RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 32, 64],
        depths=[1, 1, 1, 1],
        out_features=["stage2", "stage3", "stage4"],
        layer_type="basic",
    )


_WINDOWS = dict(image_size=64, patch_size=2, window_size=4, embed_dim=16, depths=[1, 2], num_heads=[2, 4])
_SERIES = dict(prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=1, d_model=64)
_DETR = dict(num_queries=8, backbone_config=_resnet("stage4"), use_timm_backbone=False)
_RT_DETR = dict(
    backbone_config=_rt_detr_resnet,
    encoder_hidden_dim=32,
    encoder_in_channels=[16, 32, 64],
    feat_strides=[8, 16, 32],
    encoder_layers=1,
    d_model=32,
    num_queries=8,
    decoder_in_channels=[32, 32, 32],
    decoder_n_points=4,
    anchor_image_size=None,
    num_denoising=0,
)
_DINO = dict(backbone_config=_swin("stage2", "stage3", "stage4"), d_model=32, num_queries=8, num_feature_levels=4)
_HIERA = dict(
    hidden_size=16,
    image_size=[64, 64],
    embed_dim_per_stage=[16, 32, 64],
    num_attention_heads_per_stage=[2, 4, 4],
    blocks_per_stage=[1, 1, 2],
    window_size_per_stage=[8, 8, 4],
    global_attention_blocks=[3],
    num_query_pool_stages=2,
)
_SAM2 = dict(
    backbone_channel_list=[64, 32, 16],
    backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]],
    fpn_hidden_size=64,
    fpn_top_down_levels=[0, 1, 2],
    num_feature_levels=3,
)
_MAMBA = dict(mamba_n_heads=8, mamba_d_state=8, num_attention_heads=4, num_key_value_heads=2, hidden_size=64)
_ZAMBA_LAYERS = ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"]

CONFIGS: dict[str, dict[str, Any]] = {
    **_all("Qwen2VLTextConfig PaddleOCRTextConfig Qwen2_5_VLTextConfig", _rope(2, 3, 3)),
    **_all("Glm46VTextConfig Glm4vTextConfig GlmImageTextConfig GlmOcrTextConfig GlmgaTextConfig", _rope(2, 3, 3)),
    "Glm4vMoeTextConfig": _rope(1, 1, 2, partial_rotary_factor=0.5),
    **_all("cosmos3_edge_text Cosmos3EdgeTextConfig HYV4VLTextConfig", _rope(2, 3, 3)),
    **_all(
        "WavTokenizerConfig WavTokenizerEncoderConfig", dict(hidden_size=64, codebook_dim=64, decoder_hidden_size=64)
    ),
    **_all("Qwen2_5OmniTextConfig Qwen2_5OmniTalkerConfig qwen2_5_omni_text qwen2_5_omni_talker", _rope(2, 3, 3)),
    **_all("autoformer informer time_series_transformer", _SERIES),
    "autoformer": {**_SERIES, "label_length": 4},
    **_all("detr conditional_detr table-transformer", _DETR),
    "deformable_detr": {**_DETR, "backbone_config": _resnet("stage2", "stage3", "stage4")},
    "dab-detr": _DETR,
    **_all("rt_detr rt_detr_v2", _RT_DETR),
    **_all("grounding-dino mm-grounding-dino", _DINO),
    "mask2former": dict(
        backbone_config=_swin("stage1", "stage2", "stage3", "stage4"),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=64,
        dim_feedforward=64,
        num_queries=8,
    ),
    "maskformer": dict(backbone_config=_swin("stage1", "stage2", "stage3", "stage4")),
    "oneformer": dict(
        backbone_config=_swin("stage1", "stage2", "stage3", "stage4"),
        num_queries=8,
        hidden_dim=32,
        mask_dim=32,
        conv_dim=32,
        dim_feedforward=64,
        encoder_feedforward_dim=64,
        query_dec_layers=2,
        text_encoder_width=64,
        text_encoder_num_layers=2,
        text_encoder_context_length=77,
        task_seq_len=77,
    ),
    **_all("swin donut-swin swinv2 maskformer-swin", _WINDOWS),
    "swin2sr": {**_WINDOWS, "image_size": 32, "patch_size": 1},
    "audio-spectrogram-transformer": dict(max_length=64, num_mel_bins=32),
    **_all(
        "whisper WhisperConfig VoxtralEncoderConfig MossTranscribeDiarizeAudioConfig AudioFlamingo3EncoderConfig",
        dict(max_source_positions=32),
    ),
    "bamba": {**_MAMBA, "attn_layer_indices": [1], "num_hidden_layers": 2, "mamba_d_head": 16},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "big_bird": dict(block_size=4, num_random_blocks=1),
    **_all("chameleon emu3", dict(vocabulary_map={"<image>": 300})),
    **_all("Emu3VQVAEConfig JanusVQVAEConfig ChameleonVQVAEConfig", dict(base_channels=32)),
    "falcon_h1": dict(mamba_chunk_size=8),
    "hiera": dict(image_size=[64, 64], num_query_pool=1, depths=[1, 1], embed_dim=32, num_heads=[2, 4]),
    **_all("sam2_hiera_det_model Sam2HieraDetConfig", _HIERA),
    **_all("sam2_vision_model Sam2VisionConfig", _SAM2),
    **_all("SamVisionConfig SamHQVisionConfig", dict(output_channels=64, num_pos_feats=32)),
    **_all("SamPromptEncoderConfig SamHQPromptEncoderConfig", dict(image_size=64)),
    "Sam2PromptEncoderConfig": dict(image_size=64),
    "SamHQMaskDecoderConfig": dict(vit_dim=64),
    "ClapAudioConfig": dict(
        depths=(2, 1, 1, 1), hidden_size=128, patch_embeds_hidden_size=16, num_attention_heads=(2, 2, 4, 4)
    ),
    "ernie4_5_vl_moe_text": dict(intermediate_size=64, moe_intermediate_size=[64, 32]),
    "funnel": dict(block_sizes=(2, 1, 1), d_inner=64),
    **_all("gemma3n_audio Gemma3nAudioConfig", dict(conf_num_hidden_layers=2)),
    "kimi_linear": dict(linear_num_heads=4, linear_head_dim=16),
    "levit": dict(depths=(2, 1, 1)),
    "nemotron_h": dict(mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=16, chunk_size=8),
    "pegasus_x": dict(block_size=16),
    "slanext": dict(max_text_length=16),
    "vits": dict(
        upsample_initial_channel=32,
        upsample_rates=(2, 2),
        upsample_kernel_sizes=(4, 4),
        spectrogram_bins=64,
        posterior_encoder_num_wavenet_layers=2,
        prior_encoder_num_wavenet_layers=1,
        prior_encoder_num_flows=2,
    ),
    **_all("dia_decoder DiaDecoderConfig", dict(cross_hidden_size=64)),
    "AlignVisionConfig": dict(hidden_dim=640),
    "AlignConfig": dict(projection_dim=640),
    "pix2struct_text_model": dict(initializer_range=0.02),
    "t5gemma2_decoder": dict(dropout_rate=0.0),
    "moonshine_streaming": dict(num_key_value_heads=4),
    **_all(
        "diffusion_gemma_text DiffusionGemmaTextConfig",
        dict(num_experts=4, top_k_experts=2, moe_intermediate_size=32),
    ),
    **_all(
        "deepseek_ocr2_text DeepseekOcr2TextConfig", dict(mlp_layer_types=["dense", "sparse"], num_experts_per_tok=2)
    ),
    **_all("Qwen2_5OmniThinkerConfig Qwen3OmniMoeThinkerConfig", dict(vision_start_token_id=250)),
    "blip-2": dict(num_query_tokens=4, image_token_index=300),
    "XCLIPVisionConfig": dict(mit_hidden_size=64),
    **_all("lw_detr rf_detr", dict(num_queries=4, group_detr=1)),
    **_all("T5Gemma2TextConfig T5Gemma2DecoderConfig", dict(dropout_rate=0.0)),
    **_all("depth_anything prompt_depth_anything", dict(backbone_config=_dinov2, reassemble_hidden_size=64)),
    "zoedepth": dict(backbone_config=_dinov2, bottleneck_features=64),
    "superglue": dict(hidden_size=256, gnn_layers_types=["self", "cross"]),
    "clvp_encoder": dict(projection_dim=64, hidden_size=128),
    "dbrx": dict(
        max_seq_len=256,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0, "attn_pdrop": 0.0},
        ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}},
    ),
    "deberta": dict(relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=16),
    "deberta-v2": dict(
        relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=16, position_buckets=-1
    ),
    "deepseek_v2": dict(num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=32),
    "DeepseekV2Config": dict(num_experts_per_tok=2, n_routed_experts=4, n_shared_experts=1),
    "dots1": dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=32),
    "esm": dict(
        vocab_size=33,
        mask_token_id=32,
        pad_token_id=1,
        position_embedding_type="rotary",
        hidden_size=64,
        num_attention_heads=4,
    ),
    "gemma3n_text": dict(
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        intermediate_size=[64] * 4,
        activation_sparsity_pattern=[0.0] * 4,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=384,
        laurel_rank=8,
    ),
    **_all("glm5_next_text Glm5NextTextConfig", dict(index_topk=16, linear_num_heads=4, linear_head_dim=16)),
    **_all("gpt2 imagegpt", dict(scale_attn_by_inverse_layer_idx=True)),
    "gpt_neo": dict(
        attention_types=[[["global", "local"], 1]],
        num_layers=2,
        num_heads=4,
        hidden_size=64,
        window_size=8,
        intermediate_size=64,
    ),
    "hunyuan_v1_moe": dict(head_dim=16, num_experts=4, moe_topk=2),
    **_all("hunyuan_vl_text HunYuanVLTextConfig", {**_rope(2, 2, 2, 2, name="xdrope_section"), "head_dim": 16}),
    **_all("HunYuanDenseV1Config HunYuanMoEV1Config HunYuanVLConfig MinistralConfig NemotronConfig", dict(head_dim=16)),
    **_all("ministral nemotron", dict(head_dim=16, num_key_value_heads=2)),
    "jamba": dict(
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=8,
    ),
    "kosmos-2": dict(latent_query_num=4),
    "layoutlmv3": dict(coordinate_size=8, shape_size=16, input_size=32, patch_size=16),
    "led": dict(attention_window=8, max_encoder_position_embeddings=512, max_decoder_position_embeddings=512),
    "lfm2_moe": dict(layer_types=["full_attention", "conv"], num_dense_layers=1),
    "lilt": dict(channel_shrink_ratio=4, hidden_size=96),
    "llama4_vision_model": dict(
        vision_output_dim=64, intermediate_size=256, projector_input_dim=64, projector_output_dim=64
    ),
    "longformer": dict(attention_window=8),
    "lxmert": dict(l_layers=1, x_layers=1, r_layers=1),
    "mllama_vision_model": dict(intermediate_layers_indices=[0, 1], num_global_layers=1, vision_output_dim=192),
    "mobilevitv2": dict(image_size=64),
    "patchtsmixer": dict(self_attn=True, self_attn_heads=2, context_length=32, d_model=8),
    "perceiver": dict(
        num_latents=8,
        d_latents=64,
        num_self_attends_per_block=2,
        num_blocks=1,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        qk_channels=64,
        v_channels=64,
    ),
    "recurrent_gemma": dict(num_hidden_layers=3, lru_width=64, attention_window_size=8, intermediate_size=128),
    "reformer": dict(
        attn_layers=["local", "lsh"],
        axial_pos_shape=[4, 8],
        axial_pos_embds_dim=[32, 32],
        attention_head_size=16,
        lsh_attn_chunk_length=4,
        local_attn_chunk_length=4,
        num_buckets=4,
    ),
    "seggpt": dict(
        image_size=(64, 32),
        patch_size=8,
        pretrain_image_size=32,
        merge_index=0,
        intermediate_hidden_state_indices=[0, 1],
    ),
    **_all("step3p5 Step3p5TextConfig", dict(sliding_window=8)),
    "timesformer": dict(num_frames=4, image_size=32, patch_size=16),
    "videomae": dict(num_frames=4, image_size=32, patch_size=16),
    "vivit": dict(num_frames=8, image_size=32, tubelet_size=[2, 16, 16]),
    "vjepa2": dict(
        crop_size=32,
        frames_per_clip=4,
        patch_size=16,
        pred_hidden_size=64,
        pred_num_attention_heads=4,
        pred_num_hidden_layers=2,
    ),
    "xmod": dict(default_language="en_XX", languages=("en_XX",)),
    "zamba": dict(
        num_hidden_layers=6,
        layers_block_type=_ZAMBA_LAYERS,
        layer_types=_ZAMBA_LAYERS,
        mamba_d_state=4,
        mamba_dt_rank=8,
        n_mamba_heads=2,
        attention_hidden_size=128,
        attention_head_dim=32,
    ),
    "zamba2": dict(
        num_hidden_layers=4,
        layers_block_type=_ZAMBA_LAYERS[:4],
        layer_types=_ZAMBA_LAYERS[:4],
        mamba_d_state=4,
        n_mamba_heads=4,
        mamba_headdim=32,
        chunk_size=8,
        num_mem_blocks=1,
    ),
    **_all(
        "VibeVoiceAcousticTokenizerConfig VibeVoiceAcousticTokenizerEncoderConfig",
        dict(num_filters=2, depths=[1] * 7),
    ),
}
"""Fields by model type, or by config class where the config is part of another one."""

WIDE = {
    "dots3_note_audio_encoder",
    "efficientloftr",
    "ernie4_5_vl_moe_text",
    "fun_asr_nano",
    "gradium_phonon_tts",
    "mimi",
    "nemo_speechlm",
    "nemotron3_5_transcribe_audio",
    "nemotron3_diarization",
    "phi4_multimodal_audio",
    "pocket_tts",
    "pocket_tts_audio_tokenizer",
}
"""Model types whose widths depend on one another in ways of their own, and are left as they are."""

CLASSES = {
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
}
"""Another model class than the usual one."""


def _patches(first: str, width: int, grid: str = "grid_thw") -> dict[str, Any]:
    """Two images of four by four patches, packed into one sequence."""
    return {first: normal(32, width), grid: torch.tensor([[1, 4, 4], [1, 4, 4]])}


def _image(*shape: int) -> dict[str, Any]:
    return {"pixel_values": normal(*shape)}


_TIMES = dict(
    past_values=normal(2, 10),
    past_time_features=normal(2, 10, 1),
    past_observed_mask=torch.ones(2, 10),
    future_values=normal(2, 4),
    future_time_features=normal(2, 4, 1),
    use_cache=False,
)
_CODES = dict(input_ids=ids(8, 8), attention_mask=padded(2, 8, 2), use_cache=False)
_SOUND = dict(input_values=normal(1, 1, 8000))
_DOCUMENT = dict(flattened_patches=lambda g: torch.cat([torch.ones(2, 8, 2), torch.randn(2, 8, 768, generator=g)], -1))
_PAIR = dict(pixel_values=uniform(1, 2, 3, 64, 64))
_QFORMER = dict(query_embeds=normal(2, 6, 64), encoder_hidden_states=normal(2, 9, 64))

INPUTS: dict[str, dict[str, Any]] = {
    **_all("autoformer informer time_series_transformer", _TIMES),
    "patchtst": dict(past_values=normal(2, 32, 1)),
    "patchtsmixer": dict(past_values=normal(2, 32, 1)),
    "timesfm": dict(past_values=normal(2, 128), past_values_padding=zeros(2, 128), freq=zeros(2, 1)),
    "timesfm2_5": dict(past_values=normal(2, 128)),
    "audio-spectrogram-transformer": dict(input_values=normal(2, 64, 32)),
    "moss_transcribe_diarize_audio": dict(input_features=normal(2, 80, 64)),
    "voxtral_encoder": dict(input_features=normal(2, 128, 64)),
    "qwen2_audio_encoder": dict(input_features=normal(2, 128, 1024)),
    "fun_asr_nano_encoder": dict(input_features=normal(2, 32, 560), input_features_mask=padded(2, 32, 8)),
    "qwen3_asr_encoder": dict(input_features=normal(2, 128, 200), input_features_mask=padded(2, 200, 40)),
    "sam2_hiera_det_model": _image(2, 3, 64, 64),
    "sam2_vision_model": _image(2, 3, 64, 64),
    "glmasr_encoder": dict(input_features=normal(2, 128, 64)),
    "voxtral_realtime_encoder": dict(input_features=normal(2, 128, 64), use_cache=False),
    "audioflamingo3_encoder": dict(input_features=normal(2, 128, 64), input_features_mask=ones(2, 64)),
    **_all("granite_speech_encoder granite_speech_plus_encoder", dict(hidden_states=normal(2, 64, 160))),
    **_all("granite_speech5_encoder granite_speech5_ctc", dict(input_features=normal(2, 64, 320))),
    "clvp_encoder": dict(input_ids=ids(2, 12, high=200)),
    "clap_audio_model": dict(input_features=normal(1, 1, 128, 64), is_longer=torch.tensor([[False]])),
    **_all(
        "glm4v_moe_vision glm4v_vision glm5_next_vision glm_ocr_vision glm46v_vision glmga_vision exaone4_5_vision "
        "qwen2_vl_vision qwen2_5_vl_vision qwen2_5_omni_vision_encoder",
        _patches("hidden_states", 1176),
    ),
    **_all(
        "cohere_compass_vision qwen3_vl_vision qwen3_vl_moe_vision qwen3_omni_moe_vision_encoder qwen3_5_vision "
        "qwen3_5_moe_vision qwen4_exp_vision",
        _patches("hidden_states", 1536),
    ),
    **_all("cosmos3_edge_vision glm_image_vision hunyuan_vl_vision hy_v4_vl_vision", _patches("pixel_values", 768)),
    "ernie4_5_vl_moe_vision": _patches("hidden_states", 588),
    "phi4_multimodal_audio": dict(hidden_states=normal(2, 64, 80), mask=padded(2, 64, 16).bool()),
    "lfm3_vl_vision": _patches("pixel_values", 1536),
    **_all("muse_glimmer_vision muse_spark_vision", _patches("pixel_values", 1176)),
    "kimi_k25_vision": dict(pixel_values=normal(32, 3, 14, 14), grid_thw=torch.tensor([[1, 4, 4], [1, 4, 4]])),
    "paddleocr_vl_vision": dict(pixel_values=normal(1, 32, 3, 14, 14), grid_thw=torch.tensor([[1, 4, 4], [1, 4, 4]])),
    "minimax_m3_vl_vision": _patches("pixel_values", 1176),
    "video_llama_3_vision": {**_patches("pixel_values", 768), "merge_sizes": torch.tensor([1, 1])},
    "flava_multimodal_model": dict(hidden_states=normal(2, 12, 64)),
    **_all("kosmos_2_5_vision_model pix2struct_vision_model", _DOCUMENT),
    "pix2struct": {**_DOCUMENT, "decoder_input_ids": ids(2, 8), "use_cache": False},
    "siglip2_vision_model": dict(
        pixel_values=normal(2, 16, 768),
        pixel_attention_mask=padded(2, 16),
        spatial_shapes=torch.tensor([[4, 4], [3, 4]]),
    ),
    "timesformer": _image(1, 4, 3, 32, 32),
    "videomae": _image(1, 4, 3, 32, 32),
    "vivit": _image(1, 8, 3, 32, 32),
    "vjepa2": dict(pixel_values_videos=normal(1, 4, 3, 32, 32)),
    "perceiver": dict(inputs=normal(2, 20, 64)),
    "decision_transformer": dict(
        states=normal(2, 5, 17),
        actions=normal(2, 5, 4),
        rewards=normal(2, 5, 1),
        returns_to_go=normal(2, 5, 1),
        timesteps=torch.arange(5).expand(2, 5),
        attention_mask=torch.ones(2, 5),
    ),
    "blip_2_qformer": _QFORMER,
    **_all(
        "instructblip_qformer instructblipvideo_qformer",
        {**_QFORMER, "input_ids": ids(2, 12), "attention_mask": padded(2, 18)},
    ),
    "idefics2_perceiver": dict(context=normal(2, 9, 64), attention_mask=padded(2, 9)),
    "bridgetower_vision_model": dict(image=normal(2, 3, 64, 64)),
    "got_ocr2_vision": _image(1, 3, 64, 64),
    **_all("musicgen_decoder musicgen_melody_decoder", _CODES),
    **_all(
        "mimi encodec dac pe_audio_encoder xcodec pocket_tts_audio_tokenizer omniasr_audio omniasr_ctc wavtokenizer "
        "wavtokenizer_encoder",
        _SOUND,
    ),
    "speecht5": dict(input_values=normal(2, 12, 64), decoder_input_values=normal(2, 8, 64)),
    "speech-encoder-decoder": dict(input_values=normal(2, 4000), decoder_input_ids=ids(2, 6)),
    "kyutai_speech_to_text": dict(input_ids=ids(2, 8, 33), use_cache=False),
    "moshi_depth": dict(input_ids=ids(2, 4), last_hidden_state=normal(2, 1, 4096), use_cache=False),
    "dia": dict(input_ids=ids(2, 12), attention_mask=padded(2, 12), decoder_input_ids=ids(2, 8, 9), use_cache=False),
    "gemma4_audio": dict(input_features=normal(2, 64, 128), attention_mask=padded(2, 64, 16)),
    "dia_decoder": dict(input_ids=ids(2, 8, 9), encoder_hidden_states=normal(2, 12, 64), use_cache=False),
    "seggpt": dict(
        pixel_values=normal(1, 3, 32, 32),
        prompt_pixel_values=normal(1, 3, 32, 32),
        prompt_masks=normal(1, 3, 32, 32),
    ),
    **_all("superglue lightglue efficientloftr", _PAIR),
    "mllama_vision_model": dict(
        pixel_values=normal(1, 1, 4, 3, 56, 56), aspect_ratio_ids=ones(1, 1), aspect_ratio_mask=ones(1, 1, 4)
    ),
    "xclip_vision_model": _image(8, 3, 128, 128),
    "gemma3n_audio": dict(audio_mel=normal(2, 64, 128), audio_mel_mask=zeros(2, 64, dtype=torch.bool)),
    "gemma4_vision": dict(
        pixel_values=normal(2, 36, 768),
        pixel_position_ids=torch.cartesian_prod(torch.arange(6), torch.arange(6)).expand(2, 36, 2),
    ),
    "oneformer": dict(pixel_values=normal(1, 3, 64, 64), task_inputs=ids(1, 77, low=0)),
    "blt_global_transformer": dict(inputs_embeds=normal(2, 12, 64)),
    "blt_local_encoder": dict(
        input_ids=ids(2, 12), patch_embeds=None, num_patches=3, patch_ids=(torch.arange(12) // 4).expand(2, 12)
    ),
    **_all(
        "detr conditional_detr deformable_detr dab-detr table-transformer rt_detr rt_detr_v2 mask2former",
        _image(1, 3, 64, 64),
    ),
    **_all(
        "grounding-dino mm-grounding-dino",
        dict(pixel_values=normal(1, 3, 256, 256), input_ids=torch.tensor([[101, 120, 130, 246, 140, 246, 102]])),
    ),
    "mobilevitv2": _image(1, 3, 128, 128),
    "reformer": dict(input_ids=ids(2, 32, low=110, high=190)),
    "big_bird": dict(input_ids=ids(2, 64, low=110, high=190), attention_mask=padded(2, 64, 14)),
    "kosmos-2": dict(
        pixel_values=normal(2, 3, 56, 56),
        input_ids=ids(2, 10, low=110, high=190),
        attention_mask=padded(2, 10, 2),
        image_embeds_position_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 0, 0]] * 2).bool(),
        use_cache=False,
    ),
}
"""All arguments of the forward, where the usual ones do not do."""

MORE_INPUTS: dict[str, dict[str, Any]] = {
    "t5gemma2_decoder": dict(encoder_hidden_states=normal(2, 12, 64)),
    **_all("musicgen musicgen_melody", dict(decoder_input_ids=ids(8, 8))),
    "blip-2": dict(input_ids=lambda g: torch.cat([torch.full((2, 4), 300), ids(2, 8, low=110, high=190)(g)], 1)),
    "clap": dict(input_features=normal(1, 1, 128, 64), is_longer=torch.tensor([[False]])),
    "voxtral_realtime_text": dict(t_cond=normal(2, 1, 64)),
    "jev": dict(marks=ones(1, 2), num_options=ones(1, 2), question_type_ids=zeros(1, 2)),
    "aimv2": _image(2, 3, 56, 56),
    "idefics": {**_image(2, 1, 3, 56, 56), "image_attention_mask": ones(2, 12, 1)},
    "siglip2": dict(
        pixel_values=normal(2, 16, 768),
        pixel_attention_mask=padded(2, 16),
        spatial_shapes=torch.tensor([[4, 4], [3, 4]]),
    ),
    **_all(
        "minicpm_ocr_vision minicpmv4_6_vision minicpmv4_7_vision",
        {**_image(1, 3, 64, 128), "target_sizes": torch.tensor([[4, 4], [4, 4]])},
    ),
    **_all("altclip chinese_clip clip clipseg metaclip_2 owlvit", _image(2, 3, 128, 128)),
    **_all("align blip bridgetower groupvit siglip owlv2 vilt vision-text-dual-encoder", _image(2, 3, 64, 64)),
    "whisper": dict(input_features=normal(2, 80, 64)),
    "lxmert": dict(visual_feats=normal(2, 6, 2048), visual_pos=uniform(2, 6, 4)),
    "visual_bert": dict(visual_embeds=normal(2, 4, 512), visual_attention_mask=torch.ones(2, 4)),
    "xclip": _image(2, 8, 3, 128, 128),
    "udop": dict(bbox=lambda generator: torch.rand(2, 12, 4, generator=generator).sort(-1)[0]),
}
"""Arguments besides, or in place of, the usual ones."""
