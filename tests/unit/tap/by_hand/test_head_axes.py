"""The axis of the heads, wherever the module puts it."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import betahook
from support.attention import HEADS, LENGTH, WIDTH
from support.mixing import ROOT, check_doubled, make, raw_scores

LAYOUTS = {
    "heads before the batch in one axis": lambda t: t.transpose(0, 1).flatten(0, 1),
    "batch before the heads in one axis": lambda t: t.flatten(0, 1),
    "heads first": lambda t: t.transpose(0, 1),
    "as many windows as heads": lambda t: t.unflatten(2, (HEADS, -1)).transpose(1, 2),
    "windows of padded tokens": lambda t: F.pad(t, (0, 0, 0, 4)).unflatten(2, (HEADS, -1)).transpose(1, 2),
    "windows behind the heads": lambda t: t.unflatten(2, (HEADS, -1)),
    "as many windows, all in one axis": lambda t: t.unflatten(2, (HEADS, -1)).transpose(1, 2).flatten(0, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_axis_of_the_heads_is_not_guessed_by_size(layout):
    """Batch and heads are as many."""
    x = torch.randn(HEADS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    weights = []

    def mix(module, q, k, v):
        q, k = (LAYOUTS[layout](t) for t in (q, k))
        weights.append((q @ k.mT * ROOT).softmax(-1))
        return v

    model = make(mix)
    with betahook.attach(model, controller="monitor", per_head=True) as hook:
        model(x)
        layer = hook.layers["1"]
        beta = torch.tensor([0.1, 0.3, 0.9, 2.7])
        if layer.refusal is not None:
            assert "heads cannot be told" in layer.refusal
            assert layout == "as many windows, all in one axis"
            return
        measured = layer.head_statistics.std.double()
        layer.head_beta = beta
        model(x)
    hidden = model[0](x)
    q, k = (LAYOUTS[layout](model[1].split(p(hidden))) for p in (model[1].q_proj, model[1].k_proj))
    scale = LAYOUTS[layout](beta.view(1, -1, 1, 1).expand(HEADS, -1, LENGTH, 1))
    torch.testing.assert_close(weights[-1], (scale * (q @ k.mT)).softmax(-1), rtol=1e-4, atol=1e-5)
    if "windows" not in layout:
        expected = raw_scores(model, x).transpose(0, 1).flatten(1).std(1, correction=0)
        torch.testing.assert_close(measured, expected, rtol=1e-4, atol=0)


IN_ONE_AXIS = {name: LAYOUTS[name] for name in list(LAYOUTS)[:2]}


@pytest.mark.parametrize("sizes", [[1, HEADS, 1, 2], [2, 1, HEADS]], ids=str)
@pytest.mark.parametrize("layout", [*IN_ONE_AXIS, "squeezed"])
@pytest.mark.parametrize("training", [True, False], ids=["training first", "evaluation first"])
def test_the_axis_of_the_heads_in_a_batch_of_one_is_not_that_in_others(layout, sizes, training):
    """An axis of heads and batch has as many entries as heads then; and the first forward may not be measured."""
    lay_out = {**IN_ONE_AXIS, "squeezed": lambda t: t.squeeze(0)}[layout]
    weights = []

    def mix(module, q, k, v):
        q, k = lay_out(q), lay_out(k)
        weights.append((q @ k.mT * ROOT).softmax(-1))
        return v

    model = make(mix)
    inputs = [torch.randn(size, LENGTH, WIDTH) for size in sizes]
    with betahook.attach(model, controller="monitor", per_head=True, interval=1) as hook:
        layer = hook.layers["1"]
        model.train(training)(inputs[0])
        model.train()
        for beta in (torch.full((HEADS,), ROOT), torch.tensor([0.1, 0.3, 0.9, 2.7])):
            layer.head_beta = beta
            for x in inputs:
                hook.step()
                model(x)
                scores = raw_scores(model, x)
                expected = scores.transpose(0, 1).flatten(1).std(1, correction=0)
                torch.testing.assert_close(layer.head_statistics.std.double(), expected, rtol=1e-4, atol=0)
                expected = lay_out((beta.view(-1, 1, 1) * scores).softmax(-1)).float()
                torch.testing.assert_close(weights[-1], expected, rtol=1e-4, atol=1e-5)


def test_a_batch_of_one_is_seen_inside_other_inputs():
    def mix(module, q, k, v):
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        return ((q @ k.mT * ROOT).softmax(-1) @ v).unflatten(0, (-1, HEADS))

    attention = make(mix)[1]

    class OfNamedAttention(type(attention)):
        def forward(self, inputs):
            return super().forward(inputs["hidden"])

    attention.__class__ = OfNamedAttention
    with betahook.attach(attention, controller="monitor") as hook:
        for size in (1, 3):
            attention({"hidden": torch.randn(size, LENGTH, WIDTH)})
        assert hook.layers[""].refusal is None


def test_an_axis_that_is_no_more_of_the_heads_alone_is_refused():
    """One window in a batch of one, then several, of which the sizes of the input do not tell."""

    def mix(module, q, k, v):
        q, k = (t.unflatten(2, (-1, 3)).transpose(1, 2).flatten(0, 2) for t in (q, k))
        (q @ k.mT * ROOT).softmax(-1)
        return v

    model = make(mix)
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(1, 3, WIDTH))
        assert hook.layers["1"].refusal is None
        model(torch.randn(1, 12, WIDTH))
        assert "heads cannot be told" in hook.layers["1"].refusal


@pytest.mark.parametrize("batch", [1, 3, HEADS, WIDTH // HEADS])
def test_the_heads_are_told_apart_where_a_sequence_is_as_long_as_a_head_is_wide(batch):
    x = torch.randn(batch, WIDTH // HEADS, WIDTH, generator=torch.Generator().manual_seed(0))
    model = make(lambda module, q, k, v: (q @ k.mT * ROOT).softmax(-1) @ v)
    check_doubled(model, x)
    with betahook.attach(model, controller="monitor", per_head=True) as hook:
        model(x)
        measured = hook.layers["1"].head_statistics.std.double()
    expected = raw_scores(model, x).transpose(0, 1).flatten(1).std(1, correction=0)
    torch.testing.assert_close(measured, expected, rtol=1e-4, atol=0)


class OneSequenceAttention(nn.Module):
    """Attention to the tokens of one sequence, without a batch."""

    def __init__(self, heads, attend):
        super().__init__()
        self.num_heads, self.head_dim, self.attend = heads, WIDTH // heads, attend
        self.q_proj, self.k_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        return self.attend(self.q_proj(x), self.k_proj(x)) @ x

    def by_which_it_is_known_as_attention(self, q, k):
        return (q @ k.mT).softmax(-1)


MATRICES = {
    "transposed": lambda q, k: (q @ k.T / WIDTH**0.5).softmax(-1),
    "of two matrices": lambda q, k: (torch.mm(q, k.t()) / WIDTH**0.5).softmax(-1),
    "einsum": lambda q, k: (torch.einsum("id,jd->ij", q, k) / WIDTH**0.5).softmax(-1),
}


@pytest.mark.parametrize("way", MATRICES)
def test_one_head_needs_no_axis(way):
    x = torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(OneSequenceAttention(1, MATRICES[way]))
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        layer = hook.layers["0"]
        assert layer.refusal is None
        raw = (model[0].q_proj(x).double() @ model[0].k_proj(x).double().T).detach()
        torch.testing.assert_close(layer.statistics.std.double(), raw.std(correction=0), rtol=1e-4, atol=0)
        layer.beta = 0.7
        torch.testing.assert_close(model(x), (0.7 * raw).softmax(-1).float() @ x, rtol=1e-4, atol=1e-5)


def test_heads_without_an_axis_are_refused_with_what_to_do():
    def attend(q, k):
        halves = zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        return torch.stack([(a @ b.T).softmax(-1) for a, b in halves]).mean(0)

    model = nn.Sequential(OneSequenceAttention(2, attend))
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.ones(LENGTH, WIDTH))
        reason = hook.layers["0"].refusal
    assert "is of two matrices, in which its 2 heads have no axis" in reason
    assert "with q and k as [batch, heads, tokens, d_k]" in reason


def test_the_axis_of_the_heads_is_found_behind_a_complex_rotation():
    def mix(module, q, k, v):
        angles = torch.polar(torch.ones(LENGTH, 4), torch.arange(LENGTH)[:, None] * torch.tensor([1.0, 0.5, 0.2, 0.1]))
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.float().unflatten(-1, (-1, 2))) * angles).flatten(-2)
            for t in (q, k)
        )
        return (q.transpose(0, 1) @ k.transpose(0, 1).mT * ROOT).softmax(-1).transpose(0, 1) @ v

    x = torch.randn(HEADS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    model = make(mix)
    expected = raw_scores(model, x)
    with betahook.attach(model, controller="monitor", per_head=True) as hook:
        model(x)
        layer = hook.layers["1"]
        assert layer.refusal is None
        layer.head_beta = torch.tensor([1e-6, 1.0, 1.0, 1.0])
        model(x)
        assert layer.statistics.count == 2 * expected.numel()
        q = model[1].split(model[1].q_proj(model[0](x)))
        k = model[1].split(model[1].k_proj(model[0](x)))
        largest = (q.norm(dim=-1).amax((0, 2)) * k.norm(dim=-1).amax((0, 2))).detach()
        assert (layer.head_statistics.max_score <= 1.001 * largest).all()
        assert layer.head_statistics.entropy[0] > layer.head_statistics.entropy[1:].max()


def by_strides(t):
    """Overlapping chunks of a sequence, two axes of which share memory: as in Longformer, tokens first."""
    t = t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3).flatten(0, 1)
    t = t.view(len(t), 2, LENGTH // 2, -1)
    batch, chunk, token, component = t.stride()
    return t.as_strided((len(t), 3, *t.shape[2:]), (batch, chunk // 2, token, component))


def test_the_axis_of_the_heads_is_found_in_chunks_that_overlap():
    weights = []

    def mix(module, q, k, v):
        q, k = by_strides(q), by_strides(k)
        weights.append((torch.einsum("bcid,bcjd->bcij", q, k) * ROOT).softmax(-1))
        return v

    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    model = make(mix)
    with betahook.attach(model, controller="monitor", per_head=True) as hook:
        model(x)
        assert hook.layers["1"].refusal is None
        beta = torch.tensor([0.1, 0.3, 0.9, 2.7])
        hook.layers["1"].head_beta = beta
        model(x)
    q, k = (by_strides(model[1].split(p(model[0](x)))) for p in (model[1].q_proj, model[1].k_proj))
    expected = (beta.repeat(2).view(-1, 1, 1, 1) * (q @ k.mT)).softmax(-1)
    torch.testing.assert_close(weights[-1], expected, rtol=1e-4, atol=1e-5)


POOLS = {
    "max": lambda q: q.max(dim=2).values,
    "amax": lambda q: q.amax(2),
    "mean": lambda q: torch.mean(q, 2, keepdim=True).squeeze(2),
    "mean as in numpy": lambda q: torch.mean(q, axis=2, keepdims=True).squeeze(2),
    "max of two": lambda q: torch.max(q[:, :, 0], q[:, :, 1]),
}


@pytest.mark.parametrize("pool", POOLS)
def test_the_axis_of_the_heads_is_found_in_a_pooled_query(pool):
    """Batch and heads are as many."""
    x = torch.randn(HEADS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))

    def pooled(q):
        return POOLS[pool](q.unflatten(2, (2, -1)))

    model = make(lambda module, q, k, v: ((pooled(q) @ k.mT * ROOT).softmax(-1) @ v).repeat(1, 1, 2, 1))
    check_doubled(model, x)
    with betahook.attach(model, controller="monitor", per_head=True) as hook:
        model(x)
        measured = hook.layers["1"].head_statistics.std.double()
    q, k = (model[1].split(p(model[0](x))).double() for p in (model[1].q_proj, model[1].k_proj))
    expected = (pooled(q) @ k.mT).transpose(0, 1).flatten(1).std(1, correction=0).detach()
    torch.testing.assert_close(measured, expected, rtol=1e-4, atol=0)


def test_heads_in_the_rows_of_a_query_are_found():
    """As in multi-query attention that puts its heads behind the tokens, all with one key."""
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))

    def mix(module, q, k, v):
        q = q.transpose(1, 2).flatten(1, 2)
        weights = (q @ k[:, 0].mT * ROOT).softmax(-1)
        return (weights @ v[:, 0]).unflatten(1, (-1, HEADS)).transpose(1, 2)

    model = make(mix)
    check_doubled(model, x)
    with betahook.attach(model, controller="monitor", per_head=True) as hook:
        model(x)
        measured = hook.layers["1"].head_statistics.std.double()
    q, k = (model[1].split(p(model[0](x))).double() for p in (model[1].q_proj, model[1].k_proj))
    expected = (q @ k[:, :1].mT).transpose(0, 1).flatten(1).std(1, correction=0).detach()
    torch.testing.assert_close(measured, expected, rtol=1e-4, atol=0)


TURN = torch.randn(WIDTH // HEADS, WIDTH // HEADS, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("sequences", [2, HEADS])
def test_one_head_at_a_time_is_not_taken_for_as_many_as_sequences(sequences):
    """Nor is the batch taken for the heads where a projection of its own makes each of them."""
    x = torch.randn(sequences, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))

    def mix(module, q, k, v):
        parts = ((F.linear(t[:, [head]], TURN) for t in (q, k)) for head in range(HEADS))
        return torch.cat([(q @ k.mT * ROOT).softmax(-1) for q, k in parts], 1) @ v

    model = make(mix)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        assert "heads" in hook.layers["1"].refusal


def pooled_by_a_convolution(q):
    """All but the first token, the heads in the batch, as in MViT."""
    first, others = q[:, :, :1], q[:, :, 1:].flatten(0, 1).mT
    others = F.conv1d(others, TURN[:, None, :3], stride=2, groups=len(TURN)).mT
    return torch.cat([first, others.unflatten(0, (-1, HEADS))], 2)


def test_the_axis_of_the_heads_is_found_behind_a_convolution_of_each_head():
    """Batch and heads are as many."""
    x = torch.randn(HEADS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))

    def mix(module, q, k, v):
        out = (pooled_by_a_convolution(q) @ k.mT * ROOT).softmax(-1) @ v
        return F.pad(out, (0, 0, 0, LENGTH - out.shape[2]))

    model = make(mix)
    check_doubled(model, x)
    with betahook.attach(model, controller="monitor", per_head=True) as hook:
        model(x)
        measured = hook.layers["1"].head_statistics.std.double()
    q, k = (model[1].split(p(model[0](x))) for p in (model[1].q_proj, model[1].k_proj))
    expected = (pooled_by_a_convolution(q).double() @ k.double().mT).transpose(0, 1).flatten(1).std(1, correction=0)
    torch.testing.assert_close(measured, expected.detach(), rtol=1e-4, atol=0)


class ProjectedOutside(nn.Module):
    """Queries and keys of all heads come in; batch and heads share an axis, as in DAB-DETR."""

    def __init__(self, tokens_first):
        super().__init__()
        self.num_heads, self.head_dim, self.tokens_first = HEADS, WIDTH // HEADS, tokens_first
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def fold(self, x):
        if not self.tokens_first:
            return x.unflatten(-1, (HEADS, -1)).permute(2, 0, 1, 3).flatten(0, 1)
        return x.reshape(len(x), -1, self.head_dim).transpose(0, 1)

    def forward(self, q, k, v):
        weights = (self.fold(q * ROOT) @ self.fold(k).mT).softmax(-1)
        out = weights @ self.fold(v)
        shape = (-1, HEADS) if self.tokens_first else (HEADS, -1)
        return self.out_proj(out.unflatten(0, shape).sum(0 if self.tokens_first else 1).transpose(0, 1).flatten(1))


@pytest.mark.parametrize("tokens_first", [True, False])
def test_heads_of_queries_that_were_projected_outside_are_told_apart_by_the_input(tokens_first):
    torch.manual_seed(0)
    module = nn.Sequential(ProjectedOutside(tokens_first)).double()
    q, k, v = torch.randn(3, HEADS, LENGTH, WIDTH, dtype=torch.float64)  # batch and heads are as many
    q, k, v = (x.transpose(0, 1) if tokens_first else x for x in (q, k, v))
    with betahook.attach(module, controller="monitor", per_head=True, when="always") as hook:
        layer = hook.layers["0"]
        module[0](q, k, v)
        measured = layer.head_statistics.std.double()
        beta = torch.tensor([0.1, 0.3, 0.9, 2.7])
        layer.head_beta = beta
        output = module[0](q, k, v)
    scaled = (q.unflatten(-1, (HEADS, -1)) * (beta / ROOT).view(-1, 1)).flatten(-2)
    torch.testing.assert_close(output, module[0](scaled, k, v), rtol=1e-6, atol=1e-6)
    axes = "nbhd,mbhd->hbnm" if tokens_first else "bnhd,bmhd->hbnm"
    scores = torch.einsum(axes, *(x.unflatten(-1, (HEADS, -1)) for x in (q, k)))
    torch.testing.assert_close(measured, scores.flatten(1).std(1, correction=0), rtol=1e-5, atol=0)


def test_an_input_whose_tokens_are_as_many_as_its_features_tells_no_heads_apart():
    module = nn.Sequential(ProjectedOutside(True))
    with betahook.attach(module, controller="monitor", when="always") as hook:
        module[0](*torch.randn(3, WIDTH, 2, WIDTH))
        assert "heads cannot be told" in hook.layers["0"].refusal


def test_a_bias_on_scores_of_what_was_projected_outside_is_none_of_a_projection():
    """As in audio-diffusion, whose attention gets q, k and v."""

    class CoreAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
            self.bias = nn.Parameter(torch.randn(HEADS, 1, LENGTH))

        def forward(self, q, k, v):
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
            return ((q @ k.mT * ROOT + self.bias).softmax(-1) @ v).transpose(1, 2).flatten(2)

    core, x = CoreAttention(), torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    expected = core(2 * x, x, x)
    with betahook.attach(core, controller="monitor") as hook:
        assert torch.equal(core(2 * x, x, x), expected)
        layer = hook.layers[""]
        layer.beta = 2 * ROOT
        torch.testing.assert_close(core(x, x, x), expected, rtol=1e-4, atol=1e-5)


class SharedAttention(nn.Module):
    """One projection makes the query of each head of its part of the input, another one the key."""

    def __init__(self, way):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.q_proj, self.k_proj = (nn.Linear(self.head_dim, self.head_dim, bias=False) for _ in range(2))
        self.first = nn.Linear(WIDTH, WIDTH) if way == "behind a projection of all" else nn.Identity()
        self.by_matrix, self.is_fused = way == "by a matrix", way == "fused"

    def operands(self, x):
        parts = self.first(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        if self.by_matrix:
            return [torch.einsum("bhnd,ed->bhne", parts, p.weight) for p in (self.q_proj, self.k_proj)]
        return [p(parts) for p in (self.q_proj, self.k_proj)]

    def forward(self, x, beta=ROOT):
        (q, k), v = self.operands(x), x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        if self.is_fused:
            out = F.scaled_dot_product_attention(q * beta, k, v, scale=1.0)
        else:
            out = (q @ k.mT * beta).softmax(-1) @ v
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("way", ["of the input", "behind a projection of all", "by a matrix", "fused"])
def test_heads_that_share_a_projection_are_told_apart_by_what_it_projects(way):
    """As in many a Transformer from scratch; batch and heads are as many."""
    torch.manual_seed(0)
    model, x = nn.Sequential(SharedAttention(way)), torch.randn(HEADS, LENGTH, WIDTH)
    beta = torch.tensor([0.1, 0.3, 0.9, 2.7])
    with betahook.attach(model, controller="monitor", per_head=True, when="always") as hook:
        layer = hook.layers["0"]
        model(x)
        assert layer.weight_std_q == pytest.approx(model[0].q_proj.weight.std(correction=0).item())
        measured = layer.head_statistics.std.double()
        layer.head_beta = beta
        output = model(x)
        with pytest.raises(betahook.FoldError, match="its query projection is shared by all heads, whose betas differ"):
            betahook.fold(model)
    torch.testing.assert_close(output, model[0](x, beta.view(-1, 1, 1)), rtol=1e-5, atol=1e-6)
    q, k = (operand.double() for operand in model[0].operands(x))
    torch.testing.assert_close(measured, (q @ k.mT).transpose(0, 1).flatten(1).std(1, correction=0), rtol=1e-5, atol=0)
    hook = betahook.attach(model, controller="monitor", when="always")
    model(x)
    hook.layers["0"].beta = 0.9
    expected = model(x)
    betahook.fold(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
