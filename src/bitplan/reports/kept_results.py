"""Results of a run kept as one file, and read again as if its folder were there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bitplan.core.ceilings import Ceiling
from bitplan.core.errors import FileError
from bitplan.core.record import Record
from bitplan.core.records import Costs, Gains, Graph, Plan
from bitplan.core.results import PackedRecords, RunResults
from bitplan.core.studies import Agenda, FailedTrial, Fit, Pairs, Study
from bitplan.core.trials import Result
from bitplan.store.files import load
from bitplan.store.run_folder import RunFolder


def open_run(path: str | Path) -> RunFolder:
    """Return a run as it is now, from its folder or from the file that its results are kept in."""
    if not Path(path).is_file():
        return RunSnapshot(Path(path))
    if not isinstance(load(path, Record), RunResults):
        raise FileError(
            f"{path} is not the folder of a run, nor a file of its results: make one with `bitplan sweep` or "
            "`bitplan run results RUN -o FILE`"
        )
    return ResultsFile(Path(path))


def keep_results(folder: str | Path) -> RunResults:
    """Return all data of tables, figures and pages of a run; nothing is written."""
    run = RunSnapshot(Path(folder))
    results = [result.model_copy(update={"log": ()}) for result in run.results]
    return RunResults.kept(
        results,
        run.plans,
        study=_without_places(run.study),
        graph=run.graph,
        costs=run.costs,
        failures=PackedRecords.of(one.model_copy(update={"traceback": ""}) for one in run.failures),
        gains=run.gains | run.bound_gains,
        ceilings=tuple(run.found_ceilings),
        pairs=run.pairs,
        fit=run.fit,
        unfinished=run.unfinished,
    )


def _without_places(study: Study) -> Study:
    """Return the study with names of files instead of paths."""
    fields = study.model_dump(mode="json")
    fields["task_options"] = {key: _shorten_path(value) for key, value in study.task_options.items()}
    fields["start"] |= {key: _shorten_path(fields["start"][key]) for key in ("weights", "checkpoint")}
    return Study.model_validate(fields)


def _shorten_path(value: Any) -> Any:
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


@dataclass(frozen=True)
class ResultsFile(RunFolder):
    """The content of a file of results with the interface of a run; `path` is the file's."""

    @cached_property
    def file(self) -> RunResults:
        """Return the whole file."""
        return load(self.path, RunResults)

    @property
    def study(self) -> Study:
        """Return the study."""
        return self.file.study

    @property
    def graph(self) -> Graph | None:
        """Return the network's graph."""
        return self.file.graph

    @property
    def costs(self) -> Costs | None:
        """Return the costs of the groups."""
        return self.file.costs

    @property
    def agenda(self) -> Agenda | None:
        """Return None: only `unfinished` is kept of it."""
        return None

    @property
    def unfinished(self) -> int:
        """Return how many trials were neither done nor failed."""
        return self.file.unfinished

    @cached_property
    def gains(self) -> dict[str, Gains]:
        """Return the gains of each method that was done, by its title."""
        titles = [method.title for method in self.study.methods]
        return {title: self.file.gains[title] for title in titles if title in self.file.gains}

    @cached_property
    def bound_gains(self) -> dict[str, Gains]:
        """Return the gains of the methods that choose within a budget."""
        return {title: gains for title, gains in self.file.gains.items() if title not in self.gains}

    def gains_of(self, title: str) -> Gains | None:
        """Return the gains of a method by its title, if they are there."""
        return self.file.gains.get(title)

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """Return every plan, by its id."""
        return {plan.id: plan for plan in self.file.plans.read(Plan)}

    @cached_property
    def results(self) -> list[Result]:
        """Return the trials that were done."""
        found = self.file.results.read(Result)
        lost = {result.plan for result in found if result.training} - self.plans.keys()
        if lost:
            raise FileError(f"{self.path} lacks the plan {min(lost)}, which a result of it names: make it again")
        return found

    @property
    def failures(self) -> list[FailedTrial]:
        """Return the trials that failed."""
        return self.file.failures.read(FailedTrial)

    @property
    def found_ceilings(self) -> list[Ceiling]:
        """Return the ceilings that were found."""
        return list(self.file.ceilings)

    @property
    def pairs(self) -> Pairs | None:
        """Return the first additivity experiment, if it was done."""
        return self.file.pairs

    @property
    def fit(self) -> Fit | None:
        """Return the second additivity experiment, if it was done."""
        return self.file.fit


@dataclass(frozen=True)
class RunSnapshot(RunFolder):
    """A run as it was at the first look: several tables of it read its files once."""

    @cached_property
    def study(self) -> Study:
        """Return the study."""
        return super().study

    @cached_property
    def agenda(self) -> Agenda | None:
        """Return all trials of the study, done or not."""
        return super().agenda

    @cached_property
    def gains(self) -> dict[str, Gains]:
        """Return the gains of each method that is done, by its title."""
        return super().gains

    @cached_property
    def bound_gains(self) -> dict[str, Gains]:
        """Return the gains that are done of the methods that choose within a budget."""
        return super().bound_gains

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """Return every plan, by its id."""
        return super().plans

    @cached_property
    def results(self) -> list[Result]:
        """The trials of the study that are done."""
        return super().results
