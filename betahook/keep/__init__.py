"""Beta outlives the process: restored from a folder, or folded into the weights."""
