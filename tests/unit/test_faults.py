"""The list of faults that `make test-faults` puts into the code, kept from rotting."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from faults.faults import FAULTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_changes_one_place_and_has_tests_to_notice_it(fault):
    code = (ROOT / fault.file).read_text()
    assert code.count(fault.text) == 1
    changed = code.replace(fault.text, fault.replacement)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(code))
    for test in fault.noticed_by:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists()
        assert not name or f"def {name}(" in (ROOT / file).read_text()


def test_there_are_fifty_faults_in_all_rooms_that_compute():
    rooms = Counter(fault.file.split("/")[1] for fault in FAULTS)
    assert len(FAULTS) >= 50
    assert min(rooms[room] for room in ("measure", "control", "tap", "keep")) >= 10
    assert len({(fault.file, fault.text) for fault in FAULTS}) == len(FAULTS)
