"""Attention that is written in unusual ways: followed to the end, or left alone by name."""

import math

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import betahook
from support.attention import HEADS, LENGTH, WIDTH, Block

ROOT = (WIDTH // HEADS) ** -0.5
MASKED = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


@pytest.fixture
def x():
    return torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def make(mix):
    """A model with one attention, whose values are `mix(attention, q, k, v)`."""
    torch.manual_seed(1)

    class HandAttention(Block):
        def __init__(self):
            super().__init__()
            self.further_q, self.further_k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.mixer, self.conv = nn.Linear(HEADS, HEADS), nn.Conv2d(HEADS, HEADS, 1)
            self.table = nn.Parameter(torch.randn(HEADS, HEADS))
            self.temperature = nn.Parameter(torch.tensor(0.5))
            self.temperatures = nn.Parameter(torch.linspace(-1, 1, HEADS).view(-1, 1, 1))

        def mix(self, q, k, v):
            return mix(self, q, k, v)

        def by_which_it_is_known_as_attention(self, q, k, v):
            return (q @ k.mT).softmax(-1) @ v

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), HandAttention())
    for parameter in model.parameters():
        parameter.data *= 2
    return model


def raw_scores(model, x):
    """`[batch, heads, queries, keys]`."""
    hidden, attention = model[0](x), model[1]
    q, k = (attention.split(layer(hidden)) for layer in (attention.q_proj, attention.k_proj))
    return (q.double() @ k.double().mT).detach()


def check_doubled(model, x):
    """Twice beta is twice the query."""
    expected = model(x)
    with betahook.attach(model, controller="monitor") as hook:
        assert torch.equal(model(x), expected)
        layer = hook.layers["1"]
        assert layer.refusal is None
        layer.beta = 2 * layer.beta_default
        doubled = model(x)
    for parameter in model[1].q_proj.parameters():
        parameter.data *= 2
    torch.testing.assert_close(doubled, model(x), rtol=1e-4, atol=1e-4)


def check_measured(model, x, times=1):
    """Scores of q and k, so many times."""
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(x).sum().backward()
        found = hook.layers["1"].statistics
        scores = raw_scores(model, x)
    assert found.count == times * scores.numel()
    assert found.std == pytest.approx(scores.var((0, 2, 3), correction=0).mean().sqrt().item(), rel=1e-5)


def halves_in_place(module, q, k, v):
    scores = (q * ROOT) @ k.mT
    half = len(scores) // 2
    scores[half:] = scores[half:].softmax(-1)
    scores[:half] = scores[:half].softmax(-1)
    return scores @ v


def samples_in_place(module, q, k, v):
    scores = q @ k.mT * ROOT
    for sample in range(len(scores)):
        scores[sample, :] = scores[sample, :].softmax(-1)
    gated = [scores[sample, :] * module.temperature for sample in range(len(scores))]
    return torch.stack([(weights + weights**2) @ values for weights, values in zip(gated, v, strict=True)])


def places_in_place(module, q, k, v):
    scores = q @ k.mT * ROOT
    for places in (torch.tensor([2, 0]), torch.tensor([1])):
        scores[places] = scores[places].softmax(-1)
    return scores @ v


@pytest.mark.parametrize("way", [halves_in_place, samples_in_place, places_in_place])
def test_a_softmax_in_place_of_its_scores(x, way):
    check_doubled(make(way), x)
    check_measured(make(way), x)


def top_three(a):
    values, indices = a.topk(3, -1)
    return torch.zeros_like(a).scatter(-1, indices, values)


AFTERWARDS = {
    "normalised": lambda module, a: F.normalize(a, p=1, dim=-1),
    "squared": lambda module, a: a.square(),
    "detached": lambda module, a: a.detach(),
    "in float64": lambda module, a: a.double().float(),
    "taken from one": lambda module, a: 1 - a,
    "rectified": lambda module, a: F.relu(a - 0.05),
    "thresholded": lambda module, a: F.threshold(a, 0.05, 0.0),
    "largest three": lambda module, a: top_three(a),
    "linear over heads": lambda module, a: module.mixer(a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "convolution over heads": lambda module, a: module.conv(a),
    "einsum over heads": lambda module, a: torch.einsum("bhij,hg->bgij", a, module.table),
    "computed mixing": lambda module, a: torch.einsum("bhij,hg->bgij", a, module.table.softmax(-1)),
    "power": lambda module, a: a @ a,
    "sorted": lambda module, a: a.sort(-1).values,
    "normalised over queries": lambda module, a: a / a.sum(-2, keepdim=True),
    "layer norm over heads": lambda module, a: F.layer_norm(a.permute(0, 2, 3, 1), [HEADS]).permute(0, 3, 1, 2),
    "cumulated": lambda module, a: a.cumsum(-1),
}


@pytest.mark.parametrize("way", AFTERWARDS)
def test_weights_are_followed_by_any_operation(x, way):
    check_doubled(make(lambda module, q, k, v: AFTERWARDS[way](module, (q @ k.mT * ROOT).softmax(-1)) @ v), x)


def bias_on_a_part(scores):
    scores[:, :, :, 3:] += torch.linspace(-2, 2, LENGTH - 3)
    return scores


def two_biases_on_parts(scores):
    scores[:, 1] += torch.linspace(-2, 2, LENGTH)
    scores[:, 2:] -= torch.linspace(-1, 1, LENGTH)
    return scores


@pytest.mark.parametrize("way", [bias_on_a_part, two_biases_on_parts])
def test_a_part_of_the_scores_that_is_changed_in_its_place(x, way):
    check_doubled(make(lambda module, q, k, v: way(q @ k.mT * ROOT).softmax(-1) @ v), x)


def test_a_later_product_of_activations_is_none_of_scores(x):
    def mix(module, q, k, v):
        values = (q @ k.mT * ROOT).softmax(-1) @ v
        return values + 0.01 * (values @ v.mT) @ v

    check_doubled(make(mix), x)


def test_both_products_of_differential_attention_get_beta(x):
    def mix(module, q, k, v):
        first, second = q @ k.mT * ROOT, (q + 1) @ k.mT * ROOT
        return (first.softmax(-1) - 0.3 * second.softmax(-1)) @ v

    model = make(mix)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        layer = hook.layers["1"]
        assert layer.statistics.count == 2 * raw_scores(model, x).numel()
        layer.beta = 2 * layer.beta_default
        doubled = model(x)
    hidden = model[0](x)
    q, k, v = (model[1].split(p(hidden)) for p in (model[1].q_proj, model[1].k_proj, model[1].v_proj))
    expected = mix(None, 2 * q + 1, k, v)
    expected = (2 * q @ k.mT * ROOT).softmax(-1) - 0.3 * (2 * (q + 1) @ k.mT * ROOT).softmax(-1)
    torch.testing.assert_close(doubled, (expected @ v).transpose(1, 2).flatten(2), rtol=1e-4, atol=1e-4)


SEVERAL = {
    "position first": lambda q, k, r: q @ r.mT + q @ k.mT,
    "content first": lambda q, k, r: q @ k.mT + q @ r.mT,
    "keys in two parts": lambda q, k, r: torch.cat([q @ k[:, :, :5].mT, q @ k[:, :, 5:].mT], -1),
    "queries in chunks": lambda q, k, r: torch.cat([part @ k.mT for part in q.split(5, -2)], -2),
    "heads one by one": lambda q, k, r: torch.cat([q[:, h : h + 1] @ k[:, h : h + 1].mT for h in range(HEADS)], 1),
}


@pytest.mark.parametrize("way", SEVERAL)
def test_several_products_before_a_softmax_get_beta(x, way):
    def mix(module, q, k, v):
        positions = module.split(module.further_k(torch.linspace(-1, 1, LENGTH * WIDTH).view(1, LENGTH, WIDTH)))
        return (SEVERAL[way](q, k, positions) * ROOT).softmax(-1) @ v

    model = make(mix)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        refusal = hook.layers["1"].refusal
    if refusal is None:
        check_doubled(model, x)
    else:  # a product of one head has no axis of heads
        assert way == "heads one by one"
        assert "heads are not told apart" in refusal


OWN_SCALES = {
    "content first": lambda module, q, k, r: q @ k.mT * ROOT + q @ r.mT * 0.1,
    "position first": lambda module, q, k, r: q @ r.mT * 0.1 + q @ k.mT * ROOT,
    "subtracted": lambda module, q, k, r: q @ k.mT * ROOT - (q * 0.3) @ r.mT * 0.1,
    "learned, on the scores": lambda module, q, k, r: q @ k.mT * module.temperature.exp() + q @ r.mT * 0.1,
    "learned, on the query": lambda module, q, k, r: (q * module.temperature.exp()) @ k.mT + q @ r.mT,
}


@pytest.mark.parametrize("way", OWN_SCALES)
def test_products_with_scales_of_their_own_keep_their_proportion(x, way):
    def mix(module, q, k, v):
        positions = module.split(module.further_k(torch.linspace(-1, 1, LENGTH * WIDTH).view(1, LENGTH, WIDTH)))
        return OWN_SCALES[way](module, q, k, positions).softmax(-1) @ v

    check_doubled(make(mix), x)


SCALES = {
    "of the length, on the query": lambda module, q, k: (q * (ROOT * math.log(q.shape[-2]))) @ k.mT,
    "of the length, on the scores": lambda module, q, k: q @ k.mT * (ROOT * math.log(q.shape[-2])),
    "of the length, on both": lambda module, q, k: q * math.log(q.shape[-2]) ** 0.5 @ k.mT * math.log(q.shape[-2]),
    "learned, on the query": lambda module, q, k: (q * module.temperature.exp()) @ k.mT,
    "learned, on the scores": lambda module, q, k: q @ k.mT * module.temperature.exp(),
    "learned, as a divisor": lambda module, q, k: (q @ k.mT) / module.temperature.exp(),
    "learned by head": lambda module, q, k: q @ k.mT * module.temperatures.exp(),
}


@pytest.mark.parametrize("scale", SCALES)
def test_beta_is_that_which_acts_when_the_scale_of_the_model_changes(x, scale):
    model = make(lambda module, q, k, v: SCALES[scale](module, q, k).softmax(-1) @ v)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(x)
        layer = hook.layers["1"]
        layer.beta = 0.7
        with torch.no_grad():
            model[1].temperature += 1
            model[1].temperatures *= 2
        for part in (x[:, :7], x):
            hook.step()
            got = model(part)
            scores = raw_scores(model, part)
            v = model[1].split(model[1].v_proj(model[0](part)))
            expected = ((0.7 * scores).softmax(-1).float() @ v).transpose(1, 2).flatten(2)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            assert layer.beta == pytest.approx(0.7)
            torch.testing.assert_close(
                layer.head_statistics.std.double(),
                scores.transpose(0, 1).flatten(1).std(1, correction=0),
                rtol=1e-4,
                atol=1e-5,
            )


SECOND_SCALES = {
    "a number": lambda module: 0.1,
    "a learned one": lambda module: module.temperature.abs() + 1,
    "one of each head": lambda module: module.temperatures.exp(),
}


@pytest.mark.parametrize("way", SECOND_SCALES)
def test_two_scales_in_one_forward_are_refused(x, way):
    """No beta is that of both: a tenth more of the second would be a jump of the first."""

    def mix(module, q, k, v):
        second = SECOND_SCALES[way](module)
        return ((q @ k.mT * ROOT).softmax(-1) + (q @ k.mT * second).softmax(-1)) @ v

    model = make(mix)
    expected = model(x)
    with betahook.attach(model, controller="monitor") as hook:
        assert torch.equal(model(x), expected)
        assert "get scores that are scaled differently" in hook.layers["1"].refusal
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("way", SECOND_SCALES)
def test_two_softmaxes_of_one_scale_have_one_beta(x, way):
    def mix(module, q, k, v):
        scale = SECOND_SCALES[way](module)
        return ((q @ k.mT * scale).softmax(-1) + (k @ q.mT * scale * 1.0).softmax(-1)) @ v

    model = make(mix)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        layer = hook.layers["1"]
        assert layer.refusal is None
        own = layer.head_beta_default
        layer.head_beta = 2 * own
        got, scores = model(x), raw_scores(model, x) * 2 * own.view(-1, 1, 1)
        v = model[1].split(model[1].v_proj(model[0](x)))
        expected = ((scores.softmax(-1) + scores.mT.softmax(-1)).float() @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


ROTATIONS = {
    "halves": lambda t: torch.cat([-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]], -1),
    "pairs": lambda t: torch.stack([-t[..., 1::2], t[..., ::2]], -1).flatten(-2),
    "by half a turn": lambda t: -t,
}


@pytest.mark.parametrize("way", ROTATIONS)
def test_a_query_that_is_scaled_and_then_rotated_keeps_its_scale(x, way):
    def mix(module, q, k, v):
        angle = torch.arange(q.shape[2])[:, None] * 0.1
        q, k = (t * angle.cos() + ROTATIONS[way](t) * angle.sin() for t in (q * ROOT, k))
        return (q @ k.mT).softmax(-1) @ v

    model = make(mix)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        assert hook.layers["1"].beta_default == pytest.approx(ROOT)


FACTORS = {
    "of each position": lambda module, q: torch.arange(1.0, 1 + q.shape[2])[:, None],
    "of each query": lambda module, q: q.mean(-1, keepdim=True).exp(),
    "of each sample": lambda module, q: torch.arange(1.0, 1 + len(q)).view(-1, 1, 1, 1),
}


@pytest.mark.parametrize("way", FACTORS)
def test_a_factor_that_is_not_one_for_each_head_is_a_part_of_the_scores(x, way):
    """Also where there is one query, as in generation, and it might be taken for a number."""
    model = make(lambda module, q, k, v: (q @ k.mT * ROOT * FACTORS[way](module, q)).softmax(-1) @ v)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        layer = hook.layers["1"]
        layer.beta = 2 * layer.beta_default
        got = [model(part) for part in (x, x[:1, :1], x[:, :1], x)]
        assert float(layer.beta_default) == pytest.approx(ROOT)
    model = make(lambda module, q, k, v: (2 * q @ k.mT * ROOT * FACTORS[way](module, q)).softmax(-1) @ v)
    for part, output in zip((x, x[:1, :1], x[:, :1], x), got, strict=True):
        torch.testing.assert_close(output, model(part), rtol=1e-4, atol=1e-4)


def test_a_factor_that_turns_out_to_be_one_of_each_query_is_refused(x):
    model = make(lambda module, q, k, v: (q @ k.mT * ROOT * q.mean(-1, keepdim=True).exp()).softmax(-1) @ v)
    with betahook.attach(model, controller="monitor") as hook:
        model(x[:1, :1])
        model(x)
        assert "mul by a factor that was one for each head" in hook.layers["1"].refusal


def test_the_temperatures_of_heads_are_found_behind_a_view(x):
    def mix(module, q, k, v):
        scores = (q.flatten(0, 1) @ k.flatten(0, 1).mT).view(len(q), HEADS, *k.shape[2:3], -1)
        return (scores * module.temperatures.exp()).softmax(-1) @ v

    model = make(mix)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        layer = hook.layers["1"]
        torch.testing.assert_close(layer.head_beta_default, model[1].temperatures.exp().flatten().detach())
        assert layer.statistics.max_score == pytest.approx(float(raw_scores(model, x).abs().max()), rel=1e-4)


FAR = {
    "largest subtracted": lambda s: s - s.max(-1, keepdim=True).values,
    "largest subtracted, detached": lambda s: s - s.amax(dim=-1, keepdim=True).detach(),
    "mean subtracted": lambda s: s - s.mean(-1, keepdim=True),
    "soft cap": lambda s: 5 * torch.tanh(s / 5),
    "clamped": lambda s: s.clamp(-5, 5),
    "clamped from below": lambda s: s.clamp(min=-50),
    "far bias": lambda s: s - 40.0 * (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs(),
    "bias subtracted": lambda s: s - torch.arange(LENGTH) * 20.0,
    "a bound subtracted": lambda s: s - torch.tensor(500.0),
    "a bound of each row subtracted": lambda s: s - torch.linspace(40, 400, LENGTH)[:, None].round(decimals=-2),
    "bias in front of far keys": lambda s: s - torch.arange(LENGTH) * 20.0 - 100.0,
}


@pytest.fixture(params=["of the user", "of transformers"])
def by_whom(request):
    """Tell who wrote the class, since classes of transformers are followed with less suspicion."""

    def write(model):
        if request.param == "of transformers":
            type(model[1]).__module__ = "transformers.models.made_up"
        return model

    return write


@pytest.mark.parametrize("way", FAR)
def test_what_is_no_mask_is_counted(x, way, by_whom):
    model = by_whom(make(lambda module, q, k, v: FAR[way](q @ k.mT * ROOT).softmax(-1) @ v))
    x = 20 * x
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        measured = hook.layers["1"].statistics
    scores = raw_scores(model, x)
    assert measured.count == scores.numel()
    torch.testing.assert_close(measured.max_score.double(), scores.abs().max(), rtol=1e-4, atol=0)


LOWEST = torch.finfo(torch.float32).min
MASKS = {
    "filled": lambda s: s.masked_fill(MASKED, -100.0),
    "filled in place": lambda s: s.masked_fill_(MASKED, -1e9),
    "chosen": lambda s: torch.where(MASKED, -1e9, s),
    "chosen from": lambda s: s.where(~MASKED, torch.tensor(-1e9)),
    "assigned": lambda s: assigned(s),
    "added to a part": lambda s: added_to_a_part(s),
    "added": lambda s: s + torch.zeros(LENGTH, LENGTH).masked_fill(MASKED, -1e4),
    "added infinity": lambda s: s + torch.full((LENGTH, LENGTH), -math.inf).triu(1),
    "added lowest": lambda s: s + torch.full((LENGTH, LENGTH), LOWEST).triu(1),
    "added and moved": lambda s: (
        (s + torch.zeros(3, 1, LENGTH, LENGTH).masked_fill(MASKED, -1e4)).view(-1, LENGTH, LENGTH).view_as(s)
    ),
    "added with a far bias": lambda s: (
        s - 30.0 * torch.arange(LENGTH).flip(0) + torch.zeros(LENGTH, LENGTH).masked_fill(MASKED, -1e4)
    ),
    "added in one with a far bias": lambda s: (
        s + (torch.zeros(LENGTH, LENGTH).masked_fill(MASKED, -1e4) - 30.0 * torch.arange(LENGTH).flip(0))
    ),
    "added hundred": lambda s: s + torch.full((LENGTH, LENGTH), -100.0).triu(1),
    "subtracted": lambda s: s - MASKED * 1e9,
    "multiplied and subtracted": lambda s: s * ~MASKED - 1e9 * MASKED.float(),
    "added below a bias": lambda s: s + torch.linspace(0, -300, LENGTH) + torch.full((LENGTH, LENGTH), -1e9).triu(1),
}


def assigned(scores):
    scores[:, :, MASKED] = -math.inf
    return scores


def added_to_a_part(scores):
    """As in minimind."""
    scores[:, :, :, -LENGTH:] += torch.full((LENGTH, LENGTH), -math.inf).triu(1)
    return scores


@pytest.mark.parametrize("way", MASKS)
def test_what_the_code_masks_is_not_counted(x, way, by_whom):
    model = by_whom(make(lambda module, q, k, v: MASKS[way](q @ k.mT * ROOT).softmax(-1) @ v))
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        measured = hook.layers["1"].statistics
    scores = raw_scores(model, x)[:, :, ~MASKED]
    assert measured.count == scores.numel()
    torch.testing.assert_close(measured.max_score.double(), scores.abs().max(), rtol=1e-4, atol=0)


def test_a_far_bias_of_the_fused_attention_masks_nothing(x):
    bias = -40.0 * (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    model = make(lambda module, q, k, v: F.scaled_dot_product_attention(q, k, v, bias))
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        assert hook.layers["1"].statistics.count == raw_scores(model, x).numel()


def test_an_exploded_logit_behind_a_shift_is_capped(x, by_whom):
    model = make(lambda module, q, k, v: (s := q @ k.mT * ROOT).sub(s.amax(-1, keepdim=True)).softmax(-1) @ v)
    by_whom(model)
    with betahook.attach(model, controller=betahook.Cap(100.0)) as hook:
        for _ in range(3):
            model(100 * x).sum().backward()
            hook.step()
        assert hook.layers["1"].beta * float(raw_scores(model, 100 * x).abs().max()) == pytest.approx(100, rel=1e-3)


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
            assert "heads are not told apart" in layer.refusal
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
        assert "heads are not told apart" in hook.layers["1"].refusal


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


def through_numpy(module, q, k, v):
    scores = torch.from_numpy((q @ k.mT * ROOT).detach().numpy().copy())
    return scores.softmax(-1) @ v


def by_exponential(module, q, k, v):
    weights = torch.exp(q @ k.mT * ROOT)
    return weights / weights.sum(-1, keepdim=True) @ v


def in_a_checkpoint(module, q, k, v):
    return torch.utils.checkpoint.checkpoint(lambda *t: attend(*t), q, k, v, use_reentrant=False)


class WithItsOwnBackward(torch.autograd.Function):
    """Computes its argument again in the backward, as the checkpoint of guided-diffusion does."""

    @staticmethod
    def forward(ctx, run, *operands):
        ctx.run = run
        ctx.save_for_backward(*operands)
        with torch.no_grad():
            return run(*operands)

    @staticmethod
    def backward(ctx, gradient):
        operands = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.run(*operands)
        return None, *torch.autograd.grad(output, operands, gradient)


def attend(q, k, v):
    return (q @ k.mT * ROOT).softmax(-1) @ v


def behind_a_view(module, q, k, v):
    scores = q @ k.mT * ROOT
    scores[:, 0].square_()
    return scores.softmax(-1) @ v


def put_elsewhere(module, q, k, v):
    scores = q @ k.mT * ROOT
    scores[:, 1] = scores[:, 0].add_(torch.arange(LENGTH))
    return scores.softmax(-1) @ v


def behind_two_views(module, q, k, v):
    scores = q @ k.mT * ROOT
    scores[:, 0].square_()
    scores[:, 1] += 1.0
    return scores.softmax(-1) @ v


def one_lost_of_two(module, q, k, v):
    return (q @ k.mT * ROOT).softmax(-1) @ (by_exponential(module, k, q, v))


def values_in_disguise(module, q, k, v):
    values = ((q @ k.mT * ROOT).softmax(-1)[..., None] * v[:, :, None]).sum(-2)
    return ((values * 2) @ k.mT).softmax(-1) @ v


def twice_in_disguise(module, q, k, v):
    values = ((q @ k.mT * ROOT).softmax(-1)[..., None] * v[:, :, None]).sum(-2)
    return (values @ (values + 1).mT).softmax(-1) @ v


REFUSED = {
    "a second attention, to values by hand": (values_in_disguise, "may be that of an attention"),
    "a second attention, of values by hand": (twice_in_disguise, "may be that of an attention"),
    "softplus": (lambda module, q, k, v: F.softplus(q @ k.mT).softmax(-1) @ v, "softplus at test_right_or_refused.py:"),
    "square": (lambda module, q, k, v: (q @ k.mT).square().softmax(-1) @ v, "square at test_right_or_refused.py:"),
    "gated by itself": (
        lambda module, q, k, v: ((s := q @ k.mT) * s.sigmoid()).softmax(-1) @ v,
        "test_right_or_refused.py:",
    ),
    "mixed before": (
        lambda module, q, k, v: module.conv(q @ k.mT * ROOT).softmax(-1) @ v,
        "conv2d at test_right_or_refused.py:",
    ),
    "normalised scores": (
        lambda module, q, k, v: ((s := q @ k.mT) / s.std()).softmax(-1) @ v,
        "test_right_or_refused.py:",
    ),
    "through numpy": (through_numpy, "numpy at test_right_or_refused.py:"),
    "exponential": (by_exponential, "exp at test_right_or_refused.py:"),
    "checkpoint inside": (in_a_checkpoint, "a checkpoint that begins inside the forward, at test_right_or_refused.py:"),
    "fused checkpoint inside": (
        lambda module, q, k, v: torch.utils.checkpoint.checkpoint(
            F.scaled_dot_product_attention, q, k, v, use_reentrant=False
        ),
        "a checkpoint that begins inside the forward, at test_right_or_refused.py:",
    ),
    "reentrant checkpoint inside": (
        lambda module, q, k, v: torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=True),
        "a checkpoint that begins inside the forward, at test_right_or_refused.py:",
    ),
    "function with a backward of its own": (
        lambda module, q, k, v: WithItsOwnBackward.apply(attend, q, k, v),
        "a torch.autograd.Function, whose backward is not seen, at test_right_or_refused.py:",
    ),
    "fused in a function with a backward of its own": (
        lambda module, q, k, v: WithItsOwnBackward.apply(F.scaled_dot_product_attention, q, k, v),
        "a torch.autograd.Function, whose backward is not seen, at test_right_or_refused.py:",
    ),
    "changed through a view": (behind_a_view, "test_right_or_refused.py:"),
    "changed through two views": (behind_two_views, "test_right_or_refused.py:"),
    "put elsewhere": (put_elsewhere, "test_right_or_refused.py:"),
    "one of two": (one_lost_of_two, "exp at test_right_or_refused.py:"),
    "added in the product": (
        lambda module, q, k, v: (
            torch.baddbmm((q @ v.mT).flatten(0, 1), q.flatten(0, 1), k.flatten(0, 1).mT)
            .softmax(-1)
            .unflatten(0, (-1, HEADS))
            @ v
        ),
        "baddbmm at test_right_or_refused.py:",
    ),
    "no softmax": (lambda module, q, k, v: F.relu(q @ k.mT) @ v, "relu at test_right_or_refused.py:"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_left_alone_by_name(x, caplog, case):
    mix, words = REFUSED[case]
    model = make(mix)
    expected = model(x)
    expected.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    with betahook.attach(model, controller=betahook.Search(warmup=1, window=1)) as hook:
        for _ in range(3):
            model.zero_grad()
            output = model(x)
            output.square().sum().backward()
            assert torch.equal(output, expected)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                assert (gradient is None and parameter.grad is None) or torch.equal(parameter.grad, gradient)
            hook.step()
        layer = hook.layers["1"]
        assert words in layer.refusal
        assert layer.refusal in repr(hook)
        assert int(layer.statistics.count) == 0
        with pytest.raises(RuntimeError, match=r"beta of '1' cannot be set, the layer is left alone"):
            layer.beta = 2 * layer.beta_default  # NaN, if nothing of it was seen
        assert not [name for name in hook.metrics() if name.startswith(("score_", "max_logit", "nonfinite"))]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert words in warnings[0]


def test_a_loaded_beta_acts_in_the_first_forward_already(x):
    """Whose products nobody has seen yet."""

    def mix(module, q, k, v):
        values = (q @ k.mT * (ROOT * module.temperature.exp())).softmax(-1) @ v
        return F.dropout(values + 0.01 * (values @ v.mT) @ v, 0.1)

    model = make(mix)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(x)
        hook.layers["1"].beta = 0.7
        hook.step()
        state = hook.state_dict()
        torch.manual_seed(3)
        expected = model(x)
        inputs = hook.layers["1"].statistics.input_std_q
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        hook.load_state_dict(state)
        torch.manual_seed(3)
        assert torch.equal(model(x), expected)
        assert hook.layers["1"].statistics.count == raw_scores(model, x).numel()
        assert hook.layers["1"].statistics.input_std_q == inputs


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_loaded_beta_acts_in_a_checkpointed_forward(x, reentrant):
    """Whose recomputation saves what the forward did."""
    model = make(lambda module, q, k, v: (q @ k.mT * ROOT).softmax(-1) @ v)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        hook.layers["1"].beta = 0.7
        state = hook.state_dict()
        model(x).square().sum().backward()
        expected = model[1].q_proj.weight.grad.clone()
        model.zero_grad()
    with betahook.attach(model, controller="monitor") as hook:
        hook.load_state_dict(state)
        hidden = model[0](x)
        torch.utils.checkpoint.checkpoint(model[1], hidden, use_reentrant=reentrant).square().sum().backward()
        assert torch.equal(model[1].q_proj.weight.grad, expected)


def test_the_first_forward_with_a_loaded_beta_leaves_the_module_as_one_forward_does(x):
    class MemoryAttention(Block):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.register_buffer("seen", torch.zeros(1, HEADS, 0, WIDTH // HEADS))
            self.register_buffer("total", torch.zeros(()))

        def mix(self, q, k, v):
            self.calls += 1
            self.seen = torch.cat([self.seen, k[:1].detach()], 2)
            self.total += k.detach().sum()
            self.last = k.detach()
            return (q @ k.mT * ROOT).softmax(-1) @ v

    model = nn.Sequential(MemoryAttention())
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        hook.layers["0"].beta = 0.7
        state = hook.state_dict()
    model = nn.Sequential(MemoryAttention())
    with betahook.attach(model, controller="monitor") as hook:
        hook.load_state_dict(state)
        assert torch.equal(model(x), model(x))
        attention = model[0]
        assert attention.calls == 2
        assert attention.seen.shape[2] == 2 * LENGTH
        assert attention.total == 2 * attention.last.sum()


def test_a_branch_that_is_taken_later_is_refused_then(x, caplog):
    class BranchedAttention(Block):
        def mix(self, q, k, v):
            scores = q @ k.mT * ROOT
            return (scores if self.training else F.softplus(scores)).softmax(-1) @ v

    model = nn.Sequential(BranchedAttention())
    with betahook.attach(model) as hook:
        model(x)
        assert hook.layers["0"].refusal is None
        hook.layers["0"].beta = 1.0
        model.eval()(x)
        assert "softplus at test_right_or_refused.py" in hook.layers["0"].refusal
    expected = model(x)
    assert "left alone" in caplog.text
    with betahook.attach(model) as hook:
        model.train()(x)
        model.eval()(x)
        assert torch.equal(model(x), expected)


def beside(product):
    """Attention that adds what a product of q and k makes to their scores."""
    return lambda module, q, k, v: ((q @ k.mT + product(module, q, k)) * ROOT).softmax(-1) @ v


UNREAD = {
    "two summed axes": lambda module, q, k: torch.einsum(
        "bhixd,bhjxd->bhij", *(x.unflatten(-1, (2, -1)) for x in (q, k))
    ),
    "three operands": lambda module, q, k: torch.einsum("bhid,bhjd,bhi->bhij", q, k, q.mean(-1)),
    "tensordot": lambda module, q, k: torch.tensordot(q, k[0, 0], ([3], [1])),
    "inner": lambda module, q, k: torch.inner(q, k[0, 0]),
    "linear": lambda module, q, k: F.linear(q, k[0, 0]),
    "matrix": lambda module, q, k: q @ k[0, 0].T,
    "vecdot": lambda module, q, k: torch.linalg.vecdot(q[:, :, :, None], k[:, :, None]),
    "behind a bias": lambda module, q, k: F.dropout(module.temperature + torch.inner(q, k[0, 0]), 0.0).masked_fill(
        MASKED, 0
    ),
    "stacked": lambda module, q, k: torch.stack([F.linear(a, k[0, 0]) for a in q]),
}


@pytest.mark.parametrize("way", UNREAD)
def test_a_product_that_is_not_understood_is_no_bias(x, way):
    model = make(beside(UNREAD[way]))
    expected = model(x)
    with betahook.attach(model, controller="monitor") as hook:
        assert torch.equal(model(x), expected)
        assert "its scores come to add with what " in hook.layers["1"].refusal


def test_scores_put_beside_a_product_that_is_not_understood_are_left_alone(x):
    def mix(module, q, k, v):
        scores = torch.cat([q @ k.mT, torch.inner(q, k[0, 0])], -1)
        return (scores * ROOT).softmax(-1) @ torch.cat([v, v], 2)

    with betahook.attach(make(mix), controller="monitor") as hook:
        hook.model(x)
        assert "its scores come to cat with what inner at " in hook.layers["1"].refusal


def test_only_a_product_that_is_not_understood(x):
    with betahook.attach(make(lambda module, q, k, v: torch.inner(q, k[0, 0]).softmax(-1) @ v)) as hook:
        hook.model(x)
        assert hook.layers["1"].refusal.startswith("its softmax takes what inner at ")


KEYS_OF_EACH_QUERY = {
    "heads": "bhid,bhijd->bhij",
    "heads behind the queries": "bihd,bijhd->bihj",
}


@pytest.mark.parametrize("equation", KEYS_OF_EACH_QUERY.values(), ids=KEYS_OF_EACH_QUERY)
def test_keys_of_each_query(x, equation):
    """As those that a memory finds, put beside the common ones."""

    def mix(module, q, k, v):
        own = k[:, :, None].roll(1, 3).expand(-1, -1, LENGTH, -1, -1)
        if equation == KEYS_OF_EACH_QUERY["heads"]:
            scores = torch.einsum(equation, q, own)
        else:
            scores = torch.einsum(equation, q.transpose(1, 2), own.permute(0, 2, 3, 1, 4)).transpose(1, 2)
        return (torch.cat([q @ k.mT, scores], -1) * ROOT).softmax(-1) @ torch.cat([v, v], 2)

    check_doubled(make(mix), x)
    check_measured(make(mix), x, times=2)
