"""Controllers: an observation in, a beta out."""

from betahook.control.base import Controller, Memory, Observation, check_controller
from betahook.control.decades import Decades
from betahook.control.rules import Cap, Clip, Gradient, Monitor, Variance
from betahook.control.search import Search

__all__ = [
    "Cap",
    "Clip",
    "Controller",
    "Decades",
    "Gradient",
    "Memory",
    "Monitor",
    "Observation",
    "Search",
    "Variance",
    "check_controller",
]
