"""The version of betahook; `pyproject.toml` takes it from here."""

__version__ = "0.7.0"
