"""The audit of layers whose components are known."""

import math
import random
from dataclasses import replace

import numpy
import pytest
import torch

import betahook
from support.attention import HEADS, LENGTH, WIDTH, ByHandAttention, FusedAttention
from support.models import build, inputs
from support.training import bits


def audited(mix=None, query_bias=None, key_bias=None):
    """The audit of one layer: independent normal components, those of q mixed by `mix` in each head; and its heads."""
    model = torch.nn.Sequential(FusedAttention())
    block, eye = model[0], torch.eye(WIDTH)
    half = WIDTH // 2
    with torch.no_grad():
        query = eye if mix is None else torch.block_diag(*[mix] * HEADS)
        block.q_proj.weight.copy_(query)
        block.k_proj.weight.copy_(eye.roll(half, 0))  # other components of the token: independent of those of q
        for projection, bias in ((block.q_proj, query_bias), (block.k_proj, key_bias)):
            projection.bias.zero_() if bias is None else projection.bias.copy_(bias)
    tokens = torch.randn(8, 512, WIDTH, generator=torch.Generator().manual_seed(0))
    with betahook.attach(model, controller="monitor") as hook:
        model(tokens)
        return hook.audit()[0], hook.layers["0"].head_statistics


def test_independent_heads_with_different_means_have_no_covariance():
    bias = torch.tensor([-6.0, -1.0, 2.0, 5.0]).repeat_interleave(WIDTH // HEADS)
    layer, heads = audited(query_bias=bias, key_bias=torch.full((WIDTH,), 2.0))
    assert heads.mean.std() > 3 * heads.std.mean()  # about one mean, the layer would have ten times the variance
    assert layer.covariance == pytest.approx(1.0, abs=0.05)
    assert layer.score_std == pytest.approx(heads.std.square().mean().sqrt().item(), rel=1e-6)
    assert layer.follows == "independent"


def test_the_mean_of_the_components_is_a_root_mean_square():
    model = torch.nn.Sequential(FusedAttention())
    with torch.no_grad():
        for projection, mean in ((model[0].q_proj, 2.0), (model[0].k_proj, 3.0)):
            projection.weight.zero_()
            projection.bias.fill_(mean)
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(2, LENGTH, WIDTH))
        (layer,) = hook.audit()
    assert (layer.component_mean_q, layer.component_mean_k) == (pytest.approx(2.0), pytest.approx(3.0))


def test_scores_far_below_1_follow_a_formula_too():
    layer, _ = audited(mix=0.01 * torch.eye(WIDTH // HEADS))
    assert layer.score_std == pytest.approx(0.01 * math.sqrt(WIDTH // HEADS), rel=0.05)
    assert layer.follows == "independent"


def test_covariance_between_q_and_k_shows():
    model = torch.nn.Sequential(FusedAttention())
    with torch.no_grad():
        for projection in (model[0].q_proj, model[0].k_proj):
            # All components of a head are one and the same number, of q and of k.
            projection.weight.copy_(torch.eye(HEADS, WIDTH).repeat_interleave(WIDTH // HEADS, 0))
            projection.bias.zero_()
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(8, 512, WIDTH, generator=torch.Generator().manual_seed(0)))
        assert hook.audit()[0].covariance == pytest.approx(WIDTH / HEADS, rel=0.1)


def correlated(width, share):
    """A mixing matrix of components whose correlation is `share`, each of variance 1."""
    return torch.linalg.cholesky(torch.full((width, width), share) + (1 - share) * torch.eye(width))


def test_correlated_components_of_q_alone_break_the_fourth_assumption_and_leave_the_variance_as_it_is():
    layer, _ = audited(correlated(WIDTH // HEADS, 0.9))
    assert layer.covariance == pytest.approx(1.0, abs=0.05)
    assert layer.score_std == pytest.approx(layer.predicted["classic"], rel=0.05)
    found = layer.correlations
    assert found.within_q == pytest.approx(0.9, abs=0.02)
    assert found.within_k < 0.02
    assert found.between < 0.02
    assert abs(found.tokens_q) < 0.01
    assert min(*found.variance_q, *found.variance_k) > 0.9
    assert max(*found.variance_q, *found.variance_k) < 1.1


def random_state():
    """That of Python, and that of numpy."""
    _, numbers, place, *_ = numpy.random.get_state()
    return random.getstate(), numbers.tolist(), place


def test_the_audit_leaves_no_trace_and_says_where_it_cannot_look():
    model = torch.nn.Sequential(FusedAttention(), torch.nn.Dropout(0.5))
    model.register_forward_pre_hook(lambda *call: random.random() + numpy.random.rand() and None)  # as a LayerDrop
    tokens = torch.randn(2, 16, WIDTH)
    with betahook.attach(model, controller="monitor") as hook:
        model(tokens)
        hook.audit()  # reads W_q and W_k
        others = random_state()
        before, given, state = torch.get_rng_state(), hook.last_call.input, bits(hook.state_dict())
        assert "(iv) corr" in str(hook.audit())
        assert torch.equal(torch.get_rng_state(), before)
        assert random_state() == others
        assert hook.last_call.input is given
        assert bits(hook.state_dict()) == state
        assert model.training
        assert model[1].training
        hook.last_call.input = None
        (layer,) = hook.audit()
        assert layer.correlations is None
        assert "(iv) corr" not in str(hook.audit())


def test_attention_written_by_hand_shows_its_correlations():
    model = torch.nn.Sequential(ByHandAttention())
    with torch.no_grad():
        model[0].q_proj.weight[1] = model[0].q_proj.weight[0]  # two components of the first head, of eight
        model[0].q_proj.bias[:2] = 0
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(64, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0)))
        for _ in range(2):
            (layer,) = hook.audit()
            assert layer.correlations.within_q > 0.1
            assert layer.correlations.variance_q[1] == pytest.approx(layer.component_variance_q, rel=1)
        before = layer.score_std
        model(torch.randn(64, LENGTH, WIDTH))
        assert hook.audit()[0].score_std != before  # it is recorded again


def test_of_two_calls_of_a_layer_the_first_shows_its_correlations():
    block, tokens = ByHandAttention(), torch.randn(4, LENGTH, WIDTH)
    found = []
    for model in (torch.nn.Sequential(block), torch.nn.Sequential(block, block)):
        with betahook.attach(model, controller="monitor") as hook:
            model(tokens)
            found.append(repr(hook.audit()[0].correlations))  # NaN equals none
    assert found[0] == found[1]


def test_a_mask_that_hides_no_token_changes_no_correlation():
    """A causal one does not, though each query sees fewer tokens than there are."""
    model, tokens = torch.nn.Sequential(ByHandAttention()), torch.randn(4, LENGTH, WIDTH)
    with betahook.attach(model, controller="monitor") as hook:
        model(tokens)
        causal = hook.audit()[0].correlations
    model[0].mix = lambda q, k, v: model[0].values(q @ k.mT / math.sqrt(q.shape[-1]), v)
    with betahook.attach(model, controller="monitor") as hook:
        model(tokens)
        assert repr(hook.audit()[0].correlations) == repr(causal)  # NaN equals none


def test_padded_keys_of_attention_written_by_hand_have_no_part_in_correlations():
    class Padded(ByHandAttention):
        padding = torch.ones(LENGTH, 1)

        def forward(self, x):
            q, k, v = map(self.split, (self.q_proj(x), self.k_proj(x * self.padding), self.v_proj(x)))
            scores = (q @ k.mT / math.sqrt(self.head_dim)).masked_fill(torch.arange(LENGTH) >= 9, float("-inf"))
            return self.values(scores, v).transpose(1, 2).flatten(2)

    model, tokens, found = torch.nn.Sequential(Padded()), torch.randn(4, LENGTH, WIDTH), []
    for factor in (1.0, 100.0):
        model[0].padding[9:] = factor
        with betahook.attach(model, controller="monitor") as hook:
            model(tokens)
            found.append(hook.audit()[0].correlations)
    assert found[0].variance_k == found[1].variance_k
    assert found[0].within_k == found[1].within_k


@pytest.mark.oldest_skips("T5 writes its attention by hand", family="t5")
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "bert", "t5"])
def test_models_of_every_route_show_their_correlations(family):
    model, batch = build(family), inputs(family)
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        for layer in hook.audit():
            assert 0 <= layer.correlations.within_q <= 1
            assert layer.correlations.variance_q[0] <= layer.component_variance_q <= layer.correlations.variance_q[1]
            assert -1 <= layer.correlations.tokens_k <= 1


def test_what_was_not_measured_of_one_layer_is_a_question_mark():
    layer, _ = audited()
    unknown = replace(layer, name="1", score_std=math.nan, component_mean_q=math.nan)
    audit = betahook.Audit([layer, unknown])
    predictions, assumptions = audit.tables()
    assert [row[1] for row in predictions.rows] == [f"{layer.score_std:.3g}", "?"]
    column = assumptions.header.index("(iii) mean q, k")
    assert assumptions.rows[2][column] == f"?, {layer.component_mean_k:.3g}"
    assert "nan" not in str(audit)


def test_tables_with_short_names():
    layer, _ = audited()
    tables = betahook.Audit([replace(layer, name=f"h.{index}.attn") for index in range(2)]).tables(short=True)
    assert [[row[0] for row in table.rows] for table in tables] == [["0", "1"], ["assumed", "0", "1"]]


def test_a_model_that_is_the_attention_itself_has_a_name_in_the_tables():
    torch.manual_seed(0)
    model, x = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), torch.randn(2, LENGTH, WIDTH)
    with betahook.attach(model, controller="monitor") as hook:
        model(x, x, x)
        audit = hook.audit()
    assert [table.rows[-1][0] for table in audit.tables()] == ["model", "model"]
