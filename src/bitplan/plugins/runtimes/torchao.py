"""torchao: a `FqnToConfig` as torchao itself writes it to JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from bitplan.adapters.foreign import require
from bitplan.core.errors import InputError
from bitplan.core.precision import LEFT_ALONE, LEFT_ALONE_BITS, Precision
from bitplan.exporters.base import ReadBack, Source
from bitplan.plugins.runtimes.recipes import (
    Expressible,
    Part,
    RecipeExporter,
    can_group,
    escape_name,
    fit,
    parsing_recipe,
    read_json,
    unescape_name,
    write_json,
)

_NAME = "torchao"
TARGET = Expressible(_NAME, weight_bits=lambda part: range(2, 9), act_bits=(8,))


@final
@dataclass(frozen=True)
class Torchao(RecipeExporter):
    """`IntxWeightOnlyConfig`, or with 8-bit activations `Int8DynamicActivationIntxWeightConfig`, by module name."""

    group_size: int = 32
    widen: bool = False

    def write(self, source: Source, path: Path) -> None:
        """Write JSON that `torchao.core.config.config_from_dict` reads."""
        parts = fit(source, TARGET, widen=self.widen)
        configs = {escape_name(part.name): self._config(part) for part in parts}
        recipe = {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": configs}}
        write_json(path, recipe)

    def _config(self, part: Part) -> dict[str, Any] | None:
        if part.precision.left_alone:
            return None
        dtype = {"_type": "torch.dtype", "_data": f"int{part.precision.weight_bits}"}
        granularity = (
            {"_type": "PerGroup", "_version": 1, "_data": {"group_size": self.group_size}}
            if can_group(part, self.group_size)
            else {"_type": "PerAxis", "_version": 1, "_data": {"axis": 0}}
        )
        if not part.precision.quantizes_inputs:
            data = {"weight_dtype": dtype, "granularity": granularity}
            return {"_type": "IntxWeightOnlyConfig", "_version": 2, "_data": data}
        data = {"weight_dtype": dtype, "weight_granularity": granularity}
        return {"_type": "Int8DynamicActivationIntxWeightConfig", "_version": 2, "_data": data}

    def read(self, path: Path) -> ReadBack:
        """Return the precisions of the configurations, and 16 bits for layers without one."""
        with parsing_recipe(path, _NAME):
            written = read_json(path)["_data"]["fqn_to_config"]
            found = {unescape_name(name): _precision(config) for name, config in written.items()}
        return ReadBack(found)


def torchao_config(path: str | Path) -> Any:
    """Return the `FqnToConfig` of a recipe, for `torchao.quantization.quantize_(model, config, filter_fn=None)`."""
    Torchao().read(Path(path))  # only what bitplan writes is handed on
    return make_config(read_json(Path(path)))


def _precision(config: dict[str, Any] | None) -> Precision:
    if config is None:
        return LEFT_ALONE
    acts = {"IntxWeightOnlyConfig": LEFT_ALONE_BITS, "Int8DynamicActivationIntxWeightConfig": 8}
    bits = int(config["_data"]["weight_dtype"]["_data"].removeprefix("int"))
    return Precision(weight_bits=bits, act_bits=acts[config["_type"]])


def make_config(written: dict[str, Any]) -> Any:
    """Build a configuration from torchao's own form of it in JSON."""
    require("torchao", "export", "a configuration of torchao")
    from torchao.core.config import config_from_dict

    try:
        return config_from_dict(written)
    except (ValueError, TypeError) as error:
        raise InputError(f"this torchao does not know the configuration: {error}") from None
