import pytest
import torch

from bitplan.core.records import Plan


@pytest.fixture(autouse=True)
def _one_thread_one_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def plan():
    def make(links=(), **precisions):
        named = {name.replace("__", "."): precision for name, precision in precisions.items()}
        return Plan(model="test", precisions=named, links=links, method="by hand", selector="none")

    return make
