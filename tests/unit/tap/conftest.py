import pytest
import torch

from support.attention import LENGTH, WIDTH


@pytest.fixture
def x():
    """Three sequences."""
    return torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
