"""Attentions that do not say how many heads they have; attach finds out, and what is measured is right."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import betahook
from betahook.models import trial
from support.training import fingerprint
from support.undeclared import (
    CAUSAL,
    CLASSES,
    HEAD_DIM,
    HEADS,
    LENGTH,
    WIDTH,
    Block,
    CausalByHandAttention,
    Mixer,
    Model,
    MultiQuery,
    OneHead,
    attend,
    split,
)

BATCH = 2


@torch.no_grad()
def scores_of(layer, x):
    """q k^T of every pair, `[batch, heads, queries, keys]`."""
    x = layer.norm(x) if isinstance(layer, Block) else x
    if isinstance(layer, MultiQuery):
        q, k = (F.linear(x, part.weight, part.bias) for part in (layer.a, layer.b))
        return split(q) @ split(k, 1).mT
    q, k, _ = F.linear(x, layer.projection.weight, layer.projection.bias).chunk(3, -1)
    heads = 1 if isinstance(layer, OneHead) else HEADS
    return split(q, heads) @ split(k, heads).mT


@pytest.mark.parametrize("kind", CLASSES)
def test_attention_that_does_not_state_its_heads_is_attached_and_right(kind):
    torch.manual_seed(0)
    model, x = Model(kind).double(), torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    layer = model.layer
    before, state, plain = fingerprint(model), torch.get_rng_state(), model.eval()(x)
    heads = 1 if kind is OneHead else HEADS
    with betahook.attach(model, controller="monitor", when="always") as hook:
        assert torch.equal(torch.get_rng_state(), state)
        (found,) = hook.layers.values()
        assert (found.heads, found.head_dim) == (heads, WIDTH // heads)
        assert torch.equal(model(x), plain)
        scores = scores_of(layer, x)
        if kind is CausalByHandAttention:
            scores = scores[..., ~CAUSAL]
        expected = scores.movedim(1, 0).flatten(1)
        assert found.head_statistics.std == pytest.approx(expected.std(-1, correction=0).tolist(), rel=1e-4)
        assert found.head_statistics.mean == pytest.approx(expected.mean(-1).tolist(), rel=1e-4, abs=1e-4)
        hook.step()

        def loss():
            return model(x).square().mean()

        loss().backward()
        sensitivity, step, own = found.statistics.sensitivity, 1e-3, found.beta_default

        def loss_at(factor):
            found.beta = factor * own
            return loss().item()

        with torch.no_grad():
            difference = (loss_at(math.exp(step)) - loss_at(math.exp(-step))) / (2 * step)
        assert sensitivity == pytest.approx(difference, rel=1e-4)
    model.zero_grad()
    assert fingerprint(model) == before


class Router(nn.Module):
    """A softmax and two products, but no attention."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Parameter(torch.randn(WIDTH, 3)), nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x):
        return (x @ self.gate).softmax(-1) @ self.experts


class InPlace(Mixer):
    """A softmax in the place of its scores, of one half of them after the other."""

    def mix(self, q, k, v):
        scores = q @ k.mT * HEAD_DIM**-0.5
        half = len(scores) // 2
        scores[half:] = scores[half:].softmax(-1)
        scores[:half] = scores[:half].softmax(-1)
        return scores @ v


class Window(Mixer):
    """A forward whose arguments no trial can guess."""

    def forward(self, x, grid):
        return super().forward(x * grid.width)


class Padded(Mixer):
    """More scores than tokens, so that their number does not tell how many heads there are."""

    def forward(self, x):
        return super().forward(F.pad(x, (0, 0, 0, -x.shape[1] % 4)))[:, : x.shape[1]]


class ShortPassesBy(Padded):
    """A short sequence is not looked at: a length that the module states, and that a trial may choose."""

    def __init__(self):
        super().__init__()
        self.shortest = 5

    def forward(self, x):
        return super().forward(x) if x.shape[1] > self.shortest else x


class OfChannels(nn.Module):
    """Weights between the channels of one vector for each sequence: a product that sums over nothing."""

    def __init__(self):
        super().__init__()
        self.ask, self.answer = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        mean = x.mean(1)
        weights = torch.einsum("bi,bj->bij", self.ask(mean), self.answer(mean)).softmax(-1)
        return x @ weights


class NeedsAttention(Window):
    """The same, by its name an attention."""


class SomeQueries(nn.Module):
    """Three of the queries attend, as in the Informer; heads are stated, their width is not."""

    def __init__(self):
        super().__init__()
        self.n_heads = HEADS
        self.asking, self.asked = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        q, k = (split(p(x)) for p in (self.asking, self.asked))
        return ((q[:, :, :3] @ k.mT).softmax(-1) @ k).transpose(1, 2).flatten(2)


def test_a_trial_does_not_overrule_the_heads_that_are_stated():
    model = Model(SomeQueries)
    with pytest.raises(betahook.UnsupportedModelError, match=f"how wide its {HEADS} heads are: set its attribute head"):
        betahook.attach(model)
    model.layer.head_dim = HEAD_DIM
    with betahook.attach(model, controller="monitor", when="always") as hook:
        model(torch.randn(BATCH, LENGTH, WIDTH))
        (layer,) = hook.layers.values()
        assert int(layer.statistics.count) == BATCH * HEADS * 3 * LENGTH


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Router, "it has no module that computes softmax attention"),
        (
            Window,
            "layer, Window: it takes a softmax and multiplies; if that is an attention, set its attributes num",
        ),
        (OfChannels, "layer, OfChannels: it takes a softmax and multiplies; if that is an attention, set its attr"),
        (InPlace, "layer, InPlace: it takes a softmax and multiplies; if that is an attention, set its attributes num"),
        (Padded, "layer, Padded: it takes a softmax and multiplies; if that is an attention, set its attributes num"),
        (
            ShortPassesBy,
            "layer, ShortPassesBy: it takes a softmax and multiplies; if that is an attention, set its att",
        ),
        (NeedsAttention, "says neither how many heads it has nor how wide they are: set its attributes num_heads and"),
    ],
)
def test_what_is_no_attention_or_cannot_be_tried_is_refused_with_the_attributes_that_help(kind, message):
    model = Model(kind)
    with pytest.raises(betahook.UnsupportedModelError, match=message):
        betahook.attach(model)
    if kind is not Router:
        model.layer.num_heads, model.layer.head_dim = HEADS, HEAD_DIM
        with betahook.attach(model) as hook:
            assert hook.layers["layer"].heads == HEADS


class ScaledProduct(nn.Module):
    """The product and the softmax, with a learned scale of each head."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((HEADS, 1, 1), 0.5))

    def forward(self, q, k, v):
        return (q @ k.mT * self.scale).softmax(-1) @ v


class InAPart(Mixer):
    def __init__(self):
        super().__init__()
        self.attention = ScaledProduct()

    def mix(self, q, k, v):
        return self.attention(q, k, v)


def test_a_part_with_no_parameters_but_a_scale_belongs_to_the_module_around_it():
    with betahook.attach(Model(InAPart), controller="monitor", when="always") as hook:
        (layer,) = hook.layers.values()
        assert (layer.name, layer.heads, layer.head_dim) == ("layer", HEADS, HEAD_DIM)
        hook.model(torch.randn(2, LENGTH, WIDTH))
        assert layer.head_beta_default.tolist() == [0.5] * HEADS
        assert layer.remarks == []


class MadeInForwardAttention(Mixer):
    """Its product is in the code of a module that its forward makes, and a mask is required."""

    def forward(self, x, attn_mask):
        mask = attn_mask.unsqueeze(1).repeat(1, HEADS, 1, 1)
        q, k, v = (split(part) for part in self.projection(x).chunk(3, -1))
        return MaskedProduct()(q, k, v, mask).transpose(1, 2).flatten(2)


class MaskedProduct(nn.Module):
    def forward(self, q, k, v, mask):
        return (q @ k.mT / math.sqrt(HEAD_DIM)).masked_fill(mask, -1e9).softmax(-1) @ v


class OptionalMask(Mixer):
    """It has a default, and is required all the same."""

    def forward(self, x, mask=None):
        q, k, v = (split(part).flatten(0, 1) for part in self.projection(x).chunk(3, -1))
        weights = MaskedProduct()(q, k, v, mask.repeat_interleave(HEADS, 0))
        return weights.unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2)

    mix = attend  # the product that its code shows


@pytest.mark.parametrize("kind", [MadeInForwardAttention, OptionalMask])
def test_a_mask_may_be_required_and_a_product_out_of_sight(kind):
    layer, x = kind(), torch.randn(BATCH, LENGTH, WIDTH)
    mask = CAUSAL.expand(BATCH, -1, -1)
    with betahook.attach(layer, controller="monitor", when="always") as hook:
        found = hook.layers[""]
        assert (found.heads, found.head_dim) == (HEADS, HEAD_DIM)
        query = layer.projection.weight[:WIDTH].unflatten(0, (HEADS, HEAD_DIM))
        assert torch.equal(found.projections[0].entries, query)
        layer(x, mask)
        q, k, _ = (split(part) for part in layer.projection(x).chunk(3, -1))
        scores = (q @ k.mT)[~mask[:, None].expand(-1, HEADS, -1, -1)]
        assert float(found.statistics.mean) == pytest.approx(float(scores.mean().detach()), rel=1e-4)


class Added(Mixer):
    """A bias that the product of q and k adds."""

    def mix(self, q, k, v):
        q, k = q.flatten(0, 1), k.flatten(0, 1)
        bias = torch.zeros(len(q), q.shape[1], k.shape[1])
        return torch.baddbmm(bias, q, k.mT, alpha=HEAD_DIM**-0.5).unflatten(0, (-1, HEADS)).softmax(-1) @ v


class Normalised(Mixer):
    """Takes means and maxima of tensors that no projection made, and of all entries of q."""

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return super().forward(x / x.abs().max())

    def mix(self, q, k, v):
        return super().mix(q / q.max(), k, v)


@pytest.mark.parametrize("kind", [Added, Normalised])
def test_products_with_a_bias_and_reductions_beside_them_are_looked_through(kind):
    shown = trial.run(kind())
    assert shown.size == (HEADS, HEAD_DIM)
    rows = torch.arange(2 * WIDTH).view(2, HEADS, HEAD_DIM)
    assert [place.rows.tolist() for place in shown.places] == rows.tolist()


def test_weights_that_have_no_shape_yet_are_no_scale():
    model = Model(Mixer)
    model.layer.projection = nn.LazyLinear(3 * WIDTH)
    with pytest.raises(betahook.UnsupportedModelError, match="set its attributes num_heads and head_dim before"):
        betahook.attach(model)


class FixedMask(Mixer):
    """Takes sequences of one length, that of its mask."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", CAUSAL)
        self.register_buffer("scale", torch.tensor(0.5))

    def mix(self, q, k, v):
        return (self.scale * (q @ k.mT)).masked_fill(self.mask, -math.inf).softmax(-1) @ v


class FixedLength(Mixer):
    def __init__(self):
        super().__init__()
        self.tokens = LENGTH

    def mix(self, q, k, v):
        return super().mix(q.reshape(-1, HEADS, self.tokens, HEAD_DIM), k, v)


class Windowed(Padded):
    """Padded to a number of tokens that the module states: sequences as long as that are not."""

    def __init__(self):
        super().__init__()
        self.window = 4


class LongWindow(ShortPassesBy):
    """After a length at which it does not attend, it states one that needs no padding."""

    def __init__(self):
        super().__init__()
        self.window = 8


@pytest.mark.parametrize("kind", [FixedMask, FixedLength, Windowed, LongWindow])
def test_the_one_length_of_a_sequence_is_found(kind):
    with betahook.attach(Model(kind), controller="monitor") as hook:
        assert [(layer.heads, layer.head_dim) for layer in hook.layers.values()] == [(HEADS, HEAD_DIM)]
        hook.model(torch.randn(2, LENGTH, WIDTH))
        assert hook.layers["layer"].statistics.count > 0


class Resampler(nn.Module):
    """As many queries as it states look at tokens of another width."""

    def __init__(self, tokens=5, width=40):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(tokens, WIDTH))
        self.tokens, self.of_query, self.of_rest = tokens, nn.Linear(WIDTH, WIDTH), nn.Linear(width, 2 * WIDTH)

    def forward(self, x, context):
        q, (k, v) = self.of_query(x + self.positions), self.of_rest(context).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for t in (q, k, v))
        return ((q @ k.mT * HEAD_DIM**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_a_length_and_the_width_of_a_context_are_found_together():
    shown = trial.run(Resampler())
    assert shown.size == (HEADS, HEAD_DIM)
    assert [place.owner for place in shown.places] == ["of_query", "of_rest"]


class ChannelsFirst(nn.Module):
    """Sequences as one-dimensional convolutions take them, with a number that might be taken for their length."""

    def __init__(self):
        super().__init__()
        self.channels = WIDTH
        self.a, self.b, self.c = (nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(3))

    def forward(self, x, bias):
        q, k, v = (part(x).unflatten(1, (HEADS, -1)).mT for part in (self.a, self.b, self.c))
        scores = q @ k.mT * HEAD_DIM**-0.5
        scores = scores if bias is None else scores + bias
        return (scores.softmax(-1) @ v).mT.flatten(1, 2)


def test_channels_may_come_before_tokens_and_a_bias_may_be_required():
    layer = ChannelsFirst()
    with betahook.attach(layer, controller="monitor", when="always") as hook:
        found = hook.layers[""]
        assert (found.heads, found.head_dim) == (HEADS, HEAD_DIM)
        weights = (part.weight[..., 0].unflatten(0, (HEADS, HEAD_DIM)) for part in (layer.a, layer.b))
        for projection, weight in zip(found.projections, weights, strict=True):
            assert torch.equal(projection.entries, weight)
        x = torch.randn(BATCH, WIDTH, LENGTH)
        layer(x, torch.randn(LENGTH, LENGTH))
        q, k = (part(x).unflatten(1, (HEADS, -1)).mT for part in (layer.a, layer.b))
        assert float(found.statistics.mean) == pytest.approx(float((q @ k.mT).mean().detach()), rel=1e-4)


class OfVideo(nn.Module):
    """One head over all places and times, as in a non-local block."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv3d(WIDTH, WIDTH, 1) for _ in range(3))

    def forward(self, x):
        q, k, v = (part(x).flatten(2).mT for part in (self.a, self.b, self.c))
        return ((q @ k.mT * WIDTH**-0.5).softmax(-1) @ v).mT.reshape(x.shape)


def test_an_input_may_be_a_video():
    layer = OfVideo()
    with betahook.attach(layer, controller="monitor") as hook:
        found = hook.layers[""]
        assert (found.heads, found.head_dim) == (1, WIDTH)
        assert [projection.module for projection in found.projections] == [layer.a, layer.b]
        layer(torch.randn(BATCH, WIDTH, 2, 3, 4))
        assert int(found.statistics.count) == BATCH * (2 * 3 * 4) ** 2


class OfEachPicture(nn.Module):
    """All pictures of a video, one by one, with a single head that nothing states."""

    def __init__(self):
        super().__init__()
        self.mixed = nn.Conv2d(WIDTH, 3 * WIDTH, 1)

    def forward(self, x):
        batch, _, frames, *_ = x.shape
        q, k, v = self.mixed(x.transpose(1, 2).flatten(0, 1)).flatten(2).mT[:, None].chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v).unflatten(0, (batch, frames)).flatten(1, 3).mT


def test_pictures_of_a_video_may_be_taken_one_by_one():
    torch.manual_seed(0)
    model = nn.Sequential(OfEachPicture())
    with betahook.attach(model, controller="monitor", when="always") as hook:
        (layer,) = hook.layers.values()
        assert (layer.heads, layer.head_dim) == (1, WIDTH)
        model(torch.randn(2, WIDTH, 3, 4, 4))
        assert int(layer.statistics.count) == 2 * 3 * 16 * 16
        assert layer.weight_std_q == pytest.approx(model[0].mixed.weight[:WIDTH].std(correction=0).item(), rel=1e-5)


class Comparing(Mixer):
    """Projects once where queries and keys are the same, as attention of torch's older versions does."""

    def forward(self, query, key):
        assert torch.equal(query, key)
        return super().forward(query)


def test_tensors_without_data_are_the_same_if_they_are_one():
    model = Comparing()
    with betahook.attach(model, controller="monitor") as hook:
        (layer,) = hook.layers.values()
        assert (layer.heads, layer.head_dim) == (HEADS, WIDTH // HEADS)


class OnAGrid(nn.Module):
    """The tokens of a picture, whose sides come with them; keys are those of its squares."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.scale = HEADS, WIDTH**-0.5  # by which nobody can tell how wide a head is
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.squares = nn.Conv2d(WIDTH, WIDTH, 8, 8)

    def forward(self, x, H, W):
        squares = self.squares(x.mT.unflatten(-1, (H, W))).flatten(2).mT
        k, v = (split(part) for part in self.b(squares).chunk(2, -1))
        return (split(self.a(x)) @ k.mT * self.scale).softmax(-1) @ v


class OnASizedGrid(OnAGrid):
    """Both sides in one argument, as in timm and mmsegmentation."""

    def forward(self, x, size):
        return super().forward(x, *size)


class OfHiddenStates(Mixer):
    """An argument that has the name of a side alone, and is none."""

    def forward(self, h):
        return super().forward(h)


@pytest.mark.parametrize(("kind", "sides"), [(OnAGrid, (16, 8)), (OnASizedGrid, ((16, 8),))])
def test_height_and_width_of_a_picture_are_numbers(kind, sides):
    layer = kind()
    with betahook.attach(layer, controller="monitor", when="always") as hook:
        found = hook.layers[""]
        assert (found.heads, found.head_dim) == (HEADS, HEAD_DIM)
        for projection, part in zip(found.projections, (layer.a, layer.b), strict=True):
            assert torch.equal(projection.entries, part.weight[:WIDTH].unflatten(0, (HEADS, HEAD_DIM)))
        layer(torch.randn(BATCH, 16 * 8, WIDTH), *sides)
        assert int(found.statistics.count) == BATCH * HEADS * 16 * 8 * 2
    with betahook.attach(Model(OfHiddenStates)) as hook:
        assert hook.layers["layer"].head_dim == HEAD_DIM


def test_a_trial_leaves_nothing_behind():
    class Keeps(Mixer):
        def __init__(self):
            super().__init__()
            self.seen = []
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.seen.append(x)
            self.calls += 1
            random.random()
            return super().forward(x)

    model, called = Model(Keeps), []
    model.layer.projection.register_forward_hook(lambda *args: called.append(args))
    state = random.getstate()
    betahook.attach(model).detach()
    assert random.getstate() == state
    assert not model.layer.seen
    assert not called
    assert model.layer.calls == 0


def test_a_trial_runs_no_compiled_code():
    """It would read the memory of tensors that have none, and crash."""

    class Normed(nn.Module):
        num_heads = 4

        def __init__(self):
            super().__init__()
            self.qkv, self.norm = nn.Linear(32, 96), torch.compile(nn.LayerNorm(32), backend=run)

        def forward(self, x):
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v)

    def run(graph, inputs):
        return lambda *args: seen.append(args) or graph(*args)

    seen, module = [], Normed()
    module(torch.randn(2, 5, 32))
    (seen_before,) = seen
    with betahook.attach(module) as hook:
        assert hook.layers[""].head_dim == 8
    assert seen == [seen_before]


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind is not CausalByHandAttention])
def test_attach_before_the_weights_are_there(kind):
    """On the meta device, where a model is made that is to be sharded or loaded; a mask on the CPU does not fit it."""
    loaded, x = Model(kind).eval(), torch.randn(BATCH, LENGTH, WIDTH)
    with torch.device("meta"):
        model = Model(kind).eval()
    hooks = [betahook.attach(each, controller="monitor", when="always") for each in (loaded, model)]
    model.to_empty(device="cpu").load_state_dict(loaded.state_dict())
    for hook in hooks:
        hook.model(x).sum().backward()
        hook.step()
    assert hooks[1].metrics() == hooks[0].metrics()


class Packed(nn.Module):
    """A linear map without parameters, its entries of a byte each."""

    in_features = WIDTH

    def __init__(self):
        super().__init__()
        self.register_buffer("entries", torch.randint(256, (3 * WIDTH, WIDTH), dtype=torch.uint8))
        self.register_buffer("scale", torch.tensor(0.01))

    def forward(self, x):
        return x @ (self.entries * self.scale).mT


def test_a_trial_runs_in_the_dtype_of_the_numbers_and_not_of_packed_entries():
    module = Mixer()
    module.projection = Packed()
    assert trial.run(module.double()).size == (HEADS, HEAD_DIM)


class Quantised(nn.Module):
    """A linear map whose first parameter is quantised, as in bitsandbytes; there may be no other."""

    in_features = WIDTH

    def __init__(self, dtype, has_scale):
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-9, 9, (3 * WIDTH, WIDTH), dtype=dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.full((3 * WIDTH, 1), 0.01)) if has_scale else 0.01

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.scale).mT


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
@pytest.mark.parametrize("has_scale", [False, True])
def test_a_trial_does_not_run_in_the_dtype_of_quantised_weights(dtype, has_scale):
    model = Model(Mixer)
    model.layer.projection = Quantised(dtype, has_scale)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        assert [(layer.heads, layer.head_dim) for layer in hook.layers.values()] == [(HEADS, HEAD_DIM)]
        model(torch.randn(BATCH, LENGTH, WIDTH))
        assert int(hook.layers["layer"].statistics.count) == BATCH * HEADS * LENGTH**2


class OutOfAnEmbedding(nn.Module):
    """Gets q, k and v, whose width shows behind the attention only; other numbers of its weights fit as well."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.table = nn.Embedding(8, 4)
        self.out = nn.Linear(32, 32)

    def forward(self, q, k, v):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (q, k, v))
        return self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_an_input_that_the_module_does_not_take_to_its_end_tells_no_width():
    attention = type("CoreAttention", (OutOfAnEmbedding,), {})()
    assert trial.run(attention).size == (4, 8)
