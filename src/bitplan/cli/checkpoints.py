"""Weights on disk that users type: what bitplan wrote, and files of others, which come without code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bitplan.cli.things import Typed, trace_model
from bitplan.core.errors import InputError
from bitplan.core.records import ABOUT
from bitplan.core.trust import check_code, names_code
from bitplan.weights.pretrained_folders import CONFIG

_COPIES = 3  # of the network: the float one, one to be lowered, and its lowered weights

if TYPE_CHECKING:
    from bitplan.core.records import Checkpoint, Graph, Plan
    from bitplan.core.rules import Rules


@dataclass(frozen=True)
class WeightsFile(Typed):
    """A file or folder of weights without code: layers follow from names and shapes."""

    is_a: ClassVar[str] = "a file of weights"

    def graph(self, rules: Rules, link: Sequence[str] = ()) -> Graph:
        """By the names of its tensors."""
        from bitplan.graph.names import LinkRule, Names, trace_checkpoint

        self.refuse_inputs()
        asked = tuple(LinkRule(pattern, pattern) for pattern in link if pattern != "none")
        return trace_checkpoint(self.weights, rules, names=Names(links=asked) if link else Names())

    @property
    def model(self) -> Any:
        """It says nothing of its network."""
        raise InputError(
            f"{self.written} is not a checkpoint that bitplan wrote: name the model and give this as --weights"
        )

    @cached_property
    def weights(self) -> Any:
        """The opened file."""
        from bitplan.weights.opened import open_checkpoint

        return open_checkpoint(self.written)


@dataclass(frozen=True)
class PretrainedModel(WeightsFile):
    """A network of transformers': a folder with its configuration, or a GGUF file.

    Without data to run it on, a folder is planned by the names of its tensors, which are mapped and not loaded, as any
    file of weights; GGUF has names of its own, so its network is loaded and traced. Where a method can run a folder
    block by block, and memory does not hold the network, it is traced without its weights.
    """

    is_a: ClassVar[str] = "a network of transformers'"

    def graph(self, rules: Rules, link: Sequence[str] = ()) -> Graph:
        """By names, or of the network."""
        if self._is_file:
            return super().graph(rules, link)
        return trace_model(self._traced, self.example, self.written, rules, link, values=self.beside.values)

    @cached_property
    def model(self) -> Any:
        """Built as its configuration says, with its weights."""
        from bitplan.models.pretrained import load_pretrained

        if self.beside.weights is not None:
            raise InputError(f"{self.written} has its own weights: leave --weights out")
        return load_pretrained(self.written)

    @cached_property
    def weights(self) -> Any:
        """The opened file, or the network."""
        return super().weights if self._is_file or self._is_large else self.model

    @property
    def example(self) -> Any:
        """A row of tokens, unless a shape was typed."""
        from bitplan.models.pretrained import example_for

        return example_for(self._traced) if self.beside.shape is None else super().example

    @property
    def spec(self) -> str | None:
        """What its checkpoints say builds it: the configuration beside them."""
        return CONFIG

    @property
    def pretrained(self) -> Path:
        """The folder or file."""
        return Path(self.written)

    @property
    def _is_file(self) -> bool:
        """Whether it is looked at as a file of weights."""
        return self.pretrained.is_dir() and self.beside.runs == "no"

    @cached_property
    def _is_large(self) -> bool:
        """Whether it is run block by block, since memory does not hold what is loaded to lower parts of it."""
        from bitplan.core.parsing import available_memory
        from bitplan.weights.opened import open_checkpoint

        if not self.pretrained.is_dir() or self.beside.runs != "small":
            return False
        tensors = open_checkpoint(self.written).tensors.values()
        need = _COPIES * sum(4 * tensor.size for tensor in tensors)  # as floats of 32 bits
        return need > (available_memory() or need)

    @cached_property
    def _traced(self) -> Any:
        """The network, without its weights where they are not loaded."""
        from bitplan.models.streamed import skeleton_of

        return skeleton_of(self.weights) if self._is_large else self.model


@dataclass(frozen=True)
class OwnCheckpoint(Typed):
    """A folder that bitplan wrote. It names a model of the zoo, or `--model` names its code, or it has only weights."""

    is_a: ClassVar[str] = "a checkpoint"

    def graph(self, rules: Rules, link: Sequence[str] = ()) -> Graph:
        """Of its network where it is known, else by the names of its tensors."""
        if self._network is None:
            return self._file.graph(rules, link)
        return trace_model(self.model, self.example, self._network, rules, link, values=self.beside.values)

    @cached_property
    def model(self) -> Any:
        """Built by name, then filled from the folder."""
        from bitplan.quant.checkpoint import load_checkpoint

        if self.beside.weights is not None:
            raise InputError(f"{self.written} has its own weights: leave --weights out")
        return load_checkpoint(self.written, self._built[0])

    @property
    def weights(self) -> Any:
        """The network where it is known, else the opened file."""
        return self._file.weights if self._network is None else self.model

    @property
    def plan(self) -> Plan:
        """The one that it was quantized by."""
        if self._about.plan is None:
            raise InputError(f"{self.written} holds a float network, which has no plan")
        return self._about.plan

    @property
    def example(self) -> Any:
        """The one that its network's code gives, unless a shape was typed."""
        return super().example if self.beside.shape is not None or self._network is None else self._built[1]

    @property
    def spec(self) -> str | None:
        """What builds its network, unless that is code."""
        return None if self._network is None or names_code(self._network) else self._network

    @property
    def pretrained(self) -> Path | None:
        """The folder itself, where a configuration of transformers' lies in it."""
        return Path(self.written) if self._about.spec == CONFIG else None

    @property
    def quantized(self) -> Any:
        """The network, plan and all."""
        return self.model

    @property
    def _network(self) -> str | None:
        """What builds its network. A file may name the zoo's; code is imported where the user names or trusts it."""
        own = self._about.spec
        if self.beside.model is None and own is not None:
            check_code(own, Path(self.written) / ABOUT, trust=self.beside.trust, otherwise="name it by --model, or ")
        return self.beside.model or own

    @cached_property
    def _built(self) -> tuple[Any, Any]:
        from bitplan.models.pretrained import built_pretrained
        from bitplan.models.zoo import load_model

        if self._network == CONFIG:
            return built_pretrained(self.written)
        if self._network is None:
            raise InputError(
                f"{self.written} names no model of the zoo: say which it is with --model package.module:factory"
            )
        return load_model(self._network)

    @cached_property
    def _file(self) -> WeightsFile:
        return WeightsFile(self.written, self.beside)

    @cached_property
    def _about(self) -> Checkpoint:
        from bitplan.core.records import Checkpoint
        from bitplan.store.files import load

        return load(Path(self.written) / ABOUT, Checkpoint)
