"""Short but distinct names of layers for tables, pictures and tags; numbers and lists in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile


def short_names(layers: Iterable[str]) -> list[str]:
    """Leave out the parts of module names that all have in common: `model.layers.3.self_attn` becomes `3`."""
    parts = [layer.split(".") for layer in layers]
    if len(parts) == 1:  # all parts of a single name are common
        return [".".join(name) or "model" for name in parts]  # the model may be the attention itself
    first = _common(parts)
    last = _common([name[:first:-1] for name in parts])
    return [".".join(name[first : len(name) - last]) or ".".join(name) for name in parts]


def shorten_to(names: Sequence[str], length: int) -> list[str]:
    """Shorten names to `length` characters, or to the fewest beyond it that keep them distinct.

    Words that all names share are left out first, then the middle: `encoder.block.0.layer.0.SelfAttention` becomes
    `encoder.0.0.SelfAttention`, or `encoder.0.…fAttention`.
    """
    parts, distinct = [name.split(".") for name in names], len(set(names))
    for word in dict.fromkeys(parts[0] if len(names) > 1 else []):
        fewer = [[part for part in name if part != word] for name in parts]
        is_shared = not word.isdecimal() and all(word in name for name in parts)
        if is_shared and all(fewer) and len(set(map(tuple, fewer))) == distinct and _longest(parts) > length:
            parts = fewer
    names = [".".join(name) for name in parts]
    for room in range(length, _longest(parts)):
        for head in (*range(room // 2, 0, -1), *range(room // 2 + 1, room)):
            cut = [elided(name, head, room) for name in names]
            if len(set(cut)) == distinct:
                return cut
    return names


def elided(name: str, head: int, length: int) -> str:
    """Shorten a name to `length` characters at most: its first `head` characters, `…` and its last ones."""
    return name if len(name) <= length else f"{name[:head]}…{name[len(name) - (length - head - 1) :]}"


def zero_padded(names: Sequence[str]) -> list[str]:
    """Pad the numbers in names to one width, so that 2 comes before 10 wherever text is sorted."""
    numbers = [part for name in names for part in name.split(".") if part.isdecimal()]
    width = max(map(len, numbers), default=0)
    return [".".join(part.zfill(width) if part.isdecimal() else part for part in name.split(".")) for name in names]


def grouped(texts: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join names that have the same text and differ by a number: `h.0.attn` and `h.1.attn` become `h.0-1.attn`."""
    names: dict[str, list[str]] = {}
    for name, text in texts:
        names.setdefault(text, []).append(name)
    return [(name, text) for text, each in names.items() for name in merge_numbered(each)]


def merge_numbered(names: Iterable[str]) -> list[str]:
    """Join names that differ only by a number in one place, trying the last place first."""
    parts = [tuple(name.split(".")) for name in names]
    for place in reversed(range(max(map(len, parts), default=0))):
        alike: dict[object, list[tuple[str, ...]]] = {}
        for name in parts:
            has_number = place < len(name) and name[place].isdecimal()
            alike.setdefault((name[:place], name[place + 1 :]) if has_number else name, []).append(name)
        parts = [_with_numbers(each, place) if len(each) > 1 else each[0] for each in alike.values()]
    return [".".join(name) for name in parts]


def listed(words: Sequence[str], most: int | None = None) -> str:
    """Write words as `a, b and c`; if there are more than `most`, as `a, b and 3 others`."""
    left_out = len(words) - len(words[:most])
    *first, last = [*words[:most], _others(left_out)] if left_out else words
    return f"{', '.join(first)} and {last}" if first else last


def ranges(numbers: Iterable[int], most: int) -> str:
    """Write sorted numbers with runs combined: `0-3, 7`; if there are more than `most` runs, as `0-3 and 20 others`."""
    runs = _runs(numbers)
    shown, left_out = ", ".join(map(_span, runs[:most])), sum(map(len, runs[most:]))
    return f"{shown} and {_others(left_out)}" if left_out else shown


def format_number(number: float, digits: int = 3) -> str:
    """Write a number with `digits` significant digits, without an exponent if a reader needs none: `11,300`."""
    return f"{float(f'{number:.{digits}g}') + 0.0:,.12g}"  # -0.0 + 0.0 is 0.0


def format_factor(number: float, digits: int = 2) -> str:
    """Write a factor like `format_number`, with more digits if it would read 1 but is not; float32 rounds to 1e-7."""
    while format_number(number, digits) == "1" and abs(number - 1) > 1e-6:
        digits += 1
    return format_number(number, digits)


def _with_numbers(names: Sequence[tuple[str, ...]], place: int) -> tuple[str, ...]:
    runs = _runs(sorted(int(name[place]) for name in names))
    return (*names[0][:place], ",".join(map(_span, runs)), *names[0][place + 1 :])


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """Divide sorted numbers into runs of consecutive ones."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def _span(run: Sequence[int]) -> str:
    """Write a run of numbers: `7`, or `0-3`."""
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def _others(count: int) -> str:
    return f"{count} other{'s' * (count > 1)}"


def _common(names: Sequence[Sequence[str]]) -> int:
    """Return the number of leading parts that all names share."""
    return sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False)))


def _longest(names: Sequence[Sequence[str]]) -> int:
    return max((len(".".join(parts)) for parts in names), default=0)
