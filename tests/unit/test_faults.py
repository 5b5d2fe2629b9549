"""The list of faults that `make test-faults` puts into the code, kept from rotting."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from faults.faults import FAULTS

ROOT = Path(__file__).parents[2]


@cache
def read(file):
    return (ROOT / file).read_text()


@cache
def structure(code):
    return ast.dump(ast.parse(code))


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_changes_one_place_and_has_tests_to_notice_it(fault):
    code = read(fault.file)
    assert code.count(fault.text) == 1
    assert structure(code.replace(fault.text, fault.replacement)) != structure(code)
    file, _, name = fault.noticed_by.partition("::")
    assert (f"def {name}(" if name else "def test_") in read(file)


def test_there_are_fifty_faults_in_all_rooms_that_compute():
    rooms = Counter(fault.file.split("/")[1] for fault in FAULTS)
    assert len(FAULTS) >= 50
    assert min(rooms[room] for room in ("measure", "control", "tap", "keep")) >= 10
    assert len({(fault.file, fault.text) for fault in FAULTS}) == len(FAULTS)
