"""Scales, temperatures and factors, of one product or of several: beta is what acts."""

import math

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import betahook
from support.attention import HEADS, LENGTH, WIDTH
from support.mixing import ROOT, check_doubled, check_measured, make, raw_scores


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
        assert "heads cannot be told" in refusal


OWN_SCALES = {
    "content first": lambda module, q, k, r: q @ k.mT * ROOT + q @ r.mT * 0.1,
    "position first": lambda module, q, k, r: q @ r.mT * 0.1 + q @ k.mT * ROOT,
    "subtracted": lambda module, q, k, r: q @ k.mT * ROOT - (q * 0.3) @ r.mT * 0.1,
    "learned, on the scores": lambda module, q, k, r: q @ k.mT * module.temperature.exp() + q @ r.mT * 0.1,
    "learned, on the query": lambda module, q, k, r: (q * module.temperature.exp()) @ k.mT + q @ r.mT,
}


def test_scores_are_measured_as_they_were_before_a_bound_in_place(x):
    check_measured(make(lambda m, q, k, v: (F.hardtanh(q @ k.mT, inplace=True) * ROOT).softmax(-1) @ v), x)


def for_another_use(module, q, k):
    scores = q @ k.mT
    module.logits = (scores * 0.5).detach()
    return scores * ROOT


def changed_in_part(module, q, k):
    scores = q @ k.mT * ROOT
    scores[..., :5] *= 0.5
    return scores


def for_no_use(module, q, k):
    scores = q @ k.mT
    module.logits = (scores * 0.0).detach()
    return scores * ROOT


SEVERAL_WAYS = {
    "for another use": for_another_use,
    "for no use": for_no_use,
    "and not": lambda module, q, k: torch.where(torch.eye(LENGTH) == 1, s := q @ k.mT * ROOT, s * 0.5),
    "in two parts": lambda module, q, k: torch.cat([(s := q @ k.mT)[..., :5] * 0.1, s[..., 5:] * ROOT], -1),
    "in part": changed_in_part,
    "added up": lambda module, q, k: (s := (q * 0.7) @ k.mT) * 0.1 + s * 0.2,
}


@pytest.mark.parametrize("way", SEVERAL_WAYS)
def test_one_product_may_be_scaled_on_several_ways(x, way):
    check_doubled(make(lambda module, q, k, v: SEVERAL_WAYS[way](module, q, k).softmax(-1) @ v), x)


OTHER_USES = {
    "kept": lambda module, scores: setattr(module, "logits", (scores * 0.5).detach()),
    "gates": lambda module, scores: setattr(module, "gate", torch.sigmoid(scores / 10).mean()),
    "for no use": lambda module, scores: setattr(module, "logits", scores * 0.0),
}


@pytest.mark.parametrize("use", OTHER_USES)
@pytest.mark.parametrize("first", [True, False], ids=["before the softmax", "behind it"])
@pytest.mark.parametrize("only", [None, "training", "evaluation"])
def test_scores_that_are_scaled_for_another_use_have_the_same_beta(x, use, first, only):
    """Whether it comes before the softmax or behind it, in each forward or only in those of one mode."""

    def mix(module, q, k, v):
        scores, is_used = q @ k.mT, only is None or module.training is (only == "training")
        if is_used and first:
            OTHER_USES[use](module, scores)
        weights = (scores * ROOT).softmax(-1)
        if is_used and not first:
            OTHER_USES[use](module, scores)
        return weights @ v

    model = make(mix)
    check_doubled(model, x)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        for is_training in (True, False, True):
            model.train(is_training)(x)
            hook.step()
        layer = hook.layers["1"]
        assert layer.beta_default == pytest.approx(ROOT)
        layer.beta = 0.7
        v = model[1].split(model[1].v_proj(model[0](x)))
        expected = ((0.7 * raw_scores(model, x)).softmax(-1).float() @ v).transpose(1, 2).flatten(2)
        for is_training in (False, True, False, False, True, True):
            torch.testing.assert_close(model.train(is_training)(x), expected, rtol=1e-4, atol=1e-5)
            hook.step()
            if use == "kept" and (only is None or is_training is (only == "training")):
                kept = 0.5 * 0.7 / ROOT * raw_scores(model, x)
                torch.testing.assert_close(model[1].logits, kept.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("factor", ["of its position", "of its norm"])
def test_a_factor_of_each_query_is_no_scale_where_there_is_one_query(x, factor):
    """As where a token is decoded with the keys of those before it."""

    def mix(module, q, k, v):
        factors = torch.arange(2.0, LENGTH + 2).log()[:, None]
        if factor == "of its norm":
            factors = q.square().mean((1, 3), keepdim=True).rsqrt()
        if module.decodes:
            q, factors = q[:, :, -1:], factors[..., -1:, :]
        return ((q * factors) @ k.mT * ROOT).softmax(-1) @ v

    model = make(mix)
    model[1].decodes = False
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        hook.layers["1"].beta = 2.5
        expected = model(x[:1])[:, -1:]
        model[1].decodes = True
        torch.testing.assert_close(model(x[:1]), expected, rtol=1e-4, atol=1e-5)
        assert hook.layers["1"].beta_default == pytest.approx(ROOT)


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
    "learned, and another": lambda module, q, k: [s := q @ k.mT, s * 0.5, s * module.temperature.exp()][-1],
    "learned, and negated": lambda module, q, k: -(q @ k.mT * -module.temperature.exp()),
    "of the length, in two parts": lambda module, q, k: torch.cat(
        [(s := q @ k.mT)[..., :3] * (ROOT * math.log(q.shape[-2])), s[..., 3:] * (ROOT * math.log(q.shape[-2]))], -1
    ),
    "of the length, and another": lambda m, q, k: [s := q @ k.mT, s * 0.5, s * (ROOT * math.log(q.shape[-2]))][-1],
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


@pytest.mark.parametrize("pool", [torch.mean, torch.sum])
def test_a_scale_before_a_pooled_query_is_beta(x, pool):
    """As in tied rows, and in Hiera, whose query is that of several tokens."""

    def mix(module, q, k, v):
        return (pool(q * 0.3, 2, keepdim=True) @ k.mT).softmax(-1) @ v

    model = make(mix)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(x)
        layer = hook.layers["1"]
        hidden, attention = model[0](x), model[1]
        q, k = (attention.split(part(hidden)).double() for part in (attention.q_proj, attention.k_proj))
        scores = pool(q, 2, keepdim=True) @ k.mT
        assert layer.beta_default == pytest.approx(0.3)
        expected = scores.transpose(0, 1).flatten(1).std(1, correction=0)
        torch.testing.assert_close(layer.head_statistics.std.double(), expected, rtol=1e-4, atol=0)


LAYOUTS = {
    "by head": lambda q, k, scale: q @ k.mT * scale,
    "einsum": lambda q, k, scale: torch.einsum("bhqd,bhkd->bqhk", q, k).transpose(1, 2) * scale,
    "heads in the batch": lambda q, k, scale: (q.flatten(0, 1) @ k.flatten(0, 1).mT * scale).unflatten(0, (-1, HEADS)),
    "batch in the heads": lambda q, k, scale: (
        (q.transpose(0, 1).flatten(0, 1) @ k.transpose(0, 1).flatten(0, 1).mT * scale)
        .unflatten(0, (HEADS, -1))
        .transpose(0, 1)
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_without_a_beta_of_their_own_keep_the_scale_that_the_model_changes(x, layout):
    """Of one head the controller has set beta, which stays; that of the others goes with the model."""
    model = make(lambda module, q, k, v: LAYOUTS[layout](q, k, ROOT * math.log(q.shape[-2])).softmax(-1) @ v)
    scores = raw_scores(model, x) * ROOT * math.log(LENGTH)
    *_, second, largest = scores.abs().amax((0, 2, 3)).sort().values.tolist()
    rule = betahook.Cap((second + largest) / 2)

    def check(hook, part):
        layer, own = hook.layers["1"], ROOT * math.log(part.shape[1])
        got, beta = model(part), torch.where(capped, bound, own)
        torch.testing.assert_close(layer.head_beta.double(), beta)
        v = model[1].split(model[1].v_proj(model[0](part)))
        weights = (beta.view(-1, 1, 1) * raw_scores(model, part)).softmax(-1).float()
        torch.testing.assert_close(got, (weights @ v).transpose(1, 2).flatten(2), rtol=1e-4, atol=1e-4)

    with betahook.attach(model, rule, per_head=True) as hook:
        model(x).sum().backward()
        hook.step()
        bound = hook.layers["1"].head_beta.double()
        capped = bound < ROOT * math.log(LENGTH) * 0.999
        assert capped.sum() == 1
        assert not capped[0]
        check(hook, x[:, :7])
        state = hook.state_dict()
    with betahook.attach(model, rule, per_head=True) as hook:
        hook.load_state_dict(state)
        check(hook, x)


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
        assert "receive scores that are scaled differently" in hook.layers["1"].refusal
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
    factor = FACTORS["of each position"]
    model = make(lambda module, q, k, v: (q @ k.mT * ROOT * factor(module, q)).softmax(-1) @ v)
    with betahook.attach(model, controller="monitor") as hook:
        model(x[:1, :1])
        model(x)
        assert "mul by a factor that was one number before, or one for each head, at" in hook.layers["1"].refusal


def filled_in(q):
    factors = q.new_ones(len(q), 1, 1, 1)
    factors[:] = q.mean((1, 2, 3), keepdim=True).exp()
    return factors


OF_ACTIVATIONS = {
    "of each sample": lambda q: q.mean((1, 2, 3), keepdim=True).exp(),
    "of each sample, filled in": filled_in,
    "of each sample, by head": lambda q: q.mean((2, 3), keepdim=True).exp(),
    "of each query": lambda q: q.mean((1, 3), keepdim=True).exp(),
}


@pytest.mark.parametrize("on", ["scores", "query"])
@pytest.mark.parametrize("way", OF_ACTIVATIONS)
def test_a_factor_of_activations_is_a_part_of_the_scores_in_a_batch_of_one_too(x, way, on):
    """Else beta would stand in the place of a temperature that the model predicts for its one sample."""

    def mix(module, q, k, v):
        factor = OF_ACTIVATIONS[way](q)
        return ((q * ROOT * factor @ k.mT) if on == "query" else (q @ k.mT * ROOT * factor)).softmax(-1) @ v

    part = x[:1, :1] if way == "of each query" else x[:1]
    model, got = make(mix), []
    for first in (part, x):
        with betahook.attach(model, controller="monitor") as hook:
            model(first)
            layer = hook.layers["1"]
            assert layer.beta_default == pytest.approx(ROOT)
            layer.beta = 2 * ROOT
            got.append((model(part), model(x)))
            assert layer.refusal is None
    torch.testing.assert_close(*got)


AS_INPUTS_ARE = {
    "dtype": lambda scale, q: scale.to(q),
    "type": lambda scale, q: scale.type_as(q),
    "axes": lambda scale, q: scale.view_as(q[:1, :1, :1, :1]),
    "shape of one": lambda scale, q: scale.expand_as(q.new_ones(1, 1, 1, 1)),
}


@pytest.mark.parametrize("way", AS_INPUTS_ARE)
def test_a_learned_number_that_gets_the_form_of_activations_is_a_scale(x, way):
    def mix(module, q, k, v):
        scale = AS_INPUTS_ARE[way](module.temperature.exp().view(1, 1, 1, 1), q)
        return (q @ k.mT * scale).softmax(-1) @ v

    model = make(mix)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        assert hook.layers["1"].beta_default == pytest.approx(model[1].temperature.exp().item())


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


@pytest.mark.filterwarnings("ignore")  # of the compiler, about gradients of scores
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_function_that_is_compiled_by_itself_is_followed_as_it_is_written(x, fullgraph):
    cap = torch.compile(lambda scores: 2.0 * (scores / 2.0).tanh(), backend="aot_eager", fullgraph=fullgraph)
    model = make(lambda module, q, k, v: cap(q @ k.mT * ROOT).softmax(-1) @ v)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        assert hook.layers["1"].beta_default == pytest.approx(ROOT)
    check_doubled(model, x)


def also_for_another_use(q, k, v, scale):
    scores = q * (scale / ROOT) @ k.mT
    (scores * 3.0).detach()
    return (scores * ROOT).softmax(-1) @ v


def tensor(number):
    return torch.tensor(number).requires_grad_()  # which nobody reads


BY_LENGTH = {
    "query, negated twice": lambda q, k, v, scale: (-((q * scale) @ k.mT * -1.0)).softmax(-1) @ v,
    "scores": lambda q, k, v, scale: (q @ k.mT * scale).softmax(-1) @ v,
    "a query": lambda q, k, v, scale: (q * scale @ k.mT).softmax(-1) @ v,
    "a query and scores": lambda q, k, v, scale: (q * (scale / ROOT) @ k.mT * ROOT).softmax(-1) @ v,
    "a query, for another use too": also_for_another_use,
    "a query, by a tensor": lambda q, k, v, scale: (q * tensor(scale / ROOT) @ k.mT * ROOT).softmax(-1) @ v,
    "scores, by a tensor": lambda q, k, v, scale: (q @ k.mT * tensor(scale)).softmax(-1) @ v,
    "a kernel": lambda q, k, v, scale: F.scaled_dot_product_attention(q, k, v, scale=scale),
}


@pytest.mark.parametrize("lengths", [[LENGTH, 1, 7, LENGTH], [1, LENGTH, 1, 7, LENGTH]], ids=str)
@pytest.mark.parametrize("way", BY_LENGTH)
def test_the_log_of_a_single_token_scales_by_zero(way, lengths):
    """Scores are multiplied by log n, as in scalable softmax: what beta is makes no difference then."""
    model = make(lambda module, q, k, v: BY_LENGTH[way](q, k, v, ROOT * math.log(q.shape[2])))
    inputs = [torch.randn(2, n, WIDTH, generator=torch.Generator().manual_seed(n)) for n in lengths]
    alone = [model(x) for x in inputs]
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        layer = hook.layers["1"]
        for x, expected in zip(inputs, alone, strict=True):
            assert torch.equal(model(x), expected)
            hook.step()
            assert "tensor" in way or not hook.metrics().get("nonfinite/1")
        assert layer.refusal is None
        own = ROOT * math.log(LENGTH)
        assert layer.beta_default == pytest.approx(own)
        expected = raw_scores(model, inputs[-1]).var((0, 2, 3), correction=0).mean().sqrt()
        assert layer.statistics.std == pytest.approx(expected.item(), rel=1e-5)
        layer.beta = 2 * own
        outputs = [model(x) for x in inputs]
    assert all(output.isfinite().all() for output in outputs)
    which = slice(-1, None) if way == "scores, by a tensor" else slice(None)  # others come behind a 0 that nobody reads
    for x, output in zip(inputs[which], outputs[which], strict=True):
        q, k, v = (model[1].split(p(model[0](x))) for p in (model[1].q_proj, model[1].k_proj, model[1].v_proj))
        doubled = ((2 * own * q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)
        torch.testing.assert_close(output, doubled, rtol=1e-4, atol=1e-5)


def test_a_scale_that_changes_before_anything_is_measured_is_checked_later(x):
    """After a resume, where an evaluation comes before the training."""
    model = make(lambda module, q, k, v: (q @ k.mT * (ROOT * math.log(q.shape[2]))).softmax(-1) @ v)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(x)
        hook.layers["1"].beta = ROOT
        hook.step()
        state, expected = hook.state_dict(), model(x)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        hook.load_state_dict(state)
        model.eval()(x[:, :-3])
        torch.testing.assert_close(model.train()(x), expected, rtol=1e-5, atol=1e-6)
        assert hook.layers["1"].refusal is None
