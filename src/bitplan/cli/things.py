"""Things that users type, each with what it has; asked for what it does not have, a thing says what it is.

Nothing is loaded before it is asked for, and nothing twice. `cli/door.py` tells which is which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from bitplan.core.errors import FileError, InputError
from bitplan.core.trust import names_code

if TYPE_CHECKING:
    from bitplan.core.records import Graph, Plan
    from bitplan.core.rules import Rules


Runs = Literal["no", "small", "yes"]


@dataclass(frozen=True)
class Beside:
    """What is typed beside a thing: an input's shape, weights, what they may lack, the network of a folder, a seed.

    `values` says that the network decides by the values of its input, and is traced with some; `trust` that code may be
    imported which only a file names; `runs` whether there is data to run the network on, and it must be loaded for that
    in any case, or only if it is small enough.
    """

    shape: str | None = None
    weights: str | None = None
    fresh: Sequence[str] = ()
    model: str | None = None
    seed: int = 0
    values: bool = False
    trust: bool = False
    runs: Runs = "no"

    def __post_init__(self) -> None:
        if self.fresh and self.weights is None:
            raise InputError("--fresh says which tensors --weights may lack: give --weights, or leave --fresh out")


@dataclass(frozen=True)
class Typed:
    """A thing as typed. What a kind of thing has, its class says; the rest is refused here."""

    is_a: ClassVar[str] = "nothing that bitplan knows"

    written: str
    beside: Beside = Beside()

    def graph(self, rules: Rules, link: Sequence[str] = ()) -> Graph:
        """Its layers, with those fixed that the rules fix; `link` says how names tell links where there is no model."""
        raise self._without("graph")

    def refuse_inputs(self) -> None:
        """Refuse what is typed about the input of a network, where none is run."""
        idle = [flag for flag, said in (("--input", self.beside.shape), ("--values", self.beside.values)) if said]
        if idle:
            raise InputError(
                f"{' and '.join(idle)} would have no effect: {self.written} is {self.is_a}, which is not run"
            )

    def check_plannable(self) -> None:
        """Refuse, without loading anything, what has no graph to plan on."""

    @property
    def model(self) -> Any:
        """The network with its weights."""
        raise self._without("network")

    @property
    def weights(self) -> Any:
        """What methods look at: the network, or an opened file of weights."""
        return self.model

    @property
    def has_random_weights(self) -> bool:
        """Whether its weights say nothing yet."""
        return False

    @property
    def plan(self) -> Plan:
        """A precision for every layer."""
        raise self._without("plan")

    @property
    def recorded_graph(self) -> Graph | None:
        """The graph that it was made with, where that is kept beside it."""
        return None

    @property
    def task(self) -> Any:
        """The task that it comes with, if it does."""
        return None

    @property
    def example(self) -> Any:
        """An example of its input, as `--input` says or its own; None where it has none."""
        from bitplan.cli.inputs import read_shape

        return None if self.beside.shape is None else read_shape(self.beside.shape)

    @property
    def spec(self) -> str | None:
        """Its name in the zoo, if it has one."""
        return None

    @property
    def pretrained(self) -> Path | None:
        """Where its configuration and its tokenizer are, if it is a network of transformers'."""
        return None

    @property
    def quantized(self) -> Any:
        """The network that files for others are made of."""
        raise FileError(
            f"{self.written} is neither a plan (.json), nor a checkpoint folder (with a checkpoint.json), nor that of "
            "a run (with a study.json)"
        )

    def exported(self, *, plan_only: bool) -> Any:
        """What a file is made of: the quantized network, or where that is enough and at hand, its plan."""
        return self.quantized

    def _without(self, what: str) -> InputError:
        return InputError(f"{self.written} is {self.is_a}, which has no {what}")


@dataclass(frozen=True)
class BuiltModel(Typed):
    """A model that code builds: the zoo's, or a factory of the user's own."""

    is_a: ClassVar[str] = "a model"

    def graph(self, rules: Rules, link: Sequence[str] = ()) -> Graph:
        """Of the network itself where it is loaded, else of one without weights, in no time."""
        model, _ = self._filled if self.beside.values else self._at_hand
        return trace_model(model, self.example, self.written, rules, link, values=self.beside.values)

    @property
    def model(self) -> Any:
        """Built and filled."""
        return self._filled[0]

    @property
    def has_random_weights(self) -> bool:
        """A factory may load what it likes; of a name that leads nowhere nothing is said but that."""
        from bitplan.models.zoo import find_factory

        return self.spec is not None and self.beside.weights is None and bool(find_factory(self.spec))

    @property
    def example(self) -> Any:
        """The one that its code gives, unless a shape was typed."""
        return self._at_hand[1] if self.beside.shape is None else super().example

    @property
    def spec(self) -> str | None:
        """What was typed, unless it names code."""
        return None if names_code(self.written) else self.written

    @property
    def _at_hand(self) -> tuple[Any, Any]:
        """Model and example: with weights where they were asked for, or else without."""
        return self._filled if "_filled" in vars(self) else self._bare

    @cached_property
    def _bare(self) -> tuple[Any, Any]:
        from bitplan.models.zoo import load_model

        return load_model(self.written, weightless=True)

    @cached_property
    def _filled(self) -> tuple[Any, Any]:
        """Model and example; random weights repeat for a seed."""
        import torch

        from bitplan.models.zoo import load_model

        with torch.random.fork_rng([]):
            torch.manual_seed(self.beside.seed)
            model, example = load_model(self.written)
        if self.beside.weights is not None:
            from bitplan.quant.checkpoint import load_weights_

            load_weights_(model, self.beside.weights, fresh=self.beside.fresh)
        return model, example


@dataclass(frozen=True)
class RecordFile(Typed):
    """A file of bitplan's own: a graph or a plan, which reading it tells."""

    is_a: ClassVar[str] = "a record"

    def graph(self, rules: Rules, link: Sequence[str] = ()) -> Graph:
        """As it was traced, under the rules of then, with further patterns where some were typed."""
        from bitplan.cli.steps import refuse_rules
        from bitplan.core.records import Graph
        from bitplan.graph.rules import amend
        from bitplan.store.files import load

        refuse_links(link)
        self.refuse_inputs()
        graph = load(self.written, Graph)
        why = f"{self.written} was traced under its own; trace again, or name layers by --fix and --free"
        refuse_rules(rules, why, but=("fix", "free"))
        return amend(graph, rules)

    @property
    def model(self) -> Any:
        """It has none."""
        raise InputError(f"{self.written} is no network: give the model, a checkpoint folder, or the folder of a run")

    @cached_property
    def plan(self) -> Plan:
        """As it was selected."""
        from bitplan.core.records import Plan
        from bitplan.store.files import load

        return load(self.written, Plan)

    @property
    def quantized(self) -> Any:
        """It has none either."""
        return self.model

    def exported(self, *, plan_only: bool) -> Any:
        """A plan is enough for recipes; a format that holds the network itself refuses it."""
        return self.plan


def trace_model(
    model: Any, example: Any, name: str, rules: Rules, link: Sequence[str], *, values: bool = False
) -> Graph:
    """The graph of a model that can be run on an example; `values` an example lacks are drawn."""
    from bitplan.cli.inputs import with_data
    from bitplan.graph.trace import trace

    refuse_links(link)
    if example is None:
        raise InputError(f"{name} gives no example input: add --input, such as --input 1x3x224x224")
    return trace(model, with_data(example) if values else example, rules=rules, name=name, values=values)


def refuse_links(link: Sequence[str]) -> None:
    """Say that names tell links only where nothing else does."""
    if link:
        raise InputError(
            "--link is for checkpoints, which have no forward pass; links of a model follow from its tensors"
        )
