import statistics

import transformers
from packaging.version import Version

# The families and their configs are those of one release; see constraints.txt.
collect_ignore = ["test_families.py"] if Version(transformers.__version__) < Version("5.23") else []


def pytest_terminal_summary(terminalreporter):
    """How long building, attaching to and verifying one model takes."""
    calls = [report for report in terminalreporter.stats.get("passed", []) if "test_family[" in report.nodeid]
    if calls:
        median = statistics.median(report.duration for report in calls)
        terminalreporter.write_line(f"{len(calls)} models verified, {median:.2f} s each (median)")
