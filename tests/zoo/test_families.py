"""Every model type of transformers: attach, and compare with what the model alone really computes.

`make test` runs a few that stand for the others, `make test-families` all of them.
"""

import pytest

from zoo import build, catalogue, support
from zoo.verify import verify

FAMILIES = [
    pytest.param(family, backend, marks=() if family in catalogue.REPRESENTATIVE else pytest.mark.families)
    for family in catalogue.ZOO
    for backend in support.BACKENDS
]


@pytest.mark.filterwarnings("ignore")  # of transformers and torch, about models that are tiny
@pytest.mark.parametrize(("family", "backend"), FAMILIES)
def test_family(family, backend):
    verdict = verify(family, backend)
    if verdict is not None and verdict.refusal is not None and verdict.beside:
        assert any(name in verdict.refusal for name in verdict.beside)
    assert verdict is None or family in catalogue.KNOWN or not verdict.problems
    said = support.read()[family]
    if backend == "eager":
        found = support.columns(family, {"eager": verdict, "sdpa": verdict})
        assert {**found, "sdpa": said["sdpa"]} == said
    else:
        assert support.cell(verdict) == said[backend]
        assert verdict is None or (verdict.clips == "yes") == (said["Clip"] == "yes")


def test_every_model_type_is_in_the_table_or_in_the_list_below_it():
    assert list(support.read()) == sorted(catalogue.ZOO, key=str.casefold)
    assert set(catalogue.ZOO) | set(catalogue.WITHOUT_MODEL) == set(build.MODEL_TYPES)
    assert all(f"* {name}: {reason}" in support.PAGE.read_text() for name, reason in catalogue.WITHOUT_MODEL.items())
