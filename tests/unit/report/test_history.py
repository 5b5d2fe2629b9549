"""The history of findings: bounded, with what matters kept when columns are merged."""

import itertools
import math
from dataclasses import astuple, replace

import pytest

from betahook.control.notes import Note
from betahook.control.opening import Phase
from betahook.report.history import History
from support.made_up_findings import finding, findings, numbers


def moving(step, *moves):
    layers = [finding(index, [numbers()], note=Note(Phase.SEARCH, move)) for index, move in enumerate(moves)]
    return findings(step, 0, **{f"layer_{index}": each for index, each in enumerate(layers)})


def turns(*logs):
    history = History()
    for step, moves in enumerate(logs):
        history.add(moving(step, *moves), step)
    return [column.turns for column in history.columns]


def test_turns_are_where_the_sign_changes_or_the_move_shrinks():
    assert turns([0.1, -0.1], [0.15, -0.1], [-0.075, -0.1], [-0.1, -0.02], [0.05, -0.02]) == [
        (0, 0),
        (0, 0),
        (-1, 0),
        (0, -1),
        (1, 0),
    ]


def test_a_layer_without_a_move_has_not_turned():
    assert turns([0.0], [0.1], [0.0], [0.1], [0.0], [-0.1]) == [(0,), (0,), (0,), (0,), (0,), (-1,)]


@pytest.mark.parametrize("logs", [1, 7, 8, 9, 100, 1000])
def test_it_is_bounded_and_covers_all_steps(logs):
    history = History(limit=8)
    for step in range(10, 10 * logs + 1, 10):
        history.add(findings(step), step)
    columns = history.columns
    assert len(columns) <= 8
    assert sum(column.logs for column in columns) == logs
    assert (columns[0].first, columns[-1].last) == (10, 10 * logs)
    assert all(later.first == earlier.last + 10 for earlier, later in itertools.pairwise(columns))
    assert len({column.logs for column in columns[:-1]}) <= 1
    assert columns[-1].logs <= columns[0].logs
    assert history.latest.step == 10 * logs


def test_merging_keeps_the_sharpest_and_the_largest_and_every_turn():
    history = History(limit=1)
    sharp, large = [numbers(ratio=0.1, logit_std=1.0)], [numbers(max_logit=90.0)]
    history.add(findings(1, layer_1=finding(1, sharp, note=Note(move=0.1))), 1)
    history.add(findings(2, layer_1=finding(1, large, gain=3.0, note=Note(Phase.SEARCH, move=-0.1))), 2)
    history.add(findings(3, layer_1=finding(1, [numbers()], gain=2.0, note=Note(Phase.SEARCH, -0.1))), 3)
    (column,) = history.columns
    assert column.numbers[1].relative_entropy == pytest.approx(0.1)
    assert column.numbers[1].max_logit == 90
    assert column.numbers[1].logit_std == 2
    assert (column.gains[1], column.phases[1], column.turns) == (2.0, "search", (0, -1, 0))


def test_of_two_turns_in_a_column_the_later_one_shows():
    history = History(limit=1)
    for step, move in enumerate([0.1, -0.1, 0.1, 0.1]):
        history.add(moving(step, move), step)
    assert history.columns[0].turns == (1,)


def test_what_was_not_measured_gives_way():
    history = History(limit=1)
    nothing = finding(1, [numbers(math.nan, math.nan, math.nan)])
    for step, layer in enumerate([nothing, finding(1, [numbers()]), nothing]):
        history.add(findings(step, layer_1=layer), step)
    assert astuple(history.columns[0].numbers[1]) == pytest.approx(astuple(numbers()), nan_ok=True)


def test_what_was_not_finite_in_one_of_several_logs_stays():
    history = History(limit=1)
    lost = replace(numbers(math.nan, math.nan, math.nan), nonfinite=1.0)
    for step, layer in enumerate([numbers(), lost, numbers(ratio=0.2)]):
        history.add(findings(step, layer_1=replace(finding(1, [layer]), numbers=layer)), step)
    assert history.columns[0].numbers[1].nonfinite == 1
    assert history.columns[0].numbers[1].relative_entropy == pytest.approx(0.2)


def test_a_second_log_of_a_step_becomes_a_part_of_the_first():
    history = History(limit=4)
    for step, large in [(1, 5.0), (2, 9.0), (2, 7.0), (2, math.nan), (3, 5.0)]:
        history.add(findings(step, layer_1=finding(1, [numbers(max_logit=large)], gain=large)), step)
    assert [(column.first, column.last, column.logs) for column in history.columns] == [(1, 1, 1), (2, 2, 1), (3, 3, 1)]
    assert history.columns[1].numbers[1].max_logit == 9


def test_a_log_of_an_earlier_step_begins_the_history_anew():
    history = History(limit=2)
    for step in (*range(10, 100, 10), 30, 40):
        history.add(findings(step), step)
    assert [(column.first, column.last, column.logs) for column in history.columns] == [(30, 30, 1), (40, 40, 1)]
    assert history.latest.step == 40


def test_a_log_of_another_model_begins_the_history_anew():
    history = History()
    for step in (10, 20):
        history.add(findings(step), step)
    history.add(findings(20, layers=5), 20)
    assert [(column.first, column.last, len(column.gains)) for column in history.columns] == [(20, 20, 5)]
    assert history.added == 1
    history.add(findings(30, layers=5, layer_1=finding(7, [numbers()] * 2)), 30)
    assert [column.first for column in history.columns] == [30]
