"""Everything that changes while a model trains: one `State` for each hook."""

from betahook.state.factors import gain_of
from betahook.state.ranges import HeadRange, head_ranges, heads_of
from betahook.state.state import (
    LARGEST_BETA,
    SMALLEST_BETA,
    State,
    forget_refused,
    is_beta,
    is_pooled,
    refusal_anywhere,
    release_refused,
    writing_to,
)

__all__ = [
    "LARGEST_BETA",
    "SMALLEST_BETA",
    "HeadRange",
    "State",
    "forget_refused",
    "gain_of",
    "head_ranges",
    "heads_of",
    "is_beta",
    "is_pooled",
    "refusal_anywhere",
    "release_refused",
    "writing_to",
]
