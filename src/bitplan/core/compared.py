"""The parts of a study: methods, quantizers, where they start, and what choosing may see."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, JsonValue, model_validator

from bitplan.core.record import Value
from bitplan.core.records import Name
from bitplan.core.trials import Recipe


class Method(Value):
    """A gain with its options, the selector it is used with (the method's own unless said), and how tables call it.

    `start` are options of quantize for the network that its gains are estimated from, where that is not the study's:
    made from the same float network by the same recipe. Trials start from the study's all the same.
    """

    unless_usual: ClassVar[frozenset[str]] = frozenset({"start"})

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

    unless_usual: ClassVar[frozenset[str]] = frozenset({"seeds"})

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
