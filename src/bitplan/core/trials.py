"""The nouns of experiments: how to train, one trial, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from bitplan.core.defaults import COST
from bitplan.core.precision import Precision
from bitplan.core.record import Record
from bitplan.core.records import Name

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
LogLines = dict[str, int | float | None]
"""Some steps of a training together: step, epoch, loss, score, rate."""

# What a recipe without a rate gets.
_RATES = {"sgd": 0.01, "adamw": 1e-4, "lamb": 1e-3}
_HARMLESS = {"warmup": 0.1, "move_limit": 0.001}


TAUGHT = ("distill", "distill_hidden", "distill_attention")
"""What of a recipe needs a teacher."""
FOR_FLOATS = dict.fromkeys((*TAUGHT, "sharpness"), 0.0)
"""What of a recipe has no meaning for a float network."""


class Recipe(Record):
    """How a network is trained: for a number of epochs, or of steps.

    A step sees `batch_size` samples, in `accumulate` pieces that fit into memory; the result is the same up to
    rounding. `step_lr` multiplies the rate of LSQ's steps, `warmup` is a share of all steps, `decay_vectors`
    False spares biases and norms from weight decay, `distill` is the teacher's share of the loss. `held_out` is a share
    of the training samples that is not trained on: the weights that score best on it are kept.

    `move_limit` is the most that a weight tensor, or a step, may move in one step of the optimizer, as a share of its
    own size; it follows the schedule, and 0 is none. `distill_hidden` and `distill_attention` are what the mean squared
    differences from the teacher's hidden states and attention scores count, which TernaryBERT and KDLSQ-BERT add to the
    loss with 1 (`tune/distillation.py` says what is compared). `sharpness` is the radius of SAQ's step
    (`tune/loop.py`),
    0 for plain training. `then` is a second stage with a recipe of its own, and perhaps a third: a new schedule and a
    new optimizer, from the weights that the stage before it left. A recipe without `lr` gets a rate, a warm-up and a
    limit that do a trained network no harm; with one, it does just what it says.
    """

    epochs: Positive | None = None
    steps: Count | None = None
    batch_size: Count = 128
    accumulate: Count = 1
    optimizer: Literal["sgd", "adamw", "lamb"] = "sgd"
    lr: Positive = _RATES["sgd"]  # where none is told, `_harmless` says which
    step_lr: Positive = 1.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False
    weight_decay: NotNegative = 1e-4
    decay_vectors: bool = True
    grad_clip: Positive | None = None
    schedule: Literal["cosine", "poly", "linear", "constant"] = "cosine"
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    distill: Annotated[float, Field(ge=0, le=1)] = 0.0
    temperature: Positive = 1.0
    distill_hidden: NotNegative = 0.0
    distill_attention: NotNegative = 0.0
    precision: Literal["no", "bf16"] = "no"
    channels_last: bool = True
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.0
    move_limit: NotNegative = 0.0
    sharpness: NotNegative = 0.0
    then: Recipe | None = None

    @model_validator(mode="before")
    @classmethod
    def _harmless(cls, told: Any) -> Any:
        """Where no rate is told, one that does no harm, with what belongs to it."""
        if not isinstance(told, dict) or "lr" in told:
            return told
        rate = _RATES.get(str(told.get("optimizer")), _RATES["sgd"])
        return {"lr": rate, **_HARMLESS} | told

    @property
    def distills(self) -> bool:
        """Whether it needs a teacher, in some stage."""
        own = bool(self.distill or self.distill_hidden or self.distill_attention)
        return own or (self.then is not None and self.then.distills)

    @property
    def stages(self) -> tuple[Recipe, ...]:
        """Its stages in turn, each a recipe of one stage; itself where it has no other."""
        if self.then is None:
            return (self,)
        return (self.model_copy(update={"then": None}), *self.then.stages)

    def for_floats(self) -> Self:
        """The same for a float network, which has no teacher and no quantized weights."""
        then = None if self.then is None else self.then.for_floats()
        return self.model_copy(update={**FOR_FLOATS, "then": then})

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give the length of training once, as epochs or as steps")
        return self

    @model_validator(mode="after")
    def _possible_together(self) -> Self:
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size {self.batch_size} cannot be cut into {self.accumulate} equal pieces (accumulate)"
            )
        if self.nesterov and (self.optimizer != "sgd" or not self.momentum):
            raise ValueError("nesterov needs the optimizer sgd with a momentum above 0")
        return self


LENGTHS = ("epochs", "steps")
"""How the length of a training is told."""


def merge_recipes(changes: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a recipe with changes on top. A new length replaces the base's length and further stages.

    The fields of a second stage, `then`, come on top of the first; it always has its own length.
    """
    replaced = (*LENGTHS, "then") if any(key in changes for key in LENGTHS) else ()
    told = {key: value for key, value in base.items() if key not in replaced} | dict(changes)
    then = told.get("then")
    if isinstance(then, Mapping):
        first = {key: value for key, value in told.items() if key not in (*LENGTHS, "then")}
        told["then"] = merge_recipes(then, first)
    return told


class Run(Record):
    """One training: everything that its weights depend on. A folder with its checkpoints belongs to it alone.

    `network`, `weights` and `teacher` are hashes: of names, shapes and plan, of the first weights, of the teacher.
    """

    again: ClassVar[str] = "delete the folder that it lies in to begin anew"

    recipe: Recipe
    seed: int
    task: str
    network: str
    weights: str
    teacher: str | None = None
    processes: Count = 1


Role = Literal["float", "start", "reference", "choice", "quantizer"]
"""What a trial is for: the float network, the one that others start from, one alike in all layers, a method's, or a
quantizer's at a plan that was given."""


class Trial(Record):
    """One network to train: everything that its score depends on. Its id names its file.

    `method` is the name of a gain where the trial is a choice, and else what people call it; `precision` is that of all
    layers of a start or a reference. Without a recipe the network is scored as it is. `gain_recipe` and `gain_seed` are
    what the method estimated with, `gain_spend` what a search could spend, in epochs, `gain_hold_out` the share of
    training samples that was held out to judge by, `gain_start` how the network was quantized that it estimated from,
    where that is another than trials start from. Of a quantizer, `method` is its name with its options and `at` the
    plan that it is tried at: a precision, or the name and the id of a plan. `start_seed` is the seed of the start,
    where a study has several.
    """

    task: Name
    model: Name
    start: str
    role: Role = "choice"
    method: Name
    precision: Precision | None = None
    options: dict[str, JsonValue] = {}
    selector: Name = "exact"
    cost: Name = COST
    budgets: tuple[str, ...] = ()
    choices: tuple[Precision, ...]
    recipe: Recipe | None
    seed: int
    gain_recipe: Recipe | None = None
    gain_seed: int = 0
    gain_spend: Positive | None = None
    gain_hold_out: NotNegative = 0.0
    gain_start: dict[str, JsonValue] | None = None
    at: str = ""
    start_seed: int | None = None

    @model_validator(mode="after")
    def _as_its_role_says(self) -> Self:
        if (self.precision is not None) != (self.role in ("start", "reference")):
            raise ValueError(f"a {self.role} has {'one' if self.precision is None else 'no'} precision for all layers")
        if bool(self.at) != (self.role == "quantizer"):
            raise ValueError(f"a {self.role} is {'not ' if self.at else ''}tried at a plan that was given")
        if self.budgets and self.role != "choice":
            raise ValueError(f"a {self.role} has no budget")
        return self


class Result(Record):
    """The score a trial reached, and with which plan.

    Results of one `training` share it: their plans have the same precisions, so the network was trained once.
    `metric` is what the task calls its score. `losses` are those of
    each window of the test split, where a task scores by windows (`Task.each`): networks are compared on the same ones.
    """

    outside_id: ClassVar[frozenset[str]] = Record.outside_id | {"metric", "losses"}

    trial: Trial
    plan: str
    training: str = ""
    score: float
    metric: str = ""
    losses: tuple[float, ...] = ()
    higher_is_better: bool
    log: tuple[LogLines, ...] = ()
    seconds: NotNegative = 0.0
    device: str = ""
    versions: dict[str, str] = {}
