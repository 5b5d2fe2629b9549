"""Record of what a run has reported, so that nothing is reported twice, and of what the next report is about.

`report.warnings`, `report.findings` and `Hook.metrics` read and write it. `betahook.checkpoint` saves four of the
entries, `schema.REPORTED`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Reported:
    """The reports of a hook.

    Attributes:
        alerts_step: the last step whose metrics were checked against the alerts.
        findings_step: the last step whose findings were logged.
        warned_of_nonfinite: True once a NaN or an infinity was reported.
        warned_of_unreached: True once layers out of reach were reported.
        warned_of_missing_steps: True once it was reported that `step` is never called.
        asked: reports requested before the first `step`.
        changed: indices of the layers whose condition has just begun.
        idle_steps: steps ended since attention was last measured; minus infinity once they are not to be reported.
    """

    alerts_step: int = 0
    findings_step: int = 0
    warned_of_nonfinite: bool = False
    warned_of_unreached: bool = False
    warned_of_missing_steps: bool = False
    asked: set[str] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    idle_steps: float = 0.0
