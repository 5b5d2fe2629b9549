"""Put one fault after the other into a copy of the tree, and see whether the tests of its file notice.

Last of all, the tests that noticed are run without any fault, and must pass. `make test-faults` runs all faults of
`faults.py`; `python tests/faults/run.py measure/rows` those whose file contains that.
"""

from __future__ import annotations

import compileall
import contextlib
import gc
import importlib
import inspect
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import cache_from_source
from multiprocessing.connection import wait
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest

from faults import FAULTS, Fault

IMPORTED = [
    "torch.testing",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "scipy.stats",
    "hypothesis",
]
"""Once for all faults, whose processes are forked from this one; nothing of betahook."""
ROOT = Path(__file__).parents[2]
AT_ONCE = 2
LIMIT = 120.0
"""Seconds after which the tests of one fault count as hanging, and it as noticed."""
ENDED = 10
"""Added to the status of pytest, whose 1 would be that of an exception here, too."""
MISSED, NOTICED = ENDED, ENDED + 1


@dataclass
class Run:
    """Tests on a copy of the tree with one fault, or with none."""

    fault: Fault | None
    tests: Sequence[str]
    folder: Path
    """Its copy of the tree; what pytest said and which test failed lie beside it."""
    seconds: float = 0.0
    status: int | None = None
    """Of pytest, with `ENDED` added; None where the tests hang."""

    @property
    def said(self) -> Path:
        return self.folder.with_suffix(".txt")

    @property
    def failed(self) -> Path:
        return self.folder.with_suffix(".failed")


def tree() -> list[str]:
    """What makes up the tree: tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.splitlines() if (ROOT / name).is_file()]


def copy_tree(target: Path) -> None:
    """With bytecode, so that every process compiles only the file with the fault."""
    for name in tree():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target / name)
    # Where an installed package has it: otherwise the finder of an editable install would lead back to the tree.
    (target / "betahook/integrations").symlink_to("../integrations")
    compileall.compile_dir(target, quiet=1, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)


def plant(fault: Fault, folder: Path) -> None:
    changed = folder / fault.file
    before, found, after = changed.read_text().partition(fault.text)
    assert found, fault
    changed.unlink()  # a link to the file of all the other copies
    changed.write_text(f"{before}{fault.replacement}{after}")
    Path(cache_from_source(changed)).unlink()


class FirstFailure:
    """A plugin of pytest that writes down the test that failed first, or the file that could not be imported."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self._target.exists():
            self._target.write_text(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


def run_tests(run: Run, original: Path) -> None:
    """In a process of its own: exit with the status of pytest."""
    shutil.copytree(original, run.folder, symlinks=True, copy_function=os.link)
    if run.fault is not None:
        plant(run.fault, run.folder)
    os.chdir(run.folder)
    sys.path[:] = [str(run.folder), *(path for path in sys.path if not path.startswith(str(ROOT / "tests")))]
    options = ["-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain"]
    with run.said.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        status = pytest.main([*options, *run.tests], [FirstFailure(run.failed)])
    shutil.rmtree(run.folder)
    os._exit(ENDED + int(status))


def completed(runs: Sequence[Run], original: Path) -> Iterator[Run]:
    """Each as soon as it has ended, with its status and seconds."""
    context, waiting = multiprocessing.get_context("fork"), list(runs)
    running: dict[multiprocessing.process.BaseProcess, tuple[Run, float]] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            run = waiting.pop(0)
            process = context.Process(target=run_tests, args=(run, original))
            process.start()
            running[process] = run, time.monotonic()
        wait([process.sentinel for process in running], timeout=1)
        for process, (run, started) in list(running.items()):
            run.seconds = time.monotonic() - started
            if process.is_alive() and run.seconds < LIMIT:
                continue
            run.status = None if process.is_alive() else process.exitcode
            process.kill()
            process.join()
            del running[process]
            yield run


def warm_up() -> None:
    """What every process would do again."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.dont_write_bytecode = True  # a fault may be as long as what it replaces
    for name in IMPORTED:
        importlib.import_module(name)
    inspect.getmodule(inspect.currentframe())  # looks at the files of all modules, and remembers them
    gc.collect()
    gc.freeze()  # nobody looks at these objects again


def all_is_well(runs: Sequence[Run], original: Path) -> bool:
    """Print each fault and what became of it; then run without any fault what noticed them."""
    missed, noticed_by = 0, set[str]()
    for run in completed(runs, original):
        said = {NOTICED: "noticed", None: "hangs", MISSED: "MISSED"}.get(run.status, f"BROKEN ({run.status})")
        print(f"{said:8} {run.seconds:5.1f} s  {run.fault}", flush=True)
        if run.status not in (NOTICED, MISSED, None):
            print(run.said.read_text()[-2000:])
        missed += run.status not in (NOTICED, None)
        noticed_by.update([run.failed.read_text()] if run.failed.exists() else run.tests)
    print(f"{len(runs) - missed} of {len(runs)} faults noticed")
    tests, parts = sorted(noticed_by), min(AT_ONCE, len(noticed_by))
    without = [Run(None, tests[part::parts], original.with_name(f"none{part}")) for part in range(parts)]
    for run in completed(without, original):
        if run.status != MISSED:
            print(run.said.read_text(), "\nThese tests fail without any fault.", sep="")
    return not missed and all(run.status == MISSED for run in without)


def main(part: str = "") -> int:
    started = time.monotonic()
    warm_up()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(folder / "original")
        chosen = [fault for fault in FAULTS if part in fault.file]
        runs = [Run(fault, [fault.noticed_by], folder / str(index)) for index, fault in enumerate(chosen)]
        well = all_is_well(runs, folder / "original")
    print(f"{time.monotonic() - started:.0f} s")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
