"""Sums over scores against the full score matrix in float64."""

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from betahook import masks, scores
from betahook.masks import Band, Mask

HEAD_DIM = 8
LENGTHS = [1, 2, 63, 64, 65, 130, 200]
"""Around the ends of blocks."""

BANDS = {
    "full": (Band(), 0),
    "causal": (Band(None, 0), 0),
    "causal behind a cache": (Band(None, 5), 5),
    "causal behind a cache longer than a block": (Band(None, 70), 70),
    "sliding window": (Band(-9, 0), 0),
    "sliding window longer than a block": (Band(-67, 0), 0),
    "sliding window behind a cache": (Band(-4, 6), 6),
    "sliding window longer than everything": (Band(-1000, 0), 0),
    "window in both directions": (Band(-8, 7), 0),
    "window in both directions longer than a block": (Band(-70, 69), 0),
    "full, fewer keys": (Band(), -3),
    "causal, fewer keys": (Band(None, -3), -3),
    "causal, fewer keys, all that came before": (Band(None, 0), -3),
    "window in both directions, fewer keys": (Band(-8, 7), -3),
    "open above": (Band(2, None), 0),
}
"""A band, and by how many the keys exceed the queries."""


def make(queries, keys, *, batch=2, heads=2, key_heads=2, dtype=torch.float32, query_mean=0.0, key_mean=0.0):
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(batch, heads, queries, HEAD_DIM, generator=generator, dtype=torch.float64)
    key = torch.randn(batch, key_heads, keys, HEAD_DIM, generator=generator, dtype=torch.float64)
    return (query + query_mean).to(dtype), (2 * key + key_mean).to(dtype)


def pairs_of(band, queries, keys):
    distance = torch.arange(keys) - torch.arange(queries)[:, None]
    low = -math.inf if band.low is None else band.low
    high = math.inf if band.high is None else band.high
    return (distance > low) & (distance <= high)


def full(query, key):
    """All scores in float64, `[batch, heads, queries, keys]`, the keys repeated for grouped-query attention."""
    key = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    return torch.einsum("bhqd,bhkd->bhqk", query.double(), key)


def used(query, key, allowed):
    """The scores of each head over the allowed pairs, one flat tensor a head."""
    matrix = full(query, key)
    return [head[pairs] for head, pairs in zip(matrix.unbind(1), allowed.expand_as(matrix).unbind(1), strict=True)]


def exact(query, key, mask):
    """`score_sums` as a layer calls it, centred at the mean of the queries that take part."""
    return with_key_moments(query, key, mask)[0]


def with_key_moments(query, key, mask):
    return scores.score_sums(query, key, mask, scores.components(query, mask.queries).mean)


def assert_components(found, tokens, valid, rel=1e-5):
    """Compare count, mean and variance with those of the tokens that take part, in float64."""
    keep = torch.ones(1, tokens.shape[2], dtype=torch.bool) if valid is None else valid
    chosen = tokens.double().transpose(1, 2)[keep.expand(len(tokens), -1)]
    assert found.count == len(chosen)
    torch.testing.assert_close(found.mean.double(), chosen.mean(0), rtol=rel, atol=1e-6)
    torch.testing.assert_close(found.variance.double(), chosen.var(0, correction=0), rtol=rel, atol=0)


def assert_sums(sums, expected, rel=1e-5):
    """Compare number, mean and standard deviation; the sums themselves would hide a wrong spread under a large mean."""
    assert sums.pairs.tolist() == [len(x) for x in expected]
    for head, x in enumerate(expected):
        count = sums.pairs[head].item()
        if count == 0:
            assert sums.score[head] == sums.score_square[head] == 0
            continue
        mean = sums.score[head].item() / count
        variance = sums.score_square[head].item() / count - mean**2
        assert mean == pytest.approx(x.mean().item(), rel=rel, abs=rel * x.std(correction=0).item() + 1e-12)
        # One score has no spread: what is left is the rounding of its square.
        noise = 1e-6 * x.square().mean().item()
        assert math.sqrt(max(variance, 0)) == pytest.approx(
            x.std(correction=0).item(), rel=rel, abs=math.sqrt(noise) if count == 1 else 0
        )


@pytest.fixture(params=[1, 3])
def blocks_at_once(request, monkeypatch):
    """How many blocks of queries are worked on at once: one on the CPU, more on an accelerator and compiled."""

    def slabs(length, device):
        step = request.param * scores.BLOCK
        return [(start, min(start + step, length)) for start in range(0, length, step)]

    monkeypatch.setattr(scores, "_slabs", slabs)


@pytest.mark.usefixtures("blocks_at_once")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", BANDS)
def test_sums_over_bands(name, length):
    band, more = BANDS[name]
    keys = max(length + more, 1)
    query, key = make(length, keys, query_mean=0.3, key_mean=-0.5)
    expected = used(query, key, pairs_of(band, length, keys))
    assert_sums(exact(query, key, Mask(band)), expected)
    if length <= scores.ROWS:
        assert_sums(scores.row_sums(query, key, Mask(band), torch.tensor(1.0)).scores, expected)


PADDING = {
    "right": lambda tokens: tokens < 50,
    "left": lambda tokens: tokens >= 20,
    "scattered": lambda tokens: tokens % 3 != 1,
    "everything": lambda tokens: tokens < 0,
}


@pytest.mark.parametrize("batch", [1, 2], ids=["one padding for all", "its own for each"])
@pytest.mark.parametrize("name", ["full", "causal", "sliding window behind a cache", "window in both directions"])
@pytest.mark.parametrize("side", PADDING)
@pytest.mark.parametrize("of", ["queries", "keys", "both"])
def test_padding_takes_no_part(name, side, of, batch):
    band, more = BANDS[name]
    queries, keys = 70, 70 + more
    query, key = make(queries, keys, query_mean=0.3, key_mean=-0.5)
    valid = [PADDING[side](torch.arange(size)).repeat(batch, 1) for size in (queries, keys)]
    if batch == 2:
        valid = [torch.cat([torch.ones_like(part[:1]), part[1:]]) for part in valid]
    valid = [part if of in (which, "both") else None for part, which in zip(valid, ("queries", "keys"), strict=True)]
    allowed = pairs_of(band, queries, keys).expand(batch, 1, -1, -1)
    for part, dim, tokens in zip(valid, (-1, -2), (query, key), strict=True):
        if part is not None:
            allowed = allowed & part[:, None].unsqueeze(dim)
            tokens.masked_fill_(~part[:, None, :, None], 1e3)  # whatever padding holds, it must not be seen
    mask = Mask(band, *valid)
    assert_sums(exact(query, key, mask), used(query, key, allowed))
    picked = scores.sampled_rows(queries, query.device)
    rows = scores.row_sums(query, key, mask, torch.tensor(1.0))
    expected = used(query[:, :, picked], key, allowed[:, :, picked])
    assert_sums(rows.scores, expected)
    assert rows.max_score.tolist() == pytest.approx([max([0, *x.abs().tolist()]) for x in expected], rel=1e-5)


@pytest.mark.usefixtures("blocks_at_once")
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("name", ["full", "causal behind a cache", "window in both directions"])
def test_grouped_queries_share_their_key_head(name, key_heads):
    band, more = BANDS[name]
    query, key = make(65, 65 + more, heads=4, key_heads=key_heads, query_mean=0.3, key_mean=-0.5)
    query *= torch.arange(1.0, 5).view(4, 1, 1)  # heads that cannot be taken for each other
    allowed = pairs_of(band, 65, 65 + more)
    assert_sums(exact(query, key, Mask(band)), used(query, key, allowed))
    picked = scores.sampled_rows(65, query.device)
    rows = scores.row_sums(query, key, Mask(band), torch.tensor(1.0))
    assert_sums(rows.scores, used(query[:, :, picked], key, allowed[picked]))


@pytest.mark.parametrize("name", ["full", "causal", "sliding window", "window in both directions"])
def test_a_mean_far_above_the_spread_costs_no_digits(name):
    band, more = BANDS[name]
    query, key = make(130, 130 + more, query_mean=100, key_mean=-200)
    expected = used(query, key, pairs_of(band, 130, 130 + more))
    assert abs(expected[0].mean()) > 200 * expected[0].std()
    assert_sums(exact(query, key, Mask(band)), expected)


def test_the_centre_changes_the_rounding_only():
    query, key = make(70, 70, dtype=torch.float64)
    centre = torch.randn(2, HEAD_DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = used(query, key, pairs_of(Band(None, 0), 70, 70))
    for query_mean in (centre, torch.zeros_like(centre)):
        assert_sums(scores.score_sums(query, key, Mask(Band(None, 0)), query_mean)[0], expected, rel=1e-10)


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("name", ["full", "causal"])
def test_dtypes(name, dtype, rel):
    band, more = BANDS[name]
    query, key = make(130, 130 + more, dtype=dtype)
    sums, allowed = exact(query, key, Mask(band)), pairs_of(band, 130, 130 + more)
    assert {x.dtype for x in vars(sums).values()} == {torch.float64}
    assert_sums(sums, used(*make(130, 130 + more, dtype=torch.float64), allowed), rel)
    # Against the rounded tokens bfloat16 loses nothing: the sums are taken in float32 or better.
    assert_sums(sums, used(query, key, allowed), min(rel, 1e-5))


def scattered(heads, queries, keys):
    """A 4-D mask without structure, which leaves at least one key to every query."""
    mask = torch.rand(2, heads, queries, keys, generator=torch.Generator().manual_seed(4)) < 0.3
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("heads", [1, 2], ids=["one mask for all heads", "its own for each head"])
@pytest.mark.parametrize("queries", [2, 31, 32, 33, 130])
def test_masks_without_structure_are_sampled(queries, heads):
    query, key = make(queries, queries + 3)
    pairs = scattered(heads, queries, queries + 3)
    mask = masks.from_tensor(pairs, Band())
    assert not mask.structured
    rows = scores.row_sums(query, key, mask, torch.tensor(1.0))
    picked = scores.sampled_rows(queries, query.device)
    assert_sums(
        scores.choose(exact(query, key, mask), rows.scores, mask), used(query[:, :, picked], key, pairs[:, :, picked])
    )
    assert bool(scores.is_exact(mask, queries)) == (queries <= scores.ROWS)


@pytest.mark.parametrize("queries", [20, 130])
def test_masks_with_structure_are_exact(queries):
    query, key = make(queries, queries)
    pairs = pairs_of(Band(None, 0), queries, queries)
    for mask in (masks.from_tensor(pairs.expand(2, 1, -1, -1), Band(None, 0)), Mask(Band(None, 0))):
        rows = scores.row_sums(query, key, mask, torch.tensor(1.0))
        assert_sums(scores.choose(exact(query, key, mask), rows.scores, mask), used(query, key, pairs))
        assert scores.is_exact(mask, queries)


@pytest.mark.parametrize("queries", [1, 31, 32, 33, 64, 1000])
def test_sampled_rows_are_evenly_spaced_with_both_ends(queries):
    rows = scores.sampled_rows(queries, torch.device("cpu")).tolist()
    assert len(rows) == min(queries, scores.ROWS)
    assert (rows[0], rows[-1]) == (0, queries - 1)
    gaps = {b - a for a, b in itertools.pairwise(rows)}
    assert min(gaps, default=1) >= 1
    assert max(gaps, default=1) - min(gaps, default=1) <= 1


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def additive(queries, keys):
    """A causal mask in its additive form, with a bias that differs by pair and is different for each sequence."""
    bias = noise(2, 1, queries, keys)
    return bias.masked_fill(~pairs_of(Band(None, keys - queries), queries, keys), torch.finfo(torch.float32).min)


ENTROPY_MASKS = {
    "none": lambda queries, keys: Mask(Band()),
    "causal": lambda queries, keys: Mask(Band(None, keys - queries)),
    "padded": lambda queries, keys: Mask(Band(), None, (torch.arange(keys) < keys - 4)[None]),
    "boolean": lambda queries, keys: masks.from_tensor(scattered(2, queries, keys), Band()),
    "additive": lambda queries, keys: masks.from_tensor(additive(queries, keys), Band(None, keys - queries)),
}


@pytest.mark.parametrize("queries", [24, 100])
@pytest.mark.parametrize("name", ENTROPY_MASKS)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("beta", [torch.tensor(0.35), torch.tensor([0.1, 2.0])], ids=["one beta", "one a head"])
def test_entropy_is_that_of_the_softmax(queries, name, softcap, biased, beta):
    keys = queries + 3
    query, key = make(queries, keys)
    mask = ENTROPY_MASKS[name](queries, keys)
    position_bias = noise(1, 2, queries, keys) if biased else None

    logits = full(query, key) * beta.double().view(-1, 1, 1)
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    if biased:
        logits = logits + position_bias
    if mask.pairs is None:
        allowed = pairs_of(mask.band, queries, keys) & (True if mask.keys is None else mask.keys[0])
    else:
        allowed = mask.pairs
        logits = logits if mask.bias is None else logits + mask.bias
    picked = scores.sampled_rows(queries, query.device)
    weights = logits.masked_fill(~allowed, -math.inf)[:, :, picked].softmax(-1)
    expected = torch.special.entr(weights).sum((0, 2, 3))

    rows = scores.row_sums(query, key, mask, beta, position_bias=position_bias, softcap=softcap)
    torch.testing.assert_close(rows.entropy, expected, rtol=1e-5, atol=1e-5)
    assert rows.rows.tolist() == [2 * len(picked)] * 2


@pytest.mark.parametrize("form", ["boolean", "additive"])
def test_rows_without_a_key_count_for_nothing(form):
    query, key = make(20, 20)
    pairs = scattered(1, 20, 20)
    pairs[:, :, 7] = False
    pairs[1, :, 9:12] = False
    tensor = (
        pairs if form == "boolean" else torch.zeros(pairs.shape).masked_fill(~pairs, torch.finfo(torch.float32).min)
    )
    rows = scores.row_sums(query, key, masks.from_tensor(tensor, Band()), torch.tensor(1.0))
    weights = full(query, key).masked_fill(~pairs, -math.inf).softmax(-1).nan_to_num(nan=0.0)
    assert rows.rows.tolist() == [2 * 20 - 2 - 3] * 2
    torch.testing.assert_close(rows.entropy, torch.special.entr(weights).sum((0, 2, 3)), rtol=1e-5, atol=1e-5)
    assert_sums(rows.scores, used(query, key, pairs))


def test_without_any_pair_everything_is_zero():
    query, key = make(20, 20)
    mask = masks.from_tensor(torch.zeros(2, 1, 20, 20, dtype=torch.bool), Band(None, 0))
    rows = scores.row_sums(query, key, mask, torch.tensor(1.0))
    for sums in (exact(query, key, mask), rows.scores):
        assert_sums(sums, [torch.empty(0)] * 2)
    assert rows.rows.tolist() == rows.entropy.tolist() == rows.max_score.tolist() == [0, 0]


@pytest.mark.parametrize("scale", [1e4, 1e-4], ids=["a single key", "all keys alike"])
def test_entropy_at_its_ends(scale):
    query, key = make(16, 16)
    rows = scores.row_sums(query, key, Mask(Band()), torch.tensor(scale))
    expected = 0.0 if scale > 1 else math.log(16)
    assert (rows.entropy / rows.rows).tolist() == pytest.approx([expected] * 2, abs=1e-4)


def test_the_largest_score_is_of_the_sampled_pairs_in_use():
    query, key = make(20, 20, batch=1)
    key[:, :, 19] = 1e3  # future: only the last query may see it
    rows = scores.row_sums(query[:, :, :19], key, Mask(Band(None, 0)), torch.tensor(7.0))
    expected = [x.abs().max().item() for x in used(query[:, :, :19], key, pairs_of(Band(None, 0), 19, 20))]
    assert max(expected) < 1e3
    assert rows.max_score.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("beta", [0.05, 0.5])
def test_sampled_rows_are_as_good_as_documented(beta):
    """On unrelated queries, whose rows any subset samples as well as a random one."""
    query, key = make(1000, 1000)
    rows = scores.row_sums(query, key, Mask(Band()), torch.tensor(beta))
    every = full(query, key)
    number, largest = rows.rows[0].item(), rows.max_score.view(1, 2, 1)
    assert number == 2 * scores.ROWS
    assert (largest <= every.abs().amax((0, 2, 3), keepdim=True).view(1, 2, 1) * (1 + 1e-6)).all()
    assert ((every.abs().amax(-1) > largest).double().mean((0, 2)) <= 3 / number).all()
    entropy = torch.special.entr((beta * every).softmax(-1)).sum(-1).mean((0, 2))
    standard_error = math.log(1000) / (2 * math.sqrt(number))
    assert ((rows.entropy / rows.rows - entropy).abs() <= 2 * standard_error).all()


@pytest.mark.parametrize("valid", [None, torch.arange(50) < 33, torch.stack([torch.arange(50) > 5] * 2)], ids=str)
def test_component_moments(valid):
    tokens = make(50, 1, dtype=torch.bfloat16, query_mean=1.5)[0]
    mask = valid if valid is None or valid.dim() == 2 else valid[None]
    assert_components(scores.components(tokens, mask), tokens, mask)


@pytest.mark.parametrize("padding", [None, *PADDING])
@pytest.mark.parametrize("length", [70, 300])
@pytest.mark.parametrize("name", BANDS)
def test_moments_of_the_keys_are_of_all_of_them(name, length, padding):
    """Of those too that no query sees, and of both keys under a group of queries."""
    band, more = BANDS[name]
    query, key = make(70, length + more, heads=4, key_mean=-1.5)
    valid = None if padding is None else PADDING[padding](torch.arange(length + more))[None]
    if padding is not None:
        key.masked_fill_(~valid[:, None, :, None], 1e3)
    _, of_key = with_key_moments(query, key, Mask(band, keys=valid))
    if padding != "everything":
        assert_components(of_key, key, valid)
    for found in (of_key.count, of_key.mean, of_key.variance):
        assert found.any() == (padding != "everything")


def test_component_moments_under_a_mean_far_above_the_spread():
    query, key = make(4000, 4000, query_mean=300, key_mean=600)
    of_query = scores.components(query, None)
    _, of_key = with_key_moments(query, key, Mask(Band(None, 0)))
    for found, tokens in ((of_query, query), (of_key, key)):
        assert_components(found, tokens, None, rel=1e-4)


def test_component_moments_without_a_token_are_zero():
    result = scores.components(make(5, 1)[0], torch.zeros(1, 5, dtype=torch.bool))
    assert not result.mean.any()
    assert not result.variance.any()


def everything(query, key, mask):
    """All that a layer computes in one call, as flat tensors."""
    rows = scores.row_sums(query, key, mask, torch.tensor(0.5), position_bias=noise(1, 2, 130, 130))
    chosen = scores.choose(exact(query, key, mask), rows.scores, mask)
    return [*vars(chosen).values(), rows.rows, rows.entropy, rows.max_score]


STRUCTURES = {
    "band": lambda n: Mask(Band(-70, 0)),
    "mask": lambda n: masks.from_tensor(scattered(1, n, n), Band(None, 0)),
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_measuring_draws_nothing_and_writes_nothing(structure):
    query, key = make(130, 130)
    operands = [query, key, *filter(torch.is_tensor, vars(mask := STRUCTURES[structure](130)).values())]
    copies = [x.clone() for x in operands]
    torch.manual_seed(10)
    first = everything(query, key, mask)
    torch.manual_seed(11)
    state = torch.get_rng_state()
    second = everything(query, key, mask)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(operands, copies, strict=True))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_nothing_is_read_back_to_the_host(structure):
    # Meta tensors have no values: reading one back would raise.
    query, key = (x.to("meta") for x in make(130, 130))
    mask = Mask(
        **{name: x.to("meta") if torch.is_tensor(x) else x for name, x in vars(STRUCTURES[structure](130)).items()}
    )
    rows = scores.row_sums(query, key, mask, torch.empty(2, device="meta"))
    chosen = scores.choose(exact(query, key, mask), rows.scores, mask)
    assert {x.shape for x in (*vars(chosen).values(), rows.rows, rows.entropy, rows.max_score)} == {(2,)}


class Largest(TorchDispatchMode):
    """Remember the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = (x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("band", [Band(), Band(None, 0), Band(-300, 0), Band(-300, 299)], ids=str)
def test_no_quadratic_tensor_is_made(band):
    length = 2048
    query, key = make(length, length, batch=1, heads=1, key_heads=1)
    with Largest() as largest:
        exact(query, key, Mask(band))
        scores.row_sums(query, key, Mask(band), torch.tensor(1.0))
    assert 0 < largest.elements <= length * max(scores.BLOCK, scores.ROWS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_overflow_bound_is_where_the_exponential_overflows(dtype):
    bound = scores.overflow_logit(dtype)
    softmax = torch.promote_types(dtype, torch.float32)
    assert torch.tensor(bound * (1 - 1e-6), dtype=softmax).exp().isfinite()
    assert torch.tensor(bound * (1 + 1e-6), dtype=softmax).exp().isinf()
