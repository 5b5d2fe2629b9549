from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items):
    for item in items:  # of the whole run
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # torch's own, of tracing and of kernels that are new
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a GPU of CUDA"))
