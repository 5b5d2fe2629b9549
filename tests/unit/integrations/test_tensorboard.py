"""The pages as TensorBoard itself serves them, over its HTTP interface on loopback."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest

import betahook
from betahook.integrations.tensorboard import HISTOGRAMS, TensorBoardWriter, layout
from support.models import build, inputs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three steps, what its hook said of each, and a `fetch` of the pages of a real TensorBoard."""
    folder = tmp_path_factory.mktemp("runs")
    model, batch = build("llama"), inputs("llama")
    said = []
    with betahook.attach(model) as hook, TensorBoardWriter(str(folder / "one")) as writer:
        for step in range(3):
            model(**batch).loss.backward()
            hook.step()
            writer.write(hook, step)
            said.append((hook.metrics(), hook.head_metrics()))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def fetch(page, **query):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/{page}?{urllib.parse.urlencode(query)}") as answer:
            return json.load(answer)

    def loaded():
        """TensorBoard serves while it still reads; the last event of a run is a histogram of its last step."""
        try:
            histograms = fetch(
                "plugin/histograms/histograms", run="one", tag="sensitivity_by_head/model.layers.1.self_attn"
            )
        except urllib.error.URLError:
            return False
        return len(histograms) == len(said)

    try:
        deadline = time.monotonic() + 60
        while not loaded():
            assert time.monotonic() < deadline, "TensorBoard did not load the run"
            time.sleep(0.2)
        yield said, fetch
    finally:
        server.terminate()
        server.wait()


def test_scalars(run):
    said, fetch = run
    assert set(fetch("plugin/scalars/tags")["one"]) == set(said[0][0])
    for tag in said[0][0]:
        served = [value for _, _, value in fetch("plugin/scalars/scalars", run="one", tag=tag)]
        assert served == pytest.approx([metrics[tag] for metrics, _ in said], rel=1e-5)


def test_histograms_over_heads(run):
    said, fetch = run
    tags = fetch("plugin/histograms/tags")["one"]
    differing = set(HISTOGRAMS) - {"beta"}  # which is one for a layer here
    assert set(tags) == {f"{q}_by_head/model.layers.{i}.self_attn" for q in differing for i in range(2)}
    for tag in tags:
        served = fetch("plugin/histograms/histograms", run="one", tag=tag)
        for (_, _, buckets), (_, heads) in zip(served, said, strict=True):
            filled = [bucket for bucket in buckets if bucket[2] > 0]
            values = heads[tag.replace("_by_head", "")]
            rounding = 1e-6 * values.abs()
            assert sum(bucket[2] for bucket in filled) == pytest.approx(len(values))
            assert filled[0][0] <= (values + rounding).min()
            assert filled[-1][1] >= (values - rounding).max()


def test_every_chart_of_the_layout_finds_its_tags(run):
    _, fetch = run
    served = fetch("plugin/custom_scalars/layout")
    titles = {category["title"]: [chart["title"] for chart in category["chart"]] for category in served["category"]}
    names = [f"model.layers.{index}.self_attn" for index in range(2)]
    assert titles == {category: list(charts) for category, charts in layout(names).items()}
    for category in served["category"]:
        for chart in category["chart"]:
            for pattern in chart["multiline"]["tag"]:
                answer = fetch("plugin/custom_scalars/scalars", run="one", tag=pattern)
                assert answer["regex_valid"]
                assert answer["tag_to_events"], f"{chart['title']}: nothing matches {pattern}"


def test_a_chart_of_one_layer_does_not_match_a_longer_name():
    charts = layout(["layers.1", "layers.10"])["score std: measured against predicted"]
    assert all(re.match(pattern, "score_std/layers.10") is None for pattern in charts["layers.1"][1])
