"""What a hook must not do to a step of training: wait for the device, or keep the graph."""

import gc
import weakref
from collections import Counter

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import betahook
from betahook.measure import devices
from betahook.tap import gain, opaque
from support.models import build, inputs
from support.operations import Operations
from support.training import CONTROLLERS


def step(model, hook, batch):
    model(**batch).loss.backward()
    hook.step()


class Readbacks(TorchFunctionMode):
    """Count the calls through which Python gets to know a value of a tensor."""

    names = ("item", "tolist", "cpu", "numpy", "equal", "allclose", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self):
        self.calls = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function.__name__ in self.names:
            self.calls[function.__name__] += 1
        return function(*args, **(kwargs or {}))


class Counting(TorchDispatchMode):
    """Count some operations by name."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()


class Waits(Counting):
    """Count the operations that end in a number of the host, or in a tensor whose shape depends on values."""

    names = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "aten.equal", "repeat_interleave.Tensor")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(name in str(function) for name in self.names) and "output_size" not in (kwargs or {}):
            self.calls[str(function)] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.oldest_skips("T5 writes its attention by hand, and has no sdpa", family="t5")
@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5"])
def test_nothing_is_read_back_between_the_forward_and_the_metrics(family, controller):
    model, batch = build(family, "sdpa"), inputs(family)
    with Readbacks() as alone_readbacks, Waits() as alone_waits:
        model(**batch).loss.backward()
    with betahook.attach(model, controller=CONTROLLERS[controller](), interval=2) as hook:
        for _ in range(3):
            with Readbacks() as readbacks, Waits() as waits:
                step(model, hook, batch)
            assert (readbacks.calls, waits.calls) == (alone_readbacks.calls, alone_waits.calls)
        with Readbacks() as readbacks, Waits() as waits:
            hook.metrics()
        # For the table, for the layers that no forward came to, for what holds all controllers, and one for each of
        # these that explains itself; none a layer.
        explained = sum("explain" in vars(type(controller)) for controller in hook.controllers)
        assert 3 <= readbacks.calls["tolist"] <= 3 + explained
        assert sum(waits.calls.values()) > 0


class OnTheHost(Counting):
    """Count the operations that read or write a tensor on the CPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.device.type == "cpu" for tensor in tensors):
            self.calls[str(function)] += 1
        return result


@pytest.mark.oldest_skips("T5 writes its attention by hand, and has no sdpa", family="t5")
@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("family", ["gpt2", "bert", "t5"])
def test_everything_stays_on_the_device_of_the_model(family, controller):
    """Shown on the meta device, which has no values, and for transformers 5.1 no rotary embedding."""
    model = build(family, "sdpa").to("meta")
    batch = {name: tensor.to("meta") for name, tensor in inputs(family, padded=False).items()}
    with betahook.attach(model, controller=CONTROLLERS[controller](), interval=2) as hook:
        hook._state.to(torch.device("meta"))
        step(model, hook, batch)
        for _ in range(2):  # in which Search asks whether W_q and W_k are random: here nobody knows
            with OnTheHost() as host:
                step(model, hook, batch)
            assert not host.calls


@pytest.mark.oldest_skips("T5 writes its attention by hand, and has no sdpa", family="t5")
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5"])
def test_forward_and_step_write_to_the_same_places_all_the_time(family):
    """A CUDA graph reads and writes where it did when it was captured."""
    model, batch = build(family, "sdpa"), inputs(family)

    def places():
        state = hook._state
        return [x.data_ptr() for x in (state.beta, state.beta_default, state.table, state.moments)]

    with betahook.attach(model, controller=betahook.Search(warmup=0, window=1, rise=False)) as hook:
        before, betas = places(), set()
        for _ in range(3):
            step(model, hook, batch)
            betas.add(next(iter(hook.layers.values())).beta)
        hook.load_state_dict(hook.state_dict())
        assert places() == before
        assert len(betas) == 3


@pytest.mark.oldest_skips("torch cannot trace the models at all")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of the import of inductor
def test_a_graph_that_is_launched_without_python_measures_all_layers_by_the_beta_of_the_step():
    """As a CUDA graph is; on the CPU, by a stand-in for it."""
    from support.captured import Captured

    model, batch = build("llama", "sdpa", num_hidden_layers=3), inputs("llama", padded=False)
    said = []
    for captured in (None, Captured()):
        torch._dynamo.reset()
        with betahook.attach(model, controller="monitor", interval=3 if captured else 1) as hook:
            forward = torch.compile(model, backend=captured.backend, fullgraph=True) if captured else model
            steps = []
            for number in range(5):
                model.zero_grad()
                if captured and captured.replays:  # a graph of another length may have written there
                    hook._state.beta_default.zero_()
                shifted = {name: values.roll(number, 1) for name, values in batch.items()}
                loss = forward(**shifted).loss
                loss.backward()
                steps.append([loss.item()])
                for layer in hook.layers.values():
                    found = layer.statistics
                    steps[-1] += [float(x) for x in (found.count, found.std, found.entropy, found.sensitivity)]
                    steps[-1] += [layer.beta, layer.beta_default, float(found.input_std_k)]
                hook.step()
                for sums in (hook._state.table, hook._state.moments):  # which may be pooled later
                    sums.zero_()
                hook._state.gains.set_sensitivity(None)
                for layer in hook.layers.values():
                    layer.beta = 0.3 + 0.1 * number
            said.append(steps)
    written, found_again = captured.inputs
    assert captured.replays == 3
    assert len(written) == 3
    assert written <= found_again
    for eager, replayed in zip(*said, strict=True):
        assert replayed == pytest.approx(eager, rel=1e-4, abs=1e-6)


@pytest.mark.oldest_skips("torch cannot trace the models at all")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of the import of inductor
def test_a_backward_graph_that_uses_its_memory_again_accumulates_the_sensitivity():
    from support.captured import Captured

    model, batch = build("llama", "sdpa"), inputs("llama", padded=False)
    said = []
    for captured in (None, Captured()):
        torch._dynamo.reset()
        with betahook.attach(model, controller="monitor") as hook:
            forward = torch.compile(model, backend=captured.backend, fullgraph=True) if captured else model
            for number in range(8):
                forward(**{name: values.roll(number, 1) for name, values in batch.items()}).loss.backward()
                model.zero_grad()
                if number % 2:
                    hook.step()
                    said.append([float(layer.statistics.sensitivity) for layer in hook.layers.values()])
    assert captured.backward_runs == 8
    assert said[4:] == [pytest.approx(values, rel=1e-4) for values in said[:4]]


@pytest.mark.oldest_skips("torch cannot trace the models at all")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of the same
def test_a_graph_looks_at_a_mask_once_for_all_layers(monkeypatch):
    """On an accelerator, where each operation is a launch."""
    model, launched, run = build("llama", "sdpa", num_hidden_layers=3), [], opaque._run
    batch = {"input_ids": torch.arange(400).view(2, 200) % 64, "attention_mask": torch.ones(2, 200, dtype=torch.long)}
    batch["attention_mask"][0, :50] = 0

    def counted(name, *args):
        with Operations() as operations:
            run(name, *args)
        if name == "_record_call":
            launched.append(operations.calls.total())

    monkeypatch.setattr(opaque, "_run", counted)
    monkeypatch.setattr(devices, "is_cpu", lambda device: False)
    with betahook.attach(model, controller="monitor", interval=1):
        torch.compile(model, backend="aot_eager", fullgraph=True)(**batch)
    first, *others = launched
    assert len(others) == 2
    assert max(others) <= 95
    assert first <= 154


@pytest.mark.parametrize("backward", [False, True], ids=["no backward", "backward"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_graph_is_kept_alive(family, backward):
    model, batch = build(family, "sdpa"), inputs(family)
    with betahook.attach(model) as hook:
        model(**batch).loss.backward()
        activations = []

        def watch(module, args, output):
            parts = output if isinstance(output, tuple) else (output,)
            activations.extend(weakref.ref(part) for part in parts if isinstance(part, torch.Tensor))

        handles = [module.register_forward_hook(watch) for module in model.modules()]
        gc.disable()  # what goes away has to go away by itself
        try:
            output = model(**batch)
            assert len(activations) > 10
            if backward:
                output.loss.backward()
                hook.step()
            del output
            assert [reference for reference in activations if reference() is not None] == []
        finally:
            gc.enable()
        for handle in handles:
            handle.remove()
        assert not any(tensor.requires_grad for tensor in hook.state_dict().values() if torch.is_tensor(tensor))


@pytest.mark.oldest_skips("T5 writes its attention by hand, and has no sdpa", family="t5")
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_detached_model_and_its_hook_go_away_by_themselves(family):
    gc.disable()
    try:
        model, batch = build(family, "sdpa"), inputs(family)
        hook = betahook.attach(model)
        step(model, hook, batch)
        hook.metrics()
        hook.detach()
        alive = [weakref.ref(each) for each in (model, hook, next(model.parameters()))]
        del model, hook
        assert [reference() for reference in alive] == [None, None, None]
    finally:
        gc.enable()


def counted(controller, layers, steps):
    """Operations of some steps of `Hook.step`, by the number of the step from 0 on."""
    model, batch = build("llama", "sdpa", num_hidden_layers=layers), inputs("llama", padded=False)
    counts = {}
    with betahook.attach(model, controller=controller) as hook:
        for index in range(max(steps) + 1):
            model(**batch).loss.backward()
            with Operations() as operations:
                hook.step()
            counts[index] = operations.calls.total()
    return [counts[index] for index in steps]


@pytest.mark.parametrize("layers", [1, 3])
def test_a_step_takes_as_many_operations_for_any_number_of_layers(layers):
    """So many are launched on an accelerator, whose host they keep waiting; views are none."""
    short = betahook.Search(warmup=1, plateau_batches=1, rise_batches=10)  # the search alone from batch 24 on
    after_warmup, opening, *search = counted(short, layers, [3, 13, *range(30, 40)])
    assert search[:-1] == [1] * 9
    assert search[-1] <= 100
    assert opening <= 159
    assert after_warmup <= 193  # in the batches that look for layers which missed the end of the warm-up


@pytest.mark.parametrize(("layers", "turns"), [(2, 1), (8, 4)])
def test_a_step_that_moves_no_beta_computes_none(layers, turns):
    """It adds up what the last turn of a pair of layers has brought, when the next one begins."""
    first, *between, due = counted("monitor", layers, range(10, 20))
    assert first == 1
    assert sorted(between)[: 9 - turns] == [0] * (9 - turns)
    assert max(between) <= 22
    assert due <= 32


def kept_for_the_backward(model, batch):
    """Bytes of memory, without the weights."""
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch).loss
    loss.backward()
    return sum(kept[place] for place in kept.keys() - {x.untyped_storage().data_ptr() for x in model.parameters()})


@pytest.mark.oldest_skips("torch cannot trace the models at all")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the same
@pytest.mark.parametrize(
    ("small", "compiled", "queries"),
    [(True, False, 1), (False, False, 0), pytest.param(True, True, 0, marks=pytest.mark.slow)],
)
def test_memory_that_a_layer_keeps_for_its_backward(small, compiled, queries, monkeypatch):
    """Of a small query the unscaled one too; a large one is scaled where the attention keeps it, compiled ones are."""
    if not small:
        monkeypatch.setattr(gain, "SMALL", 0)
    model, batch = build("llama", "sdpa", num_hidden_layers=1), inputs("llama", padded=False)
    forward = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    alone = kept_for_the_backward(forward, batch)
    with betahook.attach(model) as hook:
        forward(**batch).loss.backward()
        hook.step()
        added = kept_for_the_backward(forward, batch) - alone
    query = 4 * 32 * batch["input_ids"].numel()
    assert added == pytest.approx(queries * query, abs=256)
    assert query > 1000


class Made(TorchDispatchMode):
    """Remember which tensors operations make."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.tensors += [weakref.ref(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return result


@pytest.mark.oldest_skips("torch cannot trace the models at all")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of the same
def test_what_a_graph_measures_leaves_no_tensor_behind(monkeypatch):
    """The memory is that of the graph: where CUDA graphs are to be captured, torch raises if anything stays in it."""
    model, batch, made = build("llama", "sdpa"), inputs("llama", padded=False), Made()
    run = opaque._run

    def watched(*args):
        with made:
            run(*args)

    monkeypatch.setattr(opaque, "_run", watched)
    with betahook.attach(model, interval=1) as hook:
        step(torch.compile(model, backend="aot_eager", fullgraph=True), hook, batch)
        assert len(made.tensors) > 100
        assert [tensor() for tensor in made.tensors if tensor() is not None] == []
