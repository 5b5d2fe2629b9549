"""Random attention modules: right in output, statistics, sensitivity and fold, or left alone by name."""

import pytest

from generated.verify import verify_all


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("first", range(0, 30, 10))
def test_generated_attention_is_right_or_left_alone(first):
    verify_all(range(first, first + 10))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("first", range(0, 800, 200))
def test_many_generated_attentions_are_right_or_left_alone(first):
    summary = verify_all(range(first, first + 200))
    assert summary.supported >= 0.8
    assert summary.plain["left alone late"] <= 5
