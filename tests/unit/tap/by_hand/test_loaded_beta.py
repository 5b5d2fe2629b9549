"""A loaded beta acts in the first forward, whose products nobody has seen yet."""

import copy
import functools
import types

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import betahook
from support.attention import HEADS, LENGTH, WIDTH, Block
from support.mixing import ROOT, make, raw_scores


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


def set_or_load(hook, x, state):
    """Set a beta after a forward and return the state; or load the state that was returned."""
    if state is None:
        hook.model(x)
        hook.layers["1"].beta = 0.7
        return hook.state_dict()
    hook.load_state_dict(state)
    return state


@pytest.mark.oldest_skips("torch crashes where a module with a generator is copied without data")
def test_the_first_forward_with_a_loaded_beta_draws_once_from_a_generator_of_the_module(x):
    def mix(module, q, k, v):
        return (q @ k.mT * ROOT).softmax(-1) @ v + torch.rand((), generator=module.generator)

    model = make(mix)
    model[1].generator = torch.Generator()
    drawn = []
    state = None
    for _ in range(2):
        with betahook.attach(model, controller="monitor") as hook:
            state = set_or_load(hook, x, state)
            model[1].generator.manual_seed(3)
            drawn.append((model(x), model[1].generator.get_state()))
    for one, other in zip(*drawn, strict=True):
        assert torch.equal(one, other)


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


calls = 0
"""Number of forwards, which the forward below counts as a global variable."""


class Store:
    """Keeps attention weights, as prompt-to-prompt does."""

    def __init__(self):
        self.calls, self.weights = 0, {"all": []}

    def __call__(self, weights):
        self.calls += 1
        self.weights["all"].append(weights.detach())
        return weights


def storing(attention, store, report):
    """A forward that writes to variables around it, and to objects in them."""
    seen = 0

    @functools.wraps(attention.forward)
    def forward(x):
        global calls, last
        nonlocal seen
        q, k, v = (attention.split(layer(x)) for layer in (attention.q_proj, attention.k_proj, attention.v_proj))
        calls, seen = calls + 1, seen + 1
        report((calls, seen, "last" in globals()))
        last = store((q @ k.mT * ROOT).softmax(-1))
        return (last @ v).transpose(1, 2).flatten(2)

    return forward


def test_the_first_forward_with_a_loaded_beta_writes_once_outside_of_its_module(x):
    global calls
    model, state, outputs = make(lambda module, q, k, v: None), None, []
    for _ in range(2):
        store, reports = Store(), []
        model[1].forward = storing(model[1], store, reports.append)
        with betahook.attach(model, controller="monitor") as hook:
            state = set_or_load(hook, x, state)
            calls, store.calls, store.weights["all"][:], reports[:] = 0, 0, [], []
            globals().pop("last")
            outputs.append(model(x))
    assert torch.equal(*outputs)
    assert (calls, store.calls, len(store.weights["all"])) == (1, 1, 1)
    assert torch.equal(last, store.weights["all"][0])
    assert reports == [(1, 2, False)]  # attach ran it once, without data


class Decoding(Block):
    """One token at a time, with the keys and values of earlier ones in one kind of cache."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.table, self.entries = kind, {}, []
        layer = types.SimpleNamespace(keys=None, values=None)
        self.object = types.SimpleNamespace(entries=[], tensors=[tuple(CACHES["tensors"]())], layers=[layer])

    def forward(self, x, cache=None, again=None):
        assert again is None or again is x  # as a self-attention may ask
        q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        k, v = self.grown(k, v, cache) if cache is not None else (k, v)
        return self.mix(q, k, v).transpose(1, 2).flatten(2)

    def mix(self, q, k, v):
        return (q @ k.mT * ROOT).softmax(-1) @ v

    def grown(self, k, v, cache):
        if self.kind in ("tensors", "own tensors"):  # of which the last is how many entries the others have
            keys, values, length = cache if self.kind == "tensors" else self.object.tensors[0]
            entry = slice(int(length), int(length) + 1)
            keys[:, :, entry], values[:, :, entry] = k, v
            length += 1
            return keys[:, :, : entry.stop], values[:, :, : entry.stop]
        if self.kind == "own layers":  # whose attributes are replaced
            layer = self.object.layers[0]
            layer.keys = k if layer.keys is None else torch.cat([layer.keys, k], 2)
            layer.values = v if layer.values is None else torch.cat([layer.values, v], 2)
            return layer.keys, layer.values
        entries = {
            "list": cache,
            "dictionary": cache.setdefault("entries", []) if isinstance(cache, dict) else None,
            "own list": self.entries,
            "own dictionary": self.table.setdefault("entries", []),
            "own object": self.object.entries,
        }[self.kind]
        entries.append((k, v))
        return (torch.cat(parts, 2) for parts in zip(*entries, strict=True))


CACHES = {
    "tensors": lambda: [*torch.zeros(2, 3, HEADS, LENGTH, WIDTH // HEADS), torch.zeros((), dtype=torch.int64)],
    "list": list,
    "dictionary": dict,
    "own list": list,
    "own dictionary": list,
    "own object": list,
    "own tensors": list,
    "own layers": list,
}


@torch.no_grad()
def decoded(model, x, cache):
    return torch.cat([model(part, cache, part) for part in x.split(1, 1)], 1)


@pytest.mark.parametrize("kind", CACHES)
def test_a_loaded_beta_decodes_from_the_first_token_on(x, kind):
    """A dry run that fills a cache would leave a token in it twice."""
    torch.manual_seed(0)
    model = Decoding(kind)
    fresh = copy.deepcopy(model)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        hook.layers[""].beta = 1.5
        state, expected = hook.state_dict(), decoded(model, x, CACHES[kind]())
    with betahook.attach(fresh, controller="monitor") as hook:
        hook.load_state_dict(state)
        torch.testing.assert_close(decoded(fresh, x, CACHES[kind]()), expected)


def test_a_loaded_beta_decodes_where_forward_hooks_fill_a_cache(x):
    """As in openai/whisper."""
    torch.manual_seed(0)
    model, fresh = (Decoding("by hooks") for _ in range(2))
    fresh.load_state_dict(model.state_dict())

    def filling(cache):
        def fill(module, args, output):
            cache[module] = torch.cat([cache[module], output], 1) if module in cache else output
            return cache[module]

        return fill

    def run(model):
        fill = filling({})
        hooks = [part.register_forward_hook(fill) for part in (model.k_proj, model.v_proj)]
        with torch.no_grad():
            outputs = [model(part) for part in x.split(1, 1)]
        for each in hooks:
            each.remove()
        return torch.cat(outputs, 1)

    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        hook.layers[""].beta = 1.5
        state, expected = hook.state_dict(), run(model)
    with betahook.attach(fresh, controller="monitor") as hook:
        hook.load_state_dict(state)
        assert torch.equal(run(fresh), expected)
