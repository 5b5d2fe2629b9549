"""The defaults of Search: the numbers, what beta does by them, what its card says of them, and what is refused."""

import math
import re
from pathlib import Path

import pytest

from betahook import Search
from betahook.control.base import options
from betahook.control.notes import Note
from betahook.control.opening import Phase
from support.observations import approx, decades, observe, run, sensitivities

NAN = math.nan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, r"Search\(window=\.\.\.\) must be a whole number, 1 or more; got 0"),
        ({"window": True}, r"Search\(window=\.\.\.\) must be a whole number, 1 or more; got True"),
        ({"window": 1.5}, r"Search\(window=\.\.\.\)"),
        ({"warmup": 2.5}, r"Search\(warmup=\.\.\.\) must be a whole number, 0 or more; got 2.5"),
        ({"warmup": -1}, r"Search\(warmup=\.\.\.\) must be a whole number, 0 or more; got -1"),
        ({"rise": "no"}, r"Search\(rise=\.\.\.\) must be True or False; got 'no'"),
        ({"smallest": 0}, r"Search\(smallest=\.\.\.\)"),
        ({"opening": 2.0, "smallest": 0.1}, r"Search\(opening=\.\.\.\)"),
        ({"opening": 0.1, "smallest": 0.2}, r"Search\(opening=\.\.\.\)"),
        ({"growth": 0.5}, r"Search\(growth=\.\.\.\) must be 1 or more; got 0\.5"),
        *[
            ({name: value}, rf"Search\({name}=\.\.\.\) must be {expected}; got {value}")
            for names, expected, values in [
                (("plateau_batches",), "a whole number, 0 or more", (-1, 1.5)),
                (("rise_batches",), "a whole number, 1 or more", (0, 1.5)),
                (("fresh_ratio", "plateau_growth", "rise_logit_std"), "a positive number", (0, NAN, True)),
                (("warmup_decades", "plateau_decades", "rise_decades"), "a number from 0 to 3", (-1, 3.5)),
                (("early_share",), "a number from 0 to 1", (-0.1, 1.1)),
                (("fresh_bound", "plateau_fall"), "above 0, at most 1", (0, 1.1)),
            ]
            for name in names
            for value in values
        ],
    ],
)
def test_options_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Search(**changes)


def test_the_defaults():
    assert options(Search()) == {
        "window": 10,
        "warmup": 30,
        "rise": True,
        "opening": 0.1,
        "growth": 1.5,
        "smallest": 0.01,
        "largest": 0.2,
        "fresh_ratio": 1.1,
        "early_share": 1 / 3,
        "warmup_decades": 0.5,
        "plateau_decades": 2.0,
        "plateau_batches": 70,
        "plateau_fall": 0.03,
        "plateau_growth": 1.12,
        "rise_decades": 1.0,
        "rise_batches": 100,
        "rise_logit_std": 3.0,
        "fresh_bound": 0.5,
    }


def looking(*ratios, steps, **measured):
    """Observations whose weights look as the last ratio given, from its position on."""
    ratios = [*ratios, *[ratios[-1]] * steps][:steps]
    return [observe(**{"sensitivity": 1, "std": 0.1, **measured}, spectral_ratio=ratio) for ratio in ratios]


def test_the_default_on_a_fresh_model_that_learns():
    path = decades(run(Search(), looking(*[1.1] * 11, 1.11, steps=142)))
    assert path[:30] == approx([-0.5] * 30)
    assert path[30:130] == approx([index / 100 for index in range(1, 101)])
    assert path[130:] == approx([*[1] * 9, *[0.9] * 3])


def test_the_default_on_a_plateau():
    path = decades(run(Search(), looking(1.1, steps=201)))
    assert path[:30] == approx([-0.5] * 30)
    assert path[30:100] == approx([-2] * 70)
    assert path[100:200] == approx([-2 + 0.03 * index for index in range(1, 101)])


@pytest.mark.parametrize(("learns_at", "then"), [(10, math.log10(3 / 0.6)), (11, -0.5)])
def test_the_default_looks_for_fast_learning_in_the_first_third_of_the_warmup(learns_at, then):
    path = decades(run(Search(), looking(*[1.1] * learns_at, 1.2, steps=111, std=0.6)))
    assert path[:10] == approx([-0.5] * 10)
    assert path[11] == approx(then)
    # The rise lasts a hundred batches from there.
    assert path[109] == approx(math.log10(3 / 0.6))


def test_the_default_holds_the_logits_at_a_std_of_three():
    assert run(Search(), looking(*[1.1] * 11, 1.2, steps=130, std=2.0))[-1] == approx(1.5)


def test_the_default_keeps_half_of_the_overflow_bound_free_in_a_model_that_was_fresh():
    history = run(Search(), looking(*[1.1] * 11, 1.2, steps=200, overflow=60.0, max_score=10.0, sensitivity=-1))
    assert max(history) == approx(3.0)


def test_the_default_step_begins_at_a_tenth_of_a_decade_grows_by_half_to_a_fifth_and_halves_to_a_hundredth():
    signs = [-1, -1, -1, -1, *[1, -1] * 5]
    steps = [0.1, 0.15, 0.2, 0.2, -0.1, 0.05, -0.025, 0.0125, -0.01, 0.01, -0.01]
    path = decades(run(Search(warmup=0, rise=False), sensitivities(*[sign for sign in signs for _ in range(10)])))
    taken = [after - before for before, after in zip([0, *path[9::10]], path[9::10], strict=False)]
    assert taken[: len(steps)] == approx(steps)


def test_a_brief_opening_keeps_beta_and_then_triples_it():
    path = decades(run(Search.brief(), looking(*[1.1] * 11, 1.11, steps=60)))
    assert path[:30] == approx([0] * 30)
    assert path[30:47] == approx([0.5 * index / 17 for index in range(1, 18)])
    assert path[47:] == approx([*[0.5] * 9, *[0.4] * 4])
    assert eval(repr(Search.brief())) == Search.brief()


def test_the_card_names_the_phases():
    card = Path(__file__).parents[3].joinpath("docs/controllers/search.md").read_text()
    rows = re.findall(r"^\| (\d) \| ([\w-]+) \|", card, re.MULTILINE)
    assert rows == [(str(int(phase)), Note(phase).phase_name) for phase in Phase]


def test_what_the_card_says_of_the_default():
    """Every number of its paragraph, in order, is that of the code."""
    card = Path(__file__).parents[3].joinpath("docs/controllers/search.md").read_text()
    title = "**What the default does to a freshly initialised model.**"
    paragraph = " ".join(card.split(title)[1].split("\n\n")[0].split())
    paragraph = re.sub(r": a two-layer Llama .* \(six seeds.*?\)", "", paragraph)  # measured, by a test of the README
    words = {"a third": 3, "first ten": 10, "ten times": 10, "a hundredth": 100}
    told = [words.get(number) or int(number) for number in re.findall(rf"{'|'.join(words)}|\d+", paragraph)]
    rule = Search()
    below, plateau, above = (10**x for x in (rule.warmup_decades, rule.plateau_decades, rule.rise_decades))
    total = rule.warmup + rule.plateau_batches + rule.rise_batches
    usual = [round(below), rule.warmup, rule.rise_batches, above, rule.rise_logit_std]
    early = [rule.warmup * rule.early_share, rule.rise_logit_std, above]
    assert told == [*usual, rule.warmup, rule.plateau_batches, plateau, *early, total, rule.warmup]
