"""betahook: measure the scale of attention scores while a model trains, and adapt beta, the factor on them."""

from betahook import log
from betahook.control.base import Controller, Observation
from betahook.control.beta_search import BetaSearch
from betahook.control.decades import Decades
from betahook.control.rules import Cap, Clip, Gradient, Monitor, Variance
from betahook.control.search import Search
from betahook.examination import Examination, examine
from betahook.hook import Hook, attach, detach
from betahook.keep.folding import fold
from betahook.keep.refusals import FoldError
from betahook.keep.restoring import restore
from betahook.layer import AttentionLayer
from betahook.measure.statistics import Statistics
from betahook.options import ControllerChoice, LayerChoice, UnsupportedModelError
from betahook.report.alerts import Alert, Alerts
from betahook.report.audit import Audit, LayerAudit
from betahook.report.conditions import Condition
from betahook.report.findings import Finding, Findings
from betahook.report.glance import Picture
from betahook.report.metrics import MetricName
from betahook.report.precision import Precision
from betahook.version import __version__ as __version__

__all__ = [
    "Alert",
    "Alerts",
    "AttentionLayer",
    "Audit",
    "BetaSearch",
    "Cap",
    "Clip",
    "Condition",
    "Controller",
    "ControllerChoice",
    "Decades",
    "Examination",
    "Finding",
    "Findings",
    "FoldError",
    "Gradient",
    "Hook",
    "LayerAudit",
    "LayerChoice",
    "MetricName",
    "Monitor",
    "Observation",
    "Picture",
    "Precision",
    "Search",
    "Statistics",
    "UnsupportedModelError",
    "Variance",
    "attach",
    "detach",
    "examine",
    "fold",
    "restore",
]

log.name_warnings()
