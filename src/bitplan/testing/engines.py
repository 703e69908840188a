"""The contract of engines."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import dataclass

from bitplan.core.registry import ENGINES
from bitplan.store.engines import Engine, Failure
from bitplan.testing.contract import Contract

_ITEMS = 7
_FAILS = 3


@dataclass(frozen=True)
class SquareNumber:
    """Work that other processes can import; one number has no square."""

    fails: int | None = None

    def __call__(self, number: int) -> int:
        """number²."""
        if number == self.fails:
            raise ValueError(f"no square for {number}")
        return number**2


def check_engine(engine: Engine) -> None:
    """Hold an engine to its contract, with small work."""
    contract = Contract(f"engine {ENGINES.name_of(engine)}")
    contract.has_all_of(engine, Engine, "an engine")
    with contract.works("it can be sent to another process"):
        contract.clause("it can be sent to another process", pickle.loads(pickle.dumps(engine)) == engine)
    with contract.works("an item that fails stops no other"):
        found = list(engine.run(SquareNumber(fails=_FAILS), range(_ITEMS)))
    times = Counter(item for item, _ in found)
    odd = [item for item in range(_ITEMS) if times[item] != 1]
    clause = "every item has one outcome"
    contract.clause(clause, not odd and len(times) == _ITEMS, odd and f"{odd[0]} has {times[odd[0]]}")
    outcomes = dict(found)  # in whichever order they came
    failure = outcomes.pop(_FAILS)
    wrong = [item for item, outcome in outcomes.items() if outcome != item**2]
    clause = "an outcome comes with its own item"
    contract.clause(clause, not wrong, wrong and f"{wrong[0]} came with {outcomes[wrong[0]]!r}")
    clause = "an item that fails gives a Failure with the kind of error and its message"
    contract.clause(clause, isinstance(failure, Failure), type(failure).__name__)
    assert isinstance(failure, Failure)
    contract.clause(clause, failure.error == "ValueError: no square for 3", failure.error)
    contract.clause("a Failure has the traceback", "no square for" in failure.traceback)
    with contract.works("no items are no work"):
        contract.clause("no items are no work", list(engine.run(SquareNumber(), [])) == [])
