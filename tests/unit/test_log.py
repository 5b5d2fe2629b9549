import io
import logging

import pytest

from betahook import log

logger = logging.getLogger("betahook.somewhere")


@pytest.fixture
def unconfigured(monkeypatch):
    """A function that makes this a program without logging: as a test runs, pytest has handlers of its own."""

    def forget():
        monkeypatch.setattr(logging.root, "handlers", [])
        monkeypatch.setattr(log.LOGGER, "handlers", [])
        log.name_warnings()
        log.name_warnings()  # as if the package were loaded again

    return forget


def test_a_warning_says_that_it_is_of_betahook_where_nobody_configured_logging(unconfigured, capsys):
    unconfigured()
    logger.warning("beta of %d layers", 3)
    logger.info("nothing")
    assert capsys.readouterr().err == "[betahook] beta of 3 layers\n"


@pytest.mark.parametrize("place", [logging.root, log.LOGGER], ids=["root", "betahook"])
def test_a_program_that_configured_logging_shows_it_in_its_own_form_alone(unconfigured, capsys, place):
    unconfigured()
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    place.addHandler(handler)
    logger.warning("said")
    assert (stream.getvalue(), capsys.readouterr().err) == ("betahook.somewhere: said\n", "")


def test_importing_betahook_is_enough():
    assert any(isinstance(handler, log._LastResort) for handler in log.LOGGER.handlers)
