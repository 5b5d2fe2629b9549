"""The schema of a state: known by names, not by places; crafted files are refused with a message on the fault."""

import copy
import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

import betahook
from betahook import checkpoint
from betahook.checkpoint import file, schema
from betahook.cli import main
from betahook.integrations.trainer import BetaHookCallback
from betahook.measure.statistics import ROW
from betahook.report.conditions import Condition
from support.models import build
from support.trainer import make_trainer
from support.training import LAYER, bits, train

VERSION_2 = Path(__file__).parent / "version-2"
"""What version 0.1 saved in the middle of the sixth step of a tiny Llama, and what it reported then."""


@pytest.fixture(scope="module")
def trained():
    """A hook after two steps, and its state."""
    model = build("llama")
    with betahook.attach(model, controller=[betahook.Search(window=1, warmup=0), betahook.Cap(2.0)]) as hook:
        train(model, hook, 2)
        yield hook, hook.state_dict()


def reordered(state, seed):
    """The same state with its rows, layers, options and entries in another order."""
    generator = torch.Generator().manual_seed(seed)

    def shuffled(entries):
        return {list(entries)[i]: entries[list(entries)[i]] for i in torch.randperm(len(entries), generator=generator)}

    state = shuffled(copy.deepcopy(state))
    for name, rows in state["rows"].items():
        order = torch.randperm(len(rows), generator=generator)
        state[name], state["rows"][name] = state[name][order], [rows[index] for index in order]
    state["controllers"] = [
        {**entry, "options": shuffled(entry["options"]), "state": shuffled(entry["state"])}
        for entry in state["controllers"]
    ]
    return state


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_names_means_nothing(trained, seed):
    hook, state = trained
    hook.load_state_dict(reordered(state, seed))
    assert bits(hook.state_dict()) == bits(state)


def test_a_row_that_a_state_lacks_was_not_measured(trained):
    hook, state = trained
    older = copy.deepcopy(state)
    index = older["rows"]["recent"].index("entropy")
    older["rows"]["recent"].remove("entropy")
    older["recent"] = torch.cat([older["recent"][:index], older["recent"][index + 1 :]])
    hook.load_state_dict(older)
    assert not hook.state_dict()["recent"][ROW["entropy"]].any()
    hook.load_state_dict(state)


def test_a_table_that_is_a_single_number_is_refused_as_any(trained):
    _, state = trained
    older = {name: value for name, value in state.items() if name != "window"}  # of before there was one
    with pytest.raises(ValueError, match=r"incomplete: table should have the shape \[rows, heads\] .*, got \[\]"):
        schema.parse({**older, "table": torch.tensor(1.0, dtype=torch.float64)})


@dataclass(frozen=True)
class Old(betahook.Controller):
    rate: float = 0.5

    def start(self, beta):
        return {"age": torch.zeros_like(beta)}

    def update(self, beta, observation, state):
        return beta * self.rate, {"age": state["age"] + 1}


@dataclass(frozen=True)
class New(Old):
    __qualname__ = "Old"
    floor: float = 0.1
    stages: tuple[tuple[float, float], ...] = ((0.0, 1.0),)


@dataclass(frozen=True)
class Renamed(betahook.Controller):
    __qualname__ = "Old"
    speed: float = 0.5

    def update(self, beta, observation, state):
        return beta, state


def saved(controller):
    model = build("llama")
    with betahook.attach(model, controller=controller) as hook:
        train(model, hook, 1)
        return hook.state_dict()


def test_a_new_option_with_a_default_loads_an_old_state():
    state = saved(Old())
    with betahook.attach(build("llama"), controller=New()) as hook:
        hook.load_state_dict(state)
        (entry,) = hook.state_dict()["controllers"]
    assert entry["options"] == {"rate": 0.5, "floor": 0.1, "stages": [[0.0, 1.0]]}
    assert entry["state"]["age"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("controller", "message"),
    [
        (New(floor=0.2), r"expected \[Old\(floor=0.2\)\], got \[Old\(\)\]"),
        (Old(rate=0.25), r"expected \[Old\(rate=0.25\)\], got \[Old\(\)\]"),
        (Renamed(), r"Old has no option rate: renamed or removed since then"),
        (betahook.Cap(), r"expected \[Cap\(\)\], got \[Old\(\)\]"),
    ],
)
def test_other_options_are_refused_by_name(controller, message):
    state = saved(Old())
    with betahook.attach(build("llama"), controller=controller) as hook:
        before = bits(hook.state_dict())
        with pytest.raises(ValueError, match=message):
            hook.load_state_dict(state)
        assert bits(hook.state_dict()) == before


@dataclass(frozen=True)
class Counting(betahook.Controller):
    """Remembers in whole numbers and in booleans."""

    def start(self, beta):
        return {"count": torch.zeros_like(beta, dtype=torch.long), "even": torch.ones_like(beta, dtype=torch.bool)}

    def update(self, beta, observation, state):
        return beta * torch.where(state["even"], 1.1, 0.8), {"count": state["count"] + 1, "even": ~state["even"]}


def test_memories_that_are_not_of_floats(tmp_path):
    model = build("llama")
    with betahook.attach(model, Counting(), interval=1) as hook:
        train(model, hook, 3)
        checkpoint.save(hook, tmp_path)
        state, beta = hook.state_dict(), hook.layers[LAYER].beta
    with betahook.attach(model, Counting(), interval=1) as hook:
        checkpoint.read(tmp_path).load(hook)
        assert bits(hook.state_dict()) == bits(state)
        train(model, hook, 1)
        assert hook.layers[LAYER].beta == pytest.approx(0.8 * beta)
        (memory,) = (entry["state"] for entry in hook.state_dict()["controllers"])
        assert memory["count"].tolist() == [4, 4]
        state["controllers"][0]["state"]["even"] = torch.zeros(2, dtype=torch.int64)
        with pytest.raises(ValueError, match=r"even of Counting should be of torch.bool, got torch.int64"):
            hook.load_state_dict(state)


def test_an_option_that_no_json_holds_is_damage():
    state = saved(Old())
    state["controllers"][0]["options"]["rate"] = torch.ones(2)
    with pytest.raises(ValueError, match="damaged: controller 0 should be a class, options and a state by name, got"):
        schema.parse(state)


def test_a_state_of_before_the_controllers_that_made_a_beta_were_saved(trained):
    hook, state = trained
    older = {name: value for name, value in state.items() if name != "trained_by"}
    assert schema.parse(older)["trained_by"] == []
    with pytest.raises(ValueError, match=r"damaged: trained_by should be controllers in words, got \[3\]"):
        hook.load_state_dict({**state, "trained_by": [3]})


@pytest.mark.parametrize(("saved", "named"), [("4.2", "transformers 4.2"), (None, "another version of transformers")])
def test_other_layers_may_be_the_same_ones_in_another_transformers(trained, tmp_path, saved, named):
    """After an upgrade, which renamed those of ViT and CLIP."""
    _, state = trained
    renamed = {**state, "layers": {"old.0": 4, "old.1": 4}, "order": ["old.0", "old.1"], "transformers": saved}
    renamed = {name: value for name, value in renamed.items() if value is not None}  # as before it was saved
    said = (
        rf"\. Layers may have other names in {named} than in {re.escape(transformers.__version__)}: restore and fold "
        "with the one that saved it, then load the folded model with this one$"
    )
    model = build("llama")
    model.config.betahook = "beta is in a file"
    checkpoint.save(SimpleNamespace(model=torch.nn.Module(), state_dict=lambda: copy.deepcopy(renamed)), tmp_path)
    with pytest.raises(ValueError, match=f"layers that this model lacks: .*{said}"):
        betahook.restore(model, tmp_path)
    with betahook.attach(build("llama")) as hook:
        with pytest.raises(ValueError, match=f"the state belongs to other layers: .*{said}"):
            hook.load_state_dict(renamed)
        with pytest.raises(ValueError, match=r"with the same layers=\.\.\.$"):
            hook.load_state_dict({**renamed, "transformers": state["transformers"]})


def test_an_attention_of_one_head_has_a_state_too():
    model = torch.nn.MultiheadAttention(8, 1)
    with betahook.attach(model, controller="monitor") as hook:
        assert schema.parse(hook.state_dict())["layers"] == {"": 1}


@pytest.mark.parametrize("name", ["steps", "alerts_step"])
def test_steps_are_as_many_as_a_float64_counts(trained, name):
    _, state = trained
    assert schema.parse({**state, name: 2**53 - 1})[name] == 2**53 - 1
    with pytest.raises(ValueError, match=rf"damaged: .*\b{2**53}\b"):
        schema.parse({**state, name: 2**53})


def test_a_row_that_is_unknown_is_damage(trained):
    _, state = trained
    _, *others = state["rows"]["table"]
    with pytest.raises(ValueError, match=r"a newer betahook than this: table has rows that are unknown, gamma"):
        schema.parse({**state, "rows": {**state["rows"], "table": ["gamma", *others]}})


def test_an_entry_that_is_not_there_is_named(trained):
    _, state = trained
    without = {name: value for name, value in state.items() if name != "steps"}
    with pytest.raises(ValueError, match=r"incomplete: steps should be a int, got nothing"):
        schema.parse(without)


def test_conditions_that_are_unknown_are_damage(trained):
    hook, state = trained
    assert sorted(Condition) == list(range(schema.CONDITIONS))
    for number in (-1, schema.CONDITIONS):
        with pytest.raises(ValueError, match=rf"newer .*: condition has entries that are unknown, \[{number}\]"):
            hook.load_state_dict({**state, "condition": torch.full_like(state["condition"], number)})


def test_a_controller_that_is_no_dataclass_is_refused_when_attached():
    class Plain(betahook.Monitor):
        pass

    model = build("llama")
    with pytest.raises(TypeError, match=r"class Plain is not decorated with @dataclass"):
        betahook.attach(model, controller=Plain())
    betahook.attach(model).detach()


def test_a_file_of_version_2_still_loads():
    told = json.loads((VERSION_2 / "expected.json").read_text())
    rules = [betahook.Search(window=2, warmup=3), betahook.Gradient(), betahook.Cap(2.0)]
    model = build("llama")
    with betahook.attach(model, controller=rules) as hook:
        checkpoint.read(VERSION_2).load(hook)
        metrics = hook.metrics()
        for name, value in told.items():
            if "/" in name and not name.startswith("weight_std"):
                assert metrics[name] == pytest.approx(value, rel=1e-6), name
        layers = hook.layers.values()
        assert [int(layer.statistics.count) for layer in layers] == told["count"]
        assert [float(layer.statistics.entropy) for layer in layers] == pytest.approx(told["now"], rel=1e-6)
        assert hook.steps == 5
        search, gradient, _ = hook.state_dict()["controllers"]
        assert (search["state"]["phase"] == betahook.control.opening.Phase.WARM_UP).all()  # and on the plateau since
        assert gradient["state"]["steps"].tolist() == [5, 5]
        train(model, hook, 1)


def test_a_state_of_version_2_in_memory_is_the_same():
    state = checkpoint.read(VERSION_2).state
    with safe_open(VERSION_2 / checkpoint.FILE, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, it is not a dict
        old = json.loads(opened.metadata()["betahook"])["state"]
    for index, entry in enumerate(old["controllers"]):
        prefix = f"controllers.{index}."
        names = [name for name in tensors if name.startswith(prefix)]
        entry["state"] = {name.removeprefix(prefix): tensors.pop(name) for name in names}
    assert bits(schema.parse({**old, **tensors})) == bits(state)


def craft(folder, **changes):
    """Write a version 2 file, valid by its checksum, with other tensors or entries of its header."""
    with safe_open(VERSION_2 / checkpoint.FILE, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, it is not a dict
        state = json.loads(opened.metadata()["betahook"])["state"]
    tensors |= {name: value for name, value in changes.items() if isinstance(value, torch.Tensor)}
    state |= {name: value for name, value in changes.items() if not isinstance(value, torch.Tensor)}
    header = json.dumps({"state": state, "sha256": file._checksum(state, tensors)})
    save_file(tensors, Path(folder, checkpoint.FILE), {"betahook": header})


CRAFTED = {
    "controllers that are a number": (dict(controllers=5), "controllers should be a list of dictionaries, got 5"),
    "a tensor in the place of the layers": (dict(layers=torch.ones(8)), "no place for a tensor called 'layers'"),
    "beta in float8": (dict(beta=torch.ones(8).to(torch.float8_e4m3fn)), "beta should be of torch.float32 or"),
    "beta of 1e30": (dict(beta=torch.full((8,), 1e30)), "beta has entries that are not .* between 1e-10 and 1e"),
    "negative beta": (dict(beta_default=-torch.ones(8)), "beta_default has entries that are not positive"),
    "too few rows": (dict(table=torch.zeros(3, 8)), r"table should have the shape \[28, heads\], got \[3, 8\]"),
    "a tensor that is unknown": (dict(gamma=torch.ones(8)), "it has entries that are unknown, gamma"),
    "no layers": (dict(layers=[1]), "layers should be a dict, got list"),
    "layers without heads": (dict(layers={"a": 0}), "layers should be names with numbers of heads, got 'a': 0"),
    "more skipped than steps": (dict(skipped_steps=9), "5 steps, 9 of them skipped"),
    "more batches than steps": (dict(batches=9), "5 steps, 0 of them skipped, 9 since the last pooling"),
    "steps that are true": (dict(steps=True), "steps should be a int, got bool"),
    "a negative loss scale": (dict(loss_scale=-1.0), "the loss scale should be a number, 0 or more, got -1.0"),
    "a controller that is code": (
        dict(controllers=[{"rule": "Search(window=__import__('os').getpid())"}]),
        "is not a controller",
    ),
    "a controller with a place": (dict(controllers=[{"rule": "Search(10)"}]), "is not a call with options by name"),
}


def ways(folder, tmp_path):
    """Every way by which a file comes in."""
    model = build("llama")
    yield lambda: checkpoint.read(folder)
    with betahook.attach(model) as hook:
        yield lambda: checkpoint.read(folder).load(hook)
    marked = build("llama")
    marked.config.betahook = "beta is in a file"
    yield lambda: betahook.restore(marked, folder)
    trainer = make_trainer(tmp_path, BetaHookCallback(), max_steps=2, save_strategy="steps", save_steps=1)
    trainer.train()
    (tmp_path / "checkpoint-1" / checkpoint.FILE).write_bytes((folder / checkpoint.FILE).read_bytes())
    path = str(tmp_path / "checkpoint-1")
    again = make_trainer(tmp_path, BetaHookCallback(), max_steps=2, save_strategy="no", resume_from_checkpoint=path)
    yield lambda: again.train(resume_from_checkpoint=path)


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_files_are_refused_by_what_is_wrong(name, tmp_path):
    changes, message = CRAFTED[name]
    craft(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        checkpoint.read(tmp_path)
    assert str(tmp_path / checkpoint.FILE) in str(caught.value)


def test_a_crafted_file_is_refused_whoever_reads_it(tmp_path, capsys):
    (folder := tmp_path / "crafted").mkdir()
    craft(folder, controllers=5)
    for way in ways(folder, tmp_path / "run"):
        with pytest.raises(
            ValueError, match=f"{checkpoint.FILE}: the state is incomplete: controllers should be a list"
        ):
            way()
    config = build("llama").config
    setattr(config, checkpoint.MARK, "needs it")
    config.save_pretrained(folder)
    assert main(["inspect", str(folder)]) == 1
    assert "controllers should be a list of dictionaries, got 5" in capsys.readouterr().err
