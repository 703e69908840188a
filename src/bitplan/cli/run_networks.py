"""The network of a run: the one that its page recommends or that was picked, trained again where it is not kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from bitplan.cli.terminal import tell
from bitplan.cli.things import Typed
from bitplan.core.errors import FileError, InputError
from bitplan.core.records import Graph
from bitplan.core.studies import Study
from bitplan.core.trust import check_code
from bitplan.store.run_folder import RunFolder

if TYPE_CHECKING:
    from bitplan.core.records import Plan
    from bitplan.core.rules import Rules
    from bitplan.core.trials import Result
    from bitplan.study.context import Setting


@dataclass(frozen=True)
class Pick:
    """Which network of a run, as typed; what is not said is as the run's page recommends."""

    method: str | None = None
    budget: str | None = None
    seed: int | None = None
    threads: int | None = None


@dataclass(frozen=True)
class RunNetwork(Typed):
    """A trained network of a run, with the run's task. Training it again is said, and where it ends up otherwise."""

    is_a: ClassVar[str] = "the folder of a run"

    pick: Pick = Pick()

    def graph(self, rules: Rules, link: Sequence[str] = ()) -> NoReturn:
        """It has one already, under the rules of its study."""
        self.check_plannable()
        raise AssertionError

    def check_plannable(self) -> NoReturn:
        """A run has plans; others are selected from its gains."""
        raise InputError(
            f"{self.written} is the folder of a run: its graph is in {self._run.file_of(Graph)}, and `bitplan select` "
            "chooses from its gains"
        )

    @cached_property
    def model(self) -> Any:
        """Kept, or trained again."""
        return _trained(self._setting, self._result, self._words, self.pick.threads)

    @cached_property
    def plan(self) -> Plan:
        """The one that the network was trained with."""
        tell(f"the plan of {self._run.study.words_over_seeds(self._result.trial)}")
        plans, name = self._run.plans, self._result.plan
        if name not in plans:
            raise FileError(
                f"{self.written} no longer has the plan of {self._words} ({name}): go on with `bitplan sweep`"
            )
        return plans[name]

    @property
    def recorded_graph(self) -> Graph | None:
        """The run's."""
        return self._run.graph

    @property
    def task(self) -> Any:
        """The study's."""
        return self._setting.task

    @property
    def example(self) -> Any:
        """The task's, unless a shape was typed."""
        return self.task.example() if self.beside.shape is None else super().example

    @property
    def spec(self) -> str | None:
        """The study's model, if it is one of the zoo."""
        return self._setting.spec

    @property
    def quantized(self) -> Any:
        """The network."""
        return self.model

    def exported(self, *, plan_only: bool) -> Any:
        """For a recipe only the plan, without training."""
        return self.plan if plan_only else self.model

    @cached_property
    def _run(self) -> RunFolder:
        return RunFolder(Path(self.written))

    @cached_property
    def _setting(self) -> Setting:
        from bitplan.study.context import Setting

        study, trust = self._run.study, self.beside.trust
        check_code(study.model, self._run.file_of(Study), trust=trust)
        return Setting(study, self._run, trust)

    @cached_property
    def _result(self) -> Result:
        from bitplan.reports.scores import choose

        return choose(self._run, method=self.pick.method, budget=self.pick.budget, seed=self.pick.seed)

    @property
    def _words(self) -> str:
        return self._run.study.words(self._result.trial)


def _trained(setting: Setting, result: Result, words: str, threads: int | None) -> Any:
    """The network of a result; says what is trained, and where it scores otherwise than recorded."""
    from bitplan.cli.progress import showing_progress
    from bitplan.cli.steps import limit_threads
    from bitplan.core.progress import clock
    from bitplan.study.networks import is_kept, trained_network

    run = setting.run
    if is_kept(run, result):
        tell(f"{words}, scored {result.score:.4g}")
    else:
        tell(f"{words}, scored {result.score:.4g}: not kept, so it is trained again; about {clock(result.seconds)}")
        limit_threads(threads or _threads_of(run))
    with showing_progress("training again") as progress:
        found = trained_network(run, result, progress=progress, trust=setting.trust)
    if not found.as_recorded:
        tell(
            f"warning: this is not the network that the run had: it scores {found.score:.6g}, recorded is "
            f"{found.recorded:.6g}. Another machine, version or number of --threads (1 where the sweep had workers) "
            f"trains otherwise; remove {found.folder} to train it again"
        )
    tell(f"its checkpoint is {found.folder}")
    return found.model


def _threads_of(run: RunFolder) -> int | None:
    """How many threads each worker of the run had, where its study says that there were workers."""
    options = run.study.engine_options
    return int(str(options.get("threads", 1))) if run.study.engine == "local" and options.get("workers") else None
