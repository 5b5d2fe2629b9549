"""Search as a whole, with short phases: the path that beta takes, and a memory of the old format."""

import math
from dataclasses import replace

import pytest
import torch

from betahook import Search
from betahook.control.base import apply
from betahook.control.opening import Phase
from betahook.control.search import limit_increase
from support.observations import approx, decades, observe, run, sensitivities

NAN = math.nan


def search(**changes):
    """A Search that is quick: nothing that lasts has its default."""
    quick = {"window": 1, "warmup": 0, "rise": False, "plateau_batches": 3, "rise_batches": 10}
    return Search(**{**quick, "opening": 0.5, "growth": 1.5, "smallest": 0.01, "largest": 1.0, **changes})


def test_search_steps_against_the_sensitivity():
    # The loss falls with log beta in the first unit and rises in the second.
    history = run(search(), [observe(units=2, sensitivity=[-1e-9, 1e9])], [1.0, 1.0])
    assert decades(history[0]) == approx([0.5, -0.5])


def test_search_steps_grow_while_the_sign_persists_and_halve_on_every_reversal():
    history = run(search(), sensitivities(-1, -2, 3, 4, -5))
    # Steps 0.5, 0.5 * 1.5, 0.75 / 2 back, 0.375 * 1.5 back, 0.5625 / 2 forth.
    assert decades(history) == approx([0.5, 1.25, 0.875, 0.3125, 0.59375])


def test_search_steps_stay_between_the_smallest_and_a_decade():
    growing = run(search(opening=0.8, growth=2.0), sensitivities(-1, -1, -1))
    assert decades(growing) == approx([0.8, 1.8, 2.8])
    halving = run(search(opening=0.5, smallest=0.2), sensitivities(-1, 1, -1, 1))
    assert decades(halving) == approx([0.5, 0.25, 0.45, 0.25])


def test_search_moves_once_a_window_by_the_sign_of_the_sum():
    history = run(search(window=3), sensitivities(-1, -1, 3, 1, 1, -3))
    assert decades(history) == approx([0, 0, -0.5, -0.5, -0.5, -0.25])


def test_search_warms_up_before_its_first_window():
    """Neither does beta move, nor do the batches of the warm-up count in the first window."""
    history = run(search(warmup=4, window=2), sensitivities(-9, -9, -9, -9, 1, 1, 1, 1))
    assert decades(history) == approx([0, 0, 0, 0, 0, -0.5, -0.5, -1.25])


@pytest.mark.parametrize(("rise", "waits"), [(False, 60), (True, 400)])
def test_search_is_due_at_the_ends_of_windows_after_twice_the_longest_way_to_it(rise, waits):
    due = [step for step in range(440) if Search(rise=rise).is_due(step)]
    assert due == [*range(waits), *range(waits + 9, 440, 10)]


FRESH, LEARNED = 1.1, 1.2


def rising(ratios, count, **measured):
    """Observations of a Search that looks at the weights in the first step and after a warm-up of two."""
    first, *later = ratios
    ratios = [first, NAN, *later, *[NAN] * count][:count]
    return [observe(**{"sensitivity": 1, "std": 0.1, **measured}, spectral_ratio=ratio) for ratio in ratios]


def test_search_rises_to_ten_times_the_beta_of_a_fresh_model_that_has_begun_to_learn():
    """In ten batches, whatever the sensitivity says; then the search goes on downward, as it wants."""
    observations = rising([FRESH, LEARNED], 14, beta_default=0.5)
    history = run(search(warmup=2, window=2, rise=True), observations, 0.5)
    climb = [0.1 * index for index in range(1, 11)]
    assert [math.log10(beta / 0.5) for beta in history] == approx([-0.5, -0.5, *climb, 1, 0.5])


def test_search_begins_two_decades_below_where_weights_still_look_random_after_the_warmup():
    history = run(search(warmup=2, rise=True), rising([FRESH, FRESH], 17))
    climb = [-2 + 0.3 * index for index in range(1, 11)]
    assert decades(history) == approx([-0.5, -0.5, -2, -2, -2, *climb, 0.5, -0.25])


def test_a_fresh_model_whose_loss_falls_does_not_wait_for_its_weights():
    losses = [observe(loss=loss).loss for loss in (4.0, 3.0, 2.0)]
    observations = rising([FRESH, FRESH], 13)
    observations[:3] = [replace(one, loss=loss) for one, loss in zip(observations[:3], losses, strict=True)]
    climb = [0.1 * index for index in range(1, 11)]
    assert decades(run(search(warmup=2, rise=True), observations)) == approx([-0.5, -0.5, *climb, 0.5])


def test_a_fresh_model_without_a_warmup_begins_below_at_once():
    assert decades(run(search(rise=True), rising([FRESH], 4))) == approx([-2, -2, -2, -1.7])


@pytest.mark.parametrize(
    ("rise", "ratios"),
    [(True, [LEARNED, FRESH]), (True, [NAN, FRESH]), (False, [FRESH, FRESH])],
    ids=["trained", "unknown", "told not to"],
)
def test_search_does_not_rise_where_weights_have_learned_or_are_unknown(rise, ratios):
    history = run(search(warmup=2, rise=rise), rising(ratios, 5))
    assert decades(history) == approx([0, 0, -0.5, -1.25, -2.25])


def test_the_logits_of_a_rising_unit_are_held_at_their_std_until_the_rise_is_over():
    """The scores of the first two keep their std, those of the third grow tenfold in the fifth batch."""
    held = Search().rise_logit_std
    observations = rising([FRESH, LEARNED], 13, units=3, std=[held / 2, held * 2, held / 2])
    observations[4:] = [
        replace(one, statistics=replace(one.statistics, std=one.statistics.std * torch.tensor([1, 1, 10])))
        for one in observations[4:]
    ]
    history = run(search(warmup=2, rise=True), observations, [1.0] * 3)
    first, second, third = ([math.log10(beta) for beta in path] for path in zip(*history, strict=True))
    two = math.log10(2)
    assert first == approx([-0.5, -0.5, 0.1, 0.2, 0.3, *[two] * 7, two - 0.5])
    assert second == approx([-0.5, -0.5, *[-two] * 10, -two - 0.5])
    assert third == approx([-0.5, -0.5, 0.1, 0.2, *[two - 1] * 8, two - 1 - 0.5])


def seen(observation, *counts):
    """The same, but of as many pairs in each unit."""
    return replace(observation, statistics=replace(observation.statistics, count=torch.tensor(counts)))


@pytest.mark.parametrize("first", [1, 2, 5])
def test_a_unit_that_is_seen_later_rises_too(first):
    """As with LayerDrop, or where the first batches have no images: with the others, or after their warm-up at once."""
    observations = [seen(one, 1, step >= first) for step, one in enumerate(rising([FRESH, LEARNED], 17, units=2))]
    used, late = zip(*run(search(warmup=2, rise=True), observations, [1.0] * 2), strict=True)
    rise = [0.1 * index for index in range(1, 11)]
    assert decades(used) == approx([-0.5, -0.5, *rise, 0.5, -0.25, -1.25, -2.25, -3])
    waits = [-0.5] if first == 1 else []
    ends = [0.5, -0.25, -1.25, -2.25, -3][: 17 - first - len(waits) - 10]
    assert decades(late) == approx([*[0] * first, *waits, *rise, *ends])


def test_a_unit_that_is_seen_later_does_not_rise_in_a_trained_model():
    observations = [seen(one, 1, step >= 1) for step, one in enumerate(rising([LEARNED, FRESH], 4, units=2))]
    _, late = zip(*run(search(warmup=2, rise=True), observations, [1.0] * 2), strict=True)
    assert decades(late) == approx([0, 0, 0, -0.5])


@pytest.mark.parametrize(("ratio", "then"), [(FRESH, [-2, -2, -2, -1.7]), (LEARNED, [0, 0, -0.5, -1.25])])
def test_what_is_first_seen_when_nobody_looks_waits_for_the_next_look(ratio, then):
    """After the first third of the warm-up, and before its end."""
    observations = [observe(sensitivity=1, std=0.1, spectral_ratio=ratio) for _ in range(8)]
    observations[:2] = [seen(one, 0) for one in observations[:2]]
    history = run(search(warmup=4, rise=True), observations)
    assert decades(history) == approx([0, 0, 0, 0, *then])


def test_where_nothing_is_seen_at_first_the_first_look_at_a_unit_decides():
    """Steps in evaluation mode, say."""
    observations = [replace(one, spectral_ratio=lambda: torch.tensor(FRESH)) for one in rising([FRESH, FRESH], 4)]
    observations[0] = seen(observations[0], 0)
    assert decades(run(search(warmup=4, rise=True), observations)) == approx([0, -0.5, -0.5, -0.5])


def test_a_rise_takes_no_logit_beyond_half_the_overflow_bound_and_ends_all_the_same():
    history = run(search(rise=True, warmup=2), rising([FRESH, LEARNED], 13, max_score=22.0))
    assert max(history) == approx(2.0)
    assert decades(history)[-1] == approx(math.log10(2) - 0.5)


def test_the_end_of_the_warmup_takes_no_logit_beyond_half_the_overflow_bound_either():
    history = run(search(rise=True, warmup=2), rising([FRESH, LEARNED], 4, max_score=100.0))
    assert history == approx([10**-0.5, 10**-0.5, 0.44, 0.44])


def test_where_weights_learn_in_the_first_third_of_the_warmup_the_rise_begins_at_the_std_that_holds_it():
    """In the third batch, two thirds of a decade above and below the model's own; it ends ten batches later."""
    ratios = [FRESH, FRESH, LEARNED, *[FRESH] * 10]
    apart = 10 ** (2 / 3)
    held = Search().rise_logit_std
    std = [held / apart, held * apart]
    observations = [observe(units=2, sensitivity=1, std=std, spectral_ratio=ratio) for ratio in ratios]
    above, below = zip(*run(search(warmup=6, rise=True), observations, [1.0] * 2), strict=True)
    assert decades(above) == approx([-0.5, -0.5, *[2 / 3] * 10, 2 / 3 - 0.5])
    assert decades(below) == approx([-0.5, -0.5, *[-2 / 3] * 10, -2 / 3 - 0.5])


TOGETHER = dict(window=3, warmup=6, plateau_batches=3, rise_batches=6, rise=True, opening=0.1)
"""Waiting, a plateau and a rise take whole windows, and from batch 30 on the windows of all units end together."""


def story(first, at_the_end, count=70):
    """Observations of weights that look so at first and at the end of the warm-up."""
    generator = torch.Generator().manual_seed(5)
    slopes = torch.randn(count, 2, generator=generator, dtype=torch.float64) + 0.3
    ratios = [first] * 6 + [at_the_end] * count
    return [
        observe(units=2, step=step, sensitivity=slope, std=0.1, spectral_ratio=ratio)
        for step, (slope, ratio) in enumerate(zip(slopes, ratios, strict=False))
    ]


@pytest.mark.parametrize("looks", [(LEARNED, LEARNED), (FRESH, LEARNED), (FRESH, FRESH)], ids=str)
def test_windows_that_end_together_decide_as_those_of_each_unit(looks, monkeypatch):
    """And so do updates at their ends alone, with the mean over their batches."""
    rule, observations = search(**TOGETHER), story(*looks)
    together = run(rule, observations, [1.0, 1.0])
    beta, memories, batches = torch.ones(2, dtype=torch.float64), [{}], []
    for observation, expected in zip(observations, together, strict=True):
        batches.append(observation.statistics.sensitivity)
        if rule.is_due(observation.step):
            mean = replace(observation.statistics, sensitivity=torch.stack(batches).mean(0))
            given = replace(observation, statistics=mean, batches=len(batches))
            (beta, memories), batches = apply([rule], beta, given, memories), []
        assert beta.tolist() == expected
    monkeypatch.setattr(Search, "_searches_alone", lambda self, step: False)
    assert run(rule, observations, [1.0, 1.0]) == together
    assert together[30:] != [together[30]] * 40


def test_a_mean_counts_for_all_its_batches_in_the_sum_of_a_window():
    rule = search(**TOGETHER)
    beta, memories = torch.ones(1, dtype=torch.float64), [rule.start(torch.ones(1, dtype=torch.float64))]
    for step, batches, sensitivity in ((31, 2, 1.0), (32, 1, -1.5)):
        given = replace(observe(step=step, sensitivity=sensitivity), batches=batches)
        beta, memories = apply([rule], beta, given, memories)
    assert beta.item() == approx(10**-0.1)


def test_a_window_is_longer_where_those_of_all_units_begin_to_end_together():
    """Weights that learned in the second batch rise at once: windows end after batches 8 + 3 n until the 30th."""
    observations = [replace(one, spectral_ratio=lambda: torch.tensor(LEARNED)) for one in story(LEARNED, LEARNED)]
    observations[0] = replace(observations[0], spectral_ratio=lambda: torch.tensor(FRESH))
    history = [first for first, _ in run(search(**TOGETHER), observations, [1.0, 1.0])]
    moves = [step + 1 for step in range(8, 42) if history[step] != history[step - 1]]
    assert moves == [10, 13, 16, 19, 22, 25, 28, 33, 36, 39, 42]


@pytest.mark.parametrize(("warmup", "steps"), [(0, [0]), (2, [0, 2]), (7, [0, 1, 2, 7])])
def test_search_looks_at_the_weights_only_when_it_has_to_decide(warmup, steps):
    looks = []

    def observed(step):
        def look():
            looks.append(step)
            return torch.tensor(FRESH)

        return replace(observe(sensitivity=1), spectral_ratio=look)

    observations = [observed(step) for step in range(9)]
    run(search(warmup=warmup, rise=False), observations)
    assert not looks
    run(search(warmup=warmup, rise=True), observations)
    assert looks == steps


def test_search_without_sensitivity_stays_and_forgets_nothing():
    history = run(search(), sensitivities(-1, 0, 1))
    assert decades(history) == approx([0.5, 0.5, 0.25])


def test_in_a_model_that_was_fresh_no_step_takes_a_logit_up_beyond_half_the_overflow_bound():
    """Neither in the rise nor after it; in a trained one the bound itself is the limit."""
    fresh, trained = (
        run(search(warmup=2, rise=True), rising(ratios, 16, max_score=22.0, sensitivity=-1))
        for ratios in ([FRESH, LEARNED], [LEARNED, NAN])
    )
    assert max(fresh) == fresh[-1] == approx(2.0)
    assert max(trained) == trained[-1] == approx(4.0)


def test_a_logit_beyond_the_bound_takes_nothing_from_beta_but_the_steps_up():
    """It grew there by itself, in a model that was fresh, or was there from the start, in a trained one."""
    large = {"std": 0.1, "max_score": 17.6}
    fresh = rising([FRESH, LEARNED], 12, sensitivity=-1)
    assert run(search(warmup=2, rise=True), [*fresh, observe(sensitivity=-1, **large)])[11:] == approx([10.0, 10.0])
    trained = sensitivities(-1, 1, -1, max_score=176.0)
    assert decades(run(search(), trained)) == approx([0, -0.25, -0.25])


def test_search_stays_below_the_overflow_bound():
    history = run(search(opening=1.0), sensitivities(-1, -1, -1, overflow=40.0, max_score=20.0))
    assert history == approx([2.0, 2.0, 2.0])


def test_search_finds_the_minimum_of_a_loss_in_one_run():
    rule, beta, optimum = search(opening=0.1), torch.ones(2, dtype=torch.float64), torch.tensor([1.3, -0.7])
    memories = [{}]
    for _ in range(60):
        slope = beta.log10() - optimum
        beta, memories = apply([rule], beta, observe(units=2, sensitivity=slope), memories)
    assert beta.log10().tolist() == pytest.approx(optimum.tolist(), abs=0.05)


def test_a_rise_takes_nothing_back_from_a_beta_beyond_its_end():
    history = run(search(warmup=2, rise=True), rising([FRESH, LEARNED], 12, std=0.01), 100.0)
    assert decades(history) == approx([1.5, 1.5, *[2] * 10])


def test_a_rise_begins_at_the_beta_that_was_set():
    history = run(search(warmup=2, rise=True), rising([FRESH, LEARNED], 12, beta_default=0.5), 1.0)
    first = math.log10(2)
    climb = [first + (1 - first) * index / 10 for index in range(1, 11)]
    assert [math.log10(beta / 0.5) for beta in history] == approx([first - 0.5] * 2 + climb)


def test_no_step_up_passes_the_limit_and_none_is_taken_back():
    observation = observe(units=5, max_score=[10, 10, 10, 10, NAN])
    old, new = torch.tensor([[1, 1, 8, 8, 1], [2, 9, 9, 7, 9]], dtype=torch.float64)
    assert limit_increase(new, old, 50.0, observation).tolist() == [2, 5, 8, 7, 9]


@pytest.mark.parametrize(
    ("phase", "left", "expected"),
    [
        (Phase.UNSEEN, 3, False),
        (Phase.WAIT, 3, False),
        (Phase.WARM_UP, 0, True),
        (Phase.PLATEAU, 0, True),
        (Phase.CLIMB, 1, True),
        (Phase.CLIMB, 0, False),
        (Phase.SEARCH, 0, False),
    ],
)
def test_beta_is_on_its_way_until_the_rise_is_over(phase, left, expected):
    """In one unit of two."""
    assert not Search().is_in_transition({})
    memory = {"phase": torch.tensor([Phase.SEARCH, phase]), "left": torch.tensor([0, left])}
    assert Search().is_in_transition(memory) is expected


@pytest.mark.parametrize(
    ("wait", "rise", "fresh", "phase", "left"),
    [
        (12, 0, -1, Phase.UNSEEN, 12),
        (0, 0, -1, Phase.UNSEEN, 0),  # which may search: nobody ever looked
        (12, 0, 0, Phase.WAIT, 12),
        (0, 0, 0, Phase.SEARCH, 0),
        (12, 100, 1, Phase.WARM_UP, 12),
        (0, 100, 1, Phase.WARM_UP, 0),
        (0, 99, 1, Phase.CLIMB, 99),
        (0, 0, 1, Phase.SEARCH, 0),
    ],
)
def test_a_memory_of_the_old_format_is_read(wait, rise, fresh, phase, left):
    def tensor(value):
        return torch.tensor([value], dtype=torch.float64)

    search = {"batches": tensor(4), "total": tensor(-0.5), "direction": tensor(-1), "step": tensor(0.15)}
    old = {"wait": tensor(wait), "rise": tensor(rise), "fresh": tensor(fresh), **search}
    new = Search.migrate(old)
    assert new.pop("early").isnan()  # unknown, as are the others
    assert new.pop("late").isnan()
    assert new.pop("spread") == 0
    assert new == {"phase": tensor(phase), "left": tensor(left), "fresh": tensor(max(fresh, 0)), **search}
    new = Search.migrate(new)  # as version 0.4 wrote it
    assert new["early"].isnan()
    assert new["spread"] == 0
    assert new.keys() == Search().start(tensor(1)).keys()
    assert {value.dtype for value in new.values()} == {torch.float64}
    assert Search.migrate(new) is new
    unlike = {name: value for name, value in new.items() if name not in ("early", "late")}
    assert Search.migrate({**unlike, "fall": tensor(0.3), "spread": tensor(2)})["spread"] == 2  # of version 0.6


def test_a_search_begins_to_count_its_warmup_unseen():
    memory = {name: value.tolist() for name, value in Search(warmup=7).start(torch.ones(2)).items()}
    assert memory.pop("step") == pytest.approx([0.1, 0.1])
    assert memory.pop("phase") == [Phase.UNSEEN] * 2
    assert memory.pop("left") == [7, 7]
    assert all(math.isnan(loss) for loss in memory.pop("early") + memory.pop("late"))
    assert all(value == [0, 0] for value in memory.values())
