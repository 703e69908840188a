"""The contract of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bitplan.graph.trace import trace
from bitplan.testing.contract import Contract, NeedsMore


def check_model(factory: Callable[[], Any], *, example: Any = None, name: str = "") -> None:
    """Hold a factory of models to its contract; `example` is for one that gives no example of its input."""
    name = name or getattr(factory, "__name__", type(factory).__name__)
    contract = Contract(f"model {name}")
    with contract.works("it is built without arguments"):
        made = _built(factory)
    model, own = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    kind = type(model).__name__
    contract.clause("it gives a model, or a model and its example", isinstance(model, nn.Module), kind)
    given = own if example is None else example
    if given is None:
        raise NeedsMore(f"the model {name} gives no example of its input: check_model(factory, example=…)")
    with contract.works("it is traced with its example"):
        first, second = (trace(model, given, name=name) for _ in range(2))
    contract.clause("tracing it again gives the same graph", first == second)
    contract.clause("it has a layer with weights", any(layer.weights for layer in first.layers))


def _built(factory: Callable[[], Any]) -> Any:
    """Without memory for its weights where that is possible, as `bitplan steps trace` builds it."""
    try:
        with torch.device("meta"):
            return factory()
    except (NotImplementedError, RuntimeError):  # it reads numbers while it is built
        return factory()
