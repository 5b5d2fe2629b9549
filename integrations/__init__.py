"""Adapters to training frameworks and loggers, one file each; nothing else in betahook imports these files."""
