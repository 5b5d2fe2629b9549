"""Reports of a run: what was said, so that nothing is said twice, and what the next report is to say.

`report.warnings`, `report.findings` and `Hook.metrics` read and write it. `betahook.checkpoint` saves four of the
entries, `schema.REPORTED`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Reported:
    """The reports of a hook.

    Attributes:
        alerts_step: the last step whose metrics were held against the alerts.
        findings_step: the last step whose findings were logged.
        warned_of_nonfinite: True once a NaN or an infinity was reported.
        warned_of_unreached: True once layers out of reach were reported.
        warned_of_missing_steps: True once it was reported that `step` is never called.
        asked: reports requested before the first `step`.
        changed: the layers whose condition has just begun, by index.
        idle_steps: steps ended since attention was last measured; minus infinity once nobody is to hear of them.
    """

    alerts_step: int = 0
    findings_step: int = 0
    warned_of_nonfinite: bool = False
    warned_of_unreached: bool = False
    warned_of_missing_steps: bool = False
    asked: set[str] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    idle_steps: float = 0.0
