"""The language model example, a few steps of it."""

import pytest
import torch

from support.examples import imported


@pytest.fixture(scope="module")
def example():
    with imported("language_model") as modules:
        yield modules["language_model"]


def test_no_file_is_trained_on_and_validated(example):
    training, validation = example.read_library()
    assert len(training) > 5 * len(validation) > 100_000
    assert validation[:2_000] not in training


def test_windows_are_bytes(example):
    windows = example.Windows(b"betahook!", 4)
    assert len(windows) == 2
    assert bytes(windows[1]["input_ids"].tolist()) == b"hook"
    assert torch.equal(windows[1]["labels"], windows[1]["input_ids"])


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_both_losses_are_printed_side_by_side(example, model, tmp_path, capsys):
    example.main(["--model", model, "--steps", "4", "--length", "16", "--output", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    start = next(index for index, line in enumerate(lines) if "1/sqrt(d_k)" in line)
    rows = [line.split() for line in lines[start + 1 : start + 5]]
    assert [row[2] for row in rows] == ["1", "2", "3", "4"]
    assert all(1 < float(row[3]) < 8 and 1 < float(row[4]) < 8 for row in rows)
    assert len(list(tmp_path.glob("*/runs/*/events*"))) == 4  # of the Trainer and of betahook, for each of the two


@pytest.mark.parametrize("option", ["--steps", "--length"])
def test_nothing_to_train_is_refused(example, capsys, option):
    with pytest.raises(SystemExit, match="2"):
        example.main([option, "0"])
    assert f"argument {option}: must be at least 1, not 0" in capsys.readouterr().err
