"""The benchmark of attention written by hand, on a tiny model."""

import json

import pytest
import torch

import betahook
from support.examples import imported


@pytest.fixture(scope="module")
def example():
    with imported("by_hand") as modules:
        yield modules["by_hand"]


@pytest.mark.parametrize("fused", [True, False])
def test_its_attention_is_followed(example, fused):
    model = example.GPT(16, 8, fused)
    tokens = torch.arange(8)[None]
    with betahook.attach(model, controller="monitor") as hook:
        model(tokens, tokens).loss.backward()
        hook.step()
        assert len(hook.layers) == example.LAYERS
        assert not any(layer.refusal for layer in hook.layers.values())
        assert [int(layer.statistics.count) for layer in hook.layers.values()] == [2 * 36] * example.LAYERS


def test_each_form_is_compared(example, monkeypatch, tmp_path, capsys):
    row = {"median": 1.25, "low": 1.0, "high": 1.5}
    monkeypatch.setattr(example, "compare_small", lambda bench, rounds: {"default": row})
    example.main(["--width", "16", "--length", "8", "--device", "cpu", "--output", str(tmp_path)])
    result = json.loads((tmp_path / "by_hand.json").read_text())["result"]
    assert result == {form: {"default": row} for form in ("product and softmax", "F.scaled_dot_product_attention")}
    assert capsys.readouterr().out.count("1.250   1.000   1.500") == 2


def test_compiled_steps_are_compared_in_turn(example, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(type(module).__name__))
    monkeypatch.setattr(example, "SMALL", {"monitor": {"controller": "monitor"}})
    ours, unhooked = (example.Bench(example.GPT(16, 8, True), 1, 8) for _ in range(2))
    found = example.compare_compiled(ours, unhooked, rounds=2)
    assert compiled == ["GPT", "GPT"]
    assert found["monitor"]["low"] <= found["monitor"]["median"] <= found["monitor"]["high"]
    betahook.attach(ours.model).detach()  # it can be hooked again


def test_a_width_of_no_whole_head_is_refused(example, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        example.main(["--width", "12", "--output", str(tmp_path)])
    assert "--width 12: give a multiple of 8, the width of a head" in capsys.readouterr().err
