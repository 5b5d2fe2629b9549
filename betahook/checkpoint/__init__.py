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
    has_fingerprint,
    has_fsdp_shards,
    naming_place,
    read,
    read_exported,
    save,
    was_save_started,
)
from betahook.checkpoint.pretrained import (
    ADAPTER_CONFIG,
    MARK,
    accept_marked_weights,
    has_transformers_config,
    is_marked,
    is_marked_folder,
    read_config,
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
    "accept_marked_weights",
    "export",
    "finished",
    "has_fingerprint",
    "has_fsdp_shards",
    "has_transformers_config",
    "is_marked",
    "is_marked_folder",
    "makers",
    "naming_place",
    "other_names",
    "read",
    "read_config",
    "read_exported",
    "save",
    "unmarked",
    "was_save_started",
]
