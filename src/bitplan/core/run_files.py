"""The names of a run's files, below its folder; `core/runs.py` draws them."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from pathlib import PurePath
from urllib.parse import quote_plus

from bitplan.core.record import Record
from bitplan.core.records import Costs, Graph
from bitplan.core.studies import Agenda, Fit, Pairs, Study

_LONGEST = 150  # letters of a file's name; file systems take 255 bytes
_GAINS, LEASES = "gains", "leases"
FILES: dict[type[Record], str] = {
    Study: "study.json",
    Graph: "graph.json",
    Costs: "costs.json",
    Agenda: "agenda.json",
    Pairs: "additivity/pairs.json",
    Fit: "additivity/fit.json",
}
"""Where the records are that a run has one of."""


class RunPart(StrEnum):
    """What a run keeps by id, each in the folder of this name."""

    TRIALS = "trials"
    FAILURES = "failures"
    PLANS = "plans"
    ESTIMATES = "estimates"
    TRAINED = "trained"
    NETWORKS = "networks"
    JOBS = "jobs"
    RUNNING = "running"
    STARTS = "starts"
    CEILINGS = "ceilings"


def is_own(name: PurePath) -> bool:
    """Whether what lies below a run's folder under that name is the run's own; the rest is people's."""
    own = {_GAINS, LEASES, *RunPart, *(PurePath(file).parts[0] for file in FILES.values())}
    return name.parts[0] in own


def title_at(title: str, budgets: tuple[str, ...], seed: int, *, start: int | None = None) -> str:
    """What the gains of a method are called; of one that chooses within budgets they hold for these and a seed.

    `start` is the seed of the network that they were estimated from, where that is not a study's first.
    """
    own = f"{title} at {' and '.join(budgets)}, seed {seed}" if budgets else title
    return own if start is None else f"{own}, start {start}"


def gains_file(title: str) -> str:
    """Where the gains of a method are, from the run's folder; two titles never share a file."""
    name = quote_plus(title)
    if name.startswith("."):  # it would be hidden
        name = f"%2E{name[1:]}"
    if len(name) > _LONGEST:  # "=" stands in no name that quote_plus gives
        name = f"{name[:_LONGEST]}={hashlib.sha256(title.encode()).hexdigest()[:16]}"
    return f"{_GAINS}/{name}.json"
