"""Modes for a while."""

import threading

import torch

from betahook.models.modes import eagerly


def stance():
    """The stance of the compiler, by what compiled code does."""
    compiled = torch.compile(lambda: torch.compiler.is_compiling(), backend="eager")
    return "default" if compiled() else "force_eager"


def test_threads_that_overlap_leave_the_stance_of_the_compiler():
    """The first one leaves while the second is at work, and this one then puts back what it found."""
    torch.compiler.reset()
    assert stance() == "default"
    entered, left = threading.Event(), threading.Event()

    def second():
        with eagerly():
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=second)
    with eagerly():
        assert stance() == "force_eager"
        thread.start()
        entered.wait(10)
    assert stance() == "force_eager"
    left.set()
    thread.join()
    assert stance() == "default"
