"""The picture at a glance outside of TensorBoard."""

import pytest

import betahook
from betahook.report import pictures
from betahook.report.history import History
from betahook.report.pictures import PIXELS, draw
from support.made_up_findings import findings

pytest.importorskip("matplotlib")


def test_it_is_that_of_the_findings_so_far():
    picture, history = betahook.Picture(), History()
    for step in (10, 20, 30):
        picture.add(findings(step), step)
        history.add(findings(step), step)
    expected = draw(history)
    assert picture.png() == picture._repr_png_() == expected
    assert picture.image().size == PIXELS


def test_the_step_is_that_of_the_hook_unless_the_run_has_its_own():
    def drawn(step, *given):
        picture = betahook.Picture()
        picture.add(findings(step), *given)
        return picture.png()

    assert drawn(7) == drawn(7, 7)
    assert drawn(7) != drawn(7, 4000)


def test_what_are_no_findings_is_refused():
    with pytest.raises(TypeError, match=r"add\(findings, step\) takes what hook.findings\(\) returned; got int"):
        betahook.Picture().add(3)


def test_a_step_that_is_no_whole_number_is_refused():
    with pytest.raises(TypeError, match=r"add\(findings, step\) takes a whole number as its step; got 'x'"):
        betahook.Picture().add(findings(1), "x")


def test_an_empty_picture_is_not_drawn():
    picture = betahook.Picture()
    assert picture._repr_png_() is None
    with pytest.raises(ValueError, match=r"the picture is empty: add\(hook.findings\(\)\) first"):
        picture.image()


def test_it_is_due_ever_more_rarely(monkeypatch):
    monkeypatch.setattr(pictures, "draw", lambda history: b"")
    picture, drawn = betahook.Picture(), []
    for step in range(1, 21):
        picture.add(findings(step))
        if picture.is_due:
            picture.png()
            drawn.append(step)
    assert drawn == [1, 2, 3, 5, 7, 10, 14, 20]
    drawn.clear()
    for step in range(1, 11):  # another run
        picture.add(findings(step))
        if picture.is_due:
            picture.png()
            drawn.append(step)
    assert drawn == [1, 2, 3, 5, 7, 10]
