"""Short names of layers."""

import pytest

from betahook.report.names import (
    format_number,
    grouped,
    listed,
    merge_numbered,
    ranges,
    short_names,
    shorten_to,
    zero_padded,
)


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["model.layers.0.self_attn", "model.layers.11.self_attn"], ["0", "11"]),
        (
            ["encoder.0.attn", "decoder.0.attn", "decoder.0.cross"],
            ["encoder.0.attn", "decoder.0.attn", "decoder.0.cross"],
        ),
        (["h.0.attn", "h.0.cross", "h.1.attn"], ["0.attn", "0.cross", "1.attn"]),
        (["attn"], ["attn"]),
        ([""], ["model"]),
        (["a", "a.b"], ["a", "b"]),
        (["x.a.a", "x.a"], ["a", "x.a"]),
        (["layers.1", "layers.12"], ["1", "12"]),  # no part of a number is common
    ],
)
def test_short_names(names, short):
    assert short_names(names) == short
    assert len(set(short)) == len(names)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], []),
        (["h.0.attn", "h.1.attn", "h.2.attn"], ["h.0-2.attn"]),
        (["h.10.attn", "h.9.attn"], ["h.9-10.attn"]),
        ([f"h.{layer}.attn" for layer in (0, 1, 2, 4, 12, 13)], ["h.0-2,4,12-13.attn"]),
        (["h.3.attn"], ["h.3.attn"]),
        (["attn", "h.0", "h.1", "h"], ["attn", "h.0-1", "h"]),
        (["h.0.attn", "h.1.cross", "h.1.attn"], ["h.0-1.attn", "h.1.cross"]),
        ([f"s.{stage}.b.{block}" for stage in (0, 1) for block in (0, 1)], ["s.0-1.b.0-1"]),
        (["s.0.b.0", "s.0.b.1", "s.1.b.0"], ["s.0.b.0-1", "s.1.b.0"]),
        (["the model"], ["the model"]),
    ],
)
def test_names_that_differ_by_a_number_are_joined(names, expected):
    assert merge_numbered(names) == expected
    assert grouped((name, "4 heads of 8") for name in names) == [(name, "4 heads of 8") for name in expected]


def test_names_of_different_texts_are_not_joined():
    texts = [("h.0", "one"), ("h.1", "two"), ("h.2", "one"), ("h.3", "two")]
    assert grouped(texts) == [("h.0,2", "one"), ("h.1,3", "two")]
    assert grouped([]) == []


@pytest.mark.parametrize(
    ("words", "most", "said"),
    [
        (["a"], 1, "a"),
        (["a", "b"], None, "a and b"),
        (["a", "b", "c"], 3, "a, b and c"),
        (["a", "b", "c"], 2, "a, b and 1 other"),
        (["a", "b", "c", "d"], 2, "a, b and 2 others"),
    ],
)
def test_lists_of_words(words, most, said):
    assert listed(words, most) == said


def test_ranges_of_numbers():
    assert ranges([0, 1, 2, 3, 7], 2) == "0-3, 7"
    assert ranges([0, 1, 2, 3, 7, 9, 10], 2) == "0-3, 7 and 2 others"


T5 = [f"encoder.block.{block}.layer.0.SelfAttention" for block in (0, 11)]
T5 += [
    f"decoder.block.{block}.layer.{place}" for block in (0, 11) for place in ("0.SelfAttention", "1.EncDecAttention")
]


@pytest.mark.parametrize(
    ("names", "length", "shown"),
    [
        (["0", "11"], 4, ["0", "11"]),
        (["transformer.h.0.attn"], 28, ["transformer.h.0.attn"]),
        (["transformer.h.0.attn"], 9, ["tran…attn"]),
        (T5[::2], 28, ["encoder.0.0.SelfAttention", "decoder.0.0.SelfAttention", "decoder.11.0.SelfAttention"]),
        (T5[:2], 12, ["0.0", "11.0"]),
        (["a.x.1", "b.x.2"], 4, ["a.1", "b.2"]),
        (["x.a.a", "x.a"], 4, ["a.a", "a"]),
        (["x.a.a", "x.a"], 5, ["x.a.a", "x.a"]),
        (["attn", "encoder.layers.attn"], 10, ["attn", "encod…attn"]),  # none is left empty
        (["aaaa1zzzzzz", "aaaa2zzzzzz"], 7, ["aaaa1…z", "aaaa2…z"]),  # beyond the middle, where they differ
    ],
)
def test_names_that_fit(names, length, shown):
    assert shorten_to(names, length) == shown


@pytest.mark.parametrize("length", range(1, 45))
def test_names_that_fit_are_still_apart(length):
    names = [*T5, "decoder.block.1.layer.1.EncDecAttention"]
    shown = shorten_to(names, length)
    assert len(set(shown)) == len(names)
    assert length < 15 or max(map(len, shown)) <= length


def test_padded_names_sort_as_numbers_do():
    names = [f"{stack}.{index}.attn" for stack in ("decoder", "encoder") for index in range(12)]
    padded = zero_padded(names)
    assert sorted(padded) == padded
    assert padded[2] == "decoder.02.attn"
    assert zero_padded(["attn"]) == ["attn"]


def test_numbers_that_are_read_at_a_glance():
    written = [format_number(number) for number in (11252.9, 0.00195312, 8.0, 99.96, 1e30, float("nan"), float("inf"))]
    assert written == ["11,300", "0.00195", "8", "100", "1e+30", "nan", "inf"]
    assert format_number(720.4, 2) == "720"
    assert format_number(-0.0) == "0"
