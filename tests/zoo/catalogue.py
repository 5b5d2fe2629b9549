"""Which model types have a tiny model, and which of them stand for the others."""

from __future__ import annotations

from zoo.build import MODEL_TYPES


def _all(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


WITHOUT_MODEL = {
    **_all(
        "is a part without a model of its own",
        """
        edgetam_mask_decoder edgetam_prompt_encoder edgetam_video_mask_decoder
        edgetam_video_prompt_encoder gemma4_unified_audio gemma4_unified_vision idefics_perciever
        idefics_vision layoutxlm nougat pp_chart2table pp_chart2table_vision sam2_mask_decoder
        sam2_prompt_encoder sam2_video_mask_decoder sam2_video_prompt_encoder sam3_geometry_encoder
        sam3_lite_text_geometry_encoder sam3_tracker_mask_decoder sam3_tracker_prompt_encoder
        sam3_tracker_video_mask_decoder sam3_tracker_video_prompt_encoder sam_hq_mask_decoder
        sam_hq_prompt_encoder sam_mask_decoder sam_prompt_encoder sapiens2_head t5_gemma_module
        vibevoice_diffusion
        """,
    ),
    **_all(
        "needs timm",
        """
        edgetam edgetam_vision_model fast_vlm gemma3n gemma3n_vision omdet-turbo pe_audio_video
        pe_audio_video_encoder pe_video pe_video_encoder perception_lm timm_backbone timm_wrapper
        """,
    ),
    **_all(
        "needs natten",
        """
        dinat
        """,
    ),
    **_all(
        "needs detectron2",
        """
        layoutlmv2
        """,
    ),
    **_all(
        "needs torchaudio",
        """
        higgs_audio_v2_tokenizer
        """,
    ),
    **_all(
        "its forward fails in transformers 5.24 where it gets no image, with or without betahook",
        """
        llama4
        """,
    ),
    **_all(
        "has no forward",
        """
        apertus1p5_vision_tokenizer bark chameleon_vqgan emu3_vqgan glm_image_vqmodel qwen2_5_omni
        """,
    ),
    **_all(
        "no inputs written: its forward takes the outputs of other models",
        """
        deepseek_ocr2_encoder dots3_note_audio_encoder edgetam_video fastspeech2_conformer_hifigan
        inkling2_vision inkling_audio instructblip instructblipvideo janus_vqgan molmo2_adapter
        muse_glimmer_assistant pi0 qwen2_5_omni_bigvgan qwen2_5_omni_dit qwen2_5_omni_token2wav
        sam2_video sam3 sam3_detr_decoder sam3_detr_encoder sam3_lite_text
        sam3_lite_text_detr_decoder sam3_lite_text_detr_encoder sam3_lite_text_mask_decoder
        sam3_mask_decoder sam3_tracker_video sam3_video speecht5_hifigan
        unlimited_ocr_vision_encoder voxtral_realtime
        """,
    ),
    **_all(
        "takes a minute, even when it is small",
        """
        blt rag
        """,
    ),
    **_all(
        "no small config that runs has been written",
        """
        apertus1p5 blt_local_decoder chmv2 clvp cohere_compass cohere_compass_text csm d_fine deepseek_ocr2_vision
        deimv2 depth_pro dots3_note dots3_note_vision_encoder efficientnet ernie4_5_vl_moe esmfold2
        fastspeech2_conformer_with_hifigan florence_vision gemma4_assistant gemma4_unified_assistant
        granite4_vision inkling_vision lw_detr lw_detr_vit mamba2 molmo2 molmo2_vision muse_spark
        muse_spark_audio nemotron3_5_transcribe_audio nemotron_h_omni neucodec pe_audio pp_doclayout_v2
        pp_doclayout_v3 pp_doclayout_v4 pp_ocrv5_mobile_det pp_ocrv5_mobile_rec pp_ocrv5_server_det
        pp_ocrv6_medium_det pp_ocrv6_small_det qwen2_5_omni_audio_encoder qwen3_omni_moe
        qwen3_omni_moe_audio_encoder qwen3_omni_moe_talker_code_predictor qwen3_omni_moe_talker_text
        qwen4_exp qwen4_exp_text rf_detr_dinov2 sam3_tracker shieldgemma2 slanet tipsv2_dpt tvp
        unlimited_ocr_vision upernet uvdoc vibevoice_acoustic_tokenizer
        vibevoice_acoustic_tokenizer_decoder vibevoice_acoustic_tokenizer_encoder vitmatte xcodec2
        mimi_decoder mimi_encoder pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder
        """,
    ),
}
"""Model types of which the zoo has no model, with the reason."""

ZOO = [model_type for model_type in MODEL_TYPES if model_type not in WITHOUT_MODEL]

KNOWN = {
    "bigbird_pegasus": "its encoder falls back to full attention on short input, and is not reached then",
    "lilt": "of its two softmaxes, with factors of their own, one is reported",
    "funnel": "a product with a parameter is counted as part of the sum, but not by the truth",
    "gemma3n_audio": "the truth loses the number that its queries are multiplied by",
    "openai_privacy_filter": "a factor in its cosines and sines is not counted",
    **_all("its sinks scale what its softmax returns, and are a part of the entropy", "granite_swa granitemoe_swa"),
    **_all("it computes its attention twice and uses one of them", "sam2 sam2_hiera_det_model sam2_vision_model"),
}
"""Where betahook and the truth differ, and why."""

SUMS = {
    *("BigBirdBlockSparseAttention", "BigBirdPegasusBlockSparseAttention", "BrosSelfAttention"),
    *("DisentangledSelfAttention", "FastSpeech2ConformerAttention", "FunnelRelMultiheadAttention"),
    *("Gemma3nAudioAttention", "Gemma4AudioAttention", "LEDEncoderSelfAttention", "LiltSelfAttention"),
    *("LongformerSelfAttention", "LukeSelfAttention", "PegasusXGlobalLocalAttention", "SpeechT5Attention"),
    "XLNetRelativeAttention",
}
"""Classes whose scores are a sum of products of activations; a product of q with a parameter, as in SAM, is a bias."""

REPRESENTATIVE = {
    "llama": "rotary, grouped keys, causal",
    "bert": "bidirectional, padded",
    "t5": "position bias, cross-attention, no scale",
    "gpt2": "fused projection, a scale of its own in each layer",
    "gemma2": "soft cap, sliding window, no sdpa",
    "gpt_oss": "sinks",
    "deepseek_v3": "latent attention",
    "whisper": "the scale is in the query",
    "albert": "one layer called several times",
    "qwen2_vl_vision": "packed images, one call each",
    "parakeet_encoder": "operands by keyword, a further product in the mask",
    "doge": "an attention interface of its own",
    "swin": "windows, masked by -100",
    "siglip_vision_model": "a pooling head beside the attention",
    "mllama_vision_model": "a mask without structure",
    "bloom": "one product by hand, ALiBi",
    "deberta-v2": "several products by hand",
    "mra": "attention without a softmax over scores",
    "resnet": "no attention",
    "swinv2": "a learned temperature for each head",
    "longformer": "chunks of scores, put together",
    "wavlm": "the attention of plain torch",
}
"""What `make test` runs, and what each of them stands for."""
