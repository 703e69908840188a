"""The folder of a run: one file per record, each whole or not there.

RUN/
├── study.json  agenda.json  what is compared, and the trials that this takes
├── graph.json  costs.json
├── gains/LABEL.json         one per method
├── plans/ID.json
├── trials/ID.json           the Result of a trial that is done
├── failures/ID.json         a trial that failed
├── estimates/ID.json        the same gains, by what they depend on
├── trained/ID.json          what a training gave; trials with the same precisions share it
├── running/ID/              where a killed training goes on
├── jobs/ID.json             what methods measured on the way, such as ALPS's fine-tuned groups
├── leases/ID                who works on what right now
├── starts/ID/               checkpoints that trials start from
├── networks/ID/  ID.json    a trained network as a checkpoint, by its training, and what that training gave
└── additivity/pairs.json  additivity/fit.json
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bitplan.core.errors import FileError
from bitplan.core.record import Record
from bitplan.core.records import Costs, Gains, Graph, Plan
from bitplan.core.store import load
from bitplan.core.studies import Agenda, FailedTrial, Fit, Pairs, Study
from bitplan.core.trials import Result

AnyRecord = TypeVar("AnyRecord", bound=Record)


@dataclass(frozen=True)
class RunFolder:
    """Where the records of a run are, and what they say; reading never writes."""

    path: Path

    @property
    def study(self) -> Study:
        """What is compared here."""
        if not (self.path / "study.json").is_file():
            raise FileError(
                f"{self.path} is not the folder of a run: it has no study.json; make one with `bitplan sweep`"
            )
        return load(self.path / "study.json", Study)

    @property
    def graph(self) -> Graph | None:
        """The network's graph, once it is traced."""
        return self._maybe("graph.json", Graph)

    @property
    def costs(self) -> Costs | None:
        """What the groups cost."""
        return self._maybe("costs.json", Costs)

    @property
    def gains(self) -> dict[str, Gains]:
        """The gains of each method that is done, by its title."""
        found = {}
        for method in self.study.methods:
            gains = self._maybe(f"gains/{file_name(method.title)}.json", Gains)
            if gains is not None:
                found[method.title] = gains
        return found

    @property
    def plans(self) -> dict[str, Plan]:
        """Every plan, by its id."""
        return {plan.id: plan for plan in self._all("plans", Plan)}

    @property
    def agenda(self) -> Agenda | None:
        """All trials of the study, done or not."""
        return self._maybe("agenda.json", Agenda)

    @property
    def results(self) -> list[Result]:
        """The trials of the study that are done, in the agenda's order; what earlier studies left is not among them."""
        found = {result.trial.id: result for result in self._all("trials", Result)}
        return [found[one] for one in self._wanted(found) if one in found]

    @property
    def failures(self) -> list[FailedTrial]:
        """The trials of the study that failed."""
        found = {failed.trial.id: failed for failed in self._all("failures", FailedTrial)}
        return [found[one] for one in self._wanted(found) if one in found]

    @property
    def pairs(self) -> Pairs | None:
        """The first additivity experiment, if it was done."""
        return self._maybe("additivity/pairs.json", Pairs)

    @property
    def fit(self) -> Fit | None:
        """The second additivity experiment, if it was done."""
        return self._maybe("additivity/fit.json", Fit)

    def _wanted(self, found: Iterable[str]) -> list[str]:
        agenda = self.agenda
        return list(found) if agenda is None else [trial.id for trial in agenda.trials]

    def _maybe(self, name: str, kind: type[AnyRecord]) -> AnyRecord | None:
        path = self.path / name
        return load(path, kind) if path.is_file() else None

    def _all(self, folder: str, kind: type[AnyRecord]) -> list[AnyRecord]:
        return [load(path, kind) for path in sorted((self.path / folder).glob("[!.]*.json"))]


def file_name(title: str) -> str:
    """A title as a file may be called."""
    return re.sub(r"[^\w.+-]+", "-", title).strip("-.") or "method"
