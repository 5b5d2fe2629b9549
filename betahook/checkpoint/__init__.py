"""The state of a hook in a folder: its schema, its file, and `save_pretrained` of a hooked model.

Other packages import everything from here, as in `checkpoint.read`; only `hook.py` also uses `schema` and `pretrained`.
"""

from betahook.checkpoint.file import (
    FILE,
    UNFINISHED,
    ForeignStateError,
    Saved,
    export,
    finished,
    is_begun,
    is_in_shards,
    names_weights,
    naming,
    read,
    read_exported,
    save,
)
from betahook.checkpoint.pretrained import (
    ADAPTER_CONFIG,
    MARK,
    is_marked,
    is_marked_folder,
    read_config,
    take_marked,
    takes_notes,
    unmarked,
)
from betahook.checkpoint.schema import makers, other_names

__all__ = [
    "ADAPTER_CONFIG",
    "FILE",
    "MARK",
    "UNFINISHED",
    "ForeignStateError",
    "Saved",
    "export",
    "finished",
    "is_begun",
    "is_in_shards",
    "is_marked",
    "is_marked_folder",
    "makers",
    "names_weights",
    "naming",
    "other_names",
    "read",
    "read_config",
    "read_exported",
    "save",
    "take_marked",
    "takes_notes",
    "unmarked",
]
