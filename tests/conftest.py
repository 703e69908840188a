"""What all tests share: one thread (two busy cores are slower than one), and small graphs made by hand."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from bitplan.core.precision import Precision
from bitplan.core.records import Graph, Layer, Link

# No timing decides a test. A gate repeats the same examples; at the desk they are new ones every time.
settings.register_profile("desk", deadline=None)
settings.register_profile("gate", deadline=None, derandomize=True)
settings.load_profile("gate" if os.environ.get("CI") else "desk")

EIGHT = Precision.parse("w8a8")


def layer(name, macs=100, weights=10, in_features=256, fixed=None, why=""):
    return Layer(name=name, kind="conv2d", macs=macs, weights=weights, in_features=in_features, fixed=fixed, why=why)


@pytest.fixture
def graph():
    """Six layers: fixed ends, a link of two between them, and two single ones."""
    return Graph(
        model="small",
        layers=(
            layer("stem", 50, fixed=EIGHT, why="first layer"),
            layer("a", 100, 30),
            layer("b", 300, 20),
            layer("side", 60, 40),
            layer("c", 80, 50),
            layer("head", 10, fixed=EIGHT, why="last layer"),
        ),
        links=(Link(layers=("a", "side"), through="output of stem"),),
    )
