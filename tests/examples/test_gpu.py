"""The GPU benchmark, on a model that takes no time, without a GPU."""

import json

import pytest

from support.examples import imported


@pytest.fixture
def example(monkeypatch):
    with imported("gpu") as modules:
        module = modules["gpu"]
        monkeypatch.setattr(module, "BLOCK", 1)
        monkeypatch.setattr(module, "WARM_UP", 1)
        yield module


def test_every_way_is_compared_with_the_unhooked_model(example, tmp_path, capsys):
    example.main(["--size", "tiny", "--device", "cpu", "--modes", "eager", "--blocks", "2", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "gpu.json").read_text())["result"]["eager"]
    assert list(rows) == list(example.ways("eager"))
    assert rows["unhooked"]["ratio"] + rows["unhooked again"]["ratio"] == pytest.approx(2)
    assert all(row["seconds"]["median"] > 0 for row in rows.values())
    assert "\ndefault, spread " in capsys.readouterr().out


def test_no_gpu_is_no_result(example, monkeypatch, capsys):
    monkeypatch.setattr(example.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        example.main([])
    assert "torch finds no CUDA here" in capsys.readouterr().err
