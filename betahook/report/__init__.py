"""Numbers for people: metrics, findings, pictures, warnings, alerts and the audit."""
