"""The contracts of everything that can be exchanged, for tests of your own; docs/extend.md shows each.

    from bitplan.testing import check_gain

    def test_mine():
        check_gain(Mine())

`pytest --pyargs bitplan.testing` checks all that is registered, entries of other packages included. A contract that is
broken is one line with the clause. Nothing here needs pytest but `test_registered.py`.
"""

from __future__ import annotations

from typing import Any

from bitplan.core.registry import CONTRACTS
from bitplan.testing.contract import BrokenContract, NeedsMore
from bitplan.testing.costs import check_cost
from bitplan.testing.engines import check_engine
from bitplan.testing.exporters import check_exporter
from bitplan.testing.gains import check_gain
from bitplan.testing.layers import check_layer
from bitplan.testing.models import check_model
from bitplan.testing.quantizers import check_quantizer
from bitplan.testing.selectors import check_selector
from bitplan.testing.tasks import check_task

__all__ = [
    "BrokenContract",
    "NeedsMore",
    "check_cost",
    "check_engine",
    "check_exporter",
    "check_gain",
    "check_layer",
    "check_model",
    "check_quantizer",
    "check_selector",
    "check_task",
]


def __getattr__(name: str) -> Any:
    """Return the contract of a plugin's kind, such as `check_search`, which the plugin brings."""
    if name not in CONTRACTS:
        raise AttributeError(f"module 'bitplan.testing' has no attribute {name!r}")
    return CONTRACTS.get(name)
