"""Finding the attention modules of a model."""

import functools
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from betahook.models import discovery, trial
from betahook.models.discovery import Survey, survey
from support.models import CONFIGS, build


class Calls(nn.Module):
    def forward(self, x):
        return transformers.AttentionInterface().get_interface("eager", None)


class Inherits(Calls):
    pass


class Helper(nn.Module):
    def choose(self, registry):
        return registry.get_interface("eager", None)


class CallsSuper(Calls):
    def forward(self, *args):
        return super().forward(*args)


class CallsBase(Calls):
    def forward(self, *args):
        return Calls.forward(self, *args)


Asking = Calls


class CallsAlias(Calls):
    def forward(self, *args):
        return Asking.forward(self, *args)


class CallsSuperLater(Calls):
    def forward(self, *args):
        def run():
            return super(CallsSuperLater, self).forward(*args)

        return run()


class OverridesAll(Calls):
    """Has neither the base's attention, nor one of its own."""

    def forward(self, *args):
        return args if isinstance(self, OverridesAll) else None


class Decorated(nn.Module):
    @staticmethod
    def keep(function):
        @functools.wraps(function)
        def inner(*args):
            return function(*args)

        return inner

    forward = keep(Calls.forward)


class DecoratedSuper(Calls):
    @Decorated.keep
    def forward(self, *args):
        return super().forward(*args)


class ByHandAttention(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


class MatmulAttention(nn.Module):
    def scores(self, x):
        return torch.matmul(x, x.mT)

    def forward(self, x):
        return nn.Softmax(-1)(self.scores(x)) @ x


class NestedAttention(nn.Module):
    def forward(self, x):
        def weights(y):
            return torch.bmm(y, y.mT).softmax(-1)

        return weights(x)


class Torchs(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Product(nn.Module):
    def forward(self, x):
        return torch.matmul(x, x.mT)


class WithPartsAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.product, self.normalise = Product(), nn.Softmax(-1)

    def forward(self, x):
        return self.normalise(self.product(x))


class Fused(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class Mixer(nn.Module):
    """A softmax and a product, but nothing that calls it attention."""

    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


class LinearAttention(nn.Module):
    def forward(self, x):
        return x @ (x.mT @ x)


def sized(module, heads=2, head_dim=4):
    module.num_heads, module.head_dim = heads, head_dim
    return module


@pytest.mark.parametrize(
    "cls",
    [Calls, Inherits, CallsSuper, CallsBase, CallsAlias, CallsSuperLater, Helper, Decorated, DecoratedSuper],
)
def test_modules_that_ask_the_interface_are_found_by_their_code(cls):
    assert survey(sized(cls())).found[""].route == "interface"


@pytest.mark.parametrize(
    "cls", [ByHandAttention, Fused, MatmulAttention, WithPartsAttention, nn.MultiheadAttention, Torchs, NestedAttention]
)
def test_modules_that_compute_their_scores_are_found_by_their_code(cls):
    module = cls(8, 2) if issubclass(cls, nn.MultiheadAttention) else sized(cls())
    assert survey(module).found[""].route == ("torch" if cls is Fused else "by hand")


@pytest.mark.parametrize("module", [Mixer(), OverridesAll(), nn.Linear(2, 2), nn.Module()], ids=type)
def test_modules_that_are_no_attention_are_left_alone(module):
    assert survey(sized(module)) == Survey(module, {}, {})


def test_the_attention_may_be_kept_apart_from_the_module():
    """As in diffusers, whose modules call a processor."""

    class Processor:
        def __call__(self, attention, x):
            return F.scaled_dot_product_attention(x, x, x)

    module = type("Attention", (nn.Module,), {"forward": lambda self, x: self.processor(self, x)})()
    module.processor = Processor()
    assert survey(sized(module)).found[""].route == "torch"


def test_modules_of_one_class_may_keep_different_attentions():
    """And none decides for another, nor for a later model."""

    class ByTorch:
        def __call__(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    class ByHand:
        def __call__(self, x):
            return (x @ x.mT).softmax(-1) @ x

    kind = type("Attention", (nn.Module,), {})
    model = nn.ModuleList(sized(kind()) for _ in range(3))
    for module, processor in zip(model, (ByTorch(), ByHand(), None), strict=True):
        module.processor = processor
    for _ in range(2):
        seen = survey(model)
        assert {name: found.route for name, found in seen.found.items()} == {"0": "torch", "1": "by hand"}
        assert list(seen.not_reached) == ["2"]
    model[0].processor = ByHand()
    assert survey(model).found["0"].route == "by hand"


def test_a_class_that_gets_another_forward_is_read_again(monkeypatch):
    """As the libraries do that patch classes of transformers."""
    module = sized(type("SomeAttention", (ByHandAttention,), {})())
    assert survey(module).found[""].route == "by hand"
    monkeypatch.setattr(type(module), "forward", Calls.forward)
    assert survey(module).found[""].route == "interface"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_wrapper_around_the_forward_of_a_class_of_transformers_is_seen_through(monkeypatch, depth):
    """Also without `functools.wraps`, which would name the original."""

    def timed(forward):
        def run(*args, **kwargs):
            return forward(*args, **kwargs)

        return run

    model = build("llama", "sdpa")
    kind = type(model.model.layers[0].self_attn)
    for _ in range(depth):
        monkeypatch.setattr(kind, "forward", timed(kind.forward))
    assert [each.route for each in survey(model).found.values()] == ["interface"] * 2


def test_parts_of_one_attention_in_another_are_not_shared():
    model = build("llama")
    outer, other = (layer.self_attn for layer in model.model.layers)
    outer.inner, other.q_proj = build("llama").model.layers[0].self_attn, outer.q_proj
    shared = {one.module: one.shared for one in survey(model).found.values()}
    assert len(shared) == 3
    assert shared[outer.inner] == set()
    assert shared[other] == {outer.q_proj}
    assert outer.q_proj in shared[outer]


def test_of_two_that_hold_one_another_the_inner_one_is_found():
    outer = sized(ByHandAttention())
    outer.core = sized(Fused())
    assert list(survey(outer).found) == ["core"]


def test_gpt2_goes_past_the_interface_when_it_upcasts():
    model = build("gpt2", reorder_and_upcast_attn=True)
    assert all(found.route == "by hand" for found in survey(model).found.values())


@pytest.mark.oldest_skips("T5 writes its attention by hand", family="t5")
@pytest.mark.parametrize("family", CONFIGS)
def test_every_attention_of_a_model_is_found_with_its_size(family):
    model = build(family)
    found = survey(model).found.values()
    config = model.config
    width = getattr(config, "d_kv", None) or getattr(config, "head_dim", None) or 32 // config.num_attention_heads
    # T5 has self-attention in its encoder, self- and cross-attention in its decoder.
    assert len(found) == config.num_hidden_layers * (3 if family == "t5" else 1)
    assert [(x.heads, x.head_dim) for x in found] == [(config.num_attention_heads, width)] * len(found)


def test_attention_that_is_not_reached_is_named_with_the_reason():
    model = nn.Module()
    model.inside = sized(Calls())
    model.inside.rotary_attention = LinearAttention()  # part of a layer that is reached
    model.inside.indexer = type("SparseIndexer", (ByHandAttention,), {})()
    model.linear = LinearAttention()
    model.unknown = ByHandAttention()
    model.landmarks = type("NystromformerSelfAttention", (ByHandAttention,), {})()
    model.feed_forward = nn.Linear(2, 2)
    model.output = type("AttentionOutput", (nn.Linear,), {})(2, 2)
    model.around = type("BlockAttention", (nn.Module,), {})()  # holds a layer that is reached
    model.around.attention = sized(Calls())
    seen = survey(model)
    assert list(seen.found) == ["inside", "around.attention"]
    assert seen.not_reached == {
        "inside.indexer": "SparseIndexer: it picks the keys of another attention, without a softmax",
        "linear": "LinearAttention: neither its code nor the functions that it calls by name have a product followed "
        "by a softmax; attention by F.scaled_dot_product_attention would be recognised",
        "unknown": "ByHandAttention: it says neither how many heads it has nor how wide they are: set its attributes "
        "num_heads and head_dim before attach",
        "landmarks": "NystromformerSelfAttention: it approximates the softmax by landmarks",
    }
    assert list(survey(LinearAttention()).not_reached) == ["the model"]


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def scaled(x, scale):
    return (scale * x @ x.mT).softmax(-1) @ x


class GivenAttention(nn.Module):
    """Computes its attention by a function that it was given, as open_lm's does."""

    def __init__(self, function):
        super().__init__()
        self.num_heads, self.head_dim, self.function = 4, 8, function

    def forward(self, x):
        return self.function(x, x, x)


@pytest.mark.parametrize(
    ("function", "route"),
    [
        (attend, "torch"),
        (functools.partial(attend), "torch"),
        (F.scaled_dot_product_attention, "torch"),
        (functools.partial(scaled, scale=2.0), "by hand"),
        (F.gelu, None),
        (F.softmax, None),
    ],
)
def test_a_function_that_a_module_holds_is_read(function, route):
    found = survey(GivenAttention(function)).found
    assert [each.route for each in found.values()] == ([route] if route else [])


class WeightsWithBackward(torch.autograd.Function):
    """Attention weights with a backward of their own, as in EDM."""

    @staticmethod
    def forward(ctx, q, k):
        return (q @ k.mT).softmax(-1)


class Block(nn.Module):
    """Attention by such a function, and nothing that calls it one."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim, self.qkv = 4, 8, nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return (WeightsWithBackward.apply(q, k) @ v).transpose(1, 2).flatten(2)


def test_a_function_with_a_backward_of_its_own_is_read():
    assert [each.route for each in survey(Block()).found.values()] == ["by hand"]


class Backend:
    @staticmethod
    def mix(q, k, v):
        return attend(q, k, v)


double = functools.partial(scaled, scale=2.0)
of_torch = functools.partial(F.scaled_dot_product_attention, is_causal=True)


def test_a_partial_function_and_a_static_method_are_read():
    def calling(mix):
        return type("Block", (Block,), {"forward": lambda self, x: mix(self.qkv(x))})()

    blocks = [
        calling(mix) for mix in (lambda x: double(x), lambda x: of_torch(x, x, x), lambda x: Backend.mix(x, x, x))
    ]
    routes = [[each.route for each in survey(block).found.values()] for block in blocks]
    assert routes == [["by hand"], ["torch"], ["torch"]]


class Pooled(nn.Module):
    """Has an attention of its own, written in its forward, behind that of its layers."""

    def __init__(self):
        super().__init__()
        self.encoder = sized(Fused())

    def forward(self, x):
        x = self.encoder(x)
        return F.scaled_dot_product_attention(x[:, :1], x, x)


class PooledByHand(Pooled):
    def forward(self, x):
        x = self.encoder(x)
        return (x[:, :1] @ x.mT).softmax(-1) @ x


class Sampler(Pooled):
    """A language model, whose generate takes a softmax."""

    def forward(self, x):
        return self.encoder(x) @ x.mT

    def generate(self, x):
        return torch.multinomial(self(x).softmax(-1), 1)


class Classifier(Pooled):
    """As the Transformer2DModel of diffusers, which has a product in one method and returns classes in another."""

    def forward(self, x):
        return F.log_softmax(self.unpatchify(self.encoder(x)), -1)

    def unpatchify(self, x):
        return torch.einsum("bij,bkj->bik", x, x)


def configured(module):
    """As a language model, whose config is that of its layers."""
    module.config = types.SimpleNamespace(num_attention_heads=4, head_dim=8)
    return module


class AttentionBlock(PooledByHand):
    """Called attention."""


class WrapperAttention(nn.Module):
    """Called attention, for that of its part."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.MultiheadAttention(32, 4)

    def forward(self, x):
        return self.encoder(x, x, x)[0]


@pytest.mark.parametrize(
    ("outer", "named"),
    [
        (Pooled(), True),
        (AttentionBlock(), True),
        (WrapperAttention(), False),
        (sized(WrapperAttention()), False),
        (sized(PooledByHand()), True),
        (PooledByHand(), False),
        (Sampler(), False),
        (configured(Sampler()), False),
        (sized(Classifier()), False),
    ],
)
def test_attention_around_other_attention_is_named(outer, named):
    """Where it asks for a kernel, is called attention, or says how many heads it has; else it may be something else."""
    seen = survey(nn.Sequential(outer))
    assert list(seen.found) == ["0.encoder"]
    assert ("0" in seen.not_reached) is named
    if named:
        reason = "it contains attention modules, which are hooked, so attention that it computes itself is not reached"
        assert reason in seen.not_reached["0"]


def test_attention_around_what_cannot_be_hooked_is_named():
    class OddAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x, *, needed):
            return (x @ self.weight @ x.mT).softmax(-1) @ x

    outer = AttentionBlock()
    outer.encoder = OddAttention()
    seen = survey(nn.Sequential(outer, nn.MultiheadAttention(32, 4)))
    assert list(seen.found) == ["1"]
    assert "it contains a module that looks like attention" in seen.not_reached["0"]
    assert "it says neither how many heads" in seen.not_reached["0.encoder"]


class BasicAttention(nn.Module):
    def forward(self, q, k):
        return (q @ k.mT).softmax(-1) @ k


class Reader(nn.Module):
    """It holds an encoder, and an attention without weights beside that."""

    def __init__(self):
        super().__init__()
        self.encoder, self.pool = nn.MultiheadAttention(32, 4, batch_first=True), BasicAttention()

    def forward(self, x):
        x, _ = self.encoder(x, x, x)
        return self.pool(x[:, :1], x)


def test_attention_without_weights_beside_other_attention_is_named():
    seen = survey(nn.Sequential(Reader()))
    assert list(seen.found) == ["0.encoder"]
    assert list(seen.not_reached) == ["0.pool"]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 2))])
def test_attention_that_torch_jit_compiled_is_named(compiled):
    seen = survey(nn.Sequential(compiled(LinearAttention()), nn.ReLU(), compiled(nn.ReLU())))
    assert list(seen.not_reached) == ["0"]
    assert "torch.jit compiled this LinearAttention" in seen.not_reached["0"]


def normalised(scores: torch.Tensor):
    return F.softmax(scores, -1)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    return torch.softmax(torch.matmul(q, k.mT), -1) @ v


def doubled(x: torch.Tensor):
    return 2 * x


with warnings.catch_warnings(action="ignore"):  # torch would rather see them compiled
    normalised, attended, doubled = map(torch.jit.script, (normalised, attended, doubled))


class TaskHead(nn.Module):
    """Its product is in its code, its softmax is not, as in Graphormer-3D."""

    scale = staticmethod(doubled)

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return normalised(self.scale(self.q_proj(x)) @ self.k_proj(x).mT) @ x


class OfAMember(TaskHead):
    """As in EGT, which calls all of it by a static method."""

    weigh = staticmethod(attended)

    def forward(self, x):
        return self.weigh(self.q_proj(x), self.k_proj(x), x)


class InAPart(nn.Module):
    def forward(self, scores):
        return normalised(scores)


class OfAPart(TaskHead):
    def __init__(self):
        super().__init__()
        self.normalise = InAPart()

    def forward(self, x):
        return self.normalise(self.q_proj(x) @ self.k_proj(x).mT) @ x


class WithoutSoftmax(TaskHead):
    def forward(self, x):
        return doubled(self.q_proj(x) @ self.k_proj(x).mT) @ x


@pytest.mark.parametrize(("kind", "name"), [(TaskHead, "normalised"), (OfAMember, "attended"), (OfAPart, "normalised")])
@pytest.mark.parametrize("is_named", [True, False])
def test_attention_that_calls_a_scripted_function_is_named(kind, name, is_named):
    kind = type(f"{kind.__name__}{'Attention' * is_named}", (kind,), {})
    seen = survey(nn.Sequential(kind(), kind(), WithoutSoftmax()))
    assert list(seen.not_reached) == ["0", "1"]
    assert not seen.found
    reason = f"it calls {name}, whose scores are hidden, since torch.jit.script compiled it: keep it in Python"
    assert seen.not_reached["0"] == f"{kind.__name__}: {reason}"


class Normalise(nn.Module):
    """Takes a softmax, and has nothing else."""

    def forward(self, scores):
        return scores.softmax(-1)


class CoreAttention(nn.Module):
    """Takes products, with the softmax in a module of its own, as Megatron has it."""

    def __init__(self):
        super().__init__()
        self.normalise = Normalise()

    def forward(self, q, k, v):
        return self.normalise(q @ k.mT * 8**-0.5) @ v


class HoldsCore(nn.Module):
    num_attention_heads, head_dim = 4, 8

    def __init__(self):
        super().__init__()
        self.core, self.qkv = CoreAttention(), nn.Linear(32, 96)

    def forward(self, x):
        return self.core(*self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4))


def test_a_softmax_in_a_part_of_a_part():
    survey = discovery.survey(nn.Sequential(HoldsCore()))
    assert list(survey.found) == ["0"]
    assert survey.not_reached == {}


class Processor(nn.Module):
    """With weights and an attention of its own, called past its forward, as processors of diffusers are."""

    def __init__(self):
        super().__init__()
        self.to_k = nn.Linear(32, 32)

    def __call__(self, attention, x):
        q, k = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (attention.to_q, self.to_k))
        return F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


class HasProcessor(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.head_dim, self.to_q, self.processor = 4, 8, nn.Linear(32, 32), Processor()

    def forward(self, x):
        return self.processor(self, x)


def test_what_is_called_past_its_forward_belongs_to_its_caller():
    survey = discovery.survey(nn.Sequential(HasProcessor()))
    assert list(survey.found) == ["0"]
    assert survey.not_reached == {}


class Unsized(nn.Module):
    """An attention that nothing tells the size of, as its forward asks for more than a tensor."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x, options):
        q, k, v = self.qkv(x).unflatten(-1, (3, options["heads"], -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v)


class HoldsUnsized(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.inner = 4, Unsized()

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, self.inner(x, {"heads": 4}))


def test_an_attention_around_one_that_is_not_hooked_is_not_said_to_be_in_its_way():
    survey = discovery.survey(nn.Sequential(HoldsUnsized()))
    assert list(survey.not_reached) == ["0.inner"]


def flash_attn_qkvpacked_func(qkv):
    """As that of flash-attn, which shows nobody what it computes."""


packed = flash_attn_qkvpacked_func


class DDiTBlock(nn.Module):
    """As in MDLM, but for the name of the function."""

    def __init__(self):
        super().__init__()
        self.n_heads, self.head_dim, self.attn_qkv = 4, 4, nn.Linear(16, 48)

    def forward(self, x):
        return packed(self.attn_qkv(x).unflatten(-1, (3, 4, 4)))


class HoldsAKernel(DDiTBlock):
    def __init__(self):
        super().__init__()
        self.kernel = flash_attn_qkvpacked_func

    def forward(self, x):
        return self.kernel(self.attn_qkv(x))


@pytest.mark.parametrize("kind", [DDiTBlock, HoldsAKernel])
def test_a_module_that_calls_a_kernel_that_is_not_followed_is_named_whatever_its_name(kind):
    survey = discovery.survey(nn.Sequential(kind(), nn.MultiheadAttention(16, 4)))
    assert list(survey.found) == ["1"]
    reason = "it calls flash_attn_qkvpacked_func, which is not followed: call flash_attn_func with q, k and v apart"
    assert survey.not_reached == {"0": f"{kind.__name__}: {reason}"}


class TakesPairAttention(nn.Module):
    """Runs on no made-up input."""

    def __init__(self, index, width=16, rotates=True):
        super().__init__()
        self.index, self.num_heads, self.rotates = index, 4, rotates
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, angles):
        (cos, sin), q, k = angles, self.q(x).view(3, 7, 4, -1), self.k(x).view(3, 7, 4, -1)
        return (q * cos @ (k * sin).mT).softmax(-1) @ k


def test_no_more_than_two_of_a_kind_are_tried_in_vain(monkeypatch):
    tried, run = [], trial.run
    monkeypatch.setattr(trial, "run", lambda module: tried.append(module) or run(module))
    alike = [TakesPairAttention(index) for index in range(4)]
    others = [TakesPairAttention(4, width=32), TakesPairAttention(5, rotates=False)]
    assert len(survey(nn.ModuleList([*alike, *others])).found) == 6
    assert tried == [*alike[:2], *others]
