"""Adapters to training frameworks and loggers; each module imports its own, the rest of the package none of them."""
