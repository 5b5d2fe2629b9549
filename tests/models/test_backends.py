"""The same statistics from every backend and mask: flex attention, compiled models, masks of the user's own."""

import pytest
import torch
import torch._dynamo.testing
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

import betahook
from betahook.measure.pairs import is_short, sampled_rows, sampling_weight
from betahook.measure.statistics import ROW
from support.attention import LENGTH, WIDTH, ByHandAttention
from support.matrices import overall_std
from support.models import build, delegating, inputs, trace
from support.training import enable_checkpointing


def statistics(hook):
    names = ("count", "mean", "std", "max_score", "entropy", "sensitivity")
    return [[float(getattr(layer.statistics, name)) for name in names] for layer in hook.layers.values()]


@pytest.mark.filterwarnings("ignore")  # flex attention without a compiler warns of its slowness
@pytest.mark.parametrize("family", ["llama", "mistral", "bert"])
def test_flex_attention(family):
    """In evaluation, since flex attention has no backward on the CPU."""
    measured = []
    for backend in ("eager", "flex_attention"):
        model = build(family, backend).eval()
        # transformers would compile what makes the mask, for many seconds.
        eagerly = torch.compiler.set_stance("force_eager")
        with betahook.attach(model, controller="monitor", when="always") as hook, torch.no_grad(), eagerly:
            model(**inputs(family))
            measured.append(statistics(hook))
    eager, flex = measured
    for a, b in zip(eager, flex, strict=True):
        assert b == pytest.approx(a, rel=1e-4)


@pytest.mark.parametrize("length", [24, 140])
def test_a_mask_without_structure(length):
    """Exact up to the number of rows that are looked at in full; beyond, sampled, and said to be."""
    batch = inputs("llama", length, padded=False)
    generator = torch.Generator().manual_seed(4)
    mask = torch.rand(2, 1, length, length, generator=generator) < 0.5
    mask |= torch.eye(length, dtype=torch.bool)
    batch["attention_mask"] = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook, trace() as calls:
        model(**batch)
        for layer, call in zip(hook.layers.values(), calls, strict=True):
            values, allowed = call.scores()
            if not is_short(length, length):
                rows = sampled_rows(length, length, values.device)
                values, allowed = values[:, :, rows], allowed[:, :, rows]
            used = values[allowed.expand_as(values)]
            assert bool(layer.statistics.exact) is (length == 24)
            assert float(layer.statistics.count) == sampling_weight(length, length) * len(used)
            assert float(overall_std(layer.head_statistics)) == pytest.approx(float(used.std(correction=0)), rel=1e-5)


@pytest.fixture
def flash():
    """A stand-in for flash attention, which has no kernel for the CPU, under a name and with arguments like its own."""

    def attention(module, query, key, value, mask, scaling, documents, **options):
        assert mask is None
        same = documents[:, None] == documents
        pairs = torch.where(same.tril(), 0.0, -torch.inf)[None, None]
        return sdpa_attention_forward(module, query, key, value, pairs, scaling=scaling, is_causal=False)

    AttentionInterface.register("flash_stand_in", attention)
    AttentionMaskInterface.register("flash_stand_in", flash_attention_mask)
    yield "flash_stand_in"
    del AttentionInterface._global_mapping["flash_stand_in"]
    del AttentionMaskInterface._global_mapping["flash_stand_in"]


@pytest.mark.parametrize("lengths", [[30], [10, 12, 8], [150], [60, 85, 5]], ids=str)
@pytest.mark.parametrize("told_by", ["position_ids", "cu_seq_lens_q"])
def test_packed_sequences(flash, lengths, told_by):
    """Exact up to the number of rows that are looked at in full and where nothing is packed; else sampled."""
    length = sum(lengths)
    ids = inputs("llama", length, padded=False)["input_ids"][:1]
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ends = {"cu_seq_lens_q": torch.tensor([0, *lengths]).cumsum(0)} if told_by == "cu_seq_lens_q" else {}
    mask = (documents[:, None] == documents).tril()
    allowed = torch.where(mask, 0.0, torch.finfo(torch.float32).min)[None, None]
    with trace() as calls:
        expected = build("llama")(input_ids=ids, position_ids=positions, attention_mask=allowed).logits
    model = build("llama", "sdpa")
    model.config._attn_implementation = flash  # the setter looks for kernels
    with betahook.attach(model, controller="monitor") as hook:
        logits = model(input_ids=ids, position_ids=positions, documents=documents, **ends).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        for layer, call in zip(hook.layers.values(), calls, strict=True):
            values, _ = call.scores()
            exact = length == 30 or len(lengths) == 1
            rows = torch.arange(length) if exact else sampled_rows(length, length, values.device)
            used = values[:, :, rows][mask[rows].expand(1, values.shape[1], -1, -1)]
            assert bool(layer.statistics.exact) is exact
            assert float(layer.statistics.count) == len(used) * (1 if exact else sampling_weight(length, length))
            assert float(overall_std(layer.head_statistics)) == pytest.approx(float(used.std(correction=0)), rel=1e-4)


def test_packed_windows_longer_than_the_sampled_rows_are_exact():
    """Causal with a sliding window and padding: recognised in the mask tensor itself."""
    batch = inputs("mistral", 140)
    model = build("mistral", "sdpa")
    with trace() as calls:
        build("mistral")(**batch)
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        for layer, call in zip(hook.layers.values(), calls, strict=True):
            values, allowed = call.scores()
            used = values[allowed.expand_as(values)]
            assert bool(layer.statistics.exact)
            assert float(overall_std(layer.head_statistics)) == pytest.approx(float(used.std(correction=0)), rel=1e-5)


ONE_LAYER = {
    "gpt2": {"n_layer": 1},
    "bert": {"num_hidden_layers": 1},
    "t5": {"num_layers": 1, "num_decoder_layers": 1},  # and so three attention modules
}
"""Of a family, the sizes of a model that compiles in half the time."""


@pytest.mark.oldest_skips("torch cannot trace the models at all")
@pytest.mark.needs_torch("2.13", "the caches of transformers are not traced", family="t5")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(x, marks=pytest.mark.slow) for x in ("gpt2", "bert", "t5"))]
)
def test_one_graph_serves_every_beta(family):
    model, batch = build(family, "sdpa", **ONE_LAYER.get(family, {})), inputs(family)
    betas = [0.2 * 1.1**n for n in range(20)]
    if family == "gpt2":  # with labels transformers itself breaks the graph, to log its loss_type
        del batch["labels"]
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        plain = run(model, hook, batch, betas)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = run(torch.compile(model, backend=counter, fullgraph=True), hook, batch, betas)
    assert counter.frame_count == 1
    for a, b in zip(plain, compiled, strict=True):
        assert b == pytest.approx(a, rel=1e-5, abs=1e-6)


@pytest.mark.oldest_skips("torch cannot trace the models at all")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of the same
@pytest.mark.parametrize(
    ("breaks", "checkpointing"), [(False, False), (False, True), pytest.param(True, False, marks=pytest.mark.slow)]
)
def test_a_function_that_asks_the_interface_for_another_one_compiles(breaks, checkpointing):
    """Into one graph for every beta, also in a checkpoint; where it breaks the graph, it is right all the same."""
    batch, measured = {**inputs("llama"), "use_cache": False}, []
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    with delegating(lambda module: torch._dynamo.graph_break() if breaks else None) as backend:
        for chosen in ("sdpa", backend):
            model = build("llama", "sdpa").train()
            model.config._attn_implementation = chosen
            if checkpointing:
                enable_checkpointing(model, reentrant=False)
            with betahook.attach(model, controller="monitor", interval=1) as hook:
                torch._dynamo.reset()
                compiled = torch.compile(model, backend=counter, fullgraph=not breaks)
                measured.append(run(model if chosen == "sdpa" else compiled, hook, batch, [0.3, 0.6]))
    assert counter.frame_count == 1 or breaks
    for a, b in zip(*measured, strict=True):
        assert b == pytest.approx(a, rel=1e-5, abs=1e-6)


@pytest.mark.oldest_skips("torch does not tell that it exports")
@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_an_exported_model_keeps_beta_without_its_hook(training):
    model, tokens = build("llama", "sdpa", num_hidden_layers=1).train(training), inputs("llama")["input_ids"]
    with betahook.attach(model) as hook:
        for layer in hook.layers.values():
            layer.beta = 2.0
        exported = torch.export.export(model, (tokens,), {"use_cache": False}, strict=False)
        expected = model(tokens).logits
    del hook, layer
    torch.testing.assert_close(exported.module()(tokens, use_cache=False).logits, expected, rtol=0, atol=0)


@pytest.mark.oldest_skips("torch does not tell that it exports")
@pytest.mark.filterwarnings("ignore")  # torch's own
def test_attention_by_hand_is_exported_with_other_arguments_than_it_ran_with():
    class FlaggedAttention(ByHandAttention):
        def forward(self, x, is_shown=False):
            return super().forward(x)

    model, x = FlaggedAttention().eval(), torch.randn(2, LENGTH, WIDTH)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        hook.layers[""].beta = 2.0
        expected = model(x)
        exported = torch.export.export(model, (x,), {"is_shown": None}, strict=False)
    torch.testing.assert_close(exported.module()(x, is_shown=None), expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
@pytest.mark.parametrize(
    "same",
    [pytest.param(True, id="the model itself"), pytest.param(False, id="another of its class", marks=pytest.mark.slow)],
)
def test_graphs_from_before_the_hook_are_not_used(same):
    """torch.compile keeps them by class, and does not notice that the tap was registered."""
    model, batch = build("llama", "sdpa", num_hidden_layers=1), inputs("llama")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    plain = compiled(**batch).logits
    if not same:
        model = build("llama", "sdpa", num_hidden_layers=1)
    with betahook.attach(model, controller="monitor") as hook:
        if not same:
            compiled = torch.compile(model, backend="eager")
        compiled(**batch)
        for layer in hook.layers.values():
            assert layer.statistics.count > 0
            layer.beta = 2.0
        assert not torch.allclose(compiled(**batch).logits, plain)
    assert torch.equal(compiled(**batch).logits, plain)


def run(model, hook, batch, betas):
    """Loss and statistics for each beta."""
    said = []
    for beta in betas:
        for layer in hook.layers.values():
            layer.beta = beta
        output = model(**batch)
        loss = output.logits.square().mean() if output.loss is None else output.loss
        loss.backward()
        said.append([loss.item(), *(value for layer in statistics(hook) for value in layer)])
        hook.step()
    return said


def test_a_mask_that_is_left_to_broadcast():
    """A padding mask of the shape [batch, 1, 1, keys], which bert accepts as it is."""
    batch = inputs("bert", 40)
    expected, given = build("bert", "sdpa"), build("bert", "sdpa")
    with betahook.attach(expected, controller="monitor") as a, betahook.attach(given, controller="monitor") as b:
        expected(**batch)
        given(**{**batch, "attention_mask": batch["attention_mask"][:, None, None, :].bool()})
        for layer in a.layers:
            assert float(b.layers[layer].statistics.std) == float(a.layers[layer].statistics.std)
            assert bool(b.layers[layer].statistics.exact)


@pytest.mark.slow
@pytest.mark.needs_torch("2.10", "a graph counts the pairs of both runs")
@pytest.mark.oldest_skips("torch cannot trace the models at all")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of the same
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # of torch 2.11
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("regional", [False, True])
def test_compiled_checkpointing_counts_once(regional, reentrant):
    """And what ran without gradients not at all."""
    measured = []
    for compiles in (False, True):
        model = build("llama").train()
        with betahook.attach(model, controller="monitor") as hook:
            if compiles:
                enable_checkpointing(model, reentrant)
                model.enable_input_require_grads()
                for part in model.model.layers if regional else [model]:
                    part.compile(backend="aot_eager")
            with torch.no_grad():
                model(**inputs("llama"))
            model(**inputs("llama")).loss.backward()
            statistics = [layer.statistics for layer in hook.layers.values()]
            measured.append(torch.stack([torch.stack([x.count, x.std, x.sensitivity]) for x in statistics]))
    torch.testing.assert_close(*measured, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.oldest_skips("torch cannot trace the models at all")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of the same
def test_compiled_checkpointing_computes_the_gain_again():
    """In the backward, when the layers after have noted their own beta."""
    losses = []
    for compiles in (False, True):
        model = build("t5", **ONE_LAYER["t5"]).train()
        with betahook.attach(model, controller="monitor") as hook:
            enable_checkpointing(model, reentrant=False)
            if compiles:
                model.compile(backend="aot_eager")
            model(**inputs("t5")).loss.backward()
            losses.append([float(layer.statistics.sensitivity) for layer in hook.layers.values()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-6)


@pytest.mark.oldest_skips("torch cannot trace the models at all")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of the same
def test_one_graph_measures_the_layers_in_turn():
    model = build("llama", num_hidden_layers=4).train()
    with betahook.attach(model, controller="monitor", interval=2) as hook:
        forward = torch.compile(model, backend="aot_eager", fullgraph=True)
        counts, inputs_counted = [], []
        for _ in range(3):
            forward(**inputs("llama", padded=False)).loss.backward()
            collected = hook._state.collect()
            for row, found in (("pairs", counts), ("query_inputs", inputs_counted)):
                found.append((collected[ROW[row]].view(4, -1).amax(1) > 0).tolist())
            hook.step()
    assert counts == inputs_counted == [[True] * 4, [False, False, True, True], [True, True, False, False]]


@pytest.mark.needs_torch("2.11", "each module with hooks is compiled anew")
@pytest.mark.oldest_skips("torch cannot trace the models at all")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of the same
def test_layers_that_are_compiled_one_by_one_share_their_code():
    """Of which torch keeps eight versions at most: a model with more layers could not be compiled so."""
    model, batch = build("llama", "sdpa", num_hidden_layers=3), inputs("llama", padded=False)
    measured = []
    for compiles in (False, True):
        with betahook.attach(model, controller="monitor", interval=1) as hook:
            torch._dynamo.reset()
            counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
            for part in model.model.layers if compiles else ():
                part.compile(backend=counter, fullgraph=True)
            for _ in range(2):
                model(**batch, use_cache=False).loss.backward()
                measured.append(torch.tensor(statistics(hook)))
                hook.step()
                for number, layer in enumerate(hook.layers.values()):
                    layer.beta = 0.3 + 0.1 * number
    assert counter.frame_count == 1
    for a, b in zip(measured[:2], measured[2:], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
