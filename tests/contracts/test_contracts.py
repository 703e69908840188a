"""What every registered entry must do: the contracts that bitplan ships; a new one is tested by existing.

Tasks are tried in tests/tasks, where their data is.
"""

import sys
from itertools import pairwise

import pytest

import bitplan
from bitplan.core.registry import COSTS, MODELS
from bitplan.models.zoo import load_model
from bitplan.testing.test_registered import (  # noqa: F401
    test_cost,
    test_engine,
    test_exporter,
    test_gain,
    test_judge,
    test_layer,
    test_model,
    test_quantizer,
    test_relaxation,
    test_search,
    test_selector,
)


@pytest.fixture(scope="module", autouse=True)
def _no_cluster_is_left():
    yield
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.mark.parametrize("choices", ["w2a2,w4a4", "w2a2,w3a3,w4a4,w8a8"])
@pytest.mark.parametrize("name", list(COSTS))
def test_our_costs_do_not_fall(graph, name, choices):
    for row in bitplan.price(name, graph, choices).rows.values():
        assert all(low <= high for low, high in pairwise(row))
        assert row[-1] > 0


@pytest.mark.parametrize("name", list(MODELS))
def test_of_our_models_the_first_layer_is_fixed_as_such(name):
    model, example = load_model(name, weightless=True)
    assert bitplan.trace(model, example, name=name).layers[0].why == "first layer"
