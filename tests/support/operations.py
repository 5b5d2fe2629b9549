"""Counting what torch is asked to do."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = {
    *("alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze"),
    *("t", "transpose", "unbind", "unsqueeze", "view", "_reshape_alias", "_unsafe_view", "_conj", "unfold"),
}
"""Operations that only look at a tensor in another way: nothing is launched for them."""


class Operations(TorchDispatchMode):
    """Count the operations that are launched, by name; views are none."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        if name not in VIEWS:
            self.calls[name] += 1
        return function(*args, **(kwargs or {}))
