import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Tests run in parallel processes; threads would only get in each other's way."""
    torch.set_num_threads(1)
