"""compressed-tensors: the `quantization_config` that llm-compressor, transformers and vLLM read."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from bitplan.core.precision import LEFT_ALONE, LEFT_ALONE_BITS, Precision
from bitplan.exporters.base import ReadBack, Source
from bitplan.exporters.recipes import (
    Expressible,
    Part,
    RecipeExporter,
    fit,
    grouped,
    literal,
    read_json,
    reading,
    unliteral,
    write_json,
)

_NAME = "compressed-tensors"
_EIGHT = Precision.parse("w8a8")


def fused(name: str) -> str | None:
    """What vLLM runs as one: q/k/v, gate/up, and all experts of a block; their schemes must be equal."""
    experts = re.match(r"(.*\.experts)\.\d+\.", name)
    if experts:
        return experts[1]
    found = re.fullmatch(r"(.*\.)((?P<qkv>[qkv])|gate|up)_proj", name)
    if not found:
        return None
    if found["qkv"] and re.search(r"encoder_attn|cross_?attn", name):  # its keys and values read another tensor
        return None if found["qkv"] == "q" else f"{found[1]}kv_proj"
    return found[1] + ("qkv_proj" if found["qkv"] else "gate_up_proj")


TARGET = Expressible(_NAME, weight_bits=lambda part: range(2, 9), act_bits=(8,), one=fused)


@final
@dataclass(frozen=True)
class CompressedTensors(RecipeExporter):
    """`config_groups`, one per precision: integer weights in groups, activations per token as they come."""

    group_size: int = 128
    widen: bool = False

    def write(self, source: Source, path: Path) -> None:
        """Write `{"quantization_config": …}`."""
        parts = fit(source, TARGET, widen=self.widen)
        groups: dict[tuple[Precision, bool], list[str]] = defaultdict(list)
        for part in parts:
            if not part.precision.left_alone:
                groups[part.precision, self._in_groups(part)].append(literal(part.name))
        config = {
            "quant_method": _NAME,
            "config_groups": {
                f"group_{index}": self._scheme(precision, in_groups, names)
                for index, ((precision, in_groups), names) in enumerate(groups.items())
            },
            "ignore": [literal(part.name) for part in parts if part.precision.left_alone],
        }
        write_json(path, {"quantization_config": config})

    def _in_groups(self, part: Part) -> bool:
        """Rows that cannot be cut, and w8a8 (whose kernels want it so), have one step per output channel."""
        return part.precision != _EIGHT and grouped(part, self.group_size)

    def _scheme(self, precision: Precision, in_groups: bool, names: list[str]) -> dict[str, Any]:
        weights = {"num_bits": precision.weight_bits, "type": "int", "symmetric": True, "dynamic": False}
        weights |= {"strategy": "group", "group_size": self.group_size} if in_groups else {"strategy": "channel"}
        inputs = {
            "num_bits": precision.act_bits,
            "type": "int",
            "symmetric": True,
            "dynamic": True,
            "strategy": "token",
        }
        return {
            "targets": names,
            "weights": weights,
            "input_activations": inputs if precision.quantizes_inputs else None,
            "output_activations": None,
        }

    def read(self, path: Path) -> ReadBack:
        """The precisions of the groups, and 16 bits for what is ignored."""
        with reading(path, _NAME):
            config = read_json(path)["quantization_config"]
            found = {unliteral(name): LEFT_ALONE for name in config["ignore"]}
            for group in config["config_groups"].values():
                inputs = group["input_activations"]
                act = inputs["num_bits"] if inputs else LEFT_ALONE_BITS
                precision = Precision(weight_bits=group["weights"]["num_bits"], act_bits=act)
                found |= {unliteral(name): precision for name in group["targets"]}
        return ReadBack(found)
