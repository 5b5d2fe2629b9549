"""Model types whose query takes a factor in the weights, and types that are refused."""

import torch

FOLDABLE = """
    bart bert bloom clip codegen cohere deepseek_v2 deepseek_v3 falcon gemma gemma2 gemma3_text glm4v_moe_text
    glm_image_text gptj
    glm_image_vision glmasr_encoder gpt2 gpt_bigcode gpt_neox granite granite4_vision_text granitemoe helium hyperclovax
    idefics2_vision idefics3_vision ijepa instructblip_qformer instructblip_vision_model instructblipvideo_qformer
    instructblipvideo_vision_model internvl_vision jais2 janus_vision_model kosmos_2_vision_model layoutlm
    lfm2 lfm3_vl_vision llama llama4_vision_model mbart metaclip_2_text_model minicpm3 minimax_m3_vl_text
    minimax_m3_vl_vision ministral3 mistral mistral_large4_text mixtral mlcd_vision_model mllama_text_model modernbert
    modernbert-decoder molmo2_text moonshine_streaming_encoder moss_transcribe_diarize_audio
    musicgen_melody_decoder olmo2 opt persimmon phi3 qwen2_5_vl_text qwen3 roberta
    roberta-prelayernorm seed_oss siglip2_text_model siglip_text_model smolvlm_vision t5
"""
"""Types whose attention modules are all of different classes, but for the best known ones."""
ONE_NORM_FOR_ALL_HEADS = "gemma3_text lfm2 lfm3_vl_vision minimax_m3_vl_text molmo2_text persimmon qwen3"
REFUSED = {
    "conditional_detr": "its query projection has no known form",
    "dbrx": "it clips q, k and v after the projection",
    "nanochat": "not that of a scaled query projection or norm",  # a norm without a weight
    "parakeet_encoder": "not that of a scaled query projection or norm",  # the query makes a position bias too
}


def tensors(output):
    """Every floating-point tensor in an output."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else []
    return [tensor for part in parts for tensor in tensors(part)]


@torch.no_grad()
def run(model, batch):
    torch.manual_seed(0)
    return tensors(model(**batch))
