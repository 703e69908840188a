"""The nouns of experiments: how to train, one trial, and what came of it."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from bitplan.core.precision import Precision
from bitplan.core.record import Record
from bitplan.core.records import Name

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Recipe(Record):
    """How a network is trained: for a number of epochs, or of steps."""

    epochs: Positive | None = None
    steps: Annotated[int, Field(gt=0)] | None = None
    batch_size: Annotated[int, Field(gt=0)] = 128
    optimizer: Literal["sgd", "adamw", "lamb"] = "sgd"
    lr: Positive = 0.01
    momentum: NotNegative = 0.9
    weight_decay: NotNegative = 1e-4
    schedule: Literal["cosine", "poly", "linear", "constant"] = "cosine"
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    distill: Annotated[float, Field(ge=0, le=1)] = 0.0
    temperature: Positive = 1.0

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give the length of training once, as epochs or as steps")
        return self


class Trial(Record):
    """One network to train: everything that its score depends on. Its id names its file."""

    task: Name
    model: Name
    start: str
    method: Name
    options: dict[str, JsonValue] = {}
    selector: Name = "exact"
    cost: Name = "bmac"
    budgets: tuple[str, ...] = ()
    choices: tuple[Precision, ...]
    recipe: Recipe
    seed: int


class Result(Record):
    """The score a trial reached, and with which plan."""

    trial: Trial
    plan: str
    score: Annotated[float, Field(allow_inf_nan=False)]
    higher_is_better: bool
    log: tuple[dict[str, JsonValue], ...] = ()
    seconds: NotNegative = 0.0
    device: str = ""
    versions: dict[str, str] = {}
