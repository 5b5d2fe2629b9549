"""Facts about attention classes of transformers that their code does not say in a form that can be read off."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Facts:
    """What to know of a class. All but `prescale` and `remark` is about scores that are computed by hand.

    Attributes:
        prescale: the factor that the module puts on the query before it asks for its attention; part of its beta.
        remark: what betahook does not measure as one would think, in words.
        heads: how many, where the module does not say.
        skipped_products: products before the first one that makes scores.
        every_product: the scores are put together from several products, which are scaled alike.
        product_axis: where the heads lie in the operands of the product, among the axes before the last two.
        folded: the einsum in whose operands batch and heads share an axis.
        score_axis: the place of the heads in what the softmax gets.
        temperature: the factor that the module learns, `[heads]` or to be broadcast to that.
    """

    prescale: Callable[[Any], float] | None = None
    remark: str | None = None
    heads: int | None = None
    skipped_products: int = 0
    every_product: bool = False
    product_axis: int | None = None
    folded: str | None = None
    score_axis: int | None = None
    temperature: Callable[[Any], Tensor] | None = None


def _logit_scale(module: Any) -> Tensor:
    """Swin v2: a temperature for each head, at most 100."""
    scale: Tensor = module.logit_scale.detach().clamp(max=math.log(100)).exp().flatten()
    return scale


_SUM = Facts(every_product=True)
_CHUNKED = Facts(every_product=True, folded="bcxd,bcyd->bcxy", score_axis=2)

_PRESCALED = Facts(prescale=lambda module: module.scaling)
_NOT_BETA = ", a part of the scores and not of beta"
_ROTATED = Facts(remark="the factor of its rotary embedding (YaRN) is in q and k" + _NOT_BETA)
_NORMED = Facts(remark="q carries a constant factor behind its norm" + _NOT_BETA)
_POSITIONAL = Facts(remark="q carries a factor that grows with the position" + _NOT_BETA)
_LEARNED = Facts(remark="q carries a learned factor for each component" + _NOT_BETA)
_SPARSE = Facts(
    every_product=True, remark="short inputs make the model replace it by full attention, which is not hooked"
)

FACTS = {
    "AudioFlamingo3Attention": _PRESCALED,
    "BigBirdBlockSparseAttention": _SPARSE,
    "BigBirdPegasusBlockSparseAttention": _SPARSE,
    "BrosSelfAttention": _SUM,
    "DisentangledSelfAttention": _SUM,
    "EsmSelfAttention": Facts(prescale=lambda module: module.attention_head_size**-0.5),
    "FastSpeech2ConformerAttention": _SUM,
    "FunnelRelMultiheadAttention": _SUM,
    "Gemma3nAudioAttention": Facts(every_product=True, remark=_LEARNED.remark),
    "Gemma4AudioAttention": Facts(every_product=True, remark=_LEARNED.remark),
    "GptOssAttention": _ROTATED,
    "GroupViTAssignAttention": Facts(heads=1),
    "InformerProbSparseAttention": Facts(skipped_products=1),
    "Inkling2FullAttention": _POSITIONAL,
    "InklingAttention": _POSITIONAL,
    "Kosmos2_5TextAttention": _PRESCALED,
    "LEDEncoderSelfAttention": _CHUNKED,
    "LiltSelfAttention": Facts(
        every_product=True, remark="text and layout scale their common scores differently, beta is that of one of them"
    ),
    "Llama4TextAttention": _POSITIONAL,
    "LongcatFlashMLA": _NORMED,
    "LongformerSelfAttention": _CHUNKED,
    "LongT5LocalAttention": Facts(product_axis=2, score_axis=2),
    "LongT5TransientGlobalAttention": Facts(product_axis=2, score_axis=2),
    "LukeSelfAttention": _SUM,
    "Ministral3Attention": _POSITIONAL,
    "Mistral4Attention": _POSITIONAL,
    "MossTranscribeDiarizeAudioAttention": _PRESCALED,
    "MuseGlimmerTextAttention": _NORMED,
    "MuseSparkTextAttention": _NORMED,
    "OpenAIPrivacyFilterAttention": Facts(prescale=lambda module: module.scaling**2, remark=_ROTATED.remark),
    "OPTAttention": _PRESCALED,
    "PegasusXGlobalLocalAttention": Facts(every_product=True, product_axis=1, score_axis=1),
    "Qwen2AudioAttention": _PRESCALED,
    "Swin2SRSelfAttention": Facts(temperature=_logit_scale),
    "Swinv2SelfAttention": Facts(temperature=_logit_scale),
    "TimesFm2_5Attention": _LEARNED,
    "TimesFmAttention": _LEARNED,
    "VideoPrismMultiheadAttentionPoolingHead": _LEARNED,
    "VoxtralAttention": _PRESCALED,
    "WhisperAttention": _PRESCALED,
    "XLNetRelativeAttention": _SUM,
}
"""Class name to facts. A class that is not here carries no factor in q, and has, if it computes its scores by hand, one
product and its heads where most have them."""

NO_ATTENTION = {
    "ConditionalDetrMHAttentionMap": "it makes a map for segmentation, not weights for values",
    "DabDetrMHAttentionMap": "it makes a map for segmentation, not weights for values",
    "DetrMHAttentionMap": "it makes a map for segmentation, not weights for values",
    "MaskFormerDetrMHAttentionMap": "it makes a map for segmentation, not weights for values",
    "DogeCDMoE": "it routes tokens to experts",
    "EsmFold2RowAttentionPooling": "it pools with learned weights, without queries",
    "Inkling2BlockAttentionResidual": "it mixes layers, not tokens",
    "MgpstrA3Module": "it pools tokens with learned weights, without queries",
    "NystromformerSelfAttention": "it approximates the softmax by landmarks",
    "SLANetAttentionGRUCell": "its scores are additive, not products",
    "SLANeXtAttentionGRUCell": "its scores are additive, not products",
    "SwiftFormerEfficientAdditiveAttention": "its scores are additive, not products",
}
"""Classes that look like attention with scores `q . k` and are not, with the reason."""


def facts(module: nn.Module) -> Facts:
    """The facts about a module's class."""
    return next((FACTS[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in FACTS), Facts())
