"""The benchmark of a log, with few of them."""

import json

from support.examples import imported


def test_every_part_of_a_log_is_timed(tmp_path, capsys):
    small = ["--config", "num_hidden_layers=2", "hidden_size=8", "num_attention_heads=2"]
    with imported("logs") as modules:
        modules["logs"].main([*small, "--logs", "4", "--device", "cpu", "--output", str(tmp_path)])
    result = json.loads((tmp_path / "logs.json").read_text())["result"]
    assert 1 <= result["pictures"] <= 4
    parts = ["hook.metrics()", "hook.findings()", "write, the picture apart", "a picture"]
    assert list(result) == [*parts, "pictures", "write, with its share of pictures"]
    assert all(result[part] > 0 for part in parts)
    assert result["write, with its share of pictures"] > result["write, the picture apart"]
    assert "pictures" in capsys.readouterr().out
