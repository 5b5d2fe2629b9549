from types import SimpleNamespace

import pytest
import torch

from betahook.measure.dtypes import sum_dtype


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(("has_fp64", "expected"), [(True, torch.float64), (False, torch.float32)])
def test_sums_are_float64_where_an_xpu_has_it(monkeypatch, has_fp64, expected, is_compiled):
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=has_fp64))

    def added(tensor):
        return tensor.to(sum_dtype(torch.device("xpu", 0))) + 1

    torch.compiler.reset()
    function = torch.compile(added, fullgraph=True, backend="eager") if is_compiled else added
    assert function(torch.ones(2)).dtype == expected
