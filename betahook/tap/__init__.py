"""The tap: how a query gets its factor, and how q and k get to the recorder."""
