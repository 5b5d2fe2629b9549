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
def test_both_losses_are_printed_side_by_side(example, tmp_path, capsys):
    options = ["--model", "llama", "--bf16", "--attention", "eager"]  # the defaults are those of the run below
    example.main([*options, "--steps", "4", "--length", "16", "--output", str(tmp_path)])
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


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_checkpoints_of_other_options_are_refused(example, tmp_path, monkeypatch):
    monkeypatch.setattr(example, "read_library", lambda: (bytes(256) * 4, bytes(256)))
    options = ["--steps", "2", "--length", "16", "--width", "32", "--layers", "1", "--save-steps", "2"]
    options += ["--output", str(tmp_path)]
    example.main(options)
    example.main(options)  # goes on, with nothing to do
    folder = tmp_path / "monitor-0.01-seed0"

    def refused(*others):
        with pytest.raises(SystemExit) as refusal:
            example.main([*options, *others])
        assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-2"]
        return str(refusal.value)

    said = f"{folder} holds checkpoints of {{}}: give another --output"
    assert refused("--model", "llama", "--layers", "2") == said.format("--model gpt2, not llama; --layers 1, not 2")
    assert refused("--steps", "1", "--bf16") == said.format("--steps 2, not 1; --bf16 False, not True")
    assert refused("--attention", "eager") == said.format("--attention sdpa, not eager")
    (folder / "options.json").unlink()
    assert "--model unknown, not gpt2; --steps unknown, not 2" in refused()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mtime may not be reliable")  # transformers 5.1, of two checkpoints in one second
@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_an_interrupted_comparison_goes_on_where_it_was(example, tmp_path, capsys, monkeypatch):
    text = bytes(range(256)) * 4
    monkeypatch.setattr(example, "read_library", lambda: (text, text[::-1]))

    def losses(folder):
        example.main(["--steps", "2", "--length", "16", "--save-steps", "1", "--output", str(tmp_path / folder)])
        return [line for line in capsys.readouterr().out.splitlines() if line.endswith("%")]

    whole = losses("whole")
    assert len(whole) == 2

    class Interrupted(example.Bar):
        def on_step_end(self, args, state, control, **kwargs):
            super().on_step_end(args, state, control, **kwargs)
            if state.global_step == 2 and "default" in args.output_dir:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(example, "Bar", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            losses("interrupted")
    steps = []
    monkeypatch.setattr(example.Bar, "on_step_begin", lambda *args, **kwargs: steps.append(1))
    assert losses("interrupted") == whole
    assert len(steps) == 1  # of the plain run none, of the other the last


def test_a_width_that_is_no_multiple_of_a_head_is_refused(example, capsys):
    with pytest.raises(SystemExit, match="2"):
        example.main(["--width", "100"])
    assert "--width must be a multiple of 32, not 100" in capsys.readouterr().err
