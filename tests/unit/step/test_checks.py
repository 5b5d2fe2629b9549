"""What a rank answers in its first step, and what it makes of the answers of another one, which is made up here."""

import math

import pytest
import torch

import betahook
from betahook.measure import ranks
from betahook.state.left_alone import refuse
from betahook.step import checks
from support.attention import WIDTH, LengthDependent, make
from support.models import build, inputs


@pytest.fixture
def other(monkeypatch):
    """Let another rank answer: its numbers are those of this one but for those in the list that is returned."""
    changes = []

    def reduce(tensor, operation):
        there = tensor.clone()
        for row, answer in changes.pop(0) if changes else ():
            there[row] = torch.as_tensor(answer)
        torch.maximum(tensor, there, out=tensor)

    monkeypatch.setattr(checks, "is_pooled", lambda state: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
    return changes


@pytest.fixture
def hook():
    with betahook.attach(build("llama"), "monitor") as hook:
        yield hook


def check(hook):
    checks.check(hook._state, hook.layers, hook.controllers, hook.settings)


def test_what_another_rank_has_seen_counts_here(hook, other):
    other.append([(1, [-1, 1]), (2, [-1, 1])])
    check(hook)
    assert hook._state.ranks_agree


def test_what_no_rank_has_seen_is_asked_again(hook, other):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no forward has reached a hooked layer"):
            check(hook)
    assert not hook._state.ranks_agree


@pytest.mark.parametrize("row", [0, 1, 2, 9])
def test_another_step_or_beta_is_refused(hook, other, row):
    hook.model(**inputs("llama"))
    other.extend([[], [(row, [-7, 7])]])
    with pytest.raises(RuntimeError, match="all ranks must begin with the same beta and the same step"):
        check(hook)


def test_ranks_that_come_together_after_a_step_alone_are_compared(hook, request):
    hook.model(**inputs("llama"))
    check(hook)
    request.getfixturevalue("other").extend([[], [(2, [-7, 7])]])
    with pytest.raises(RuntimeError, match="all ranks must begin with the same beta and the same step"):
        check(hook)


def test_other_layers_are_refused(hook, other):
    other.append([(0, [-7, 7])])
    with pytest.raises(RuntimeError, match="must have the same attention layers"):
        check(hook)


OPTIONS = ["controller=Monitor()", "interval=10", "per_head=False"]


@pytest.mark.parametrize(("row", "shown"), [*enumerate(OPTIONS, start=4)])
def test_options_that_make_ranks_wait_or_train_apart_are_refused(hook, other, row, shown):
    other.append([(row, [-7, 7])])
    with pytest.raises(RuntimeError, match="Give every rank the same options of attach") as refused:
        check(hook)
    assert [each in str(refused.value) for each in OPTIONS] == [each == shown for each in OPTIONS]


def test_the_beta_of_what_is_left_alone_here_is_not_compared(hook, other):
    hook.model(**inputs("llama"))
    refuse(hook._state, hook._state.ranges[1], "of a reason")
    other.extend([[], [(row, [-7, 7]) for row in range(6, 10)]])
    check(hook)
    assert hook._state.ranks_agree


@pytest.mark.parametrize(("here", "there", "largest"), [(1.0, math.nan, 1.0), (1.0, 2.0, 2.0), (math.nan,) * 3])
def test_the_largest_number_is_that_of_the_ranks_that_know_one(monkeypatch, here, there, largest):
    there = torch.tensor(there).nan_to_num(-math.inf)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, operation: torch.maximum(x, there, out=x))
    found = ranks.largest_over_ranks(torch.tensor(here), torch.zeros(()))
    assert str(found.item()) == str(largest)


def test_a_first_step_of_layers_that_are_left_alone_needs_no_second_warning(caplog):
    model = make(LengthDependent)
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(2, 8, WIDTH)).sum().backward()
        hook.step()
    assert "left alone" in caplog.text
    assert "no attention was measured" not in caplog.text
