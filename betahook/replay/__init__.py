"""The last call of a hooked model, run again to compare outputs."""
