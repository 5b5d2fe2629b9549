"""The Accelerate example: on one process and on two, killed and resumed."""

import os
import subprocess
import sys

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support.examples import EXAMPLES, imported
from support.killed import differences, flatten

LAYER = "transformer.h.0.attn"


@pytest.fixture
def example():
    with imported("accelerate_loop") as modules:

        def run(folder, *arguments):
            for state in (AcceleratorState, GradientState, PartialState):
                state._reset_state()
            options = ["--cpu", "--length", "16", "--log-every", "2", "--output", str(folder)]
            modules["accelerate_loop"].main([*options, *arguments])

        run.module = modules["accelerate_loop"]
        yield run
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def logged(folder, tag):
    (events,) = {path.parent for path in (folder / "logs").rglob("events*")}
    return {event.step: event.value for event in EventAccumulator(str(events)).Reload().Scalars(tag)}


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_a_resumed_run_ends_with_the_same_bits(example, tmp_path, capsys):
    options = ["--save-every", "4"]
    example(tmp_path / "whole", "--steps", "8", *options)
    example(tmp_path / "parts", "--steps", "6", *options)
    example(tmp_path / "parts", "--steps", "8", *options, "--resume")
    files = {
        "model/model.safetensors": load_file,
        "state/model.safetensors": load_file,
        "state/optimizer.bin": torch.load,
        "state/custom_checkpoint_0.pkl": torch.load,  # betahook's, in the form that Accelerate gives it
    }
    for file, load in files.items():
        whole, parts = (flatten(load(tmp_path / run / file)) for run in ("whole", "parts"))
        assert len(whole) > 10
        assert differences(whole, parts) == []
    assert set(logged(tmp_path / "whole", f"beta/{LAYER}")) == {2, 4, 6, 8}
    losses = logged(tmp_path / "whole", "loss")
    assert set(losses) == {2, 4, 6, 8}

    def said(steps):
        return [f"step {step}: loss {losses[step]:.4f}" for step in steps]

    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("curves")]
    resumed = f"goes on after step 4, from {tmp_path / 'parts' / 'state'}"
    assert lines == [*said((2, 4, 6, 8)), *said((2, 4, 6)), resumed, *said((6, 8))]


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
@pytest.mark.parametrize("saved", [3, 4])  # where a pass ends, and within the next one
def test_a_run_of_several_passes_over_the_data_goes_on_where_it_was(example, tmp_path, monkeypatch, saved):
    """A pass has 40 windows in five batches, and so three steps, the last of them of one batch."""
    windows, seen = example.module.Windows, []
    monkeypatch.setattr(example.module, "read_library", lambda: ((bytes(range(256)) * 3)[:640], b""))
    take = windows.__getitem__
    monkeypatch.setattr(windows, "__getitem__", lambda self, index: (seen.append(index), take(self, index))[1])
    options = ["--log-every", "1", "--save-every", str(saved)]
    example(tmp_path / "whole", "--steps", "8", *options)
    assert list(logged(tmp_path / "whole", "loss")) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sorted(seen[:40]) == sorted(seen[40:80]) == list(range(40))
    assert seen[:40] != seen[40:80]
    example(tmp_path / "parts", "--steps", str(saved), *options)
    example(tmp_path / "parts", "--steps", "8", *options, "--resume")
    whole, parts = (flatten(load_file(tmp_path / run / "model" / "model.safetensors")) for run in ("whole", "parts"))
    assert differences(whole, parts) == []


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_a_run_that_is_done_is_not_trained_further(example, tmp_path):
    example(tmp_path, "--steps", "2", "--save-every", "2")
    with pytest.raises(SystemExit, match="state is of step 2 already: give more than --steps 2"):
        example(tmp_path, "--steps", "2", "--resume")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--resume: there is no {}/state; a run saves it every --save-every steps"),
        (["--log-every", "0"], "argument --log-every: must be at least 1, not 0"),
        (["--save-every", "-1"], "argument --save-every: must be at least 1, not -1"),
        (["--steps", "0"], "argument --steps: must be at least 1, not 0"),
    ],
)
def test_bad_options_of_the_loop_are_refused(example, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        example(tmp_path, *arguments)
    assert message.format(tmp_path) in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [
        str(EXAMPLES / "accelerate_loop.py"),
        "--cpu",
        "--steps",
        "4",
        "--length",
        "16",
        "--log-every",
        "2",
        "--output",
        str(tmp_path),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, timeout=240, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "processes: 2" in run.stdout
    assert set(logged(tmp_path, f"beta/{LAYER}")) == {2, 4}
    assert (tmp_path / "model" / "model.safetensors").is_file()
