"""What `apply` guarantees whatever the controllers do, and which classes and options make a controller."""

import json
import math
import re
from dataclasses import FrozenInstanceError, dataclass, fields, make_dataclass, replace

import numpy
import pytest
import torch

from betahook import Cap, Controller, Decades, Gradient, Monitor, Observation, Search, Statistics, Variance
from betahook.control.base import apply, check_controller, is_at_bound, options
from support.observations import approx, as_list, observe, run

NAN, INF = math.nan, math.inf


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


def search(**changes):
    """A Search that is quick to move."""
    return Search(**{"window": 1, "opening": 0.5, "warmup": 0, "largest": 1.0, "rise": False, **changes})


RULES = {
    "monitor": Monitor,
    "variance": Variance,
    "variance from weights": lambda: Variance(source="weights"),
    "search": search,
    # Of trained weights, whose units have windows of their own.
    "search with a window": lambda: search(window=3, rise=True, fresh_ratio=1.0),
    "search with a rise": lambda: search(window=2, rise=True, plateau_batches=3, rise_batches=10),
    "gradient": Gradient,
    "cap": lambda: Cap(5.0),
    "search, cap": lambda: [search(), Cap(5.0)],
}
JUDGED = {**RULES, "decades": lambda: Decades(window=1), "decades in turn": lambda: Decades(window=1, together=False)}
"""With those that are judged by the loss, which is the same for all units."""


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
            spectral_ratio=1.1,
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
        memories = [{} for _ in rules]
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
                    units=3, **measured, **SICK[reason](False), predicted_std=predicted, spectral_ratio=1.1
                )
            beta, memories = apply(rules, beta, replace(observation, step=len(betas)), memories)
            betas.append(beta.tolist())
        return betas

    disturbed, healthy, without = history(sick=3), history(sick=None), history(sick=None, skipped=[3])
    for unit in (0, 2):
        assert [step[unit] for step in disturbed] == [step[unit] for step in healthy]
    # For the sick unit the step never was: beta and memory go on as if it had been left out.
    assert disturbed[3][1] == disturbed[2][1]
    assert [step[1] for step in disturbed[:3] + disturbed[4:]] == [step[1] for step in without]


@pytest.mark.parametrize("rule", JUDGED)
def test_an_update_leaves_tensors_that_others_may_hold(rule):
    rules, beta = as_list(JUDGED[rule]()), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    memories = [{} for _ in rules]
    for observation in story(slice(None)):
        names = [sorted(memory) for memory in memories]
        states = [(tensor, tensor.clone()) for memory in memories for tensor in memory.values()]
        held, given = [*states, (beta, beta.clone())], memories
        beta, memories = apply(rules, beta, observation, memories)
        assert all(torch.equal(tensor.nan_to_num(-1), copy.nan_to_num(-1)) for tensor, copy in held)
        assert [sorted(memory) for memory in given] == names


@pytest.mark.parametrize("rule", JUDGED)
def test_nothing_is_read_back_to_the_host(rule):
    """On a device without numbers there is nothing to read."""
    rules = as_list(JUDGED[rule]())
    memories = [{} for _ in rules]
    with torch.device("meta"):
        values = {field.name: torch.ones(3, dtype=torch.float64) for field in fields(Statistics)}
        values["finite"] = values["finite"].bool()
        beta, ratio = torch.ones(3), torch.ones(())
    for step in range(3):
        given = Observation(beta, Statistics(**values), lambda: values["std"], 88.0, step, lambda: ratio, lambda: ratio)
        beta, memories = apply(rules, beta, given, memories)


@dataclass
class Broken(Controller):
    """A rule of a user that goes wrong."""

    value: float = NAN

    def update(self, beta, observation, state):
        return torch.full_like(beta, self.value), state


@pytest.mark.parametrize("value", [NAN, INF, -INF, 0.0, -1.0])
def test_a_rule_that_goes_wrong_moves_nothing(value):
    assert run(Broken(value), [observe()], 0.7) == [0.7]


@pytest.mark.parametrize("rule", RULES)
def test_beta_keeps_its_precision(rule):
    beta = torch.tensor([0.5, 1.0, 2.0])
    observation = story(slice(None))[0]
    observation = replace(observation, beta_default=beta)
    rules = as_list(RULES[rule]())
    beta, memories = apply(rules, beta, observation, [{} for _ in rules])
    assert beta.dtype == torch.float32
    assert {value.dtype for memory in memories for value in memory.values()} <= {torch.float64}


def test_a_memory_that_start_does_not_know_is_an_error():
    @dataclass
    class Counting(Controller):
        def update(self, beta, observation, state):
            return beta, {"count": beta + 1}

    with pytest.raises(ValueError, match=r"Counting\(\) made the memory \['count'\], but start\(\) \[\]; start"):
        run(Counting(), [observe()])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda beta: beta, r"Wrong\(\) must return beta and the memory, \(beta, state\); got Tensor"),
        (lambda beta: None, r"Wrong\(\) must return beta and the memory, \(beta, state\); got NoneType"),
        (lambda beta: (beta, {}, 1), r"Wrong\(\) must return beta and the memory, \(beta, state\); got a tuple of 3"),
        (lambda beta: (beta, None), r"a dictionary of tensors for the memory, .*, \{\} for no memory; got NoneType"),
        (lambda beta: (beta.mean(), {}), r"a beta of shape \[2\], as it got; got a tensor of shape \[\]"),
        (lambda beta: (0.5, {}), r"a beta of shape \[2\], as it got; got 0\.5"),
    ],
)
def test_an_update_that_is_no_beta_with_a_memory(answer, said):
    @dataclass
    class Wrong(Controller):
        def update(self, beta, observation, state):
            return answer(beta)

    with pytest.raises(TypeError, match=said):
        run(Wrong(), [observe(units=2)], beta=[1.0, 1.0])


@pytest.mark.parametrize("memory", [None, {"count": 0}], ids=str)
def test_a_start_without_tensors(memory):
    @dataclass
    class Wrong(Controller):
        def start(self, beta):
            return memory

        def update(self, beta, observation, state):
            return beta, state

    with pytest.raises(TypeError, match=r"Wrong\(\) must return a dictionary of tensors, \{\} for no memory"):
        run(Wrong(), [observe()])


def test_every_controller_has_a_memory_of_its_own():
    """Also where it is the same object twice: all that changes is in the memories."""
    rule, beta = Gradient(), torch.ones(1, dtype=torch.float64)
    beta, memories = apply([rule, rule], beta, observe(sensitivity=-1), [{}, rule.start(beta)])
    assert [memory["steps"].item() for memory in memories] == [1, 1]
    assert beta.item() == pytest.approx(math.exp(0.04))
    with pytest.raises(ValueError, match="zip"):
        apply([rule], beta, observe(sensitivity=-1), [])


def test_a_memory_that_an_update_changes_in_place_is_kept_where_the_observation_is_bad():
    @dataclass
    class Counting(Controller):
        def start(self, beta):
            return {"count": torch.zeros_like(beta)}

        def update(self, beta, observation, state):
            state["count"] = state["count"] + 1
            return beta, state

    _, (memory,) = apply([Counting()], torch.ones(2), observe(units=2, finite=[True, False]), [{}])
    assert memory["count"].tolist() == [1, 0]


def test_a_beta_at_a_bound_is_told_from_one_that_is_near():
    """A millionth below it, where rounding may leave it, is at the bound; a thousandth is not."""
    factors = torch.tensor([1000, 1000 * (1 - 1e-6), 999, 0.001, 0.001 * (1 + 1e-6), 0.001001, NAN])
    assert is_at_bound(0.3 * factors, torch.full((7,), 0.3)).tolist() == [True, True, False, True, True, False, False]
    reached = torch.tensor(run(Variance(smoothing=0), [observe(std=1e-9, beta_default=0.3)]))
    assert is_at_bound(reached.float(), torch.tensor([0.3])).item()


def test_a_controller_of_a_user_needs_no_more_than_update():
    """Its memory is empty, old ones are read as they are, and it never says that training ends too early."""
    rule = Broken(2.0)
    assert rule.start(torch.ones(1)) == {}
    assert not rule.is_in_transition({})
    assert rule.migrate({"old": 1}) == {"old": 1}


class Still(Controller):
    """A rule of a user that does nothing."""

    def update(self, beta, observation, state):
        return beta, state


@pytest.mark.parametrize("frozen", [False, True])
def test_the_options_of_a_controller_are_json(frozen):
    @dataclass(frozen=frozen)
    class Rule(Still):
        number: float = 0.5
        whole: int = 3
        name: str = "x"
        flag: bool = True
        nothing: None = None
        several: tuple = (1, [2.0, "y"])

    check_controller(Rule())
    expected = {"number": 0.5, "whole": 3, "name": "x", "flag": True, "nothing": None, "several": [1, [2.0, "y"]]}
    assert options(Rule()) == expected == json.loads(json.dumps(options(Rule())))


@pytest.mark.parametrize("rule", [Monitor(), Variance(), Gradient(), Cap(), Search(), Decades()])
def test_the_options_of_our_own_controllers_make_the_same_one(rule):
    check_controller(rule)
    read = {name: tuple(x) if isinstance(x, list) else x for name, x in json.loads(json.dumps(options(rule))).items()}
    assert type(rule)(**read) == rule
    assert read.keys() == {field.name for field in fields(rule)}


def test_our_own_controllers_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        Cap().threshold = 3.0


class Undecorated(Cap):
    pass


@pytest.mark.parametrize("rule", [Still(), Undecorated(3.0)])
def test_a_class_that_is_no_dataclass_itself_is_refused(rule):
    name = type(rule).__name__
    with pytest.raises(TypeError, match=f"class {name} is not decorated with @dataclass; expected .* Write @dataclass"):
        check_controller(rule)


@pytest.mark.parametrize(
    "value", [NAN, INF, {"a": 1}, 1j, b"x", torch.tensor(1.0), torch.float32, [1, (2, INF)], numpy.int64(3)], ids=repr
)
def test_an_option_that_json_cannot_hold_is_refused(value):
    bad = re.escape("[1, [2, inf]]" if isinstance(value, list) else repr(value))
    with pytest.raises(TypeError, match=rf"^Broken\(value=\.\.\.\) is {bad}, .* expected .* Put "):
        check_controller(Broken(value))


@pytest.mark.parametrize("option", ["start", "update", "explain", "is_due", "is_in_transition", "migrate"])
def test_an_option_that_hides_a_method_is_refused(option):
    rule = make_dataclass("Own", [(option, float, 1.0)], bases=(Still,))()
    with pytest.raises(TypeError, match=rf"^Own has an option {option}, .* expected another name. Rename the option$"):
        check_controller(rule)


def test_a_controller_prints_as_one_would_write_it():
    assert repr(Search()) == "Search()"
    assert repr(Search(window=5, rise=False)) == "Search(window=5, rise=False)"
    assert repr(Cap(30.0)) == "Cap(threshold=30.0)"
