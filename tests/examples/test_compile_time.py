"""The benchmark of the time to compile, without compiling."""

import json
from types import SimpleNamespace

import pytest

from support.examples import imported


@pytest.fixture(scope="module")
def example():
    with imported("compile_time") as modules:
        yield modules["compile_time"]


def test_ratios_are_those_of_processes_with_cold_caches(example, monkeypatch, tmp_path, capsys):
    caches = []

    def run(command, env, **options):
        caches.append(env["TORCHINDUCTOR_CACHE_DIR"])
        seconds = {"unhooked": 20, "default": 20 + len(caches)}[command[-1]]
        return SimpleNamespace(stdout=f"a machine\n{seconds}\n")

    monkeypatch.setattr(example, "subprocess", SimpleNamespace(run=run))
    example.main(["--rounds", "2", "--device", "cpu", "--output", str(tmp_path)])
    assert len(set(caches)) == 4
    result = json.loads((tmp_path / "compile_time.json").read_text())["result"]
    assert result["ratios"] == [1.1, 1.2]
    assert "ratio        1.150  (1.100 to 1.200)" in capsys.readouterr().out


def test_a_process_trains_one_step(example, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(example.torch, "compile", lambda model, fullgraph: model)
    for way in ("unhooked", "default"):
        small = ["--config", "num_hidden_layers=1", "hidden_size=16", "num_attention_heads=2", "vocab_size=32"]
        example.main([*small, "--device", "cpu", "--length", "8", "--output", str(tmp_path), "--way", way])
        assert 0 < float(capsys.readouterr().out.split()[-1]) < 60
