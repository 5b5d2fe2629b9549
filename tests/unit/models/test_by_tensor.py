"""A map from tensors to what is known of them."""

import gc
import sys

import torch

from betahook.models.by_tensor import ByTensor


def test_a_tensor_is_known_by_its_identity_as_long_as_it_lives():
    known = ByTensor[str]()
    one, other, passing = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    known[one], known[other], known[passing] = "first", "other", "passing"
    known[one] = "one"
    assert (known[one], known.get(other), known.get(torch.zeros(2)), known.get(3)) == ("one", "other", None, None)
    assert one in known
    assert one[:] not in known
    del passing
    gc.collect()
    assert [value for _, value in known.items()] == ["one", "other"]
    known.pop(one)
    known.pop(one)
    assert [tensor is other for tensor, _ in known.items()] == [True]


def test_no_code_of_python_runs_where_a_tensor_dies():
    """In compiled code, it would be compiled."""
    known, tensor, called = ByTensor[str](), torch.zeros(2), []
    known[tensor] = "passing"
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        del tensor
    finally:
        sys.setprofile(None)
    assert (called, list(known.items())) == ([], [])
