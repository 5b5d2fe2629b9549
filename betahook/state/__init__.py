"""Everything that changes while a model trains: one `State` for each hook."""
