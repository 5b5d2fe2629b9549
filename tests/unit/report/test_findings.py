"""Findings: what is said of each layer, when a line is logged, and that a resumed run knows since when."""

import logging
import math
from dataclasses import replace

import pytest
import torch

import betahook
from betahook.control.notes import Note
from betahook.control.opening import Phase
from betahook.report.conditions import Condition, Numbers
from betahook.report.findings import Finding, Findings, read_markdown
from betahook.tap.recorder import ATTRIBUTE
from support.models import build, inputs
from support.training import LAYER, train

SECOND = "model.layers.1.self_attn"
NOTHING = Note()


def finding(layer, condition=Condition.HEALTHY, since=1, heads=None, max_logit=8.0, note=NOTHING, is_new=True):
    numbers = Numbers(0.0, max_logit, 2.0, math.log(20), math.log(100))
    return Finding(
        f"model.layers.{layer}.attn",
        condition,
        since,
        numbers,
        heads or {},
        0.5,
        0.25,
        note,
        (numbers,) * 8,
        (2.0,) * 8,
        is_new,
    )


def forward_and_step(model, hook):
    model(**inputs("llama")).loss.backward()
    hook.step()
    return hook.findings()


def test_a_layer_that_is_left_alone_later_shows_nothing_of_before():
    model = build("llama")
    with betahook.attach(model) as hook:
        assert forward_and_step(model, hook)[0].condition is Condition.HEALTHY
        model(**inputs("llama")).loss.backward()
        getattr(model.get_submodule(LAYER), ATTRIBUTE).leave_alone("for a test")
        hook.step()
        first, second = found = hook.findings()
        assert first.condition is Condition.UNMEASURED
        assert "left alone" in found.remarks()["not measured"]
        assert str(first.note) == "left alone"
        assert second.condition is Condition.FLAT
        assert str(second.note).startswith("warm-up")
        metrics = hook.metrics()
        assert not {f"{name}/{LAYER}" for name in ("logit_std", "independent_std", "sensitivity")} & metrics.keys()


@pytest.fixture
def monitored(caplog):
    caplog.set_level(logging.INFO, "betahook")
    model = build("llama")
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        yield model, hook


def test_a_layer_and_its_heads(monitored):
    model, hook = monitored
    with torch.no_grad():
        model.get_submodule(LAYER).q_proj.weight.zero_()
        model.get_submodule(SECOND).q_proj.weight[8:16] *= 1e3  # the second head
    found = forward_and_step(model, hook)
    assert [each.layer for each in found] == [LAYER, SECOND]
    assert found.labels == ["0", "1"]
    metrics = hook.metrics()
    assert (found[0].condition, found[1].condition) == (Condition.DEAD, Condition.EXPLODING)
    assert found[0].heads == {}
    assert (1,) not in found[1].heads.values()
    assert found[1].max_logit_head == 1
    assert {head for heads in found[1].heads.values() for head in heads} == {0, 2, 3}
    assert found[1].numbers.max_logit == metrics[f"max_logit/{SECOND}"]
    assert found[1].numbers.keys == pytest.approx(math.exp(metrics[f"entropy/{SECOND}"]))
    assert found[1].gain == 1
    assert "the largest logit" in found.summary.lower()
    assert "(layer 1, head 1)" in found.summary


def test_a_layer_without_keys_is_dead_and_not_flat_at_any_length():
    """Its scores differ from row to row alone, which no softmax sees."""
    torch.manual_seed(0)
    attention, x = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 200, 16)
    with torch.no_grad():
        attention.in_proj_weight[16:32] = 0
        attention.in_proj_bias[16:32] = 1
    with betahook.attach(attention, controller="monitor") as hook:
        attention(x, x, x)[0].sum().backward()
        hook.step()
        (found,) = hook.findings()
        assert hook.metrics()["score_std/"] > 0.1
    assert found.condition is Condition.DEAD


def test_single_heads_stay_in_a_condition_as_long_as_their_layer(monitored):
    """The layer is one that exploded, with a largest logit that has come down a little."""
    model, hook = monitored
    largest = model.get_submodule(LAYER).q_proj.weight
    forward_and_step(model, hook)
    with torch.no_grad():
        largest[:8] *= 105 / hook.findings()[0].head_numbers[0].max_logit
        largest[8:] *= 1e-3
    exploding = forward_and_step(model, hook)[0]
    with torch.no_grad():
        largest[:8] *= 95 / 105
    less = forward_and_step(model, hook)[0]
    assert (exploding.condition, less.condition) == (Condition.EXPLODING,) * 2
    assert less.numbers.max_logit == pytest.approx(95, rel=0.01)
    assert [0 in heads for heads in less.heads.values()] == [False] * len(less.heads)


def test_one_line_a_step_and_only_of_what_began(monitored, caplog):
    model, hook = monitored
    forward_and_step(model, hook)
    hook.findings()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.message == "step 1: attention is now healthy in both layers"
    caplog.clear()
    forward_and_step(model, hook)
    assert caplog.records == []
    with torch.no_grad():
        model.get_submodule(SECOND).q_proj.weight.mul_(1e3)
    found = forward_and_step(model, hook)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith("step 3: attention is now exploding in layer 1 (lower the learning rate")
    assert record.message.endswith("betahook.Clip or betahook.Cap; lower the threshold of one that is in use)")
    assert [each.since for each in found] == [1, 3]


def test_the_first_nan_is_dated_by_the_step_that_had_it_and_not_by_the_look(monitored, caplog):
    """One that comes after a healthy step is dated by the look, as any other condition."""
    model, hook = monitored
    weight = model.get_submodule(SECOND).q_proj.weight
    kept = weight.detach().clone()

    def forwards(number, value):
        with torch.no_grad():
            weight.copy_(kept * value)
        for _ in range(number):
            model(**inputs("llama")).loss.backward()
            hook.step()
        return hook.findings()

    forwards(2, 1.0)
    caplog.clear()
    for begins in (3, 12):
        found = forwards(4, math.nan)
        assert [each.since for each in found] == [begins] * 2  # the first layer has no finite gradient either
        assert found[1].condition is Condition.NONFINITE
        assert hook.findings().news == found.news != ""
        assert caplog.records[-1].levelno == logging.WARNING
        assert forwards(1, math.nan).news == ""
        healthy = forwards(1, 1.0)
        assert healthy[1].since == healthy.step


def test_heads_that_broke_one_after_another_date_the_layer_by_the_first(monitored):
    model, hook = monitored
    weight = model.get_submodule(LAYER).q_proj.weight
    for rows in (slice(0), slice(8, 16), slice(0, 8)):  # of no head, the second, the first too
        with torch.no_grad():
            weight[rows] = math.nan
        model(**inputs("llama"))  # a backward would break all heads at once
        hook.step()
    (first, _) = hook.findings()
    assert (first.condition, first.since) == (Condition.NONFINITE, 2)


def test_the_largest_logit_is_none_of_a_head_that_has_no_number():
    heads = tuple(Numbers(0.0, logit, 2.0, 3.0, 4.0) for logit in (math.nan, 3.0, 8.0, math.nan))
    assert replace(finding(0), head_numbers=heads).max_logit_head == 2


def test_the_remedy_for_logits_that_are_held_is_a_lower_threshold():
    model = build("llama")
    with torch.no_grad():
        model.get_submodule(SECOND).q_proj.weight[:8] *= 1e3
    with betahook.attach(model, betahook.Clip(200.0)) as hook:
        found = forward_and_step(model, hook)
    assert found[1].condition is Condition.EXPLODING
    assert str(found[1].note) == "Clip scales the weights of heads with a logit above 200"
    assert found.remarks()["exploding"] == (
        "lower the learning rate, or limit the logits with QK-norm, betahook.Clip or betahook.Cap; lower the threshold "
        "of one that is in use"
    )


def test_a_resumed_run_knows_since_when(monitored, caplog):
    model, hook = monitored
    for _ in range(3):
        found = forward_and_step(model, hook)
    state = hook.state_dict()
    hook.detach()
    caplog.clear()
    with betahook.attach(model, controller="monitor") as resumed:
        resumed.load_state_dict(state)
        assert str(resumed.findings()) == str(found)
        kept = [(each.since, each.beta, each.numbers.logit_std) for each in found]
        assert [(each.since, each.beta, each.numbers.logit_std) for each in resumed.findings()] == kept
        assert [each.since for each in forward_and_step(model, resumed)] == [1, 1]
        assert caplog.records == []
        resumed.load_state_dict({name: value for name, value in state.items() if not name.startswith("condition")})
        assert [each.since for each in resumed.findings()] == [3, 3]


def test_a_layer_that_was_replaced_is_not_judged(monitored, caplog):
    model, hook = monitored
    forward_and_step(model, hook)
    model.model.layers[1] = build("llama").model.layers[1]
    caplog.clear()
    for _ in range(2):
        first, second = found = forward_and_step(model, hook)
    assert first.condition is Condition.HEALTHY
    assert (second.layer, second.condition, second.since) == (SECOND, Condition.UNMEASURED, 2)
    assert second.heads == {}
    assert math.isnan(second.beta)
    assert all(math.isnan(gain) for gain in second.head_gains)
    assert str(second.note) == "not reached, it is no longer part of the model: detach, and attach again"
    row = found.table().rows[1]
    assert row == ["1", "not measured", "2", "", "", "", "", ""][: len(row)]
    assert found.summary.startswith("Step 3: of 2 layers, 1 healthy and 1 not measured. The largest logit is")
    assert "beta of layer 1: not reached, it is no longer part" in str(found)
    assert caplog.records == []


def test_numbers_are_written_without_exponents():
    far = replace(finding(0, note=Note(Phase.CLIMB, 1.0)), beta=37.5, beta_default=0.25, head_gains=(150.0,) * 8)
    farther = replace(far, layer="model.layers.1.attn", beta=3000.0, head_gains=(12_000.0,) * 8)
    found = Findings.at(9, [far, farther])
    assert found.table().rows[0] == ["0", "healthy", "1", "2", "8", "20 of 100", "150 x", "+900 %"]
    assert found.summary.endswith("Beta is 150 to 12,000 times the model's own.")


def test_the_summary_has_the_range_of_beta_over_all_heads():
    apart = replace(finding(0), beta=0.25, head_gains=(0.79, 1.26) * 4)
    assert Findings.at(9, [apart]).summary.endswith("Beta is 0.79 to 1.3 times the model's own.")


@pytest.mark.parametrize(
    ("gains", "said", "cell"),
    [
        ((1.0, 1.0000001), "the model's own.", "1 x"),
        ((1.049, 1.049), "1.05 times the model's own.", "1.05 x"),
        ((0.9996, 1.0), "0.9996 to 1 times the model's own.", "0.9998 x"),
    ],
)
def test_a_beta_near_the_models_own_is_not_taken_for_it(gains, said, cell):
    near = replace(finding(0), beta=0.25 * sum(gains) / 2, beta_default=0.25, head_gains=gains)
    found = Findings.at(9, [near])
    assert found.summary.endswith(f"Beta is {said}")
    assert cell in found.table().rows[0]


@pytest.mark.parametrize("offset", [True, False])
def test_an_offset_that_all_keys_share_is_named_beside_the_explosion(offset):
    """Biases of q and k add a constant to every score; large weights of k do not."""
    model = build("gpt2")
    with torch.no_grad():
        for block in model.transformer.h[1:]:
            fused, width = block.attn.c_attn, block.attn.embed_dim
            fused.weight[:, width : 2 * width] *= 0.05 if offset else 1e3
            fused.bias[: 2 * width] = 8.0 if offset else 0.0
    with betahook.attach(model, "monitor") as hook:
        model(**inputs("gpt2")).loss.backward()
        hook.step()
        first, second = found = hook.findings()
    assert (first.condition, first.shares_offset) == (Condition.FLAT, False)
    assert (second.condition, second.shares_offset) == (Condition.EXPLODING, offset)
    said = "flat or nearly so, since the logits of a row share a large offset, which cancels"
    assert (f"\nsoftmax of layer 1: {said}\n" in str(found)) is offset


def test_nothing_is_said_before_the_first_step():
    with betahook.attach(build("llama"), controller="monitor", interval=1) as hook:
        found = hook.findings()
        assert {each.condition for each in found} == {Condition.UNMEASURED}
        assert found.news == ""
        assert found.summary == "Step 0: both layers not measured."
        assert "nan" not in str(found)


def test_findings_change_nothing_in_training():
    states = []
    for looks in (False, True):
        model = build("llama")
        with betahook.attach(model) as hook:
            for _ in range(3):
                train(model, hook, 1)
                if looks:
                    hook.findings()
            states.append((model.state_dict(), hook.metrics()))
    assert states[0][1] == states[1][1]
    assert all(torch.equal(states[0][0][name], value) for name, value in states[1][0].items())


def test_words():
    conditions = [Condition.HEALTHY, *[Condition.SHARP] * 6, Condition.ONE_KEY]
    layers = [finding(layer, condition, since=130) for layer, condition in enumerate(conditions)]
    found = Findings.at(130, layers)
    assert found.counts == {Condition.ONE_KEY: 1, Condition.SHARP: 6, Condition.HEALTHY: 1}
    assert found.news == (
        "step 130: attention is now on one key in layer 7 (some tasks ask for it; else lower the learning rate or "
        "beta, or limit the logits with QK-norm, betahook.Clip or betahook.Cap; lower the threshold of one that is in "
        "use), sharp in layers 1, 2, 3, 4 and 2 others and healthy in layer 0"
    )
    assert found.summary.startswith("Step 130: of 8 layers, 1 on one key, 6 sharp and 1 healthy. The largest logit is ")
    assert found.summary.endswith("Beta is 2 times the model's own.")


@pytest.mark.parametrize(
    ("heads", "cell"),
    [
        ((0, 2, 4, 6), "0, 2, 4, 6"),
        ((0, 2, 4, 6, 8), "0, 2, 4, 6 and 1 other"),
        (tuple(range(1, 64, 2)), "1, 3, 5, 7 and 28 others"),
        ((*range(4), 7, 9, 11, *range(20, 40)), "0-3, 7, 9, 11 and 20 others"),
    ],
)
def test_of_many_heads_the_first_are_named(heads, cell):
    assert Findings.at(1, [finding(0, heads={Condition.SHARP: heads})]).table().rows[0][-1] == f"sharp: {cell}"


def test_one_layer_more_than_are_named():
    found = Findings.at(1, [finding(layer, Condition.SHARP) for layer in range(5)] + [finding(5, is_new=False)])
    assert "sharp in layers 0, 1, 2, 3 and 1 other (" in found.news


def test_the_table():
    climbs = Note(Phase.CLIMB, 0.1, "on its way")
    found = Findings.at(
        9, [finding(0, heads={Condition.SHARP: (0, 1, 2, 5)}), finding(1, Condition.SHARP, since=4, note=climbs)]
    )
    assert found.table().rows == [
        ["0", "healthy", "1", "2", "8", "20 of 100", "2 x", "", "sharp: 0-2, 5"],
        ["1", "sharp", "4", "2", "8", "20 of 100", "2 x", "+26 %", ""],
    ]
    assert found.remarks() == {"sharp": "watch whether the largest logit grows", "beta of layer 1": "climb: on its way"}
    assert all(cell in str(found) for row in found.table().rows for cell in row)
    assert "\nsharp: watch whether the largest logit grows\nbeta of layer 1: climb: on its way\n" in str(found)
    assert "| 1 | sharp | 4 | 2 |" in found.markdown() == found._repr_markdown_()
    assert repr(found) == str(found)
    assert read_markdown(found.markdown()) == (found.summary, found.remarks(), found.table())  # as a report does
    assert "* **sharp**: watch whether the largest logit grows\n* **beta of layer 1**: climb" in found.markdown()
    assert "| heads |" in found.markdown()
    assert "| heads |" not in Findings.at(4, found[1:]).markdown()  # nothing stands there


def test_a_name_with_what_ends_a_cell_or_a_line_of_markdown():
    """In TensorBoard and notebooks, and in a report that reads the table again."""
    names = {"pipe|name": "pipe|name", "new\nline": "new line"}
    found = Findings.at(1, [replace(finding(0, Condition.SHARP), layer=name) for name in names])
    assert "\n| pipe\\|name | sharp |" in found.markdown()
    assert "\n| new line | sharp |" in found.markdown()
    _, _, table = read_markdown(found.markdown())
    assert [row[0] for row in table.rows] == list(names.values())
    other = Findings.at(1, [replace(finding(0, Condition.SHARP, note=Note(reason="climbs")), layer="new\nline")])
    assert other.markdown().startswith("**Step 1: layer new line sharp.")
    assert "\n* **beta of layer new line**: " in other.markdown()
