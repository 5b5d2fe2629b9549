"""The state of a hook in a folder: its schema, its file, and what `save_pretrained` of a hooked model does."""

from betahook.checkpoint.file import FILE, is_begun, load, read, save
from betahook.checkpoint.pretrained import MARK, is_marked, unmarked

__all__ = ["FILE", "MARK", "is_begun", "is_marked", "load", "read", "save", "unmarked"]
