"""The folder of a run: who owns its files. Every path in it and every write to it goes through `RunFolder`.

RUN/
├── study.json  agenda.json  what is compared, and the trials that this takes
├── graph.json  costs.json
├── gains/TITLE.json         one per method, for people: a copy of its estimate (of a search: TITLE at BUDGET, seed N)
├── plans/ID.json
├── trials/ID.json           the Result of a trial that is done
├── failures/ID.json         a trial that failed
├── estimates/ID.json        gains, by what they depend on
├── trained/ID.json          what a training gave; trials with the same precisions share it
├── running/ID/              where a killed training goes on
├── jobs/ID.json             what methods measured on the way, such as ALPS's fine-tuned groups
├── leases/PART-ID           who works on what right now
├── ceilings/ID.json         the search for the best plan within a budget, and what its finalists reached
├── starts/ID/               checkpoints that trials start from
├── networks/ID/  ID.json    a trained network as a checkpoint, by its training, and what that training gave
└── additivity/pairs.json  additivity/fit.json

The rules of `store/record_store.py` hold for single records too. Checkpoints are whole or not there, name their owner,
and carry a hash of their weights. A damaged file is kept as NAME.damaged. Reading never writes. There is no state but
these files, so that any process that sees the folder knows all there is to know.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path, PurePath
from typing import NamedTuple, TypeVar
from urllib.parse import quote_plus

from bitplan.core.ceilings import Ceiling, select_ceilings
from bitplan.core.errors import FileError
from bitplan.core.record import Record
from bitplan.core.records import Costs, Gains, Graph, Plan
from bitplan.core.studies import Agenda, FailedTrial, Fit, Pairs, Study, Trained
from bitplan.core.trials import Result, Trial
from bitplan.store.files import ASIDE, load
from bitplan.store.record_store import FolderStore, RecordStore, keep_record

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


def title_of_gains(title: str, budgets: tuple[str, ...], seed: int, *, start: int | None = None) -> str:
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


AnyRecord = TypeVar("AnyRecord", bound=Record)
Single = Study | Graph | Costs | Agenda | Pairs | Fit
_KINDS: dict[RunPart, type[Record]] = {
    RunPart.TRIALS: Result,
    RunPart.FAILURES: FailedTrial,
    RunPart.PLANS: Plan,
    RunPart.ESTIMATES: Gains,
    RunPart.TRAINED: Trained,
    RunPart.NETWORKS: Trained,
    RunPart.JOBS: Record,
    RunPart.CEILINGS: Ceiling,
}
"""What lies on shelves."""


class LeaseFile(NamedTuple):
    """The lease of a job: the part of the run that its outcome goes to, its id, and the file."""

    part: str
    job: str
    path: Path


@dataclass(frozen=True)
class RunFolder:
    """A run: what was asked for, how far it is, and what was found."""

    path: Path

    @staticmethod
    def is_one(path: Path) -> bool:
        """Whether a folder is that of a run."""
        return (path / FILES[Study]).is_file()

    @classmethod
    def owning(cls, path: Path) -> RunFolder | None:
        """The run that keeps its own files where a path leads, there or not; its page and what is beside are not."""
        try:
            real = path.resolve()
        except (OSError, RuntimeError):  # its links go in a circle
            return None
        runs = (folder for folder in real.parents if cls.is_one(folder) and is_own(real.relative_to(folder)))
        return next(map(cls, runs), None)

    # What it is about.

    @property
    def study(self) -> Study:
        """What is compared here."""
        if not self.is_one(self.path):
            raise FileError(
                f"{self.path} is not the folder of a run: it has no {FILES[Study]}; make one with `bitplan sweep`"
            )
        return load(self.path / FILES[Study], Study, sealed=True)

    @property
    def graph(self) -> Graph | None:
        """The network's graph, once it is traced."""
        return self._one(Graph)

    @property
    def costs(self) -> Costs | None:
        """What the groups cost."""
        return self._one(Costs)

    @property
    def agenda(self) -> Agenda | None:
        """All trials of the study, done or not."""
        return self._one(Agenda)

    def keep(self, *records: Single) -> None:
        """Write down what the run is about, or what it has one of, each whole and unless it is there already."""
        for record in records:
            keep_record(self.path / FILES[type(record)], record)

    def file_of(self, kind: type[Single]) -> Path:
        """Where the record of a kind is that a run has one of, for commands that people type."""
        return self.path / FILES[kind]

    @property
    def page(self) -> Path:
        """Where the run's page is, if it was written here."""
        return self.path / "report.html"

    # What was found, by id.

    @property
    def trials(self) -> RecordStore[Result]:
        """Results by the id of their trial."""
        return self._shelf(RunPart.TRIALS, Result)

    @property
    def failed(self) -> RecordStore[FailedTrial]:
        """Failures by the id of their trial."""
        return self._shelf(RunPart.FAILURES, FailedTrial)

    @property
    def estimates(self) -> RecordStore[Gains]:
        """Gains by the id of their estimation."""
        return self._shelf(RunPart.ESTIMATES, Gains)

    @property
    def trained(self) -> RecordStore[Trained]:
        """What trainings gave, by their id."""
        return self._shelf(RunPart.TRAINED, Trained)

    @property
    def jobs(self) -> RecordStore[Record]:
        """Outcomes of the jobs of methods, of whichever kind."""
        return self._shelf(RunPart.JOBS, Record)

    @property
    def ceilings(self) -> RecordStore[Ceiling]:
        """Searches for the best plan within a budget, by what they depend on."""
        return self._shelf(RunPart.CEILINGS, Ceiling)

    @property
    def kept(self) -> RecordStore[Trained]:
        """What the trainings of networks that are kept gave; a network without it is not whole."""
        return self._shelf(RunPart.NETWORKS, Trained)

    @property
    def starts(self) -> FolderStore:
        """Checkpoints by the trial that made them."""
        return FolderStore(self.path / RunPart.STARTS)

    @property
    def networks(self) -> FolderStore:
        """Checkpoints of trained networks, by their training."""
        return FolderStore(self.path / RunPart.NETWORKS)

    @property
    def running(self) -> FolderStore:
        """Where trainings are under way, by their id."""
        return FolderStore(self.path / RunPart.RUNNING)

    # The same for those who read.

    @property
    def gains(self) -> dict[str, Gains]:
        """The gains of each method that is done, by its title."""
        found = {method.title: self.gains_of(method.title) for method in self.study.methods}
        return {title: gains for title, gains in found.items() if gains is not None}

    @property
    def bound_gains(self) -> dict[str, Gains]:
        """Of the methods that choose within a budget, the gains that are done, by title, budget and seed in words."""
        study = self.study
        every = product(study.methods, study.budgets, study.seeds)
        titles = [title_of_gains(method.title, (budget,), study.gain_seed + seed) for method, budget, seed in every]
        found = {title: self.gains_of(title) for title in titles}
        return {title: gains for title, gains in found.items() if gains is not None}

    def gains_of(self, title: str) -> Gains | None:
        """The gains of a method by its title, if they are there."""
        path = self.path / gains_file(title)
        return load(path, Gains, of=title, sealed=True) if path.is_file() else None

    @property
    def plans(self) -> dict[str, Plan]:
        """Every plan, by its id."""
        return self._shelf(RunPart.PLANS, Plan).read_all()

    @property
    def results(self) -> list[Result]:
        """The trials of the study that are done, in the agenda's order; what earlier studies left is not among them."""
        found = self.trials.ids()
        return [self.trials.read(name) for name in self._wanted(found) if name in found]

    @property
    def failures(self) -> list[FailedTrial]:
        """The trials of the study that failed."""
        found = self.failed.ids()
        return [self.failed.read(name) for name in self._wanted(found) if name in found]

    @property
    def found_ceilings(self) -> list[Ceiling]:
        """The ceilings of the study that are found: of each budget the one that took the most trainings."""
        return select_ceilings(self.ceilings.read_all().values(), self.study) if self.ceilings.ids() else []

    @property
    def unfinished(self) -> int:
        """How many trials of the study are neither done nor failed; 0 where nobody wrote down which there are."""
        agenda = self.agenda
        return 0 if agenda is None else max(0, len(agenda.trials) - len(self.results) - len(self.failures))

    @property
    def pairs(self) -> Pairs | None:
        """The first additivity experiment, if it was done."""
        return self._one(Pairs)

    @property
    def fit(self) -> Fit | None:
        """The second additivity experiment, if it was done."""
        return self._one(Fit)

    def keep_gains(self, title: str, gains: Gains) -> None:
        """Write down the gains of a method under its title."""
        keep_record(self.path / gains_file(title), gains, of=title)

    def keep_plans(self, plans: Iterable[Plan]) -> None:
        """Write down plans under their ids, each once."""
        shelf = self._shelf(RunPart.PLANS, Plan)
        for name, plan in {plan.id: plan for plan in plans}.items():
            shelf.keep(name, plan)

    # Looking after it.

    @property
    def missing(self) -> list[Trial]:
        """The trials of the study without a result whose own, or that of their training, was damaged and set aside."""
        trainings, trials = self.trained.lost(), self.trials.lost()
        agenda = self.agenda if trainings or trials else None
        if agenda is None:
            return []
        behind = {trial for job in trainings for trial in agenda.trainings.get(job, ())}
        lost = (trials | behind) - self.trials.ids()
        return [trial for trial in agenda.trials if trial.id in lost]

    def set_aside(self) -> list[Path]:
        """Every damaged file and folder that was kept under another name."""
        return sorted(path for path in self.path.rglob(f"*{ASIDE}*") if not path.name.startswith("."))

    def folders(self) -> list[Path]:
        """Every folder that its files are written into; what lies behind a link is not the run's."""
        inside = _folders_in(self.path)
        trainings = [one for path in inside if path.name == RunPart.RUNNING for one in _folders_in(path)]
        later = [one for path in trainings for one in sorted(path.rglob("[!.]*")) if one.is_dir()]  # of further stages
        return [self.path, *inside, *trainings, *later]

    def refuse_links(self) -> None:
        """Refuse folders of the run that are links: whoever made them would have files written elsewhere."""
        for path in sorted(self.path.glob("[!.]*")):
            if path.is_symlink() and path.is_dir() and is_own(path.relative_to(self.path)):
                raise FileError(f"{path} is a link to what may not be the run's: remove it, or look there")

    def leases(self) -> list[LeaseFile]:
        """Every lease that is there, whoever holds it."""
        files = sorted(self._leases.glob("[!.]*"))
        split = [(path, *path.name.rpartition("-")[::2]) for path in files]
        return [LeaseFile(part, job, path) for path, part, job in split]

    def shelves(self) -> list[RecordStore[Record]]:
        """All that is kept as records by id."""
        return [self._shelf(part, kind) for part, kind in _KINDS.items()]

    def singles(self) -> dict[Path, type[Record]]:
        """The files of what a run has one of, as far as they are there."""
        files = {self.path / name: kind for kind, name in FILES.items()}
        return {path: kind for path, kind in files.items() if path.exists()}

    def parts(self) -> dict[RunPart, list[Path]]:
        """The files and folders of every part; what lies elsewhere, behind a link, is not the run's."""
        self.refuse_links()
        return {part: sorted((self.path / part).glob("[!.]*")) for part in RunPart}

    @property
    def _leases(self) -> Path:
        return self.path / LEASES

    def _shelf(self, part: RunPart, kind: type[AnyRecord]) -> RecordStore[AnyRecord]:
        return RecordStore(self.path / part, kind, self._leases)

    def _wanted(self, found: set[str]) -> list[str]:
        agenda = self.agenda if found else None  # which takes a while to read where there are thousands
        return sorted(found) if agenda is None else [trial.id for trial in agenda.trials]

    def _one(self, kind: type[AnyRecord]) -> AnyRecord | None:
        path = self.path / FILES[kind]
        return load(path, kind, sealed=True) if path.is_file() else None


def _folders_in(path: Path) -> list[Path]:
    return [one for one in sorted(path.glob("[!.]*")) if one.is_dir() and not one.is_symlink()]
