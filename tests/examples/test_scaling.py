"""The benchmark of the statistics over lengths, on short ones."""

import json

import pytest

from support.examples import imported


@pytest.fixture(scope="module")
def example():
    with imported("scaling") as modules:
        yield modules["scaling"]


def test_the_statistics_are_swept_over_lengths(example, tmp_path, capsys):
    example.main(["16", "80", "--rounds", "2", "--device", "cpu", "--output", str(tmp_path)])
    result = json.loads((tmp_path / "scaling.json").read_text())["result"]
    assert list(result["lengths"]) == ["16", "80"]
    names = ["attention", "exact std", "sampled rows", "moments of q", "bound on max logit"]
    names += ["exact max logit", "all statistics"]
    assert list(result["exponents"]) == list(result["lengths"]["80"]) == names
    assert "growth exponent" in capsys.readouterr().out
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_is_that_of_a_power_law(example, power):
    lengths = [1024, 2048, 8192]
    assert example.exponent(lengths, [3e-6 * n**power for n in lengths]) == pytest.approx(power)
