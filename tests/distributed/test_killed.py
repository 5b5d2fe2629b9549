"""What was killed while it saved: a run resumes to the same bits, a state without its weights is refused."""

import signal

import pytest

from support import killed, overwritten


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert killed.in_process(folder) == 0
    return killed.end(folder)


@pytest.mark.parametrize("point", killed.POINTS)
def test_killed_in_the_middle_of_a_save(tmp_path, expected, point):
    assert killed.in_process(tmp_path, point) == -signal.SIGKILL
    assert killed.in_process(tmp_path) == 0
    assert killed.differences(expected, killed.end(tmp_path)) == []


@pytest.mark.slow
def test_killed_at_twenty_random_moments():
    assert killed.main(20) == 20


@pytest.mark.slow
def test_a_folder_never_holds_beta_and_weights_of_two_saves_silently():
    outcomes = overwritten.main(30, refused=6)
    assert outcomes.keys() <= {"one save", overwritten.REFUSED, "refused by transformers"}
    assert outcomes["one save"] > 0
    assert outcomes[overwritten.REFUSED] >= 6


def test_a_run_that_differs_is_seen(expected):
    name, value = expected[0]
    assert killed.differences(expected, [(name, value + 1e-7), *expected[1:]]) == [name]
