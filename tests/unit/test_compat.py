"""The private names of torch, transformers and PEFT: each does upstream what betahook leans on."""

import gc
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import AttentionInterface
from transformers.models.llama import modeling_llama

from betahook import compat
from betahook.models.without_data import without_data
from betahook.tap import interface
from support.models import build, inputs


class Names(TorchFunctionMode):
    """Notes which functions it is handed, and runs them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_weak_dictionary_knows_a_tensor_by_its_identity_as_long_as_it_lives():
    one, other = torch.zeros(2), torch.zeros(2)
    known = compat.WeakTensorKeyDictionary()
    known[one] = "one"
    known[other] = "other"
    assert [known[one], known[other]] == ["one", "other"]
    assert known.get(torch.zeros(2)) is None
    passing = torch.zeros(2)
    known[passing] = "passing"
    del passing
    gc.collect()
    assert len(known) == 2


def test_a_weak_reference_tells_when_its_tensor_is_gone():
    gone = []
    tensor = torch.zeros(2)
    reference = compat.WeakIdRef(tensor, gone.append)
    assert reference() is tensor
    assert not gone
    del tensor
    assert gone == [reference]


def test_data_parallel_asks_a_module_for_its_replica():
    assert compat.REPLICATE in torch.nn.parallel.replicate.__code__.co_names
    assert callable(getattr(nn.Module, compat.REPLICATE))


def test_every_model_asks_one_method_of_the_interface_for_its_attention(monkeypatch):
    asked = []

    def watched(self, implementation, default):
        asked.append((implementation, default))
        return default

    assert isinstance(modeling_llama.ALL_ATTENTION_FUNCTIONS, AttentionInterface)
    assert modeling_llama.ALL_ATTENTION_FUNCTIONS is interface.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setattr(AttentionInterface, "get_interface", watched)
    build("llama")(**inputs("llama"))
    assert asked == [("eager", modeling_llama.eager_attention_forward)] * 2


def test_checkpointing_keeps_a_module_under_a_name_that_saved_weights_lack():
    names = [name for name, _ in checkpoint_wrapper(nn.Linear(2, 2)).named_modules()]
    assert names == ["", "_checkpoint_wrapped_module"]
    assert set(names) - {""} < compat.WRAPPERS


def test_fsdp_keeps_a_module_under_a_name_that_saved_weights_lack():
    common = pytest.importorskip("torch.distributed.fsdp._common_utils")
    assert common.FSDP_WRAPPED_MODULE in compat.WRAPPERS


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiling_keeps_a_module_under_a_name_that_saved_weights_lack():
    names = [name for name, _ in torch.compile(nn.Linear(2, 2)).named_modules()]
    assert names == ["", "_orig_mod"]
    assert set(names) - {""} < compat.WRAPPERS


def test_an_encoder_without_the_switch_packs_nothing():
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).eval()
    padding = torch.tensor([[False, False], [False, True]])
    nested = []
    with torch.no_grad():
        for switch in (True, False):
            assert hasattr(encoder, compat.NESTED_TENSORS)
            setattr(encoder, compat.NESTED_TENSORS, switch)
            with Names() as mode:
                encoder(torch.ones(2, 2, 8), src_key_padding_mask=padding)
            nested.append(any(func.__name__.startswith("_nested_tensor") for func in mode.seen))
    assert nested == [True, False]


def test_the_getters_that_transpose_are_known_by_identity():
    x = torch.zeros(2, 3)
    with Names() as mode:
        x.T, x.mT, x.H, x.mH, x.shape  # noqa: B018
    assert [func in compat.TRANSPOSING_GETTERS for func in mode.seen] == [True] * 4 + [False]
    assert {func.__name__ for func in mode.seen} == {"__get__"}


def test_what_is_unwatched_passes_by_a_mode():
    x = torch.zeros(2)
    with Names() as mode:
        with compat.unwatched():
            x.exp()
        x.sin()
    assert [func.__name__ for func in mode.seen] == ["sin"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_forward_runs_again_inside_the_backward(reentrant):
    seen = []

    def forward(x):
        seen.append((compat.is_in_backward(), compat.is_recomputation()))
        return x.exp()

    checkpoint(forward, torch.ones(2, requires_grad=True), use_reentrant=reentrant).sum().backward()
    assert seen == [(False, False), (True, not reentrant)]
    assert not compat.is_in_backward()
    assert not compat.is_recomputation()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # the outer one takes it away
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_nested_checkpoints_run_a_forward_once_that_counts(outer, inner):
    """With gradients and not as a recomputation."""
    counted = []

    def forward(x):
        counted.append(torch.is_grad_enabled() and not compat.is_recomputation())
        return x.exp()

    def checkpointed(x):
        return checkpoint(forward, x.sin(), use_reentrant=inner).cos()

    with torch.autograd.graph.save_on_cpu():  # hooks of another kind on the same tensors
        checkpoint(checkpointed, torch.ones(2, requires_grad=True), use_reentrant=outer).sum().backward()
    assert len(counted) > 1
    assert sum(counted) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_modules_are_known():
    in_place = nn.Linear(2, 2)
    assert not compat.is_compiled(in_place)
    in_place.compile()
    assert compat.is_compiled(in_place)
    assert compat.is_compiled(torch.compile(nn.Linear(2, 2)))


@pytest.mark.slow
def test_the_compiler_is_loaded_by_what_is_compiled_and_not_by_torch_or_betahook():
    has = "print(betahook.compat.has_compiled())"
    code = f"import torch, betahook; {has}; torch.compile(torch.nn.Linear(1, 1)); {has}"
    output = subprocess.check_output([sys.executable, "-W", "ignore", "-c", code], text=True)
    assert output.split() == ["False", "True"]


def test_a_graph_calls_what_says_so():
    assert vars(torch.compiler.assume_constant_result(lambda: True)) == {compat.CALLED_BY_GRAPHS: True}


@pytest.mark.oldest_skips("torch does not tell")
def test_an_export_is_told_from_a_compilation():
    seen = []

    class Asks(nn.Module):
        def forward(self, x):
            seen.append((torch.compiler.is_compiling(), compat.is_exporting(), compat.is_transformed()))
            return x + 1

    torch.export.export(Asks(), (torch.ones(2),), strict=False)
    Asks()(torch.ones(2))
    assert seen[0] == (True, True, True)
    assert seen[-1] == (False, False, False)


@pytest.mark.filterwarnings("ignore")  # tracing is deprecated
@pytest.mark.parametrize("run", [torch.func.grad, torch.func.vmap, lambda f: torch.jit.trace(f, torch.ones(2))])
def test_a_transform_is_told(run):
    seen = []

    def asks(x):
        seen.append(compat.is_transformed())
        return x.sin() if x.dim() else x

    made = run(asks)
    if not seen:
        made(torch.ones(2) if run is torch.func.vmap else torch.tensor(1.0))
    asks(torch.ones(2))
    assert seen[0]
    assert not seen[-1]


def of_torch_func(function):
    torch.func.vmap(function)(torch.ones(2))


def of_batched_gradients(function):
    leaf = torch.ones(2, requires_grad=True)
    output = leaf * 2
    output.register_hook(function)
    torch.autograd.grad(output, leaf, torch.eye(2), is_grads_batched=True)


@pytest.mark.parametrize("run", [of_torch_func, of_batched_gradients])
def test_a_tensor_that_stands_for_several_is_told(run):
    seen = []

    def asks(x):
        seen.append(compat.is_batched(x))
        return x * 1

    run(asks)
    asks(torch.ones(2))
    assert seen == [True, False]


def test_a_mode_without_data_is_a_transform_too():
    kept = torch.zeros(2)
    with FakeTensorMode():
        assert compat.is_transformed()
        with compat.untransformed():
            kept.fill_(3.0)
            assert not compat.is_transformed()
    assert not compat.is_transformed()
    assert kept.tolist() == [3, 3]


def test_what_is_outside_of_a_transform_changes_in_place():
    kept = torch.zeros(2)

    def changes(x):
        with compat.untransformed():
            kept.fill_(3.0)
        return x.square()

    assert torch.func.grad(changes)(torch.tensor(2.0)) == 4
    assert kept.tolist() == [3, 3]


@pytest.mark.oldest_skips("torch does not tell that it exports")
def test_what_is_outside_of_an_export_is_no_part_of_it():
    kept = torch.ones(2)

    class Copies(nn.Module):
        def forward(self, x):
            with compat.untransformed():
                copy = kept.clone()
            return x * copy

    program = torch.export.export(Copies(), (torch.ones(2),), strict=False).module()
    kept.fill_(3.0)
    assert program(torch.ones(2)).tolist() == [1, 1]


def test_the_owner_of_a_view():
    x = torch.zeros(2, 3)
    assert compat.base_of(x) is x
    assert compat.base_of(x[0][1:]) is x
    assert compat.base_of(x.clone()) is not x
    with torch.inference_mode():  # whose tensors count no changes
        made = torch.zeros(2, 3)
        assert compat.base_of(made) is made


def test_a_version_counts_changes_in_place_through_any_view():
    x = torch.zeros(2, 3)
    before = compat.inplace_version(x)
    x[0].add_(1)
    after = compat.inplace_version(x)
    assert after > before
    x + 1
    assert compat.inplace_version(x[1]) == after
    with torch.inference_mode():
        x[0].add_(1)
        x.fill_(2)
        made = torch.zeros(2, 3)
    assert compat.inplace_version(x) == after + 2
    assert compat.inplace_version(made) is compat.inplace_version(made[0]) is None


def test_attention_of_torch_goes_through_a_mode_only_from_within():
    """And gives what it gives otherwise; the function itself hands itself to the mode."""
    attention, x = nn.MultiheadAttention(4, 2), torch.ones(3, 1, 4)
    expected = attention(x, x, x)[0]

    class Inside(Names):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is F.multi_head_attention_forward:
                self.seen.append(func)
                with self:
                    return compat.multi_head_attention_forward()(*args, **(kwargs or {}))
            return super().__torch_function__(func, types, args, kwargs)

    with Inside() as mode:
        actual = attention(x, x, x)[0]
    assert torch.equal(actual, expected)
    assert mode.seen.count(F.multi_head_attention_forward) == 1
    assert any(func.__name__ in ("bmm", "baddbmm") for func in mode.seen)


def test_a_scaler_knows_its_first_scale_and_the_steps_since_it_changed():
    weight = nn.Parameter(torch.ones(()))
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3), torch.optim.SGD([weight], 0.0)
    counts = []
    for gradient in (1.0, 1.0, torch.inf, 1.0, 1.0, 1.0):
        scaler.scale(weight * gradient).backward()
        scaler.step(optimizer)
        assert compat.is_before_update(scaler)
        scaler.update()
        assert not compat.is_before_update(scaler)
        optimizer.zero_grad()
        counts.append(compat.steps_since_rescaling(scaler.state_dict()))
    assert counts == [1, 2, 0, 1, 2, 0]
    scaler.update(8.0)
    assert (scaler.get_scale(), compat.initial_scale(scaler)) == (8.0, 4.0)
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict({**scaler.state_dict(), "scale": 32.0})
    assert compat.initial_scale(other) == 32.0


def test_parameters_of_zero_3_have_an_id_of_their_own():
    """DeepSpeed cannot be installed here; PEFT and Accelerate go by the same attribute."""
    parameter = nn.Parameter(torch.empty(0))
    assert not compat.is_zero3(parameter)
    parameter.ds_id = 0
    assert compat.is_zero3(parameter)


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")  # a single rank
def test_parameters_that_fsdp_1_shards_are_marked(tmp_path):
    parameter = nn.Parameter(torch.ones(2))
    assert not compat.is_flattened(parameter)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=True)
        assert all(compat.is_flattened(parameter) for parameter in model.parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_the_state_of_a_trainer_has_a_name():
    trainer = pytest.importorskip("transformers.trainer")
    assert compat.TRAINER_STATE == trainer.TRAINER_STATE_NAME


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft")


def adapted(peft, **options):
    """A linear module with two adapters of LoRA, one of which is active."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"inner": nn.Linear(3, 3)})
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["inner"], init_lora_weights=False, **options)
    model = peft.get_peft_model(PlainModel(model), config)
    model.add_adapter("second", config)
    return model, model.base_model.model.model["inner"]


class PlainModel(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model["inner"](x)


def test_an_adapter_is_known_and_says_what_it_adds(peft):
    model, layer = adapted(peft)
    assert compat.is_adapter(layer)
    assert not compat.is_adapter(layer.base_layer)
    assert compat.is_known_adapter(layer)
    x = torch.eye(3)
    (added,) = compat.adapter_weights(layer)
    torch.testing.assert_close(layer(x) - layer.base_layer(x), added.T)
    model.set_adapter("second")
    assert not torch.equal(next(compat.adapter_weights(layer)), added)


def test_an_adapter_is_inactive_while_it_is_disabled_or_merged(peft):
    model, layer = adapted(peft)
    assert compat.is_active_adapter(layer)
    with model.disable_adapter():
        assert not compat.is_active_adapter(layer)
    model.merge_adapter()
    assert not compat.is_active_adapter(layer)
    model.unmerge_adapter()
    assert compat.is_active_adapter(layer)


def test_dora_is_known_alone(peft):
    model, layer = adapted(peft, use_dora=True)
    assert compat.is_known_adapter(layer)
    assert compat.magnitudes(layer) == [layer.lora_magnitude_vector["default"]]
    assert compat.parameters_of_adapters(model)[id(layer.lora_magnitude_vector["second"].weight)] == "second"
    assert id(layer.base_layer.weight) not in compat.parameters_of_adapters(model)
    layer.set_adapter(["default", "second"])
    assert not compat.is_known_adapter(layer)
    model.merge_adapter()
    assert not compat.magnitudes(layer)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT reads it
def test_whole_modules_and_trained_tokens_belong_to_their_adapters(peft):
    config = peft.LoraConfig(target_modules=["v_proj"], modules_to_save=["q_proj"], trainable_token_indices=[0])
    model = peft.get_peft_model(build("llama"), config)
    model.add_adapter("second", config)
    saved = compat.parameters_of_adapters(model)
    attention, tokens = model.get_submodule("base_model.model.model.layers.0.self_attn"), model.get_input_embeddings()
    for name in ("default", "second"):
        assert saved[id(attention.q_proj.modules_to_save[name].weight)] == name
        assert saved[id(tokens.token_adapter.trainable_tokens_delta[name])] == name
    assert set(saved.values()) == {"default", "second"}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT reads it
def test_a_model_says_that_it_learns_prompts(peft):
    model = build("llama")
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    assert not compat.learns_prompts(model)
    assert compat.learns_prompts(peft.get_peft_model(model, prompts))
    assert not compat.learns_prompts(adapted(peft)[0])
    prompts = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=2, adapter_layers=1)
    assert [
        name for name, m in peft.get_peft_model(build("llama"), prompts).named_modules() if compat.learns_prompts(m)
    ]


def test_a_class_is_as_it_was_written():
    linear = nn.Linear(3, 2)
    parametrize.register_parametrization(linear, "weight", nn.Tanh())
    assert type(linear) is not nn.Linear
    assert compat.class_of(linear) is nn.Linear
    assert not compat.is_fsdp2(linear)


@pytest.fixture
def mesh(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.oldest_skips("FSDP 2 does not run on a CPU")
def test_copies_what_fsdp_2_shards(mesh):
    """As its class was written, and with whole weights."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
        assert compat.is_fsdp2(module)
    assert not compat.is_fsdp2(model[1])
    assert [compat.class_of(module) for module in model.modules()] == [nn.Sequential, nn.Linear, nn.Linear]
    with without_data() as run:
        made = run.copied(model)
        assert [type(module) for module in made.modules()] == [nn.Sequential, nn.Linear, nn.Linear]
        assert made[0].weight.shape == (4, 6)
        assert made(torch.zeros(3, 6)).shape == (3, 2)


def test_a_graph_ends_at_what_stays_outside():
    def twice(x):
        seen.append(torch.compiler.is_compiling())
        return 2 * x

    seen, outside = [], compat.outside_of_graphs(twice, "it writes to a list")
    torch.compiler.reset()
    compiled = torch.compile(lambda x: outside(x) + 1, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [3, 3]
    assert seen == [False]
