"""Controllers take the same path, bit by bit, as the version that recorded it.

`trajectories.safetensors` holds, for every run below, beta after each step and the memory after some of them. It was
recorded once, with the controllers before their rewrite, and is never written again.
"""

import math
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from betahook import Cap, Gradient, Monitor, Search, Statistics, Variance
from betahook.control.base import Observation, apply

RECORDED = Path(__file__).with_name("trajectories.safetensors")
UNITS = 3
CALLS = (1, 6, 13, 29, 30, 31, 60, 99, 100, 101, 129, 130, 131)
"""After so many steps the memory was recorded, and after the last: `[times, names in alphabetical order, units]`."""


@dataclass
class Run:
    """Controllers, and what they observe.

    Attributes:
        controllers: makes them.
        steps: how many.
        learns_at: step from which W_q and W_k do not look random.
        first_used: step of the first forward of each unit.
        broken: (step, unit) of what is not finite.
        skipped: calls at which the optimizer step is skipped.
        overflow: largest logit of the softmax's dtype.
        start: beta at the start, in units of the model's own.
        dtype: of beta.
        seed: of what is observed.
    """

    controllers: object
    steps: int = 60
    learns_at: int | None = 0
    first_used: tuple[int, int, int] = (0, 0, 0)
    broken: tuple[tuple[int, int], ...] = ()
    skipped: tuple[int, ...] = ()
    overflow: float = 88.72
    start: float = 1.0
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @cached_property
    def observations(self):
        """Deterministic on every machine: uniform numbers, sums, products and quotients only."""
        generator = torch.Generator().manual_seed(self.seed)
        draws = torch.rand(self.steps, 4, UNITS, generator=generator, dtype=torch.float64)
        unit = torch.arange(UNITS, dtype=torch.float64)
        default = torch.tensor([0.125, 0.25, 1.0], dtype=self.dtype)
        made, step = [], 0
        for call, (slope, size, guess, peak) in enumerate(draws):
            skips = call in self.skipped
            std = (0.3 + 2 * unit + call * unit / 16) * (0.9 + size / 5) / default
            optimum = 0.3 + 0.2 * unit + (0.3 if call // 25 % 2 else -0.2)
            finite = torch.tensor([not skips and (call, index) not in self.broken for index in range(UNITS)])
            values = {entry.name: torch.full_like(unit, math.nan) for entry in fields(Statistics)}
            values |= {
                "std": std,
                "max_score": std * (4 + 2 * peak),
                "max_score_bound": std * (4 + 2 * peak),
                "sensitivity": torch.where(finite, (slope - optimum) / 64, math.nan),
                "count": torch.tensor([100.0 * (call >= first) for first in self.first_used], dtype=torch.float64),
                "exact": torch.ones(UNITS, dtype=torch.bool),
                "finite": finite,
            }
            random = self.learns_at is None or step < self.learns_at
            made.append(
                Observation(
                    beta_default=default,
                    statistics=Statistics(**values),
                    predicted_std=lambda predicted=std * (0.8 + guess / 2): predicted,
                    overflow=self.overflow,
                    step=step,
                    spectral_ratio=lambda ratio=0.95 if random else 1.25: torch.tensor(ratio, dtype=torch.float64),
                )
            )
            step += not skips
        return made

    @property
    def alike(self):
        """The units to compare: a search that recorded never ended the warm-up of one not finite in its last batch."""
        searches = any(isinstance(rule, Search) for rule in self.rules())
        return [unit for unit in range(UNITS) if not (searches and (30, unit) in self.broken)]

    def rules(self):
        made = self.controllers()
        return made if isinstance(made, list) else [made]

    def begin(self):
        return torch.tensor([0.125, 0.25, 1.0], dtype=self.dtype) * self.start


def search(**options):
    """A `Search` with the hold of the version that recorded, and like it one that does not look if the scores grow."""
    return Search(rise_logit_std=4.0, plateau_growth=1e9, **options)


LATE = (0, 12, 43)
FAULTS = ((3, 0), (10, 1), (30, 2), (31, 0), (77, 1), (104, 0), (150, 2))
RUNS = {
    "fresh": Run(search, 230, learns_at=18),
    "fresh in float64": Run(search, 200, learns_at=18, dtype=torch.float64, seed=1),
    "plateau": Run(search, 240, learns_at=None, seed=2),
    "learns fast": Run(search, 170, learns_at=6, seed=3),
    "trained": Run(search, 120, seed=4),
    "told not to rise": Run(lambda: search(rise=False), 120, learns_at=18, seed=5),
    "window and warmup": Run(lambda: search(window=3, warmup=7, growth=1.3), 160, learns_at=5, seed=6),
    "no warmup": Run(lambda: search(window=1, warmup=0, opening=0.2, smallest=0.05, largest=0.5), 200, None, seed=7),
    "warmup of one": Run(lambda: search(window=2, warmup=1), 130, learns_at=1, seed=8),
    "used late": Run(search, 200, learns_at=18, first_used=LATE, seed=9),
    "used late in a plateau": Run(search, 240, learns_at=None, first_used=LATE, seed=10),
    "used late, fast": Run(search, 200, learns_at=7, first_used=LATE, seed=11),
    "used late, trained": Run(search, 100, first_used=LATE, seed=12),
    "first used when nobody looks": Run(search, 200, learns_at=None, first_used=(12, 14, 40), seed=13),
    "used after the last look": Run(search, 110, learns_at=None, first_used=(31, 33, 50), seed=14),
    "not finite": Run(search, 200, learns_at=18, broken=FAULTS, seed=15),
    "not finite in a plateau": Run(search, 240, learns_at=None, broken=FAULTS, seed=16),
    "skipped": Run(search, 200, learns_at=18, skipped=(0, 1, 5, 31, 32, 80, 140), seed=17),
    "overflow": Run(search, 180, learns_at=18, overflow=11.09, seed=18),
    "overflow, trained": Run(lambda: search(window=2), 120, overflow=11.09, seed=19),
    "set by hand": Run(search, 180, learns_at=18, start=3.0, seed=20),
    "set beyond the end of the rise": Run(search, 180, learns_at=18, start=40.0, overflow=1e4, seed=21),
    "gradient": Run(Gradient, seed=22),
    "gradient with options": Run(lambda: Gradient(0.1, (0.5, 0.8)), broken=FAULTS, seed=23),
    "variance": Run(Variance, seed=24),
    "variance from weights": Run(lambda: Variance(2.0, "weights", 0.5), broken=FAULTS, seed=25),
    "cap": Run(lambda: Cap(4.0), first_used=LATE, seed=26),
    "search, cap": Run(lambda: [search(), Cap(20.0)], 180, learns_at=18, seed=27),
    "variance, gradient, cap": Run(lambda: [Variance(), Gradient(), Cap(15.0)], broken=FAULTS, seed=28),
    "monitor, search": Run(lambda: [Monitor(), search(window=4)], 180, learns_at=None, broken=FAULTS, seed=29),
}


def canary():
    """What this machine's library makes of the functions that the controllers use, in the last bit."""
    x = torch.linspace(0.01, 30, 3 * 100, dtype=torch.float64).view(-1, 3)
    return torch.stack([torch.stack([10 ** (-row), row.log10(), row.log(), (-row).exp(), 0.9**row]) for row in x])


@pytest.fixture(scope="module")
def recorded():
    return load_file(RECORDED)


@pytest.fixture(scope="module")
def tolerance(recorded):
    """None, where this machine's functions give the bits of the one that recorded."""
    return {"rtol": 0 if torch.equal(canary(), recorded["canary"]) else 1e-6, "atol": 0}


def follow(run, beta, memories, begin=0):
    """Beta and memories after each step from `begin` on."""
    for observation in run.observations[begin:]:
        beta, memories = apply(run.rules(), beta, observation, memories)
        yield beta, memories


@cache
def followed(name):
    run = RUNS[name]
    return list(follow(run, run.begin(), [{} for _ in run.rules()]))


@pytest.mark.parametrize("name", RUNS)
def test_beta_takes_the_recorded_path(name, recorded, tolerance):
    path, alike = torch.stack([beta for beta, _ in followed(name)]), RUNS[name].alike
    torch.testing.assert_close(path[:, alike], recorded[f"{name}/beta"][:, alike], **tolerance)


NAMES = {
    Search: ("batches", "direction", "fresh", "rise", "step", "total", "wait"),
    Gradient: ("mean", "square", "steps"),
}
"""What the recorded rows of a memory are."""


def recorded_memories(name, recorded, call):
    """The memories that were recorded after so many steps, in the format of that time."""
    times = [*(time for time in CALLS if time < RUNS[name].steps), RUNS[name].steps]
    for index, rule in enumerate(RUNS[name].rules()):
        rows = recorded.get(f"{name}/memory of {index}")
        yield {} if rows is None else dict(zip(NAMES[type(rule)], rows[times.index(call)], strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_what_is_remembered_is_what_was_recorded(name, recorded, tolerance):
    """As far as the formats have it in common; once all windows end together, none counts its batches any more."""
    alike = RUNS[name].alike
    for call, (_, memories) in enumerate(followed(name), 1):
        if call not in (*CALLS, RUNS[name].steps):
            continue
        for rule, memory, old in zip(
            RUNS[name].rules(), memories, recorded_memories(name, recorded, call), strict=True
        ):
            common = memory.keys() & old.keys()
            if isinstance(rule, Search) and call > 2 * max(rule.opening_batches, rule.warmup):
                common -= {"batches"}
            assert common or not memory
            for key in common:
                # The old format had -1 where nobody had looked at the weights.
                then = old[key].clamp(min=0) if key == "fresh" else old[key]
                torch.testing.assert_close(memory[key][alike], then[alike], **tolerance)


@pytest.mark.parametrize("call", [13, 30, 99])
@pytest.mark.parametrize("name", [name for name in RUNS if any(isinstance(x, Search) for x in RUNS[name].rules())])
def test_a_search_goes_on_from_a_memory_of_the_old_format(name, call, recorded, tolerance):
    """In the warm-up, before the look at its end, and on the plateau or the way up."""
    run, path = RUNS[name], recorded[f"{name}/beta"]
    old = recorded_memories(name, recorded, call)
    memories = [rule.migrate(memory) for rule, memory in zip(run.rules(), old, strict=True)]
    rest = torch.stack([beta for beta, _ in follow(run, path[call - 1], memories, call)])
    torch.testing.assert_close(rest[:, run.alike], path[call:, run.alike], **tolerance)
