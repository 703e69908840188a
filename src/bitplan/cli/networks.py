"""Networks as users name them: by the zoo, by a factory of their own, or by a checkpoint folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitplan.core.checkpoints import Checkpoint
from bitplan.core.errors import InputError
from bitplan.core.store import load

if TYPE_CHECKING:
    from bitplan.core.records import Graph
    from bitplan.core.rules import Rules


@dataclass(frozen=True)
class Network:
    """A model with its weights; its example, and its name in the zoo, where it has them."""

    model: Any
    example: Any
    name: str
    spec: str | None

    def graph(self, shape: str | None, rules: Rules) -> Graph:
        """Trace it, with its own example unless a shape is given."""
        from bitplan.cli.inputs import example_of
        from bitplan.graph.trace import trace

        example = example_of(shape) if shape else self.example
        if example is None:
            raise InputError(f"{self.name} gives no example input: add --input, such as --input 1x3x224x224")
        return trace(self.model, example, rules=rules, name=self.name)


def load_network(
    written: str, weights: str | None, fresh: Sequence[str], model: str | None = None, seed: int = 0
) -> Network:
    """Build a network and fill it: random weights repeat for a seed; `model` names the one of a checkpoint folder."""
    if Path(written).is_dir():
        return _from_folder(Path(written), weights, model)
    if model is not None:
        raise InputError(f"--model names the network of a checkpoint folder, and {written} is none")
    import torch

    from bitplan.models.zoo import load_model

    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        built, example = load_model(written)
    if weights is not None:
        from bitplan.quant.loading import load_weights_

        load_weights_(built, weights, fresh=fresh)
    return Network(built, example, written, None if ":" in written else written)


def load_teacher(written: str | None, weights: str | None, model: str | None = None) -> Any:
    """The float network of that name with its weights, or of a checkpoint folder; None where none was named."""
    if written is None:
        return None
    if Path(written).is_dir():
        return _from_folder(Path(written), weights, model).model
    if weights is None and ":" not in written:
        raise InputError(f"{written} from the zoo has random weights, which teach nothing: add --teacher-weights")
    return load_network(written, weights, ()).model


def _from_folder(folder: Path, weights: str | None, model: str | None) -> Network:
    from bitplan.models.zoo import load_model
    from bitplan.quant.checkpoint import load_checkpoint

    if weights is not None:
        raise InputError(f"{folder} has its own weights: leave --weights out")
    if not (folder / "checkpoint.json").is_file():
        raise InputError(
            f"{folder} is not a checkpoint that bitplan wrote: name the model and give the folder as --weights"
        )
    spec = model or load(folder / "checkpoint.json", Checkpoint).spec
    if spec is None:
        raise InputError(f"{folder} names no model of the zoo: say which it is with --model package.module:factory")
    built, example = load_model(spec)
    return Network(load_checkpoint(folder, built), example, spec, None if ":" in spec else spec)
