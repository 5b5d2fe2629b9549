"""The phases of a fresh model alone: each move of the table, and who else does not move."""

import math
from dataclasses import replace

import pytest
import torch

from betahook.control.opening import Course, Opening, Phase
from support.observations import approx, observe

RULE = Opening(
    window=3,
    warmup=9,
    fresh_ratio=1.1,
    early_share=1 / 3,
    warmup_decades=0.5,
    plateau_batches=7,
    plateau_decades=2.0,
    plateau_fall=0.1,
    plateau_growth=1.5,
    rise_batches=10,
    rise_decades=1.0,
    rise_logit_std=4.0,
)
RANDOM, LEARNED = 1.1, 1.2
OLD_BETA, OLD_LEFT = 0.8, 5.0


def course(*phases, left=OLD_LEFT, fresh=None, early=math.nan, late=math.nan, spread=0.0):
    """A course with a unit in each of the phases; the fresh ones are those that only fresh models have."""
    phase = torch.tensor(phases, dtype=torch.float64)
    known = (phase == Phase.WARM_UP) | (phase == Phase.PLATEAU) | (phase == Phase.CLIMB)
    fresh = known.double() if fresh is None else torch.full_like(phase, fresh)
    values = (OLD_BETA, left, early, late, spread)
    beta, left, early, late, spread = (torch.full_like(phase, value) for value in values)
    return Course(beta, phase, left, fresh, early, late, spread)


def places(after):
    """(phase, beta, batches left, fresh) of each unit."""
    rows = zip(after.phase.tolist(), after.beta.tolist(), after.left.tolist(), after.fresh.tolist(), strict=True)
    return [(Phase(int(phase)), approx(beta), left, fresh) for phase, beta, left, fresh in rows]


def decided(before, *, step, ratio=math.nan, **measured):
    units = len(before.phase)
    return places(RULE.decide(before, observe(units=units, step=step, spectral_ratio=ratio, std=0.5, **measured)))


def stays(phase, fresh=0.0):
    return (phase, OLD_BETA, OLD_LEFT, fresh)


def test_checkpoints_hold_the_numbers_of_the_phases():
    assert {phase.name: phase.value for phase in Phase} == {
        "UNSEEN": 0,
        "WAIT": 1,
        "WARM_UP": 2,
        "PLATEAU": 3,
        "CLIMB": 4,
        "SEARCH": 5,
    }


def test_weights_look_random_up_to_the_limit_and_unknown_ones_do_not():
    looks = [RULE.look(observe(spectral_ratio=ratio)).item() for ratio in (0.9, 1.1, 1.11, math.nan)]
    assert looks == [True, True, False, False]


def test_a_move_takes_only_units_of_its_source_where_it_is_told():
    before = course(Phase.WAIT, Phase.WAIT, Phase.CLIMB)
    after = before.move(Phase.WAIT, Phase.SEARCH, torch.tensor([True, False, True]), left=0, beta=before.beta * 2)
    assert places(after) == [(Phase.SEARCH, 1.6, 0, 0), stays(Phase.WAIT), stays(Phase.CLIMB, 1)]
    assert places(before) == [stays(Phase.WAIT), stays(Phase.WAIT), stays(Phase.CLIMB, 1)]


@pytest.mark.parametrize(("step", "looks"), [(0, True), (3, True), (4, False), (8, False), (9, True), (10, False)])
def test_it_looks_in_the_early_share_of_the_warmup_and_at_its_end(step, looks):
    random = RULE.look(observe(step=step, spectral_ratio=RANDOM))
    assert (random is not None) is looks
    if looks:
        assert random.item() is True
        assert RULE.look(observe(step=step, spectral_ratio=LEARNED)).item() is False


@pytest.mark.parametrize("share", [0, 1])
def test_the_early_share_can_be_nothing_or_all(share):
    rule = replace(RULE, early_share=share)
    looks = [step for step in range(12) if rule.look(observe(step=step, spectral_ratio=RANDOM)) is not None]
    assert looks == ([0, 9] if share == 0 else list(range(10)))


@pytest.mark.parametrize("step", [0, 2])
def test_the_first_look_decides_for_all(step):
    low = OLD_BETA / 10**0.5
    assert decided(course(Phase.UNSEEN), step=step, ratio=RANDOM) == [(Phase.WARM_UP, approx(low), 9 - step, 1)]
    assert decided(course(Phase.UNSEEN), step=step, ratio=LEARNED) == [stays(Phase.WAIT)]


def test_where_nobody_looks_nothing_is_decided():
    assert decided(course(Phase.UNSEEN, Phase.UNSEEN), step=5, ratio=RANDOM) == [stays(Phase.UNSEEN)] * 2


@pytest.mark.parametrize("step", [2, 5, 20])
def test_a_unit_that_is_seen_later_does_what_the_others_did(step):
    """Whatever the weights look like by then."""
    low = OLD_BETA / 10**0.5 if step <= 9 else OLD_BETA
    for other in (Phase.CLIMB, Phase.PLATEAU):
        *_, late = decided(course(other, Phase.UNSEEN), step=step, ratio=RANDOM)
        assert late == (Phase.WARM_UP, approx(low), max(9 - step, 0), 1)
    *_, late = decided(course(Phase.SEARCH, Phase.UNSEEN, fresh=1), step=step, ratio=RANDOM)
    assert late == (Phase.WARM_UP, approx(low), max(9 - step, 0), 1)
    for other in (Phase.WAIT, Phase.SEARCH):
        *_, late = decided(course(other, Phase.UNSEEN), step=step, ratio=RANDOM)
        assert late == stays(Phase.WAIT)


def test_early_learning_begins_the_climb_at_the_std_that_holds_it():
    before = course(Phase.WARM_UP, Phase.WAIT, Phase.CLIMB, Phase.PLATEAU, Phase.SEARCH)
    others = [stays(Phase.WAIT), stays(Phase.CLIMB, 1), stays(Phase.PLATEAU, 1), stays(Phase.SEARCH)]
    assert decided(before, step=3, ratio=LEARNED) == [(Phase.CLIMB, 8.0, 10, 1), *others]
    assert decided(before, step=3, ratio=RANDOM) == [stays(Phase.WARM_UP, 1), *others]
    assert decided(before, step=4, ratio=LEARNED) == [stays(Phase.WARM_UP, 1), *others]


def test_at_the_end_of_the_warmup_beta_goes_up_again_or_down_to_the_plateau():
    before = course(Phase.WARM_UP, Phase.WAIT, Phase.CLIMB, Phase.SEARCH)
    others = [stays(Phase.WAIT), stays(Phase.CLIMB, 1), stays(Phase.SEARCH)]
    up, plateau = (decided(before, step=9, ratio=ratio, beta_default=0.25) for ratio in (LEARNED, RANDOM))
    assert up == [(Phase.WARM_UP, approx(OLD_BETA * 10**0.5), OLD_LEFT, 1), *others]
    assert plateau == [(Phase.PLATEAU, approx(0.0025), 7, 1), *others]


@pytest.mark.parametrize(
    ("early", "late", "stands"),
    [
        (4.39, 4.0, True),
        (4.41, 4.0, False),
        (3.6, 4.0, True),
        (3.59, 4.0, False),
        (-3.6, -4.0, True),
        (-3.59, -4.0, False),
        (-4.41, -4.0, False),
        (0.0, 0.0, True),
        (math.nan, 4.0, True),
        (4.4, math.nan, True),
    ],
)
def test_weights_that_look_random_wait_on_a_plateau_unless_the_loss_is_known_to_have_moved(early, late, stands):
    (place,) = decided(course(Phase.WARM_UP, early=early, late=late), step=9, ratio=RANDOM)
    up, down = (Phase.WARM_UP, approx(OLD_BETA * 10**0.5), OLD_LEFT, 1), (Phase.PLATEAU, approx(0.01), 7, 1)
    assert place == (down if stands else up)


def test_units_that_saw_less_of_the_loss_do_what_the_others_do():
    losses = torch.tensor([[4.0, math.nan, 4.0], [3.0, 3.0, 4.0]], dtype=torch.float64)
    before = replace(course(*[Phase.WARM_UP] * 3), early=losses[0], late=losses[1])
    assert [phase for phase, *_ in decided(before, step=9, ratio=RANDOM)] == [Phase.WARM_UP] * 3


@pytest.mark.parametrize(("late", "stands"), [(4.0, True), (3.0, False)])
@pytest.mark.parametrize("step", [10, 12])
def test_a_unit_that_missed_the_end_of_the_warmup_ends_it_when_it_is_seen_again(step, late, stands):
    """Once, and whatever the weights look like by then; one of an old checkpoint, or seen too late, only waits."""
    after = RULE.decide(course(Phase.WARM_UP, early=4.0, late=late), observe(step=step))
    up, down = (Phase.WARM_UP, approx(OLD_BETA * 10**0.5), OLD_LEFT, 1), (Phase.PLATEAU, approx(0.01), 7, 1)
    assert places(after) == [down if stands else up]
    assert places(RULE.decide(after, observe(step=12))) == places(after)
    assert decided(course(Phase.WARM_UP), step=11) == [stays(Phase.WARM_UP, 1)]
    assert decided(course(Phase.WARM_UP, early=4.0, late=late), step=13) == [stays(Phase.WARM_UP, 1)]


@pytest.mark.parametrize("others", [Phase.PLATEAU, Phase.CLIMB, Phase.SEARCH])
@pytest.mark.parametrize("late", [4.0, 3.0])
def test_a_unit_that_missed_the_end_of_the_warmup_does_what_the_others_did(others, late):
    """Whatever its own loss shows: what theirs showed is forgotten by then."""
    missed = torch.tensor([True, False, False])
    before = course(Phase.WARM_UP, others, others, fresh=1.0)
    before = replace(before, early=torch.where(missed, 4.0, math.nan), late=torch.where(missed, late, math.nan))
    first, *rest = decided(before, step=10)
    up, down = (Phase.WARM_UP, approx(OLD_BETA * 10**0.5), OLD_LEFT, 1), (Phase.PLATEAU, approx(0.01), 7, 1)
    assert first == (down if others == Phase.PLATEAU else up)
    assert rest == [stays(others, 1)] * 2


@pytest.mark.parametrize(("spread", "stands"), [(0.34, True), (0.33, False), (0.0, True), (math.nan, True)])
@pytest.mark.parametrize("loss", [4.0, math.nan])
def test_where_scores_have_grown_training_does_not_stand(spread, stands, loss):
    """They have a std of 0.5 now, whether the loss is known or not; the first batch may have measured none."""
    (place,) = decided(course(Phase.WARM_UP, early=loss, late=loss, spread=spread), step=9, ratio=RANDOM)
    assert place[0] == (Phase.PLATEAU if stands else Phase.WARM_UP)


def test_one_layer_whose_scores_have_grown_speaks_for_all():
    before = replace(course(Phase.WARM_UP, Phase.WARM_UP), spread=torch.tensor([0.5, 0.2]))
    assert [phase for phase, *_ in decided(before, step=9, ratio=RANDOM)] == [Phase.WARM_UP] * 2


def test_the_spread_is_that_of_the_scores_in_the_first_batch():
    after = course(Phase.WARM_UP)
    for step, std in enumerate([0.3, 0.4, 0.5]):
        after = RULE.watch(after, observe(step=step, std=std))
    assert after.spread.tolist() == approx([0.3])


def means(losses, rule=RULE):
    """Of the loss, in the first window and the last."""
    after = course(Phase.WARM_UP)
    for step, loss in enumerate(losses):
        after = rule.watch(after, observe(step=step, loss=loss))
    return [*after.early.tolist(), *after.late.tolist()]


LOSSES = (6.0, 5.0, 4.0, 100.0, 100.0, 100.0, 100.0, 3.0, 2.0, 1.0, 100.0, 100.0)


def test_the_loss_is_compared_in_means_over_the_first_window_and_the_last_of_the_warmup():
    """Of three batches each: the last ends with the batch after the warm-up, in which it is decided."""
    assert means(LOSSES) == approx([5, 2])


@pytest.mark.parametrize(("missing", "early"), [([0], 4.5 + 1 / 6), ([1], 16 / 3), ([0, 1], 4), ([0, 2], 5)])
def test_a_batch_without_a_loss_does_not_count_in_its_mean(missing, early):
    losses = [math.nan if step in missing else loss for step, loss in enumerate(LOSSES)]
    assert means(losses) == approx([early, 2])


@pytest.mark.parametrize(("warmup", "fall"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (6, 4)])
def test_windows_that_would_overlap_are_halves_of_the_warmup(warmup, fall):
    """The batch in the middle is in neither."""
    early, late = means([8.0 - step for step in range(9)], replace(RULE, warmup=warmup))
    assert early - late == approx(fall)


def test_phases_that_have_no_batch_left_give_way():
    after = RULE.expire(course(*Phase, left=0.0))
    assert after.phase.tolist() == [Phase.SEARCH, Phase.SEARCH, Phase.CLIMB, Phase.CLIMB, Phase.SEARCH, Phase.SEARCH]
    assert after.left.tolist() == [0, 0, 10, 10, 0, 0]
    assert places(RULE.expire(course(*Phase))) == places(course(*Phase))


def test_a_climb_takes_an_equal_share_of_what_is_left_to_its_end():
    beta = torch.tensor([0.25, 0.5, 5.0], dtype=torch.float64)
    before = replace(course(*[Phase.CLIMB] * 3), beta=beta)
    rise = RULE.climb(before, observe(units=3, beta_default=0.25, std=0.01))
    assert rise.tolist() == approx([1 / 5, math.log10(5) / 5, 0])


def test_a_climb_holds_the_std_of_the_logits():
    before = course(*[Phase.CLIMB] * 2)
    rise = RULE.climb(before, observe(units=2, std=[4.5, 10]))
    assert rise.tolist() == approx([math.log10(4 / 3.6), math.log10(4 / 8)])
