"""Facts about attention classes of transformers that their code does not say in a form that can be read off."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Facts:
    """What to know of a class that computes its scores by hand.

    Attributes:
        heads: how many, where the module does not say.
        skipped_products: products before the first one that makes scores.
        every_product: the scores are put together from several products, which are scaled alike.
        product_axis: where the heads lie in the operands of the product, among the axes before the last two.
        folded: the einsum in whose operands batch and heads share an axis.
        score_axis: the place of the heads in what the softmax gets.
        temperature: the factor that the module learns, `[heads]` or to be broadcast to that.
    """

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

BY_HAND = {
    "BigBirdBlockSparseAttention": _SUM,
    "BigBirdPegasusBlockSparseAttention": _SUM,
    "BrosSelfAttention": _SUM,
    "DisentangledSelfAttention": _SUM,
    "FastSpeech2ConformerAttention": _SUM,
    "FunnelRelMultiheadAttention": _SUM,
    "Gemma3nAudioAttention": _SUM,
    "Gemma4AudioAttention": _SUM,
    "GroupViTAssignAttention": Facts(heads=1),
    "InformerProbSparseAttention": Facts(skipped_products=1),
    "LEDEncoderSelfAttention": _CHUNKED,
    "LiltSelfAttention": _SUM,
    "LongformerSelfAttention": _CHUNKED,
    "LongT5LocalAttention": Facts(product_axis=2, score_axis=2),
    "LongT5TransientGlobalAttention": Facts(product_axis=2, score_axis=2),
    "LukeSelfAttention": _SUM,
    "PegasusXGlobalLocalAttention": Facts(every_product=True, product_axis=1, score_axis=1),
    "SEWDDisentangledSelfAttention": _SUM,
    "Swin2SRSelfAttention": Facts(temperature=_logit_scale),
    "Swinv2SelfAttention": Facts(temperature=_logit_scale),
    "XLNetRelativeAttention": _SUM,
}
"""Class name to facts; a class that is not here has one product and its heads where most have them."""

NO_ATTENTION = {
    "ConditionalDetrMHAttentionMap": "it makes a map for segmentation, not weights for values",
    "DabDetrMHAttentionMap": "it makes a map for segmentation, not weights for values",
    "DetrMHAttentionMap": "it makes a map for segmentation, not weights for values",
    "MaskFormerDetrMHAttentionMap": "it makes a map for segmentation, not weights for values",
    "EsmFold2RowAttentionPooling": "it pools with learned weights, without queries",
    "Inkling2BlockAttentionResidual": "it mixes layers, not tokens",
    "NystromformerSelfAttention": "it approximates the softmax by landmarks",
    "SLANetAttentionGRUCell": "its scores are additive, not products",
    "SLANeXtAttentionGRUCell": "its scores are additive, not products",
    "SwiftFormerEfficientAdditiveAttention": "its scores are additive, not products",
}
"""Classes that look like attention with scores `q . k` and are not, with the reason."""


def facts(module: nn.Module) -> Facts:
    """The facts about a module's class."""
    return next((BY_HAND[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in BY_HAND), Facts())
