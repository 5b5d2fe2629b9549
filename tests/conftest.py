import fnmatch
import gc

import hypothesis
import pytest
import torch
import transformers
from packaging.version import Version

pytest.register_assert_rewrite("support.matrices")  # whose assertions are to show their values too

hypothesis.settings.register_profile("repeatable", derandomize=True)  # a change is judged by the same examples
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _one_thread():
    """Tests run in parallel processes; threads would only get in each other's way."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    oldest = Version(transformers.__version__) < Version("5.2")
    for item in items:
        for mark in item.iter_markers("oldest_skips"):
            if _is_meant(item, mark) and oldest:
                item.add_marker(pytest.mark.skip(reason=f"{mark.args[0]} in the oldest versions"))
        for mark in item.iter_markers("needs_torch"):
            if _is_meant(item, mark) and Version(torch.__version__) < Version(mark.args[0]):
                item.add_marker(pytest.mark.skip(reason=f"before torch {mark.args[0]}, {mark.args[1]}"))


def pytest_collection_finish():
    """Collections of garbage, of which the Trainer makes one at each end, pass over what was imported."""
    gc.collect()
    gc.freeze()


def _is_meant(item, mark):
    """A mark may name parameters of its test, and is then of the cases whose values match."""
    values = item.callspec.params if mark.kwargs else {}
    if unknown := mark.kwargs.keys() - values.keys():
        raise pytest.UsageError(f"{item.nodeid}: {mark.name} names {sorted(unknown)}, which are no parameters of it")
    return all(fnmatch.fnmatchcase(str(values[name]), pattern) for name, pattern in mark.kwargs.items())
