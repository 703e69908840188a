"""MLX: the `quantization` of a config.json, with one entry per module."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import final

from bitplan.core.errors import InputError
from bitplan.core.precision import LEFT_ALONE, Precision
from bitplan.exporters.base import ReadBack, Source
from bitplan.plugins.runtimes.recipes import (
    Expressible,
    Part,
    RecipeExporter,
    fit,
    parsing_recipe,
    read_json,
    write_json,
)

_NAME = "mlx"
_SIZES = (128, 64, 32)
_EXPERT = re.compile(r"(.*)\.experts\.\d+\.(\w+)")
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_TAKEN = ("group_size", "bits", "mode")


def _path(name: str) -> str:
    """Return the module in mlx-lm: that of the checkpoint, but experts are stacked in `switch_mlp`."""
    expert = _EXPERT.fullmatch(name)
    return f"{expert[1]}.switch_mlp.{_PROJECTIONS.get(expert[2], expert[2])}" if expert else name


TARGET = Expressible(
    _NAME,
    weight_bits=lambda part: () if part.row % _SIZES[-1] else (2, 3, 4, 5, 6, 8),
    kinds=("linear", "embedding", "(in, out) matrix"),
    one=_path,
)


@final
@dataclass(frozen=True)
class Mlx(RecipeExporter):
    """Weights only; a row that `group_size` does not divide is cut into smaller groups, down to 32."""

    group_size: int = 64
    widen: bool = False

    def write(self, source: Source, path: Path) -> None:
        """Write `{"quantization": …}`."""
        if self.group_size not in _SIZES:
            raise InputError(f"group_size must be 32, 64 or 128 in MLX, not {self.group_size}")
        entries: dict[str, dict[str, int] | bool] = {}
        for part in fit(source, TARGET, widen=self.widen):
            if part.name in _TAKEN:
                raise InputError(f"a module named {part.name!r} cannot have an entry in MLX's quantization")
            entries[_path(part.name)] = self._entry(part)
        quantized = [entry for entry in entries.values() if isinstance(entry, dict)]
        bits = Counter(entry["bits"] for entry in quantized).most_common(1)[0][0]
        smallest = min(entry["group_size"] for entry in quantized)  # mlx-lm skips rows that this does not divide
        quantization = {"group_size": smallest, "bits": bits, **entries}
        write_json(path, {"quantization": quantization})

    def _entry(self, part: Part) -> dict[str, int] | bool:
        if part.precision.left_alone:
            return False
        size = next(size for size in _SIZES if size <= self.group_size and part.row % size == 0)
        return {"group_size": size, "bits": part.precision.weight_bits}

    def read(self, path: Path) -> ReadBack:
        """Return the precisions of the entries, by MLX's names; false is 16 bits."""
        with parsing_recipe(path, _NAME):
            entries = read_json(path)["quantization"]
            found = {
                name: Precision.weights_only(entry["bits"]) if entry else LEFT_ALONE
                for name, entry in entries.items()
                if name not in _TAKEN
            }
        return ReadBack(found)
