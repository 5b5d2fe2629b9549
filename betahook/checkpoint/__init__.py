"""The state of a hook in a folder: its schema, its file, and what `save_pretrained` of a hooked model does."""

from betahook.checkpoint.file import (
    FILE,
    UNFINISHED,
    check,
    export,
    finished,
    is_begun,
    load,
    load_exported,
    names_weights,
    read,
    save,
)
from betahook.checkpoint.pretrained import MARK, is_marked, is_marked_folder, unmarked

__all__ = [
    "FILE",
    "MARK",
    "UNFINISHED",
    "check",
    "export",
    "finished",
    "is_begun",
    "is_marked",
    "is_marked_folder",
    "load",
    "load_exported",
    "names_weights",
    "read",
    "save",
    "unmarked",
]
