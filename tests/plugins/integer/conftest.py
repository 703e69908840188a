import pytest
import torch
from small_study import study, write  # noqa: F401


@pytest.fixture(autouse=True)
def _one_thread_one_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
