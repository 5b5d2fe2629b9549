"""Numbers for people: metrics, warnings, alerts and the audit."""
