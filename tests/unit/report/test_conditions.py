"""Conditions of attention: where each begins and ends, held against softmax itself and against the page on them."""

import math
import re
from pathlib import Path

import pytest
import torch

from betahook.report.conditions import ADVICE, RULES, SLACK, Condition, Numbers, advise, classify

HEALTHY = dict(nonfinite=0.0, max_logit=8.0, logit_std=2.0, entropy=3.0, flat_entropy=5.0, sink=0.01)


def judge(before=Condition.UNMEASURED, **changes):
    return classify(Numbers(**{**HEALTHY, **changes}), before)


@pytest.mark.parametrize(
    ("changes", "condition"),
    [
        ({}, Condition.HEALTHY),
        ({"nonfinite": 1.0}, Condition.NONFINITE),
        ({"max_logit": 100.1}, Condition.EXPLODING),
        ({"max_logit": 99.9}, Condition.HEALTHY),
        ({"logit_std": 0.0019}, Condition.DEAD),
        ({"logit_std": 0.002}, Condition.HEALTHY),
        ({"sink": 0.51}, Condition.SINK),
        ({"sink": 0.5}, Condition.HEALTHY),
        ({"sink": math.nan}, Condition.HEALTHY),
        ({"sink": 0.6, "entropy": 0.7, "flat_entropy": math.log(4)}, Condition.HEALTHY),  # flat attention gives it 0.25
        ({"sink": 0.63, "entropy": 0.7, "flat_entropy": math.log(4)}, Condition.SINK),
        ({"entropy": 0.49}, Condition.ONE_KEY),
        ({"entropy": 0.51}, Condition.SHARP),
        ({"entropy": 1.24}, Condition.SHARP),
        ({"entropy": 1.26}, Condition.HEALTHY),
        ({"logit_std": 10.1}, Condition.SHARP),
        ({"logit_std": 9.9}, Condition.HEALTHY),
        ({"entropy": 4.94}, Condition.HEALTHY),
        ({"entropy": 4.96}, Condition.FLAT),
        ({"entropy": 0.0, "flat_entropy": 0.0, "sink": 1.0}, Condition.HEALTHY),  # one key to choose from
    ],
)
def test_the_limits(changes, condition):
    assert judge(**changes) is condition


@pytest.mark.parametrize("tokens", range(1, 9))
def test_flat_attention_of_a_few_causal_tokens_is_no_sink(tokens):
    keys = torch.arange(1, tokens + 1, dtype=torch.float64)
    flat = keys.log().mean().item()
    condition = judge(sink=(1 / keys).mean().item(), entropy=flat, flat_entropy=flat)
    assert condition is (Condition.FLAT if tokens > 1 else Condition.HEALTHY)
    assert judge(sink=1.0, entropy=0.0, flat_entropy=flat) is (Condition.SINK if tokens > 1 else Condition.HEALTHY)


def test_what_was_not_measured_has_no_condition():
    assert classify(Numbers()) is Condition.UNMEASURED
    assert classify(Numbers(nonfinite=1.0)) is Condition.NONFINITE


def test_the_gravest_condition_comes_first():
    everything = dict(nonfinite=1.0, max_logit=1e3, logit_std=0.0, sink=0.9, entropy=0.0)
    calm = [("nonfinite", 0.0), ("max_logit", 1.0), ("logit_std", 9.0), ("sink", 0.0)]
    found = [judge(**everything)]
    for name, value in calm:
        everything[name] = value
        found.append(judge(**everything))
    assert found == [Condition.NONFINITE, Condition.EXPLODING, Condition.DEAD, Condition.SINK, Condition.ONE_KEY]


@pytest.mark.parametrize(
    ("condition", "name", "inside", "outside"),
    [
        (Condition.EXPLODING, "max_logit", 90.1, 89.9),
        (Condition.SHARP, "entropy", 5 * 0.274, 5 * 0.276),
        (Condition.FLAT, "entropy", 5 + math.log(0.856), 5 + math.log(0.854)),
    ],
)
def test_a_condition_ends_a_little_later_than_it_begins(condition, name, inside, outside):
    assert judge(**{name: inside}) is Condition.HEALTHY
    assert judge(condition, **{name: inside}) is condition
    assert judge(condition, **{name: outside}) is Condition.HEALTHY
    others = set(Condition) - {condition}
    assert {judge(other, **{name: inside}) for other in others} == {Condition.HEALTHY}
    assert SLACK == 0.1


@pytest.mark.parametrize("keys", [16, 128, 1024])
@pytest.mark.parametrize(
    ("std", "condition"),
    [
        (0.3, Condition.FLAT),
        (0.36, Condition.HEALTHY),
        (4.2, Condition.HEALTHY),
        (5.6, Condition.SHARP),
        (8.5, Condition.SHARP),
        (13.0, Condition.ONE_KEY),
    ],
)
def test_the_limits_belong_to_the_same_std_at_every_length(keys, std, condition):
    logits = std * torch.randn(400, keys, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1).mean().item()
    assert judge(entropy=entropy, flat_entropy=math.log(keys)) is condition


def test_rows_of_one_key_are_neither_dead_nor_a_sink():
    """Their softmax is 1 whatever their logits; beside them, flat attention gives most to the first key."""
    assert classify(Numbers(0, max_logit=5, logit_std=0, entropy=0, sink=1)) is Condition.HEALTHY
    mostly = dict(entropy=0.25 * math.log(20), flat_entropy=0.25 * math.log(20), sink=0.75 + 0.25 / 20)
    assert classify(Numbers(0, max_logit=5, logit_std=0.1, **mostly)) is Condition.FLAT


LOWERED = "beta is below the model's own, which makes attention flatter"
RAISED = "with beta above the model's own already, see if W_q and W_k learn"


@pytest.mark.parametrize(
    ("condition", "gains", "said"),
    [
        (Condition.DEAD, [0.01, 0.3], LOWERED),
        (Condition.FLAT, [0.01, 0.3], LOWERED),
        (Condition.FLAT, [2.0, 19.0], RAISED),
        (Condition.FLAT, [0.3, 2.0], ADVICE[Condition.FLAT]),
        (Condition.FLAT, [1.0], ADVICE[Condition.FLAT]),
        (Condition.DEAD, [19.0], ADVICE[Condition.DEAD]),
        (Condition.DEAD, [math.nan], ADVICE[Condition.DEAD]),
        (Condition.EXPLODING, [0.1], ADVICE[Condition.EXPLODING]),
        (Condition.FLAT, [0.95], ADVICE[Condition.FLAT]),  # as good as its own
        (Condition.FLAT, [1.05], ADVICE[Condition.FLAT]),
    ],
)
def test_the_advice_goes_by_what_beta_is_already(condition, gains, said):
    assert said in advise(condition, gains)


def test_the_keys_looked_at():
    numbers = Numbers(entropy=math.log(3), flat_entropy=math.log(12))
    assert (numbers.keys, numbers.keys_share) == pytest.approx((3, 0.25))
    assert math.isnan(Numbers(entropy=0.0, flat_entropy=0.0).relative_entropy)


def test_the_page_has_every_condition_and_limit():
    page = (Path(__file__).parents[3] / "docs" / "FINDINGS.md").read_text()
    rows = page[: page.index("| healthy |")].splitlines()
    for rule in RULES:
        name = str(rule.condition)
        (first,) = (index for index, row in enumerate(rows) if row.startswith(f"| [{name}](#{name.replace(' ', '-')})"))
        said = rows[first] if rule.condition is not Condition.SHARP else "".join(rows[first : first + 2])
        if rule.condition is not Condition.NONFINITE:
            assert f"{'above' if rule.above else 'below'} " in said
            assert f"{rule.limit:.3g}" in said
        assert f"\n## {name}\n" in page
    assert set(ADVICE) == set(Condition)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.condition} {rule.number}")
def test_the_help_has_every_condition_and_limit(rule):
    """An installed package has no other page."""
    (said,) = re.findall(rf"^ *{rule.condition}: (.*)$", Condition.__doc__, re.MULTILINE)
    if rule.condition is not Condition.NONFINITE:
        assert f"{'above' if rule.above else 'below'} {rule.limit:.3g}" in said


def test_the_help_names_the_conditions_in_the_order_in_which_they_are_asked():
    named = re.findall(r"^ *([a-z -]+): ", Condition.__doc__, re.MULTILINE)  # Python 3.13 takes off the indentation
    asked = list(dict.fromkeys(str(rule.condition) for rule in RULES))
    assert named == [*asked, str(Condition.HEALTHY), str(Condition.UNMEASURED)]
