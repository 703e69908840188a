"""The nouns of fair comparison: a study, what failed in it, and whether gains add up."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from itertools import combinations
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import Field, JsonValue, ValidationInfo, field_validator, model_validator

from bitplan.core.defaults import COST
from bitplan.core.errors import Fault
from bitplan.core.precision import Precision, why_not_choices
from bitplan.core.record import Record, Value
from bitplan.core.records import Name
from bitplan.core.rules import Rules
from bitplan.core.trials import Count, LogLines, NotNegative, Positive, Recipe, Trial


class Method(Value):
    """A gain with its options, the selector it is used with (the method's own unless said), and how tables call it.

    `start` are options of quantize for the network that its gains are estimated from, where that is not the study's:
    made from the same float network by the same recipe. Trials start from the study's all the same.
    """

    name: Name
    options: dict[str, JsonValue] = {}
    selector: Name | None = None
    label: str = ""
    recipe: Recipe | None = None
    start: dict[str, JsonValue] | None = None

    @property
    def title(self) -> str:
        """The label, or else the name."""
        return self.label or self.name


class QuantizerAt(Value):
    """A quantizer to be compared with others at the same plans: a name with its options, "pact:decay=0.0002".

    `at` are precisions of all layers that are not fixed, or paths of plans.
    """

    name: Name
    at: Annotated[tuple[Name, ...], Field(min_length=1)]
    label: str = ""

    @property
    def title(self) -> str:
        """The label, or else the name."""
        return self.label or self.name


class Start(Value):
    """Where every trial starts: the float network, and the one at the highest choice.

    `weights` is a local file or folder of float weights (`fresh`: wildcards of what it may lack, `weights_from`: where
    the public ones are); without it, or on top of it, `float_recipe` trains. `recipe` then trains the network at the
    highest choice, with the float one as teacher where it distills; `checkpoint` names one that is ready instead, and
    `checkpoint_from` what it is made from, for whoever has none: nothing depends on it, so it is in no file or id.
    `seeds` makes several starts, each with a seed of its own from the float network on, where that is trained; then
    `seed` is the first of them.
    """

    weights: str | None = None
    weights_from: str = ""
    fresh: tuple[str, ...] = ()
    float_recipe: Recipe | None = None
    recipe: Recipe | None = None
    checkpoint: str | None = None
    checkpoint_from: Annotated[str, Field(exclude=True)] = ""
    seed: int = 0
    seeds: tuple[int, ...] = ()
    options: dict[str, JsonValue] = {}

    @model_validator(mode="before")
    @classmethod
    def _first_seed(cls, told: Any) -> Any:
        """One start is as if its seed were said alone; of several, the first is `seed`."""
        seeds = told.get("seeds") if isinstance(told, dict) else None
        if not isinstance(seeds, list | tuple) or not seeds:
            return told
        return {**told, "seed": seeds[0], "seeds": seeds if len(seeds) > 1 else ()}

    @model_validator(mode="after")
    def _apart(self) -> Start:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"the seeds of starts must differ, got {', '.join(map(str, self.seeds))}")
        if self.seeds and self.checkpoint is not None:
            raise ValueError("a checkpoint is one start: leave seeds out, or the checkpoint")
        return self


class Choosing(Value):
    """What methods may see of the data while they choose.

    `hold_out` is a share of the training samples, the same for all methods: what they train they train on the others,
    what they measure they measure on these, and nothing on the test split. 0 is no such split: what is measured is
    measured on the samples that are trained on, and the oracle on the test split.
    """

    hold_out: Annotated[float, Field(ge=0, lt=1)] = 0.0


Found = TypeVar("Found")
_KNOWN = "_known"  # pydantic shows no name like this as a field
FLOAT = "float"
"""What tables call the float network."""


class Study(Record):
    """What is compared, on what, and how it is trained: one TOML file, one run folder.

    Every method is tried at every budget over every seed, with the same start and the same recipe; `references` adds
    the networks with all layers at the lowest and at the highest choice, trained alike, or the lowest by
    `lowest_recipe`: it has the most to recover, and the paper trains PSPNet's twice as long. `keep_networks` keeps
    every network in the run's folder when it is trained; no score depends on it, so it has no part in any id.
    `in_integers` scores quantized networks as integer kernels compute them (`plugins/integer`), which is faster.
    `spend` is what each search may spend at each budget unless its options say so, in epochs of training: three passes
    of every sample.
    A search begins with another seed for each of `seeds`, counted from `gain_seed`, so that spreads show its luck too.
    `choosing` is what methods may see. `quantizers` are compared at plans that are given, each trained from the float
    network over the seeds; a study has methods and budgets, or quantizers, or both.
    """

    outside_id: ClassVar[frozenset[str]] = Record.outside_id | {"keep_networks"}

    name: Name
    task: Name
    task_options: dict[str, JsonValue] = {}
    model: Name
    choices: tuple[Precision, ...]
    rules: Annotated[Rules, Field(validate_default=True)] = Rules()
    cost: Name = COST
    budgets: tuple[str, ...] = ()
    methods: tuple[Method, ...] = ()
    quantizers: tuple[QuantizerAt, ...] = ()
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    start: Start
    recipe: Recipe
    lowest_recipe: Recipe | None = None
    references: bool = True
    keep_networks: bool = False
    in_integers: bool = False
    gain_seed: int = 0
    spend: Positive | None = None
    choosing: Choosing = Choosing()
    engine: Name = "local"
    engine_options: dict[str, JsonValue] = {}

    @field_validator("rules")
    @classmethod
    def _beside_choices(cls, rules: Rules, info: ValidationInfo) -> Rules:
        return rules.settled(info.data.get("choices", ()))

    @model_validator(mode="after")
    def _compares(self) -> Self:
        if not self.quantizers and not (self.methods and self.budgets):
            raise ValueError("a study compares methods at budgets, or quantizers: give methods and budgets, or these")
        if bool(self.methods) != bool(self.budgets):
            raise ValueError("methods choose within budgets: give both, or none of them")
        return self

    @model_validator(mode="after")
    def _sound(self) -> Self:
        problem = why_not_choices(self.choices)
        if problem:
            raise ValueError(problem)
        compared: tuple[Method | QuantizerAt, ...] = (*self.methods, *self.quantizers)
        given = [("label", one.title) for one in compared]
        given += [("budget", budget) for budget in self.budgets] + [("seed", str(seed)) for seed in self.seeds]
        for what, value in given:
            if given.count((what, value)) > 1:
                raise ValueError(f"the {what} {value!r} is given twice")
        taken = {FLOAT, f"{self.choices[-1]} start", *map(str, self.choices)}
        for one in compared:
            if one.title in taken:
                raise ValueError(f"the label {one.title!r} is what tables call a reference: choose another")
        for one, other in combinations(compared, 2):
            if _looks(one.title) == _looks(other.title):
                raise ValueError(f"the labels {one.title!r} and {other.title!r} look alike: choose another")
            if _way(one) == _way(other):
                raise ValueError(f"{one.title!r} and {other.title!r} differ only by their label: leave one out")
        return self

    def reference_recipe(self, precision: Precision) -> Recipe:
        """Return the recipe for the network with all layers at one choice."""
        own = self.lowest_recipe if precision == self.choices[0] else None
        return own or self.recipe

    def title_of(self, trial: Trial) -> str:
        """Return the name of a trial's method in tables: its label, or for references `float` or the precision."""
        if trial.role == "quantizer":
            return next((one.title for one in self.quantizers if one.name == trial.method), trial.method)
        if trial.role != "choice":
            return trial.method
        return self.once("title", trial, lambda: self._title(trial))

    def _title(self, trial: Trial) -> str:
        told = (trial.method, trial.options, trial.gain_recipe, trial.gain_start)
        same = [one for one in self.methods if (one.name, one.options, one.recipe, one.start) == told]
        if len(same) > 1:  # 1, 1.0 and true are equal, and are not the same option
            same = [method for method in same if _text(method.options) == _text(trial.options)]
        said = [method for method in same if method.selector == trial.selector]
        unsaid = [method for method in same if method.selector is None]
        return next((method.title for method in said + unsaid), trial.method)

    def once(self, what: str, trial: Trial, work: Callable[[], Found]) -> Found:
        """Cache a value that depends on how a trial chose and trained, for all of its budgets and seeds."""
        known = self.__dict__.setdefault(_KNOWN, {})
        how = (str(trial.options), trial.selector, trial.gain_recipe, str(trial.gain_start), trial.recipe)
        key = (what, trial.method, *how)
        if key not in known:
            known[key] = work()
        found: Found = known[key]
        return found

    def words(self, trial: Trial) -> str:
        """Return the name of a trial for people."""
        start = "" if trial.start_seed is None else f" start {trial.start_seed}"
        return f"{self.words_over_seeds(trial)}{start} seed {trial.seed}"

    def words_over_seeds(self, trial: Trial) -> str:
        """Return the name of a trial without its seeds."""
        at = [trial.at] if trial.at else []
        return " ".join([self.title_of(trial), *trial.budgets, *at])


def _looks(title: str) -> str:
    """Return a title without differences that a hasty reader, or a disk that ignores case, would miss."""
    return " ".join(unicodedata.normalize("NFKC", title).casefold().split())


def _way(one: Method | QuantizerAt) -> str:
    """Return a text of everything about a method or quantizer but its label."""
    return f"{type(one).__name__} {_text(one.model_dump(mode='json', exclude={'label'}))}"


def _text(value: JsonValue) -> str:
    return json.dumps(value, sort_keys=True)


class Agenda(Record):
    """All trials of a study: first those that others start from, then references, then methods by budget.

    `trainings` says, once plans are there, which trials each training serves: those with the same precisions share it.
    """

    study: str
    trials: tuple[Trial, ...]
    trainings: dict[str, tuple[str, ...]] = {}


class Estimation(Record):
    """One estimate of gains: everything that they depend on. `start` is the id of the network's trial.

    `budgets`, `cost` and `spend` are said where a method chooses within a budget, `hold_out` where samples are held out
    to judge by.
    """

    start: str
    graph: str
    method: Name
    options: dict[str, JsonValue] = {}
    choices: tuple[Precision, ...]
    recipe: Recipe | None = None
    seed: int = 0
    budgets: tuple[str, ...] = ()
    cost: str = ""
    spend: Positive | None = None
    hold_out: NotNegative = 0.0


class Training(Record):
    """One network to train: trials whose plans have the same precisions share it.

    `quantizer` is said where the start is a float network, which is then quantized by it and calibrated. `hold_out` is
    a share of the training samples that is left out, and that the network is scored on instead of the test split.
    """

    task: Name
    start: str
    precisions: dict[str, Precision]
    recipe: Recipe
    seed: int
    quantizer: str = ""
    hold_out: NotNegative = 0.0


class Trained(Record):
    """What came of a training; `metric` is what the task calls its score, `losses` are as a result has them."""

    outside_id: ClassVar[frozenset[str]] = Record.outside_id | {"metric", "losses"}

    training: str
    score: float
    metric: str = ""
    losses: tuple[float, ...] = ()
    higher_is_better: bool
    log: tuple[LogLines, ...] = ()
    seconds: NotNegative = 0.0
    device: str = ""
    versions: dict[str, str] = {}


class FailedTrial(Record):
    """A trial that did not end with a score, and why."""

    trial: Trial
    fault: Fault
    error: str
    traceback: str = ""
    seconds: NotNegative = 0.0


class Pair(Value):
    """Two groups lowered together: the drop of the score that both alone predict, and the one that was measured."""

    first: Name
    second: Name
    predicted: float
    measured: float


class Pairs(Record):
    """The first additivity experiment: does the drop of two groups equal the sum of their drops?"""

    graph: str
    metric: str
    alone: dict[str, float]
    pairs: Annotated[tuple[Pair, ...], Field(min_length=1)]
    correlation: float
    seconds: NotNegative = 0.0


class Fit(Record):
    """The second: a linear regression of the score on which groups are lowered (1: at the highest choice).

    Every sample is the 0/1 vector in the order of `groups`, then what was measured and what the fit says.
    """

    graph: str
    metric: str
    groups: tuple[Name, ...]
    coefficients: tuple[float, ...]
    intercept: float
    vectors: tuple[tuple[int, ...], ...]
    measured: tuple[float, ...]
    predicted: tuple[float, ...]
    held_out: tuple[int, ...]
    correlation: float
    correlation_held_out: float | None = None
    residual: NotNegative
    epochs: NotNegative = 0.0
    networks: Count
    seconds: NotNegative = 0.0
