"""A judge that trains one network for all plans: precisions drawn at random in every step, then each plan as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.core.jobs import Job, Numbers
from bitplan.core.method_facts import About
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.spend import Spend, pause_charging
from bitplan.gains.base import Context
from bitplan.gains.drop import measures_by_batch
from bitplan.gains.finetuning import Trainings, Tuner, check_length, recipe_for, recipe_of
from bitplan.gains.jobs import check_samples, do_jobs, members_of, options_of_task, with_lowered
from bitplan.gains.lowering import By, check_by, check_task, sign_for
from bitplan.plugins.methods.searches.base import Bench, JobBench, PlanJudge
from bitplan.quant.blend import Shares, blended
from bitplan.quant.checkpoint import fingerprint
from bitplan.store.record_store import FolderStore
from bitplan.tasks.base import Task, draw, measure_, measuring_split, title_of
from bitplan.tune.length import samples_of
from bitplan.tune.log import TrainLog
from bitplan.tune.loop import finetune_
from bitplan.tune.resume import train_or_restart


@dataclass(frozen=True)
class SharedJudge(PlanJudge):
    """The loss, or the score, of a plan in one network that was trained at plans drawn at random; labels.

    SAQ (Liu et al. 2021) trains its network on what its generator draws, after ten epochs of random plans; here it is
    these random plans, each group's choice drawn anew in every step, so that the judge is done before a search begins
    and says the same of a plan whichever search asks. Weights and norms are shared, each precision has steps of its
    own, as there. It lasts for `steps`, or for `epochs`, one unless said, by the context's recipe at `lr_factor` of its
    rate, without its sharpness and `held_out`. Plans are then scored on `samples` of a share of the training samples,
    `hold_out`, that it was not trained on, or of those that a study holds out.
    """

    about: ClassVar[About] = About(True, True, True, "N, and 3·T·epochs once", "SAQ, Liu et al. 2021")

    by: By = "loss"
    epochs: float | None = None
    steps: int | None = None
    lr_factor: float = 1.0
    samples: int = 512
    batch_size: int = 64
    hold_out: float = 0.1

    def __post_init__(self) -> None:
        check_by(self.by)
        check_length("shared", self.epochs, self.steps, self.lr_factor)
        check_samples("shared", self.samples, self.batch_size)
        if not 0 < self.hold_out < 1:
            raise InputError(f"shared: hold_out is a share of the samples above 0 and below 1, not {self.hold_out}")

    def bench(self, method: str, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Bench:
        """One training, in this process, before the first plan that is not in the store."""
        recipe = recipe_for(method, context, epochs=self.epochs, steps=self.steps, lr_factor=self.lr_factor)
        recipe = recipe.model_copy(update={"held_out": 0.0, "sharpness": 0.0})
        task = check_task(context.task, method, "trains one network for all plans")
        trained_on, judging = (task, task) if measuring_split(task) == "test" else task.hold_out(self.hold_out)
        here = dataclasses.replace(context, task=trained_on, engine=None)
        tuner = Tuner.of(method, model, graph, choices, here, recipe, by=self.by)
        training = tuner.first.model_copy(
            update={
                "work": "shared", "options": {"hold_out": self.hold_out}, "members": members_of(graph),
                "choices": choices, "label": f"all of {', '.join(map(str, choices))} at once",
            }
        )  # fmt: skip
        samples = samples_of(trained_on, recipe)
        once = Spend(samples + (samples if recipe.distills else 0), samples, trainings=1, labels=True)
        work = _Showing(tuner, training, judging, None if here.shelf is None else here.shelf.running)
        first, sign = self._first(model, training, judging), sign_for(self.by, task)
        return JobBench(
            Spend(forwards=first.samples, evaluations=1), method, here, work,
            lambda plan: with_lowered(first, graph, plan),
            lambda outcome: sign * fmean(measures_by_batch(outcome, self.by)),
            lambda _: Trainings(tuner, [tuner.first]), once=once,
        )  # fmt: skip

    def _first(self, model: nn.Module, training: Job, judging: Task) -> Job:
        """Return the job that lowers nothing: others are like it."""
        available, own = min(self.samples, judging.size("test")), fingerprint(model)
        size = min(self.batch_size, available)
        return Job(
            work="shared", network=own.network, weights=own.weights, task=title_of(judging),
            task_options=options_of_task(judging), seed=training.seed, batches=available // size, batch_size=size,
            options={"trained": training.id},
        )  # fmt: skip


class DrawnShares(Shares):
    """One choice for each group: drawn anew in every step of a training, and elsewhere what it is told, `picks` (G)."""

    def __init__(self, groups: int, choices: int) -> None:
        super().__init__()
        self.picks = self._drawn = [choices - 1] * groups
        self._alone = torch.eye(choices)

    def begin_(self, step: int, total: int) -> None:
        """By the random numbers of the training, which are seeded for each piece of a batch."""
        self._drawn = torch.randint(len(self._alone), (len(self.picks),)).tolist()

    def of_group(self, group: int) -> tuple[Tensor, Sequence[bool]]:
        """All of the group is at one choice."""
        alone = self._alone[(self._drawn if self.training else self.picks)[group]]
        return alone, (alone > 0).tolist()


@dataclass
class _Showing:
    """The work of jobs: one network, trained when the first of them is to be done, at the plan of each."""

    tuner: Tuner
    training: Job
    judging: Task
    running: FolderStore | None
    network: nn.Module | None = None
    batches: dict[tuple[int, int], list[Any]] = field(default_factory=dict)

    def __call__(self, job: Job) -> Numbers:
        """Put the groups where the plan has them, run, and return the losses and scores of batches."""
        network = self._trained()
        choices, top = self.training.choices, len(self.training.choices) - 1
        picks = [
            choices.index(job.layers[layers[0]]) if layers[0] in job.layers else top
            for layers in self.training.members.values()
        ]
        shares = next(module for module in network.modules() if isinstance(module, DrawnShares))
        shares.picks = picks
        key = job.batches, job.batch_size
        if key not in self.batches:
            self.batches[key] = draw(network, self.judging, *key, job.seed, "test")
        losses, scores = measure_(network, self.judging, self.batches[key])
        return {"losses": losses} | ({} if scores is None else {"scores": scores})

    def _trained(self) -> nn.Module:
        """The network, from its folder where its training was finished before."""
        if self.network is None:
            context = dataclasses.replace(self.tuner.context, progress=None)
            do_jobs(self._train, [self.training], context, self.tuner.method)
        if self.network is None:  # its outcome was found: its weights are in the folder, unless that was cleared away
            self._train(self.training)
        assert self.network is not None
        return self.network

    def _train(self, job: Job) -> Numbers:
        work, recipe = self.tuner.work, recipe_of(job)
        folder = None if self.running is None else self.running.path(job.id)

        def made() -> nn.Module:
            shares = DrawnShares(len(job.members), len(job.choices))
            return blended(work.model, list(job.members.values()), job.choices, shares)

        def trained(model: nn.Module) -> TrainLog:
            return finetune_(model, work.task, recipe, teacher=work.teacher, seed=job.seed, folder=folder)

        with pause_charging():  # it is paid for once, before the first plan (`once`), also where it is found in a store
            if self.running is None:
                self.network = made()
                log = trained(self.network)
            else:
                self.network, log = train_or_restart(trained, made, self.running, job.id)
        return {"mean_loss": (log.mean_loss,), "steps": (len(log.lines),)}
