"""The pages as TensorBoard itself serves them, over its HTTP interface on loopback."""

import json
import logging
import math
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import get_args

import pytest
import torch
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext

import betahook
from betahook.integrations.tensorboard import CALM, TensorBoardWriter, layout
from betahook.layer import AttentionLayer
from betahook.report.summary import summarise
from support.models import build, inputs

LAYERS = [f"model.layers.{index}.self_attn" for index in range(11)]
STEPS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of some steps, what its hook said of each, and a `fetch` of the pages of a real TensorBoard."""
    folder = tmp_path_factory.mktemp("runs")
    model, batch = build("llama", num_hidden_layers=11), inputs("llama")
    said = []
    with betahook.attach(model) as hook, TensorBoardWriter(str(folder / "one"), quantities="all") as writer:
        for step in range(STEPS):
            loss = model(**batch).loss
            loss.backward()
            if step == 3:
                model.model.layers[2].self_attn.q_proj.weight.data[0] = torch.nan
                model(**batch)
            hook.step()
            writer.write(hook, step, loss=loss.item())
            said.append((hook.metrics(), hook.findings(), loss.item()))
            if step == 3:
                model.model.layers[2].self_attn.q_proj.weight.data[0] = 0.1
                model.zero_grad()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def fetch(page, **query):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/{page}?{urllib.parse.urlencode(query)}") as answer:
            return json.load(answer)

    def loaded():
        """TensorBoard serves while it still reads; the last event of a run is its last picture."""
        try:
            shown = fetch("plugin/images/images", run="one", tag="attention/at a glance", sample=0)
        except urllib.error.URLError:
            return False
        return shown[-1]["step"] == STEPS - 1

    try:
        deadline = time.monotonic() + 60
        while not loaded():
            assert time.monotonic() < deadline, "TensorBoard did not load the run"
            time.sleep(0.2)
        yield said, fetch
    finally:
        server.terminate()
        server.wait()


def scalars(fetch, tag):
    return {step: value for _, step, value in fetch("plugin/scalars/scalars", run="one", tag=tag)}


def test_the_summary_of_every_step(run):
    said, fetch = run
    served = {tag for tag in fetch("plugin/scalars/tags")["one"] if tag.startswith("attention/")}
    shown = {"attention/loss"}.union(*(summarise(found) for _, found, _ in said))
    assert served == shown - {"attention/max_logit_layer", "attention/max_logit_head"}  # places are no curves
    assert list(scalars(fetch, "attention/loss").values()) == pytest.approx([loss for *_, loss in said])
    for tag in ("attention/max_logit", "attention/lowest_entropy", "attention/layers_healthy"):
        expected = {step: summarise(found)[tag] for step, (_, found, _) in enumerate(said)}
        assert scalars(fetch, tag) == pytest.approx(expected, rel=1e-5)
    fired = scalars(fetch, "attention/layers_nonfinite")
    assert fired[3] > 0
    assert {step: share for step, share in fired.items() if step > 3} == {4: 0, 5: 0}


def test_details_are_in_the_order_of_the_layers(run):
    said, fetch = run
    tags = sorted(tag for tag in fetch("plugin/scalars/tags")["one"] if tag.startswith("logit_std/"))
    assert tags == [f"logit_std/{index:02}" for index in range(11)]
    for tag, layer in zip(tags, LAYERS, strict=True):
        expected = {step: metrics.get(f"logit_std/{layer}") for step, (metrics, *_) in enumerate(said)}
        measured = {step: value for step, value in expected.items() if value is not None}
        assert scalars(fetch, tag) == pytest.approx(measured, rel=1e-5)


def test_beta_is_shown_in_decades_from_the_models_own(run):
    said, fetch = run
    metrics = said[-1][0]
    own = metrics[f"beta/{LAYERS[4]}"] / said[-1][1][4].gain
    expected = math.log10(metrics[f"beta/{LAYERS[4]}"] / own)
    assert scalars(fetch, "log10_beta_over_own/04")[STEPS - 1] == pytest.approx(expected, abs=1e-5)


def test_constants_come_once_and_flags_when_they_fire(run):
    _, fetch = run
    assert len(scalars(fetch, "classic_std/00")) == 1
    tags = fetch("plugin/scalars/tags")["one"]
    assert not any(tag.startswith(("exact/", "at_bound/")) for tag in tags)
    assert scalars(fetch, "nonfinite/02") == {3: 1, 4: 0}


def test_histograms_over_all_heads(run):
    said, fetch = run
    names = ("logit_std", "keys_share", "max_logit")
    assert set(fetch("plugin/histograms/tags")["one"]) == {f"attention_heads/{name}" for name in names}
    for name in names:
        served = fetch("plugin/histograms/histograms", run="one", tag=f"attention_heads/{name}")
        for (_, step, buckets), (_, found, _) in zip(served, said, strict=True):
            values = [getattr(head, name) for layer in found for head in layer.head_numbers]
            values = [value for value in values if math.isfinite(value)]
            filled = [bucket for bucket in buckets if bucket[2] > 0]
            assert sum(bucket[2] for bucket in filled) == pytest.approx(len(values)), step
            assert filled[0][0] <= min(values) * (1 + 1e-6)
            assert filled[-1][1] >= max(values) * (1 - 1e-6)


def test_the_picture_and_the_findings(run):
    said, fetch = run
    shown = fetch("plugin/images/images", run="one", tag="attention/at a glance", sample=0)
    assert [each["step"] for each in shown] == [0, 1, 2, 4, 5]
    (tag,) = fetch("plugin/text/tags")["one"]
    text = fetch("plugin/text/text", run="one", tag=tag)
    assert said[-1][1].summary in text[-1]["text"].replace("&#39;", "'")
    assert all(f"<td>{index}</td>" in text[-1]["text"] for index in range(len(LAYERS)))


def test_every_chart_of_the_layout_finds_its_tags(run):
    said, fetch = run
    served = fetch("plugin/custom_scalars/layout")
    names = {key.split("/")[0] for key in said[0][0]}
    measured = [name for name in get_args(betahook.MetricName) if name in names]
    titles = {category["title"]: [chart["title"] for chart in category["chart"]] for category in served["category"]}
    assert titles == {category: list(charts) for category, charts in layout(measured, with_loss=True).items()}
    assert titles["at a glance"][:3] == ["loss", "largest logit", "lowest entropy of a layer (nats)"]
    for category in served["category"]:
        for chart in category["chart"]:
            for pattern in chart["multiline"]["tag"]:
                answer = fetch("plugin/custom_scalars/scalars", run="one", tag=pattern)
                assert answer["regex_valid"]
                assert answer["tag_to_events"], f"{chart['title']}: nothing matches {pattern}"
                assert len({tag.split("/")[0] for tag in answer["tag_to_events"]}) == 1


def shown_layout(folder):
    """Titles of the charts by category, as TensorBoard reads them from a folder."""
    from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin  # which warns

    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder)).Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    plugin = CustomScalarsPlugin(TBContext(logdir=str(folder), data_provider=provider))
    categories = json.loads(plugin.layout_impl(RequestContext(), ""))["category"]
    return {category["title"]: [chart["title"] for chart in category["chart"]] for category in categories}


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer is deprecated")
def test_what_is_measured_later_gets_its_chart(tmp_path):
    """As what a step measures where the first write is before it."""
    model = build("llama")
    with (
        betahook.attach(model, "monitor") as hook,
        TensorBoardWriter(str(tmp_path), quantities=["entropy", "beta"]) as writer,
    ):
        writer.write(hook, 0)
        model(**inputs("llama")).loss.backward()
        hook.step()
        for step in range(1, 4):
            writer.write(hook, step, loss=1.0 if step == 2 else None)
    whole = layout(["entropy", "beta"], with_loss=True)
    assert shown_layout(tmp_path) == {category: [*charts] for category, charts in whole.items()}


def written(folder):
    return sum(file.stat().st_size for file in folder.iterdir())


def test_few_bytes_between_pictures(tmp_path):
    model = build("llama", num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=8, hidden_size=64)
    with betahook.attach(model) as hook, TensorBoardWriter(str(tmp_path)) as writer:
        sizes = []
        for step in range(9):
            model(**inputs("llama")).loss.backward()
            hook.step()
            writer.write(hook, step, loss=1.0)
            sizes.append(written(tmp_path))
    drawn = {0, 1, 2, 4, 6}  # after 1, 2, 3, 5 and 7 logs
    grown = {step: sizes[step] - sizes[step - 1] for step in range(1, 9)}
    assert max(size for step, size in grown.items() if step not in drawn) < 20_000
    assert all((size > 20_000) is (step in drawn) for step, size in grown.items())
    assert written(tmp_path) > sizes[-1] + 20_000  # the last picture


def test_without_matplotlib_there_is_one_warning_and_no_picture(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    caplog.set_level(logging.WARNING, "betahook")
    model = build("llama")
    with betahook.attach(model) as hook, TensorBoardWriter(str(tmp_path)) as writer:
        for step in range(3):
            model(**inputs("llama")).loss.backward()
            hook.step()
            writer.write(hook, step)
    (record,) = caplog.records
    assert record.getMessage() == "no picture in TensorBoard: pictures need matplotlib: pip install matplotlib"
    assert os.listdir(tmp_path)


def test_two_hooks_do_not_share_a_writer(tmp_path):
    model, other = build("llama"), build("gpt2")
    with betahook.attach(model) as hook, TensorBoardWriter(str(tmp_path)) as writer:
        writer.write(hook, 1)
        with betahook.attach(other) as second, pytest.raises(ValueError, match="got another hook than before"):
            writer.write(second, 1)
        writer.write(hook, 2)
        hook.detach()
        with betahook.attach(model) as again:
            writer.write(again, 3)


def test_weights_are_read_once_for_all_that_is_written(tmp_path, monkeypatch):
    model, reads, read = build("llama"), [], AttentionLayer.read_weights
    monkeypatch.setattr(AttentionLayer, "read_weights", lambda *args, **options: reads.append(read(*args, **options)))
    with betahook.attach(model, controller="monitor") as hook, TensorBoardWriter(str(tmp_path)) as writer:
        model(**inputs("llama")).loss.backward()
        hook.step()
        writer.write(hook, 1)
        assert len(reads) == len(hook.layers)
        hook.metrics()
        assert len(reads) == 2 * len(hook.layers)


def test_what_is_no_hook_is_refused(tmp_path):
    with TensorBoardWriter(str(tmp_path)) as writer, pytest.raises(TypeError, match=r"returned; got LlamaForCausalLM"):
        writer.write(build("llama"), 1)


@pytest.mark.parametrize("step", ["1", 2.5, 3.0, None, torch.tensor(2.5)], ids=str)
def test_a_step_that_is_no_whole_number_is_refused_and_not_remembered(tmp_path, step):
    model = build("llama")
    with betahook.attach(model, "monitor") as hook, TensorBoardWriter(str(tmp_path)) as writer:
        model(**inputs("llama")).loss.backward()
        hook.step()
        writer.write(hook, 1)
        with pytest.raises(TypeError, match=r"takes a whole number as its step, such as hook.steps; got .*[1235N]"):
            writer.write(hook, step)
        writer.write(hook, torch.tensor(5))
    assert [column.last for column in writer._picture._history.columns] == [1, 5]


@pytest.mark.parametrize("loss", [torch.ones(3), "low"], ids=str)
def test_a_loss_that_is_not_one_number_is_refused_and_nothing_is_written(tmp_path, loss):
    model = build("llama")
    with betahook.attach(model, "monitor") as hook, TensorBoardWriter(str(tmp_path)) as writer:
        model(**inputs("llama")).loss.backward()
        hook.step()
        with pytest.raises(TypeError, match=r"loss=\.\.\.\) takes one number, as loss\.item\(\); got"):
            writer.write(hook, 1, loss=loss)
        assert not writer._picture._history.columns
        writer.write(hook, 1, loss=torch.ones(1))


def test_an_unknown_quantity_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"quantities must be \"all\" or names of metrics.*got \['logit_sdt'\]"):
        TensorBoardWriter(str(tmp_path), quantities=["logit_sdt"])
    with pytest.raises(ValueError, match=r"or a list of names of metrics; got 'logit_std'"):
        TensorBoardWriter(str(tmp_path), quantities="logit_std")
    assert not os.listdir(tmp_path)


def test_the_layout_has_no_chart_that_stays_empty():
    assert list(layout([], with_loss=False)) == ["at a glance"]
    assert "loss" not in layout([], with_loss=False)["at a glance"]
    assert set(layout(["max_logit", "beta", *CALM], with_loss=True)["by layer"]) == {
        "max_logit by layer",
        "log10_beta_over_own by layer",
    }


def test_a_chart_shows_no_tag_that_begins_with_that_of_another():
    _, (pattern,) = layout([], with_loss=False)["at a glance"]["largest logit"]
    assert re.match(pattern, "attention/max_logit")
    assert not re.match(pattern, "attention/max_logit_layer")
