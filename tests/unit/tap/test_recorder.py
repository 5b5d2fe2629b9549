"""Recording: when a forward is measured, and what of it shows in the statistics of its layer."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from betahook.measure import inputs as inputs_of
from betahook.measure.masks import Band, Mask
from betahook.step.loss_scale import LossScale
from betahook.step.stages import pooling
from support.layers import attention, make, projecting
from support.matrices import overall_std


@pytest.mark.parametrize(
    ("measuring", "in_evaluation", "training", "expected"),
    [(True, False, True, True), (True, False, False, False), (True, True, False, True), (False, True, True, False)],
)
def test_when_a_forward_is_measured(measuring, in_evaluation, training, expected):
    state, _, (recorder,) = make(attention(nn.Module(), 4, 8), when="always" if in_evaluation else "training")
    state.layers_due = range(1 if measuring else 0)
    recorder.module.train(training)
    assert recorder.is_recording is expected


@pytest.fixture
def measured():
    """A layer with grouped keys, one call of it recorded, and the raw query and key; a layer without projections."""
    state, layers, recorders = make(attention(projecting(4, 24), 4, 8), attention(nn.Module(), 2, 16))
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 4, 9, 8, generator=generator), torch.randn(2, 2, 9, 8, generator=generator) * 3
    recorders[0].note_default(0.5)
    recorders[0].record(query, key, Mask(Band()))
    return SimpleNamespace(state=state, layers=layers, recorders=recorders, query=query, key=key)


def test_a_recorded_call_shows_in_the_statistics_of_its_layer(measured):
    (first, second), query, key = measured.layers, measured.query, measured.key
    scores = query.double() @ key.double().repeat_interleave(2, 1).mT
    heads = scores.transpose(0, 1).flatten(1)
    assert overall_std(first.head_statistics).item() == pytest.approx(scores.std(correction=0).item(), rel=1e-5)
    assert first.statistics.std.item() == pytest.approx(heads.var(1, correction=0).mean().sqrt().item(), rel=1e-5)
    rows = scores.var(-1, correction=0).mean().sqrt().item()
    assert first.statistics.row_std.item() == pytest.approx(rows, rel=1e-5)
    assert first.statistics.count == scores.numel()
    torch.testing.assert_close(first.head_statistics.std, heads.std(1, correction=0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(first.head_statistics.mean, heads.mean(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(first.head_statistics.max_score, heads.abs().amax(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(first.head_statistics.max_positive_logit, 0.5 * heads.amax(1), rtol=1e-5, atol=0)
    for name in ("max_score", "max_logit"):  # of nine rows all are sampled
        assert torch.equal(*(getattr(first.head_statistics, name + end) for end in ("", "_bound")))
    assert second.statistics.count == 0


def test_independent_prediction_uses_the_moments_of_each_head(measured):
    first, query, key = measured.layers[0], measured.query, measured.key

    def moments(x):
        x = x.double().transpose(0, 1).flatten(1, 2)
        return x.mean(1), x.var(1, correction=0)

    (query_mean, query_variance), (key_mean, key_variance) = moments(query), moments(key.repeat_interleave(2, 1))
    expected = (query_variance + query_mean**2) * (key_variance + key_mean**2) - query_mean**2 * key_mean**2
    torch.testing.assert_close(first.head_statistics.independent_std, expected.sum(1).sqrt(), rtol=1e-5, atol=0)
    torch.testing.assert_close(first.head_statistics.component_variance_k, key_variance.mean(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        first.head_statistics.component_mean_square_q, query_mean.square().mean(1), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(
        first.head_statistics.component_mean_square_k, key_mean.square().mean(1), rtol=1e-5, atol=0
    )


def test_a_call_with_another_d_k_than_the_module_says_has_no_part_in_that_prediction(measured):
    first, query, key = measured.layers[0], measured.query, measured.key
    before = first.statistics
    measured.recorders[0].record(query[..., :6], key[..., :6], Mask(Band()))
    assert first.statistics.count == 2 * before.count
    assert first.statistics.independent_std == before.independent_std


def test_inputs_show_in_the_statistics(measured):
    first, second = measured.layers
    inputs = torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(2)) * 2 + 1
    for part in inputs.split(1):
        measured.recorders[0].record_input(part, ["query"])
        measured.recorders[0].record_input(3 * part, ["key"])
    seen = first.statistics
    std = inputs.double().std(correction=0).item()
    assert [seen.input_std_q.item(), seen.input_std_k.item()] == pytest.approx([std, 3 * std], rel=1e-5)
    assert second.statistics.input_std_q.isnan()


def test_an_input_of_both_projections_is_summed_once_unless_it_changed(measured):
    inputs = torch.ones(2, 9, 24)
    with mock.patch.object(inputs_of, "entries_of", wraps=inputs_of.entries_of) as sums:
        for _ in range(2):
            measured.recorders[0].record_input(inputs, ["query"])
            measured.recorders[0].record_input(inputs, ["key"])
        assert sums.call_count == 2
        measured.recorders[0].record_input(inputs, ["query"])
        inputs[0] = 2
        measured.recorders[0].record_input(inputs, ["key"])
        assert sums.call_count == 4
    seen = measured.layers[0].statistics
    assert seen.input_std_q == 0
    assert seen.input_std_k > 0


def test_the_sensitivity_is_the_gradient_of_the_probe():
    state, layers, (first, second) = make(attention(nn.Module(), 4, 8), attention(nn.Module(), 2, 16))
    (3 * second.probe.sum() + first.probe[2]).backward()
    assert [layer.statistics.sensitivity.item() for layer in layers] == [1, 6]
    state.gains.set_sensitivity(None)
    assert [layer.statistics.sensitivity.item() for layer in layers] == [0, 0]


def test_what_is_pooled_is_cleared_and_layers_have_turns(measured):
    with pooling(measured.state, LossScale.read(None, 0.0)):
        pass
    measured.state.layers_due = range(1, 2)
    assert measured.layers[0].statistics.count > 0  # as last pooled, until more is measured
    assert not measured.state.table.any()
    assert not measured.state.moments.any()
    assert [recorder.is_recording for recorder in measured.recorders] == [False, True]


@pytest.mark.parametrize("prescale", [1.0, 0.25])
def test_scores_that_exist_are_recorded_without_beta_and_what_the_query_was_scaled_by(prescale):
    _, (layer,), (recorder,) = make(attention(nn.Module(), 2, 8))
    recorder.note_default(0.5)
    layer.head_beta = torch.tensor([1.0, 0.125])
    query, key = torch.randn(2, 1, 2, 6, 8, generator=torch.Generator().manual_seed(1))
    scores = query @ key.mT
    factor = prescale * layer.current_gain.view(-1, 1, 1)
    raw = scores * factor
    recorder.record_pairs(raw, raw, torch.ones_like(raw, dtype=torch.bool), (query, key), factor)
    assert layer.head_statistics.std.tolist() == pytest.approx(scores.flatten(2).std(2, correction=0)[0].tolist())
    largest = scores.abs().amax((0, 2, 3))
    torch.testing.assert_close(layer.head_statistics.max_logit.float(), largest * layer.head_beta)


def test_the_probe_of_a_tensor_parallel_rank_makes_up_for_the_mean_over_ranks():
    state, _, (recorder,) = make(attention(nn.Module(), 4, 8))
    recorder.probe.sum().backward()
    assert state.gains.probes[0].grad.tolist() == [1] * 4
    state.gains.probes[0].grad = None
    recorder._local_range, recorder._local_heads = recorder._head_range.part(2, 2), 2
    recorder.probe.sum().backward()
    assert state.gains.probes[0].grad.tolist() == [0, 0, 2, 2]
