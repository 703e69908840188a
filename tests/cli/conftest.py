import sys

import pytest


@pytest.fixture
def own_model(tmp_path, monkeypatch):
    """A module of the user's, with factories of each kind."""
    monkeypatch.setitem(sys.modules, "users_model", None)
    del sys.modules["users_model"]
    (tmp_path / "users_model.py").write_text(
        """
import torch
from torch import nn

def body():
    first, second, third, last = (nn.Linear(*sizes) for sizes in ((200, 300), (300, 300), (300, 300), (300, 10)))
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third, last)

def with_example():
    return body(), torch.empty(1, 200)

def three():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3))

def wrong():
    return 42

not_callable = 1
"""
    )
    return "users_model"
