"""examples/variance.py: its functions against independent computations, its tables, plot and errors."""

import math

import pytest
import torch

from support.examples import imported


@pytest.fixture(scope="module")
def variance():
    with imported("variance") as modules:
        yield modules["variance"]


def loop_moments(query, key):
    """Mean and sample variance of all scores, in plain Python floats."""
    scores = [sum(a * b for a, b in zip(q, k, strict=True)) for q in query.tolist() for k in key.tolist()]
    mean = math.fsum(scores) / len(scores)
    return mean, math.fsum((s - mean) ** 2 for s in scores) / (len(scores) - 1)


def standard_errors(samples, expected):
    """Distance of the mean of independent samples from the expected one, in standard errors."""
    return ((samples.mean() - expected).abs() / (samples.std() / len(samples) ** 0.5)).item()


@pytest.mark.parametrize("shape", [(2, 2, 2), (3, 5, 4), (7, 4, 16)])
def test_score_moments_equal_a_double_loop(variance, shape):
    queries, keys, head_dim = shape
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(queries, head_dim, generator=generator) + 0.5
    key = torch.randn(keys, head_dim, generator=generator) * 2
    mean, sample_variance = variance.score_moments(query, key)
    expected_mean, expected_variance = loop_moments(query, key)
    assert mean.item() == pytest.approx(expected_mean, rel=1e-4, abs=1e-5)
    assert sample_variance.item() == pytest.approx(expected_variance, rel=1e-5)


def test_score_moments_of_a_batch_are_those_of_its_members(variance):
    query, key = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1))
    batch = torch.stack(variance.score_moments(query, key))
    assert batch.shape == (2, 3)
    each = [torch.stack(variance.score_moments(q, k)) for q, k in zip(query, key, strict=True)]
    torch.testing.assert_close(batch, torch.stack(each, dim=1))


def test_draws_are_reproducible_and_differ_from_each_other(variance):
    means, variances = variance.draw_moments(4, 3, 5, seed=2)
    torch.manual_seed(2)
    expected = [loop_moments(torch.randn(4, 3), torch.randn(4, 3)) for _ in range(5)]
    torch.testing.assert_close(torch.stack((means, variances), dim=1), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert len(set(variances.tolist())) == 5
    assert not torch.equal(variances, variance.draw_moments(4, 3, 5, seed=3)[1])


@pytest.mark.parametrize("size", [(2, 2), (2, 64), (16, 8)])
def test_scaled_variance_averages_one_and_spreads_as_derived(variance, size):
    tokens, head_dim = size
    generator = torch.Generator(device="cpu").manual_seed(4)
    query, key = torch.randn(2, 20_000, tokens, head_dim, generator=generator, dtype=torch.float64)
    # Centred sums of squares from the scores themselves, without the function under test.
    scores = (query @ key.mT).flatten(1)
    scaled = (scores - scores.mean(1, keepdim=True)).square().sum(1) / (tokens**2 - 1) / head_dim
    assert standard_errors(scaled, 1.0) < 4
    assert standard_errors((scaled - 1).square(), variance.spread(tokens, head_dim) ** 2) < 4

    drawn = variance.draw_moments(tokens, head_dim, 4000, seed=5)[1].double() / head_dim
    assert standard_errors(drawn, 1.0) < 4
    assert standard_errors((drawn - 1).square(), variance.spread(tokens, head_dim) ** 2) < 4


def test_spread_for_many_tokens_is_that_of_the_shared_vectors(variance):
    assert variance.spread(100_000, 64) == pytest.approx(2 / math.sqrt(100_000 * 64), rel=1e-3)
    assert variance.spread(2, 2) == pytest.approx(math.sqrt(76) / 6)  # by hand: variance 76 of the sum, 3 x 2 below


def test_a_variance_of_1_6_is_ordinary_for_2x2_and_impossible_for_512x64(variance):
    quantiles = torch.tensor([0.05, 0.95])
    low, high = (variance.draw_moments(2, 2, 2000, seed=0)[1] / 2).quantile(quantiles).tolist()
    assert low < 0.1
    assert 3 < high < 4.5
    assert low < 1 < variance.PUZZLE < high
    large = variance.draw_moments(512, 64, 20, seed=0)[1] / 64
    assert large.max() < 1.1


def test_find_draw_names_the_first_seed_that_shows_it(variance):
    def scaled(seed):
        torch.manual_seed(seed)
        return loop_moments(torch.randn(2, 2), torch.randn(2, 2))[1] / 2

    seed = variance.find_draw(2, 2, 1.6, 0)
    assert scaled(seed) == pytest.approx(1.6, abs=0.005)
    assert all(abs(scaled(earlier) - 1.6) > 0.005 for earlier in range(seed))
    assert variance.find_draw(2, 2, 1.6, seed - 1) == seed
    assert variance.find_draw(2, 2, 1.6, seed + 1) > seed


def test_puzzle_text_shows_the_draw_of_the_seed_it_names(variance):
    text = variance.puzzle_text(torch.linspace(0, 4, 101), seed=12)
    torch.manual_seed(12)
    query, key = torch.randn(2, 2), torch.randn(2, 2)
    scores = ", ".join(f"{sum(a * b for a, b in zip(q, k, strict=True)) / 2**0.5:.2f}" for q in query for k in key)
    assert "torch.manual_seed(12)" in text
    assert f"scaled scores {scores}: variance {loop_moments(query, key)[1] / 2:.2f}." in text
    assert "draws average 1.00, 90 % lie between 0.10 and 1.90" in text
    assert "20 % are above 1.6" in text


def test_readings_of_the_puzzle_differ_by_scale_and_bias(variance):
    _, variances = variance.draw_moments(2, 2, 20_000, seed=0)
    lines = variance.readings_table(variances).splitlines()
    assert len({len(line) for line in lines}) == 1
    rows = {name.strip(): cells.split() for name, cells in (line.split("|") for line in lines[2:])}
    theory = {name: float(cells[0]) for name, cells in rows.items()}
    assert theory == {
        "before / sqrt(d_k), over n - 1 (ddof 1)": 2.0,
        "before / sqrt(d_k), over n (ddof 0)": 1.5,
        "after / sqrt(d_k), over n - 1 (ddof 1)": 1.0,
        "after / sqrt(d_k), over n (ddof 0)": 0.75,
    }
    # Against the scores themselves.
    query, key = torch.randn(2, 20_000, 2, 2, generator=torch.Generator().manual_seed(9))
    scores = (query @ key.mT).flatten(1)
    for name, cells in rows.items():
        found = scores.var(1, correction=int("ddof 1" in name)) / (2 if name.startswith("after") else 1)
        assert float(cells[1]) == pytest.approx(theory[name], rel=0.05)
        assert float(cells[3]) == pytest.approx(found.quantile(0.95).item(), rel=0.05)
        assert float(cells[4]) == pytest.approx(100 * (found > 1.6).double().mean().item(), abs=2)


def test_formula_equals_the_moments_of_products_summed_by_hand(variance):
    for case in variance.make_cases(6):
        columns = (case.query_mean, case.query_variance, case.key_mean, case.key_variance)
        components = zip(*(column.tolist() for column in columns), strict=True)
        # Var(qk) = E[q^2] E[k^2] - (E[q] E[k])^2, for each component
        expected = sum((vq + mq * mq) * (vk + mk * mk) - (mq * mk) ** 2 for mq, vq, mk, vk in components)
        assert case.formula.item() == pytest.approx(expected, rel=1e-5), case.name
        assert case.naive.item() == pytest.approx(6, rel=1e-6), case.name


def test_cases_break_each_assumption(variance):
    formulas = {case.name: case.formula.item() for case in variance.make_cases(64)}
    assert formulas["means 0, variances 1"] == pytest.approx(64)
    assert formulas["q means 1"] == pytest.approx(128)
    assert formulas["q and k means 1"] == pytest.approx(192)
    assert formulas["variances 0.25"] == pytest.approx(4)
    same, opposite = (formulas[f"variances 0.1 to 1.9, {order} order"] for order in ("same", "opposite"))
    assert same + opposite == pytest.approx(2 * 64)  # v_i + v_(n-i) = 2 for every i
    assert opposite < 64 < same


def test_measured_variance_agrees_with_the_formula_and_not_with_d_k(variance):
    generator = torch.Generator().manual_seed(6)
    for case in variance.make_cases(16):
        result = variance.measure(variance.draw_scores(case, 40_000, generator))
        assert abs(result.variance - case.formula.item()) < 4 * result.error, case.name
        if case.name != "means 0, variances 1":
            assert abs(result.variance - case.naive.item()) > 10 * result.error, case.name


def test_drawn_components_have_the_moments_of_the_case(variance):
    case = variance.Case("one", *(torch.tensor([x]) for x in (2.0, 9.0, 5.0, 0.0)))  # k is 5, always
    scores = variance.draw_scores(case, 40_000, torch.Generator().manual_seed(7)) / 5
    assert scores.shape == (40_000,)
    assert standard_errors(scores, 2.0) < 4
    assert standard_errors((scores - 2).square(), 9.0) < 4


def test_measure_gives_a_standard_error_that_shrinks_with_the_sample(variance):
    scores = torch.randn(40_000, generator=torch.Generator().manual_seed(8))
    result = variance.measure(scores)
    assert result.variance == pytest.approx(scores.double().var().item(), rel=1e-5)
    assert result.error == pytest.approx(math.sqrt(2 / 40_000), rel=0.05)  # that of normal scores
    assert variance.measure(scores[:10_000]).error == pytest.approx(2 * result.error, rel=0.1)


def test_size_table_holds_first_draw_theory_and_spread(variance):
    moments = {(3, 4): (torch.tensor([0.5, 9.0]), torch.tensor([6.0, 2.0])), (2, 2): (torch.zeros(2), torch.ones(2))}
    lines = variance.size_table(moments).splitlines()
    assert len(lines) == 5
    assert len({len(line) for line in lines}) == 1
    assert [len(line) <= 120 for line in lines] == [True] * 5
    cells = [group.split() for group in lines[3].split("|")]
    assert cells[0] == ["3x4"]
    assert cells[1] == ["0.500", "6.000", "4"]
    assert cells[2] == ["0.250", "1.500", "1"]
    assert cells[3] == ["1.000", "0.550", "1.000", "1.450", "0.707", f"{variance.spread(3, 4):.3f}"]


def test_a_large_draw_has_the_variance_that_its_own_moments_predict(variance):
    words = variance.large_text(1111, 111, 0).replace(",", "").split()
    measured, formula = (float(words[words.index(word) + 1].rstrip(".")) for word in ("variance", "variances"))
    assert formula == pytest.approx(measured, rel=0.01)
    assert words[-1] == "111."


def test_case_table_turns_variances_into_betas(variance):
    cases = variance.make_cases(64)[1:2]
    lines = variance.case_table(cases, [variance.Measured(100.0, 0.5)]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [group.split() for group in lines[3].split("|")][1:] == [
        ["100.00", "0.50", "128.00", "64"],
        ["0.1000", "0.0884", "0.1250"],
        ["0.781", "1.562"],
    ]


@pytest.mark.slow
def test_main_prints_both_tables_and_writes_a_png(variance, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = torch.get_rng_state()
    variance.main(["--draws", "20", "--seed", "3"])
    printed = capsys.readouterr().out
    rows = {line.split("|")[0].strip(): line for line in printed.splitlines() if "|" in line}
    assert {"2x2", "2x64", "64x64", "512x64", "512x128"} <= rows.keys()
    assert {case.name for case in variance.make_cases(2)} <= rows.keys()
    assert "Why would 2x2 give 1.6 and not 1?" in printed
    assert "variance 1.60." in printed
    assert "2 (n - 1) / n = 1.5" in printed
    assert max(map(len, printed.splitlines())) <= 120
    image = (tmp_path / "runs/variance.png").read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(image) > 20_000  # three panels, not an empty canvas
    assert torch.equal(state, torch.get_rng_state())

    variance.main(["--draws", "20", "--seed", "3", "--output", "new/other.png"])
    assert capsys.readouterr().out == printed.replace("runs/variance.png", "new/other.png")
    assert (tmp_path / "new/other.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draws", "19"], "--draws must be at least 20, for quantiles of 5 % and 95 %, not 19"),
        (["--draws", "many"], "invalid int value: 'many'"),
        (["--seed", "-1"], "--seed must be between 0 and 2**32 - 1, not -1"),
        (["--seed", str(2**32)], "--seed must be between 0 and 2**32 - 1"),
        (["--output", "plot.pdf"], "--output must end in .png, not plot.pdf"),
        (["--output", "folder.png"], "--output must be a file, not the folder folder.png"),
    ],
)
def test_bad_options_are_refused_before_any_work(variance, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(SystemExit) as error:
        variance.main(arguments)
    assert error.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
