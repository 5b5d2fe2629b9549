"""Adapters to training frameworks and loggers; each module imports its framework, the package itself none."""
