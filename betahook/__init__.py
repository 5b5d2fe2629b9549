"""betahook: measure the scale of attention scores while a model trains, and adapt the softmax inverse temperature."""

from betahook.alerts import Alert, Alerts
from betahook.audit import Audit, LayerAudit
from betahook.beta_search import BetaSearch
from betahook.controllers import Cap, Controller, Gradient, Monitor, Observation, Search, Variance
from betahook.fold import FoldError, fold
from betahook.hook import Hook, attach
from betahook.layers import AttentionLayer
from betahook.options import UnsupportedModelError
from betahook.restore import restore
from betahook.statistics import Statistics

__version__ = "0.1.0"

__all__ = [
    "Alert",
    "Alerts",
    "AttentionLayer",
    "Audit",
    "BetaSearch",
    "Cap",
    "Controller",
    "FoldError",
    "Gradient",
    "Hook",
    "LayerAudit",
    "Monitor",
    "Observation",
    "Search",
    "Statistics",
    "UnsupportedModelError",
    "Variance",
    "attach",
    "fold",
    "restore",
]
