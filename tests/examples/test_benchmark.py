"""The benchmark example, on a model that takes no time."""

import json
import subprocess
import sys

import pytest
import torch

import betahook
from betahook.tap import gain
from support.examples import EXAMPLES, imported

TINY = ["n_layer=1", "n_embd=8", "n_head=2", "vocab_size=16", "bos_token_id=0", "eos_token_id=0"]


@pytest.fixture(scope="module")
def example():
    with imported("benchmark") as modules:
        yield modules["benchmark"]


def test_every_way_is_compared_with_the_unhooked_step(example, tmp_path, capsys):
    example.main(["--config", *TINY, "--length", "16", "--rounds", "2", "--device", "cpu", "--output", str(tmp_path)])
    written = json.loads((tmp_path / "benchmark.json").read_text())
    rows = written["result"]
    assert list(rows) == ["unhooked", *example.OURS, *example.TODAY]
    assert rows["unhooked"]["ratio"] == {"median": 1, "low": 1, "high": 1}
    assert all(row["seconds"]["median"] > 0 and row["peak"] > 0 for row in rows.values())
    assert f"torch {torch.__version__}" in written["machine"]
    said = capsys.readouterr().out
    assert all(f"\n{name} " in said for name in rows)
    assert (tmp_path / "benchmark.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("model", ["gpt2", "llama", "bert"])
def test_one_attention_layer_is_compared_with_a_whole_step(example, tmp_path, capsys, monkeypatch, model):
    monkeypatch.setattr(example, "PAIRS", 2)
    sizes = ["hidden_size=8", "num_attention_heads=2", "num_hidden_layers=2", "vocab_size=16"]
    command = ["--attention", "--model", model, "--config", *(TINY if model == "gpt2" else sizes), "--length", "16"]
    example.main([*command, "--rounds", "2", "--device", "cpu", "--output", str(tmp_path)])
    result = json.loads((tmp_path / "attention.json").read_text())["result"]
    assert list(result["added"]) == ["unhooked", "measured", "not measured", "interval=10"]
    assert result["added"]["measured"]["median"] > 0
    assert "\nnot measured " in capsys.readouterr().out


def test_the_peak_is_of_what_is_alive_at_once(example):
    def run():
        torch.zeros(2**20)
        kept = torch.zeros(2**18)
        return kept, torch.zeros(2**19)

    assert example.allocated(run) == pytest.approx(4 * 2**20, rel=0.01)


def test_no_way_leaves_anything_behind(example):
    model = example.build("gpt2", dict(map(example.override, TINY)), "cpu", torch.float32)
    ways = example.Bench(model, 1, 8).ways()

    def hooks():
        return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]

    ways["output_attentions, eager"]()  # transformers itself watches its attention from now on
    before = hooks()
    for way in ways.values():
        way()
        assert hooks() == before
        assert model.config._attn_implementation == "sdpa"


def test_a_type_without_a_language_model_is_named(example):
    with pytest.raises(SystemExit, match="--model vit: transformers has no language model"):
        example.build("vit", {}, "cpu", torch.float32)
    with pytest.raises(SystemExit, match="--model foo: transformers has no such model type"):
        example.build("foo", {}, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "n_layer"], "argument --config: expected NAME=VALUE, such as n_layer=3, not n_layer"),
        (["--device", "cuda"], "--device cuda: torch finds no CUDA here; give --device cpu"),
    ],
)
def test_bad_options_of_the_benchmark_are_refused(example, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        example.main([*arguments, "--output", str(tmp_path / "new")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "value"), [("n_layer=3", 3), ("tie=false", False), ("activation_function=gelu", "gelu"), ("x=1e-3", 1e-3)]
)
def test_overrides_are_json_where_they_can_be(example, text, value):
    assert example.override(text) == (text.split("=")[0], value)


@pytest.mark.parametrize(
    ("small", "held"),
    [pytest.param(0, 1.1, id="usual", marks=pytest.mark.slow), pytest.param(gain.SMALL, 3.2, id="small")],
)
def test_a_hook_holds_no_more_than_the_queries(example, monkeypatch, small, held):
    """The scaled ones are what the attention keeps for its backward. Of small ones the unscaled are held too, in GPT-2
    inside q, k and v, of which its attention keeps copies."""
    monkeypatch.setattr(gain, "SMALL", small)
    layers, width, length = 12, 64, 256  # many layers, since measuring needs room for one at a time
    overrides = dict(n_layer=layers, n_embd=width, n_head=4, vocab_size=1024, bos_token_id=0, eos_token_id=0)
    bench = example.Bench(example.build("gpt2", overrides, "cpu", torch.float32), 2, length)
    bench.step()
    unhooked = bench.peak(bench.step)
    with betahook.attach(bench.model, **example.OURS["default, in its opening"]) as hook:
        bench.step(hook)  # what is made once for a shape is no part of a step
        hooked = bench.peak(lambda: bench.step(hook))
    queries = layers * 2 * length * width * 4
    assert unhooked < hooked < unhooked + held * queries


@pytest.mark.slow
def test_the_profiler_does_not_write_between_the_lines(tmp_path):
    command = [
        sys.executable,
        str(EXAMPLES / "benchmark.py"),
        "--config",
        *TINY,
        "--length",
        "16",
        "--rounds",
        "1",
        "--device",
        "cpu",
    ]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], check=True, timeout=240, capture_output=True, text=True
    )
    assert "profiler_start" not in done.stderr + done.stdout
