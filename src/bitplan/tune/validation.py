"""Judge a network while it is trained: is it better than at first, and when was it best?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from bitplan.adapters.torch import modes_kept
from bitplan.core.trials import Recipe
from bitplan.quant.checkpoint import put_state_, unique_state
from bitplan.quant.quantizers import InputQuantizer
from bitplan.tasks.base import Task, draw, measure_, scores_apart_
from bitplan.tune.length import pace_of, parts_of

_DRAW = 0  # which samples are looked at
_BATCHES, _MOST = 8, 64  # how many batches these are, and of how many samples at most
_SHARE = 48  # a look takes a 48th of all that is trained on, or less: both together, one or two percent of the time
_LOOKS = 10  # at what is held out, where epochs are longer
_SURE = 2.0  # standard errors by which an end must be below the beginning to be told


@dataclass(frozen=True)
class Look:
    """The scores of a network after so many steps: a number for each batch, or one for all."""

    step: int
    scores: tuple[float, ...]

    @property
    def score(self) -> float:
        """Return the mean of the scores."""
        return statistics.fmean(self.scores)


@dataclass
class Judge:
    """Score a network at step 0, then every `every` steps and at the end.

    `keeps`: the best weights are kept, by their score on `samples` samples. `sign` is −1 if lower scores are better. A
    resumed training goes on with `looks` and `best`.
    """

    measure: Callable[[nn.Module], Sequence[float]]
    sign: int
    every: int
    keeps: bool = False
    samples: int = 0
    looks: list[Look] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)

    def is_due(self, step: int, total: int) -> bool:
        """Return True if it is time for a look that a resumed training did not have already."""
        return (step % self.every == 0 or step == total) and not (self.looks and self.looks[-1].step >= step)

    def scores(self, model: nn.Module) -> tuple[float, ...]:
        """Return the scores of a network now; empty if it cannot be scored, as before its input steps are set."""
        if any(isinstance(module, InputQuantizer) and module.range is None for module in model.modules()):
            return ()
        with modes_kept(model):
            scores = tuple(self.measure(model))
        return scores if all(map(math.isfinite, scores)) else ()

    def note(self, model: nn.Module, step: int, scores: tuple[float, ...]) -> None:
        """Remember a look, and the weights if no look before was better."""
        if not scores:
            return
        look = Look(step, scores)
        if self.keeps and all(self._gain(look, before) >= 0 for before in self.looks):
            self.best = {name: value.detach().to("cpu", copy=True) for name, value in unique_state(model)[0].items()}
        self.looks.append(look)

    def conclude_(self, model: nn.Module) -> str:
        """Give the model its best weights, if they were kept; return words if training did harm, else nothing."""
        if self.best:
            own, tied = unique_state(model)
            put_state_(model, {name: self.best[tied.get(name, name)] for name in (*own, *tied)})
        if len(self.looks) < 2 or self.looks[0].step:  # nobody knows how good it was at first
            return ""
        first, *others, last = self.looks
        if self.keeps and all(self._gain(look, first) < 0 for look in (*others, last)):
            return f"never scored better on what is held out than at first ({first.score:.4g}): these weights are kept"
        if not self.keeps and self._is_below(last, first):
            return f"ended at {last.score:.4g}, below the {first.score:.4g} it began with, on the same training samples"
        return ""

    def _gain(self, look: Look, before: Look) -> float:
        return self.sign * (look.score - before.score)

    def _is_below(self, last: Look, first: Look) -> bool:
        """Return True if the last look is below the first by two standard errors of the differences between batches."""
        differences = [after - before for before, after in zip(first.scores, last.scores, strict=True)]
        error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
        return self._gain(last, first) < -_SURE * error


def looks_of(task: Task, recipe: Recipe) -> int:
    """Return how many samples a training of one stage sees beside its own, to choose its best weights."""
    trained_on, judging = parts_of(task, recipe)
    if judging is None:
        return 0
    pace = pace_of(trained_on, recipe, 1)
    judge = judge_of(trained_on, judging, recipe, pace.total, pace.per_epoch)
    return judge.samples * sum(judge.is_due(step, pace.total) for step in range(pace.total + 1))


def judge_of(task: Task, judging: Task | None, recipe: Recipe, total: int, per_epoch: int) -> Judge:
    """Return the judge of a training: by the held-out score, or else by some samples of the training split."""
    sign = 1 if task.higher_is_better else -1
    if judging is not None:
        every = max(1, min(per_epoch, total // _LOOKS))
        return Judge(
            lambda model: (float(judging.score(model)),), sign, every, keeps=True, samples=judging.size("test")
        )
    samples = task.size("train")
    count = min(_BATCHES, samples)
    size = max(1, min(_MOST, total * recipe.batch_size // _SHARE // count, samples // count))
    at_once = count * size <= recipe.batch_size // recipe.accumulate  # as training has room for

    def measure(model: nn.Module) -> list[float]:
        scores = None
        if at_once:
            scores = scores_apart_(model, task, draw(model, task, 1, count * size, _DRAW)[0], count)
        if scores is None:
            scores = measure_(model, task, draw(model, task, count, size, _DRAW))[1]
        return scores or []

    return Judge(measure, sign, total)
