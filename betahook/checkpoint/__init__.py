"""The state of a hook in a folder: its schema, its file, and what `save_pretrained` of a hooked model does."""

from betahook.checkpoint.file import (
    FILE,
    UNFINISHED,
    ForeignStateError,
    Saved,
    export,
    finished,
    is_begun,
    names_weights,
    read,
    read_exported,
    save,
)
from betahook.checkpoint.pretrained import MARK, is_marked, is_marked_folder, take_marked, unmarked

__all__ = [
    "FILE",
    "MARK",
    "UNFINISHED",
    "ForeignStateError",
    "Saved",
    "export",
    "finished",
    "is_begun",
    "is_marked",
    "is_marked_folder",
    "names_weights",
    "read",
    "read_exported",
    "save",
    "take_marked",
    "unmarked",
]
