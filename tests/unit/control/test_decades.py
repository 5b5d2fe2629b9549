"""Decades on losses that are functions of beta: the path, where it ends, and what it does about failures and drift."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from betahook import Cap, Decades
from betahook.control.base import apply
from support.observations import approx, observe, run

NAN = math.nan


def search(loss, rules=None, *, steps=40, units=1, memories=None, beta=None, **measured):
    """Log10 of beta in each batch, a number or one a unit, and the memories after all; `loss` maps that to a number."""
    rules = rules or [Decades(window=1)]
    memories = memories or [{} for _ in rules]
    beta = torch.ones(units, dtype=torch.float64) if beta is None else beta
    path = []
    for step in range(steps):
        decades = beta.log10().tolist()
        path.append(decades if units > 1 else decades[0])
        beta, memories = apply(rules, beta, observe(units=units, step=step, loss=loss(path[-1]), **measured), memories)
    return path, memories


def parabola(optimum):
    return lambda x: (x - optimum) ** 2


def test_powers_of_ten_come_first_then_bisection():
    path, (memory,) = search(parabola(1.3))
    # N = 0 twice, as the first batch is of no trial; 0.1 is worse than 1, 100 than 10. Then stages around 10.
    assert path[:6] == approx([0, 0, 1, -1, 2, 1])
    assert path[6:14] == approx([1.5, 0.5, 1.5, 1.75, 1.25, 1.25, 1.375, 1.125])
    assert path[14:] == approx([1.25] * 26)
    assert not Decades(window=1).is_in_transition(memory)


@pytest.mark.parametrize("optimum", [-2.4, -1.0, -0.37, 0.0, 0.2, 0.86, 1.62, 2.9])
def test_it_ends_within_a_factor_of_two_of_the_best_constant(optimum):
    path, _ = search(parabola(optimum))
    assert abs(path[-1] - optimum) < math.log10(2)
    assert path[-1] == path[20]


def test_a_trial_lasts_a_window_and_is_judged_by_its_mean():
    losses = iter([0.0, 5, 1, 3, 2, 9, 9])  # the first is of no trial
    path, _ = search(lambda x: next(losses), [Decades(window=2)], steps=7)
    assert path == approx([0, 0, 0, 1, 1, -1, -1])  # means 3, 2.5 and 9


@pytest.mark.parametrize("loss", [0.0, 1e9, NAN, math.inf])
@pytest.mark.parametrize("skipped", [0, 1, 3])
def test_a_skipped_step_is_no_batch_unless_its_loss_is_not_finite(skipped, loss):
    """A beta with which float16 overflows in every step would otherwise be tried for ever."""

    def path(losses):
        beta, memories, found = torch.ones(1, dtype=torch.float64), [{}], []
        for batches, loss in losses:
            seen = replace(observe(loss=loss), batches=batches)
            beta, memories = apply([Decades(window=2)], beta, seen, memories)
            found.append(beta.item())
        return found

    losses = [(1, float(loss)) for loss in (7, 5, 1, 3, 2, 9, 9)]
    if math.isfinite(loss):
        expected = path(losses)
        expected.insert(skipped, [1.0, *expected][skipped])
    else:
        expected = path([*losses[:skipped], (1, loss), *losses[skipped:]])
    assert path([*losses[:skipped], (0, loss), *losses[skipped:]]) == expected


@pytest.mark.parametrize("where", [1, 2, 5, 30])
def test_a_step_without_a_loss_is_no_batch(where):
    """Neither of a trial nor of a window after the search, which would begin again."""

    def path(has_loss):
        beta, memories, found = torch.ones(1, dtype=torch.float64), [{}], []
        for has in has_loss:
            loss = parabola(0.3)(beta.log10().item()) if has else NAN
            seen = replace(observe(loss=loss), has_loss=lambda has=has: torch.tensor(has))
            beta, memories = apply([Decades(window=2)], beta, seen, memories)
            found.append(beta.item())
        return found

    expected = path([True] * 40)
    assert len(set(expected[30:])) == 1
    expected[where:where] = [expected[where - 1]] * 3
    assert path([True] * where + [False] * 3 + [True] * (40 - where)) == expected


def test_noise_below_what_a_step_changes_is_none():
    generator = torch.Generator().manual_seed(0)
    noisy = lambda x: parabola(1.1)(x) + 0.1 * torch.randn((), generator=generator).item()  # noqa: E731
    path, _ = search(noisy, [Decades(window=10, drift=1e9)], steps=300)
    assert abs(path[-1] - 1.1) < math.log10(2)


def test_a_plateau_is_walked_to_its_end():
    """A peak two decades away, and the same loss everywhere else."""
    path, _ = search(lambda x: 1.0 if abs(x - 2) > 0.4 else abs(x - 2))
    assert path[1:8] == approx([0, 1, -1, 2, -2, 3, -3])
    assert path[-1] == approx(2)


def test_without_any_difference_beta_returns_to_where_it_was():
    path, _ = search(lambda x: 1.0)
    assert max(path) == approx(3)
    assert path[-1] == approx(0)


@pytest.mark.parametrize("failure", [NAN, math.inf])
def test_a_failed_trial_is_worse_than_any_loss(failure):
    path, _ = search(lambda x: failure if x > 0.4 else 1 - x, sensitivity=NAN)
    assert 2 not in path
    assert 0.2 < path[-1] < 0.4


def test_trials_go_on_where_the_first_fail():
    path, _ = search(lambda x: parabola(-2)(x) if x < -1.5 else NAN)
    assert abs(path[-1] + 2) < math.log10(2)


def test_nothing_finite_counts_as_a_failed_trial_too():
    """Other controllers hold beta there; this one would stay at what broke the training for ever."""
    path, _ = search(parabola(0.3), finite=False, std=NAN)
    assert abs(path[-1] - 0.3) < math.log10(2)


def test_beta_moves_on_from_where_nothing_is_finite():
    beta, memories = torch.ones(1), [{}]
    betas = set()
    for _ in range(4):
        beta, memories = apply([Decades(window=1)], beta, observe(loss=NAN, finite=False), memories)
        betas.add(round(beta.item(), 6))
    assert len(betas) > 1


def test_an_optimum_beyond_the_edge_ends_at_it():
    path, _ = search(lambda x: -x)
    assert path[-1] == approx(3)
    path, _ = search(lambda x: -x, [Decades(window=1, decades=1, resolution=1.0)])
    assert path[1:4] == approx([0, 1, -1])
    assert set(path[4:]) == {path[2]}


def test_the_overflow_bound_ends_the_trials_upward():
    path, _ = search(lambda x: -x, max_score=10.0, overflow=88.0)
    assert max(path) == approx(math.log10(8.8))
    assert path[-1] == approx(math.log10(8.8))


def test_multiples_of_the_models_own_beta():
    for relative, middle in ((True, -0.9), (False, 0.0)):
        path, _ = search(parabola(0.2), [Decades(window=1, relative=relative)], beta_default=10**-0.9)
        assert path[1:3] == approx([middle, middle + 1])
        assert abs(path[-1] - 0.2) < math.log10(2)


def test_a_drift_of_the_loss_opens_the_search_again():
    optimum = [1.0]
    moving = lambda x: 4 + 4 * parabola(optimum[0])(x)  # noqa: E731
    path, memories = search(moving)
    assert path[-1] == approx(1)
    beta = torch.tensor([10 ** path[-1]], dtype=torch.float64)
    optimum[0] = 1.6  # 36 % more loss
    path, memories = search(moving, memories=memories, beta=beta)
    assert set(path) == {path[0]}
    optimum[0] = -1.0
    path, _ = search(moving, memories=memories, beta=beta)
    assert path[1:6] == approx([1, 2, 0, -1, -2])
    assert path[-1] == approx(-1)


def test_losses_that_stay_infinite_are_no_drift_and_a_finite_one_after_them_is():
    path, memories = search(lambda x: NAN)
    assert not Decades(window=1).is_in_transition(memories[0])
    path, memories = search(lambda x: NAN, memories=memories, steps=5)
    assert not Decades(window=1).is_in_transition(memories[0])
    path, _ = search(parabola(1.3), memories=memories)
    assert path[-1] == approx(1.25)


def test_layers_search_one_after_another():
    best = (1.0, -1.0, 0.5)
    rules = [Decades(window=1, together=False)]

    def loss(x):
        return sum((a - b) ** 2 for a, b in zip(x, best, strict=True))

    own = 10**-0.25
    beta = torch.full((3,), own, dtype=torch.float64)
    path, (memory,) = search(loss, rules, units=3, steps=70, beta=beta, beta_default=own)
    for column in zip(*path, strict=True):
        first = next(index for index, x in enumerate(column) if x != column[0])
        assert column[first : first + 3] == approx((0, 1, -1))  # N = 0 at its turn, and its own beta until then
    for before, after in itertools.pairwise(path):
        moved = [index for index in range(3) if before[index] != after[index]]
        assert len(moved) <= 2  # one begins where the other ends
    assert path[-1] == approx(list(best))
    assert (memory["turn"] == 3).all()


def of_those_in_use(best):
    """The sum of the squared distances from the best, which are NaN of layers that were not used."""
    return lambda x: sum((a - b) ** 2 for a, b in zip(x, best, strict=True) if not math.isnan(a))


@pytest.mark.parametrize("used", [(False, True, False, True), (True, False, False, True), (False, False, True, False)])
def test_only_layers_in_use_have_a_turn(used):
    rule, best = Decades(window=1, together=False), (1.0, -1.0, 0.5, -0.5)
    own = torch.where(torch.tensor(used), 10**-0.25, NAN).double()
    path, (memory,) = search(of_those_in_use(best), [rule], units=4, steps=15 * sum(used), beta=own, beta_default=own)
    first = used.index(True)
    assert [row[first] for row in path[1:4]] == approx([0, 1, -1])
    assert not rule.is_in_transition(memory)
    end, notes = path[-1], rule.explain(own, observe(units=4), memory)
    for index, was_used in enumerate(used):
        if was_used:
            assert end[index] == pytest.approx(best[index])
            assert str(notes[index]) == f"hold: the best beta of its search was {10 ** best[index]:.3g}"
        else:
            assert math.isnan(end[index])
            assert str(notes[index]) == "hold: was not in use when its turn came"


def test_a_search_layer_by_layer_waits_for_the_first_one_in_use():
    rule, unknown = Decades(window=1, together=False), torch.full((2,), NAN, dtype=torch.float64)
    _, (memory,) = search(lambda x: 1.0, [rule], units=2, steps=3, beta=unknown, beta_default=NAN)
    assert rule.is_in_transition(memory)
    own = torch.tensor([NAN, 1.0], dtype=torch.float64)
    loss = of_those_in_use((0.0, 1.0))
    path, _ = search(loss, [rule], units=2, steps=15, memories=[memory], beta=own, beta_default=own)
    assert path[-1][1] == pytest.approx(1.0)


def test_a_layer_that_comes_after_its_turn_has_one_in_the_next_search():
    rule, best, own = Decades(window=1, together=False), (1.0, -1.0), 10**-0.25
    distance, drift = of_those_in_use(best), [1.0]
    options = dict(loss=lambda x: drift[0] + distance(x), rules=[rule], units=2)
    early = torch.tensor([own, NAN], dtype=torch.float64)
    _, memories = search(**options, steps=15, beta=early, beta_default=early)
    both = torch.tensor([10.0, own], dtype=torch.float64)
    drift[0] -= distance([1.0, -0.25])
    path, memories = search(**options, steps=2, memories=memories, beta=both, beta_default=own)
    assert path[-1] == approx([1, -0.25])
    assert [str(note) for note in rule.explain(both, observe(units=2), memories[0])] == [
        "hold: the best beta of its search was 10",
        "hold: was not in use when its turn came",
    ]
    drift[0] += 10
    path, _ = search(**options, steps=40, memories=memories, beta=both, beta_default=own)
    assert path[-1] == approx(list(best))


def test_layers_search_together_by_one_factor():
    rules = [Decades(window=1, relative=True)]
    path, _ = search(lambda x: parabola(0.8)(x[0]), rules, units=2, beta_default=torch.tensor([1.0, 0.1]))
    assert all(a - b == pytest.approx(1) for a, b in path[1:])
    assert abs(path[-1][0] - 0.8) < math.log10(2)


def test_a_layer_that_is_first_used_later_follows_the_others():
    _, memories = search(parabola(1.0), units=1)
    both = torch.tensor([10.0, NAN], dtype=torch.float64)
    memories = [{name: torch.cat([value, value]) for name, value in memories[0].items()}]
    memories[0]["centre"][1] = memories[0]["best"][1] = NAN
    beta, memories = apply([Decades()], both, observe(units=2, beta_default=torch.tensor([1.0, NAN]), loss=1), memories)
    assert beta[0] == 10
    assert beta[1].isnan()
    beta, _ = apply([Decades()], torch.tensor([10.0, 0.5]), observe(units=2, beta_default=0.5, loss=1), memories)
    assert beta.tolist() == approx([10.0, 0.5])


def test_other_controllers_still_hold_where_nothing_is_finite():
    path, _ = search(lambda x: -x, [Cap(5.0)], steps=3, max_score=10.0, finite=False)
    assert path == approx([0, 0, 0])


def test_a_trial_that_a_cap_cuts_is_judged_as_it_ran():
    path, _ = search(lambda x: -x, [Decades(window=1), Cap(20.0)], max_score=10.0)
    assert path[-1] == approx(math.log10(2))


def test_a_search_under_way_says_so():
    _, (memory,) = search(parabola(0), steps=5)
    assert Decades().is_in_transition(memory)
    assert not Decades().is_in_transition({})


def test_it_says_what_it_does():
    rule, beta = Decades(window=1, together=False), torch.tensor([10.0, 1.0], dtype=torch.float64)
    said = []
    for steps in (1, 2, 60):
        _, (memory,) = search(lambda x: parabola(0)(x[0]), [rule], units=2, steps=steps)
        said.append([str(note) for note in rule.explain(beta, observe(units=2), memory)])
    waits = "waits while another layer searches"
    assert said[0] == ["centre: tries a beta of 10", f"centre: {waits}"]
    assert said[1] == ["sides: tries a beta of 10; the best was 1, with a loss of 0", f"sides: {waits}"]
    assert said[2] == ["hold: the best beta of its search was 1"] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, r"Decades\(window=\.\.\.\) must be a whole number, 1 or more; got 0"),
        ({"decades": True}, r"Decades\(decades=\.\.\.\) must be a whole number from 1 to 3; got True"),
        ({"relative": 1}, r"Decades\(relative=\.\.\.\) must be True or False; got 1"),
        ({"together": None}, r"Decades\(together=\.\.\.\) must be True or False; got None"),
        ({"decades": 4}, r"Decades\(decades=\.\.\.\) must be a whole number from 1 to 3; got 4"),
        ({"resolution": 0}, r"Decades\(resolution=\.\.\.\) must be above 0, at most 1; got 0"),
        ({"drift": True}, r"Decades\(drift=\.\.\.\) must be a positive number; got True"),
        ({"drift": NAN}, r"Decades\(drift=\.\.\.\) must be a positive number; got nan"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Decades(**options)


@pytest.mark.parametrize("together", [True, False])
def test_beta_of_rows_with_one_key_stays_while_the_others_are_tried(together):
    observation = observe(units=2, loss=1.0, flat_entropy=torch.tensor([1.0, 0.0]))
    history = run(Decades(window=1, together=together), [observation] * 40, [0.25, 0.25])
    assert len({tried for tried, _ in history}) > 3
    assert {idle for _, idle in history} == {0.25}
