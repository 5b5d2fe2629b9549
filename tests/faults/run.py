"""Put one fault after the other into a copy of the tree, and see whether the tests of its file notice.

`make test-faults` runs all of `faults.py`; `python tests/faults/run.py measure/rows` those whose file contains that.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from faults import FAULTS, Fault

IMPORTED = ["torch.testing", "transformers.models.llama.modeling_llama", "transformers.trainer", "scipy.stats"]
"""Once for all faults, whose processes are forked from this one; nothing of betahook."""
ROOT = Path(__file__).parents[2]
AT_ONCE = 2
LIMIT = 120.0
"""Seconds after which the tests of one fault count as hanging, and it as noticed."""
ENDED = 10
"""Added to the status of pytest, whose 1 would be that of an exception here, too."""
MISSED, NOTICED = ENDED, ENDED + 1


def tree() -> list[str]:
    """What makes up the tree: tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.splitlines() if (ROOT / name).is_file()]


def run_tests(fault: Fault | None, names: Sequence[str], tests: Sequence[str], log: Path) -> None:
    """In a process of its own: exit with the status of pytest, on a copy with one fault or none."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
        # Where an installed package has it: otherwise the finder of an editable install would lead back to the tree.
        Path(folder, "betahook/integrations").symlink_to(Path(folder, "integrations"))
        if fault is not None:
            changed = Path(folder, fault.file)
            before, found, after = changed.read_text().partition(fault.text)
            assert found, fault
            changed.write_text(f"{before}{fault.replacement}{after}")
        os.chdir(folder)
        sys.path[:] = [folder, *(path for path in sys.path if not path.startswith(str(ROOT / "tests")))]
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = pytest.main(["-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain", *tests])
        log.write_text(said.getvalue())
    os._exit(ENDED + int(status))


def outcomes(faults: Sequence[Fault], logs: Path) -> Iterator[tuple[Fault | None, int | None, float]]:
    """Each fault as soon as its tests have ended, with their status and seconds; None for a status where they hang.

    Before all of them, the same for no fault: the tests of all together, without a limit.
    """
    context, names = multiprocessing.get_context("fork"), tree()
    waiting: list[Fault | None] = [None, *faults]
    running: dict[multiprocessing.process.BaseProcess, tuple[Fault | None, float]] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            fault = waiting.pop(0)
            chosen = faults if fault is None else [fault]
            tests = sorted({test for each in chosen for test in each.noticed_by})
            process = context.Process(target=run_tests, args=(fault, names, tests, log_of(fault, logs)))
            process.start()
            running[process] = fault, time.monotonic()
        wait([process.sentinel for process in running], timeout=1)
        for process, (fault, started) in list(running.items()):
            seconds = time.monotonic() - started
            if process.is_alive() and (fault is None or seconds < LIMIT):
                continue
            hangs = process.is_alive()
            process.kill()
            process.join()
            del running[process]
            yield fault, None if hangs else process.exitcode, seconds


def log_of(fault: Fault | None, logs: Path) -> Path:
    return logs / f"{'none' if fault is None else FAULTS.index(fault)}.txt"


def main(part: str = "") -> int:
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.dont_write_bytecode = True  # a fault may be as long as what it replaces
    for name in IMPORTED:
        importlib.import_module(name)
    chosen = [fault for fault in FAULTS if part in fault.file]
    started, failed = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        for fault, status, seconds in outcomes(chosen, logs):
            if fault is None and status != MISSED:
                print(log_of(None, logs).read_text(), "\nThe tests fail without any fault.", sep="")
                return 2
            if fault is None:
                continue
            said = {NOTICED: "noticed", None: "hangs", MISSED: "MISSED"}.get(status, f"BROKEN ({status})")
            print(f"{said:8} {seconds:5.1f} s  {fault}", flush=True)
            failed += status not in (NOTICED, None)
            if status not in (NOTICED, MISSED, None):
                print(log_of(fault, logs).read_text()[-2000:])
    seconds = time.monotonic() - started
    print(f"{len(chosen) - failed} of {len(chosen)} faults noticed, in {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
