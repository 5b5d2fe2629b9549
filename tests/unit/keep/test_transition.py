"""Trainings that end before beta has settled."""

from contextlib import ExitStack

import pytest

import betahook
from betahook.keep.transition import choose, warn_of_short_training
from support.models import build
from support.training import train


@pytest.mark.parametrize(("missing", "warns"), [(1, True), (0, False)])
def test_a_training_as_long_as_the_opening_is_not_short(missing, warns, caplog):
    rule = betahook.Search()
    model = build("llama")
    with betahook.attach(model, controller=rule) as hook:
        train(model, hook, 1)
        warn_of_short_training(hook, rule.opening_batches - missing)
    assert (f"may need {rule.opening_batches} to bring beta" in caplog.text) is warns


def test_the_choice_that_was_made_is_not_offered():
    model = build("llama")
    with betahook.attach(model) as hook:
        train(model, hook, 1)
        for choice, others in (("own", '"keep" or "better"'), ("keep", '"own"'), ("better", '"own"')):
            with ExitStack() as undo:
                assert choose(hook, choice, undo, is_best=True).endswith(f"with unfinished={others}")
