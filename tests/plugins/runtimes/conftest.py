import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _seeded():
    """Networks are built with the same random weights in every run of a file."""
    torch.manual_seed(0)
