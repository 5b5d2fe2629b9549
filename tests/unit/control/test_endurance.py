"""Long runs of every controller: beta stays within its bounds, and neither memory nor the time of a step grows."""

import gc
import inspect
import math
from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode

import betahook
from betahook import Controller
from betahook.control.base import DECADES, apply
from support.observations import observe

STEPS, UNITS, DEFAULT = 20_000, 3, 0.125

KINDS = [
    kind
    for kind in map(vars(betahook).get, betahook.__all__)
    if inspect.isclass(kind) and issubclass(kind, Controller) and kind is not Controller
]
CHAINS = [
    *([kind()] for kind in KINDS),
    [betahook.Variance(source="weights")],
    [betahook.Search(rise=False), betahook.Cap(2.0)],
]


def observations():
    """Far too small and far too large ones, both signs, NaN and infinity in some units, and units without a pair."""
    generator = torch.Generator().manual_seed(0)

    def numbers(decades=0.0):
        sizes = 10 ** (decades * torch.randn(UNITS, generator=generator, dtype=torch.float64))
        return sizes * torch.randn(UNITS, generator=generator, dtype=torch.float64)

    made = []
    for index in range(256):
        sensitivity = numbers(4)
        if index % 16 == 0:
            sensitivity[index // 16 % UNITS] = (math.nan, math.inf, -math.inf)[index // 16 % 3]
        finite = sensitivity.isfinite()
        made.append(
            observe(
                units=UNITS,
                beta_default=DEFAULT,
                predicted_std=numbers(3).abs(),
                spectral_ratio=1.0 if index % 2 else 1.3,
                loss=float(numbers()[0]) if index % 31 else math.nan,
                sensitivity=sensitivity,
                std=numbers(3).abs(),
                row_std=numbers(3).abs(),
                max_score=numbers(3).abs(),
                count=torch.tensor([float(index % 5 > 0), 1.0, 1.0]),
                finite=finite,
            )
        )
    return made


class Count(TorchFunctionMode):
    """Counts the functions of torch that are called in it."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def span(chain, beta, memories, steps, seen):
    """Take some steps; beta and memories after them, and the lowest and highest beta on the way."""
    low, high = beta.clone(), beta.clone()
    for step in steps:
        beta, memories = apply(chain, beta, replace(seen[step % len(seen)], step=step), memories)
        low, high = torch.minimum(low, beta), torch.maximum(high, beta)
    return beta, memories, low, high


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_a_long_run_stays_in_bounds_and_does_not_grow(chain):
    seen, beta, memories = observations(), torch.full((UNITS,), DEFAULT), [{} for _ in chain]
    calls, objects, sizes, lowest, highest = [], [], [], beta, beta
    for first in range(0, STEPS, STEPS // 4):
        quarter = range(first, first + STEPS // 4 - len(seen))
        beta, memories, low, high = span(chain, beta, memories, quarter, seen)
        with Count() as count:  # one round through all observations
            beta, memories, *_ = span(chain, beta, memories, range(quarter.stop, quarter.stop + len(seen)), seen)
        lowest, highest = torch.minimum(lowest, low), torch.maximum(highest, high)
        gc.collect()
        objects.append(len(gc.get_objects()))
        calls.append(count.calls)
        sizes.append([{name: value.shape for name, value in memory.items()} for memory in memories])
    assert beta.isfinite().all()
    assert (lowest >= DEFAULT / 10**DECADES * (1 - 1e-6)).all()
    assert (highest <= DEFAULT * 10**DECADES * (1 + 1e-6)).all()
    assert all(value.shape == (UNITS,) for memory in memories for value in memory.values())
    assert sizes[1] == sizes[-1]
    assert objects[-1] <= objects[1] + STEPS // 100  # one a step would be a hundred times that
    assert calls[-1] <= 1.1 * calls[1]
