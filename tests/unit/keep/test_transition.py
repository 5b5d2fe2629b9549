"""The warning of a training that ends before beta has settled."""

import pytest

import betahook
from betahook.keep.transition import warn_of_short_training
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
