from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items):
    for item in items:  # of the whole run
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # torch's own, of tracing and of kernels that are new
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a GPU of CUDA"))


@pytest.fixture
def tf32():
    """Float32 products in TF32, as most people train."""
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")
