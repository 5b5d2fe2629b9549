"""Products of q with relative positions: with a table of the module they are a bias, with activations scores."""

import pytest
import torch
import torch.nn.functional as F

import betahook
from support.attention import HEADS, LENGTH, WIDTH
from support.mixing import ROOT, check_doubled, make, raw_scores

OFFSETS = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH) + LENGTH - 1
"""`[queries, keys]`, of a key from a query, from 0."""


@pytest.fixture
def x():
    return torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def resized(table):
    """A table `[rows, d_k]` with a row for each offset, as where a picture is larger than those of the pretraining."""
    return F.interpolate(table.T[None], size=2 * LENGTH - 1, mode="linear")[0].T


def smooth(table):
    """Another function of nothing but the table."""
    table = F.layer_norm(table, table.shape[-1:]) + table
    return torch.cat([table, table.flip(0)])[: 2 * LENGTH - 1]


def extended(table):
    """A table whose first row stands for all offsets below those that it has."""
    return torch.cat([table[:1].expand(2 * LENGTH - 1 - len(table), -1), table])


def mirrored(table):
    """Two tables, one after the other."""
    return torch.cat([table, table])[: 2 * LENGTH - 1]


@pytest.mark.parametrize("made", [resized, smooth, extended, mirrored])
def test_positions_out_of_a_table_are_a_bias(x, made):
    """As in SAM, whose heads share an axis with the batch, and whose table has none."""
    logits = []

    def mix(module, q, k, v):
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        positions = made(module.rows)[OFFSETS]
        logits.append((q * ROOT) @ k.mT + torch.einsum("bqc,qkc->bqk", q, positions))
        return (logits[-1].softmax(-1) @ v).unflatten(0, (-1, HEADS))

    model = make(mix)
    model[1].rows = torch.nn.Parameter(torch.randn(LENGTH + 1, WIDTH // HEADS))
    model(x)
    scores = raw_scores(model, x)
    bias = logits[-1].detach().double().unflatten(0, (-1, HEADS)) - ROOT * scores
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(x)
        layer = hook.layers["1"]
        assert layer.beta_default == pytest.approx(ROOT)
        found = layer.statistics
        layer.beta = 0.7
        model(x)
        assert layer.refusal is None
    assert found.std == pytest.approx(scores.var((0, 2, 3), correction=0).mean().sqrt().item(), rel=1e-5)
    expected = (0.7 * scores + bias).flatten(0, 1).softmax(-1).float()
    torch.testing.assert_close(logits[-1].softmax(-1), expected, rtol=1e-4, atol=1e-5)


TABLES = {
    "q first": lambda scores, table, q, k: scores + (q @ table.mT),
    "table first": lambda scores, table, q, k: scores + (table @ q.mT).mT,
    "added to": lambda scores, table, q, k: (table @ q.mT).mT + scores,
    "taken off": lambda scores, table, q, k: scores - (table @ q.mT).mT,
    "in place": lambda scores, table, q, k: (table @ q.mT).mT.contiguous().add_(scores),
    "scaled": lambda scores, table, q, k: scores + ROOT * (table @ q.mT).mT,
    "lost on the way": lambda scores, table, q, k: scores + (table @ q.mT).mT.cumsum(-1),
    "without an axis of the batch": lambda scores, table, q, k: scores + (table[0] @ q.mT).mT,
    "einsum": lambda scores, table, q, k: scores + torch.einsum("hjd,bhid->bhij", table[0], q),
    "with k": lambda scores, table, q, k: scores + table @ k.mT,
    "one after the other": lambda scores, table, q, k: (table @ q.mT).mT + scores + table @ k.mT,
    "two at once": lambda scores, table, q, k: scores + ((table @ q.mT).mT + table @ k.mT),
}


@pytest.mark.parametrize("form", TABLES)
def test_a_table_on_the_left_is_a_bias_as_on_the_right(x, form):
    """As in BoTNet, which multiplies its table by q."""
    logits = []

    def mix(module, q, k, v):
        logits.append(TABLES[form](q @ k.mT, module.rows, q, k))
        return (ROOT * logits[-1]).softmax(-1) @ v

    model = make(mix)
    model[1].rows = torch.nn.Parameter(torch.randn(1, HEADS, LENGTH, WIDTH // HEADS))
    expected = model(x)
    scores = raw_scores(model, x)
    bias = logits[-1].detach() - scores
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        assert torch.equal(model(x), expected)
        layer = hook.layers["1"]
        assert layer.refusal is None
        assert layer.beta_default == pytest.approx(ROOT)
        assert layer.statistics.std == pytest.approx(scores.var((0, 2, 3), correction=0).mean().sqrt().item(), rel=1e-5)
        layer.beta = 3 * layer.beta_default
        model(x)
    torch.testing.assert_close(logits[-1], (3 * scores + bias).float(), rtol=1e-4, atol=1e-4)


def test_a_beta_that_was_loaded_acts_on_no_table(x):
    def mix(module, q, k, v):
        return (ROOT * (q @ k.mT + (module.rows @ q.mT).mT)).softmax(-1) @ v

    model = make(mix)
    model[1].rows = torch.nn.Parameter(torch.randn(1, HEADS, LENGTH, WIDTH // HEADS))
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        hook.step()
        hook.layers["1"].beta = 0.7
        expected, state = model(x), hook.state_dict()
    with betahook.attach(model, controller="monitor") as hook:
        hook.load_state_dict(state)
        torch.testing.assert_close(model(x), expected)


def test_a_learned_query_makes_scores(x):
    """Its sum of two products, too."""

    def mix(module, q, k, v):
        scores = module.rows @ k.mT + module.rows @ module.split(module.further_k(module.inputs)).mT
        return (ROOT * scores).softmax(-1) @ v

    model = make(mix)
    model[1].rows = torch.nn.Parameter(torch.randn(1, HEADS, LENGTH, WIDTH // HEADS))
    model[1].inputs = x
    model(x)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(x)
        layer = hook.layers["1"]
        assert layer.refusal is None
        layer.beta = 2 * layer.beta_default
        doubled = model(x)
    model[1].rows.data *= 2
    torch.testing.assert_close(doubled, model(x), rtol=1e-4, atol=1e-4)


def test_positions_that_are_activations_are_scores(x):
    """As in SpeechT5: the query comes as `[tokens, batch * heads, d_k]`, and a key for each of its tokens."""

    def mix(module, q, k, v):
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        positions = module.further_k(torch.eye(2 * LENGTH - 1, WIDTH))[..., : WIDTH // HEADS][OFFSETS]
        scores = q @ k.mT + (q.transpose(0, 1) @ positions.mT).transpose(0, 1)
        return ((ROOT * scores).softmax(-1) @ v).unflatten(0, (-1, HEADS))

    model = make(mix)
    check_doubled(model, x)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(x)
        found = hook.layers["1"].statistics
    attention = model[1]
    positions = attention.further_k(torch.eye(2 * LENGTH - 1, WIDTH))[..., : WIDTH // HEADS][OFFSETS].double()
    q = attention.split(attention.q_proj(model[0](x))).double()
    scores = raw_scores(model, x) + torch.einsum("bhqc,qkc->bhqk", q, positions).detach()
    assert found.std == pytest.approx(scores.var((0, 2, 3), correction=0).mean().sqrt().item(), rel=1e-5)
    assert found.count == scores.numel()


def test_keys_that_are_projected_from_a_table_are_keys(x):
    """As in a Perceiver."""

    def mix(module, q, k, v):
        k, v = (module.split(projection(module.latents)) for projection in (module.further_k, module.v_proj))
        return (ROOT * (q @ k.mT)).softmax(-1) @ v

    model = make(mix)
    model[1].latents = torch.nn.Parameter(torch.randn(1, 5, WIDTH))
    check_doubled(model, x)


@pytest.mark.parametrize("learned_first", [True, False])
def test_learned_keys_beside_scaled_ones_are_keys(x, learned_first):
    """A memory that is learned, which attention sees beside the tokens."""

    def mix(module, q, k, v):
        memory = module.latents.expand(len(x), HEADS, -1, -1)
        k, v = (torch.cat([memory, t] if learned_first else [t, memory], 2) for t in (1.0 * k, v))
        return (ROOT * (q @ k.mT)).softmax(-1) @ v

    model = make(mix)
    model[1].latents = torch.nn.Parameter(torch.randn(1, 1, 3, WIDTH // HEADS))
    check_doubled(model, x)


def test_an_outer_product_is_a_bias(x):
    """A slope for each query, which its positions are multiplied by."""
    ramp = torch.linspace(-1, 1, LENGTH).expand(len(x), HEADS, 1, LENGTH)
    logits = []

    def mix(module, q, k, v):
        logits.append(ROOT * (q @ k.mT) + q[..., :1] @ ramp)
        return logits[-1].softmax(-1) @ v

    model = make(mix)
    model(x)
    scores = raw_scores(model, x)
    bias = logits[-1].detach() - ROOT * scores
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(x)
        layer = hook.layers["1"]
        assert layer.statistics.std == pytest.approx(scores.var((0, 2, 3), correction=0).mean().sqrt().item(), rel=1e-5)
        layer.beta = 0.7
        model(x)
        assert layer.refusal is None
    torch.testing.assert_close(logits[-1], (0.7 * scores + bias).float(), rtol=1e-4, atol=1e-4)


def shifted(scores, fill):
    """The relative shift of Transformer-XL: a column in front, then each row one entry later than the row above."""
    batch, heads, queries, keys = scores.shape
    padded = torch.cat([scores.new_full((batch, heads, queries, 1), fill), scores], -1)
    return padded.view(batch, heads, keys + 1, queries)[:, :, 1:].reshape(batch, heads, queries, keys)


@pytest.mark.parametrize("fill", [0.0, -torch.inf])
@pytest.mark.parametrize("content_first", [True, False])
@pytest.mark.parametrize("size", [1, 1e-3], ids=["", "small scores"])
def test_a_score_beside_what_a_shift_pads_is_a_score(x, fill, content_first, size):
    """A pair is hidden where minus infinity is added to its score, not where a zero is."""
    logits = []

    def mix(module, q, k, v):
        positions = module.split(module.further_k(torch.linspace(-1, 1, LENGTH * WIDTH).view(1, LENGTH, WIDTH)))
        position = shifted(q @ positions.mT, fill)
        logits.append(q @ k.mT + position if content_first else position + q @ k.mT)
        return (logits[-1] * ROOT).softmax(-1) @ v

    model = make(mix)
    model[1].q_proj.weight.data *= size
    model(x)
    scores = logits[-1].detach().double()
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(x)
        layer = hook.layers["1"]
        assert layer.refusal is None
        found = layer.statistics
    pairs = scores.isfinite()
    assert found.count == pairs.sum()
    variances = [head[seen].var(correction=0) for head, seen in zip(scores.unbind(1), pairs.unbind(1), strict=True)]
    assert found.std == pytest.approx(torch.stack(variances).mean().sqrt().item(), rel=1e-4)
