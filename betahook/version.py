"""The version of betahook; `pyproject.toml` takes it from here."""

__version__ = "0.8.0.dev0"
