"""Each rule against updates computed by hand, and what `apply` guarantees whatever the rule does."""

import math
from dataclasses import dataclass, fields, replace

import pytest
import torch

from betahook import Cap, Controller, Gradient, Monitor, Search, Statistics, Variance
from betahook.control import controllers
from betahook.control.controllers import Observation

NAN, INF = math.nan, math.inf


def observe(*, units=1, predicted_std=NAN, beta_default=1.0, overflow=88.0, step=0, spectral_ratio=NAN, **measured):
    """An observation of which only `measured` is known; a number stands for all units."""

    def tensor(value, dtype=torch.float64):
        return torch.as_tensor(value, dtype=dtype).expand(units).clone()

    values = {field.name: tensor(NAN) for field in fields(Statistics)}
    values["finite"] = values["exact"] = tensor(True, torch.bool)
    values["count"] = tensor(1)
    values |= {
        name: tensor(value, torch.bool if name == "finite" else torch.float64) for name, value in measured.items()
    }
    return Observation(
        beta_default=tensor(beta_default),
        statistics=Statistics(**values),
        predicted_std=lambda: tensor(predicted_std),
        overflow=overflow,
        step=step,
        spectral_ratio=lambda: torch.tensor(spectral_ratio),
    )


def run(rules, observations, beta=1.0):
    """Beta after each observation, one list a unit or a list of numbers for a single unit."""
    rules = rules if isinstance(rules, list) else [rules]
    beta = torch.as_tensor(beta, dtype=torch.float64).reshape(-1)
    history = []
    for step, observation in enumerate(observations):
        beta = controllers.apply(rules, beta, replace(observation, step=step))
        history.append(beta.item() if len(beta) == 1 else beta.tolist())
    return history


def decades(history):
    """Beta as decades from 1."""
    return [math.log10(beta) for beta in history]


def approx(values):
    return pytest.approx(values, rel=1e-9, abs=1e-9)


def test_monitor_keeps_beta():
    assert run(Monitor(), [observe(std=3, sensitivity=5, max_score=1e9)] * 2, 0.7) == [0.7, 0.7]


@pytest.mark.parametrize(
    ("source", "measured"), [("measured", {"std": 4}), ("weights", {"predicted_std": 4})], ids=["measured", "weights"]
)
@pytest.mark.parametrize("target", [1.0, 3.0])
def test_variance_reaches_target_over_std(source, measured, target):
    other = {"std": 9, "predicted_std": 9} | measured
    assert run(Variance(target, source, smoothing=0), [observe(**other)]) == approx([target / 4])


def test_variance_smooths_log_beta():
    history = run(Variance(smoothing=0.75), [observe(std=100), observe(std=100), observe(std=0.1)])
    # A quarter of the way to -2 decades, a quarter of the rest, a quarter of the way to +1.
    assert decades(history) == approx([-0.5, -0.875, -0.875 + 1.875 / 4])


@pytest.mark.parametrize("source", ["measured", "weights"])
def test_variance_without_a_std_keeps_beta(source):
    unknown = {"std": 2, "predicted_std": 2} | {"std" if source == "measured" else "predicted_std": NAN}
    assert run(Variance(source=source), [observe(**unknown)], 0.7) == [0.7]


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(controllers, "PLATEAU_BATCHES", 3)
    monkeypatch.setattr(controllers, "RISE_BATCHES", 10)


def search(**options):
    """Search with nothing left to its defaults."""
    plain = {"window": 1, "opening": 0.5, "growth": 1.5, "smallest": 0.01, "warmup": 0, "largest": 1.0, "rise": False}
    return Search(**{**plain, **options})


def sensitivities(*values, **measured):
    return [observe(sensitivity=value, **measured) for value in values]


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
    history = run(search(warmup=3, window=2), sensitivities(-9, -9, -9, 1, 1, 1, 1))
    assert decades(history) == approx([0, 0, 0, 0, -0.5, -0.5, -1.25])


FRESH, LEARNED = controllers.FRESH_RATIO, 1.2


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
    held = controllers.RISE_LOGIT_STD
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


def test_where_weights_learn_in_the_first_third_of_the_warmup_the_rise_begins_at_the_std_that_holds_it():
    """In the third batch, two thirds of a decade above and below the model's own; it ends ten batches later."""
    ratios = [FRESH, FRESH, LEARNED, *[FRESH] * 10]
    apart = 10 ** (2 / 3)
    std = [controllers.RISE_LOGIT_STD / apart, controllers.RISE_LOGIT_STD * apart]
    observations = [observe(units=2, sensitivity=1, std=std, spectral_ratio=ratio) for ratio in ratios]
    above, below = zip(*run(search(warmup=6, rise=True), observations, [1.0] * 2), strict=True)
    assert decades(above) == approx([-0.5, -0.5, *[2 / 3] * 10, 2 / 3 - 0.5])
    assert decades(below) == approx([-0.5, -0.5, *[-2 / 3] * 10, -2 / 3 - 0.5])


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
    for _ in range(60):
        slope = beta.log10() - optimum
        beta = controllers.apply([rule], beta, observe(units=2, sensitivity=slope))
    assert beta.log10().tolist() == pytest.approx(optimum.tolist(), abs=0.05)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.8)])
def test_gradient_is_adam_on_log_beta(betas):
    slopes = torch.randn(30, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    log_beta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([log_beta], lr=0.03, betas=betas, eps=1e-30)
    expected = []
    for slope in slopes:
        log_beta.grad = slope.clone()
        adam.step()
        expected.append(log_beta.detach().exp())
    history = run(Gradient(0.03, betas), [observe(units=2, sensitivity=slope) for slope in slopes], [1.0, 1.0])
    torch.testing.assert_close(torch.tensor(history, dtype=torch.float64), torch.stack(expected))


def test_gradient_without_sensitivity_keeps_beta():
    assert run(Gradient(), sensitivities(0, 0), 0.7) == [0.7, 0.7]


def test_cap_bounds_the_largest_logit():
    observation = observe(units=3, max_score=[10, 10, NAN])
    assert run(Cap(5.0), [observation], [2.0, 0.3, 2.0]) == [[0.5, 0.3, 2.0]]


def test_controllers_apply_in_the_order_of_the_list():
    observation = observe(std=0.25, max_score=10)
    variance = Variance(smoothing=0)
    assert run([variance, Cap(20.0)], [observation]) == approx([2.0])
    assert run([Cap(20.0), variance], [observation]) == approx([4.0])


def test_a_cap_without_a_maximum_does_not_hold_the_rules_before_it():
    assert run([Variance(smoothing=0), Cap(5.0)], [observe(std=0.25)]) == approx([4.0])


@pytest.mark.parametrize(("std", "expected"), [(1e-9, 500.0), (1e9, 0.0005)])
def test_beta_stays_within_three_decades_of_the_model_s_own(std, expected):
    assert run(Variance(smoothing=0), [observe(std=std, beta_default=0.5)]) == approx([expected])


def test_a_beta_set_beyond_the_bounds_is_left_where_nothing_moves_it():
    assert run([Monitor(), Cap(1.0)], [observe(max_score=1e-9, beta_default=0.5)], 1e5) == [1e5]


RULES = {
    "monitor": Monitor,
    "variance": Variance,
    "variance from weights": lambda: Variance(source="weights"),
    "search": search,
    "search with a window": lambda: search(window=3),
    "search with a rise": lambda: search(window=2, rise=True),
    "gradient": Gradient,
    "cap": lambda: Cap(5.0),
    "search, cap": lambda: [search(), Cap(5.0)],
}


def as_list(rule):
    return rule if isinstance(rule, list) else [rule]


def story(units):
    """Observations in which everything changes, `[steps]`; unit i of many is that of one alone."""
    generator = torch.Generator().manual_seed(2)
    draws = torch.randn(7, 4, 3, generator=generator, dtype=torch.float64)[..., units]
    return [
        observe(
            units=slope.numel(),
            sensitivity=slope,
            std=a.exp(),
            predicted_std=b.exp(),
            max_score=3 * c.exp(),
            spectral_ratio=FRESH,
        )
        for slope, a, b, c in draws
    ]


@pytest.mark.parametrize("rule", RULES)
def test_units_do_not_see_each_other(rule):
    together = run(RULES[rule](), story(slice(None)), [0.5, 1.0, 2.0])
    for unit, beta in enumerate([0.5, 1.0, 2.0]):
        alone = run(RULES[rule](), story(slice(unit, unit + 1)), [beta])
        assert alone == [step[unit] for step in together]
    assert rule == "monitor" or together[-1] != together[0]


SICK = {
    "not finite": lambda healthy: {"finite": [True, healthy, True]},
    "the model's own beta unknown": lambda healthy: {"beta_default": [1.0, 1.0 if healthy else NAN, 1.0]},
}


# The last one stands for a bad number in what the rule does not look at.
@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e6])
@pytest.mark.parametrize("reason", SICK)
@pytest.mark.parametrize("rule", RULES)
def test_a_bad_observation_holds_its_unit_alone(rule, reason, bad):
    def history(*, sick, skipped=()):
        rules, beta, betas = as_list(RULES[rule]()), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64), []
        for index, observation in enumerate(story(slice(None))):
            if index in skipped:
                continue
            if index == sick:
                measured = {
                    name: torch.where(torch.tensor([False, True, False]), bad, getattr(observation.statistics, name))
                    for name in ("sensitivity", "std", "max_score")
                }
                predicted = torch.where(torch.tensor([False, True, False]), bad, observation.predicted_std())
                observation = observe(
                    units=3, **measured, **SICK[reason](False), predicted_std=predicted, spectral_ratio=FRESH
                )
            beta = controllers.apply(rules, beta, replace(observation, step=len(betas)))
            betas.append(beta.tolist())
        return betas

    disturbed, healthy, without = history(sick=3), history(sick=None), history(sick=None, skipped=[3])
    for unit in (0, 2):
        assert [step[unit] for step in disturbed] == [step[unit] for step in healthy]
    # For the sick unit the step never was: beta and memory go on as if it had been left out.
    assert disturbed[3][1] == disturbed[2][1]
    assert [step[1] for step in disturbed[:3] + disturbed[4:]] == [step[1] for step in without]


@pytest.mark.parametrize("rule", RULES)
def test_an_update_leaves_tensors_that_others_may_hold(rule):
    rules, beta = as_list(RULES[rule]()), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    for observation in story(slice(None)):
        states = [(tensor, tensor.clone()) for rule in rules for tensor in rule.state.values()]
        held = [*states, (beta, beta.clone())]
        beta = controllers.apply(rules, beta, observation)
        assert all(torch.equal(tensor, copy) for tensor, copy in held)


@dataclass
class Broken(Controller):
    """A rule of a user that goes wrong."""

    value: float = NAN

    def update(self, beta, observation):
        return torch.full_like(beta, self.value)


@pytest.mark.parametrize("value", [NAN, INF, -INF, 0.0, -1.0])
def test_a_rule_that_goes_wrong_moves_nothing(value):
    assert run(Broken(value), [observe()], 0.7) == [0.7]


@pytest.mark.parametrize("rule", RULES)
def test_beta_keeps_its_precision(rule):
    beta = torch.tensor([0.5, 1.0, 2.0])
    observation = story(slice(None))[0]
    observation = replace(observation, beta_default=beta)
    assert controllers.apply(as_list(RULES[rule]()), beta, observation).dtype == torch.float32


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (Variance, {"target": 0}, r"Variance\(target=\.\.\.\) must be a positive number; got 0"),
        (Variance, {"source": "guess"}, r"Variance\(source=\.\.\.\) must be \"measured\" or \"weights\"; got 'guess'"),
        (Variance, {"smoothing": 1.0}, r"Variance\(smoothing=\.\.\.\) must be a number from 0 to below 1; got 1\.0"),
        (Variance, {"smoothing": -0.1}, r"Variance\(smoothing"),
        (Search, {"window": 0}, r"Search\(window=\.\.\.\) must be a whole number, 1 or more; got 0"),
        (Search, {"window": 1.5}, r"Search\(window=\.\.\.\)"),
        (Search, {"warmup": 2.5}, r"Search\(warmup=\.\.\.\) must be a whole number, 0 or more; got 2.5"),
        (Search, {"warmup": -1}, r"Search\(warmup=\.\.\.\) must be a whole number, 0 or more; got -1"),
        (Search, {"rise": "no"}, r"Search\(rise=\.\.\.\) must be True or False; got 'no'"),
        (Search, {"smallest": 0}, r"Search\(smallest=\.\.\.\)"),
        (Search, {"opening": 2.0, "smallest": 0.1}, r"Search\(opening=\.\.\.\)"),
        (Search, {"opening": 0.1, "smallest": 0.2}, r"Search\(opening=\.\.\.\)"),
        (Search, {"growth": 0.5}, r"Search\(growth=\.\.\.\) must be 1 or more; got 0\.5"),
        (Gradient, {"learning_rate": 0}, r"Gradient\(learning_rate=\.\.\.\) must be a positive number; got 0"),
        (
            Gradient,
            {"betas": (0.9, 1.0)},
            r"Gradient\(betas=\.\.\.\) must be two numbers from 0 to below 1; got \(0\.9",
        ),
        (Gradient, {"betas": (0.9,)}, r"Gradient\(betas=\.\.\.\)"),
        (Cap, {"threshold": -1}, r"Cap\(threshold\) must be a positive number; got -1"),
        *[(rule, {option: NAN}, "got nan") for rule, option in [(Variance, "target"), (Cap, "threshold")]],
    ],
)
def test_options_that_make_no_sense_are_refused(rule, options, message):
    with pytest.raises(ValueError, match=message):
        rule(**options)


def test_a_rise_takes_nothing_back_from_a_beta_beyond_its_end():
    history = run(search(warmup=2, rise=True), rising([FRESH, LEARNED], 12, std=0.01), 100.0)
    assert decades(history) == approx([1.5, 1.5, *[2] * 10])


def test_a_rise_begins_at_the_beta_that_was_set():
    history = run(search(warmup=2, rise=True), rising([FRESH, LEARNED], 12, beta_default=0.5), 1.0)
    first = math.log10(2)
    climb = [first + (1 - first) * index / 10 for index in range(1, 11)]
    assert [math.log10(beta / 0.5) for beta in history] == approx([first - 0.5] * 2 + climb)


def test_a_state_that_start_does_not_know_is_an_error():
    @dataclass
    class Counting(Controller):
        def update(self, beta, observation):
            self.state = {"count": beta + 1}
            return beta

    rule = Counting()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Counting\(\) made the state \['count'\], but start\(\) \[\]; start"):
            run(rule, [observe()])
