"""The measured time of each layer at each choice, as `bitplan measure` wrote it, as a cost in nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bitplan.core.errors import FileError, suggestion
from bitplan.core.latencies import Latency
from bitplan.core.precision import Precision
from bitplan.core.records import Layer
from bitplan.core.store import load


@dataclass(frozen=True)
class LatencyCost:
    """A cost function that looks its values up in a measurement."""

    path: str
    record: Latency
    unit: str = "ns"

    @classmethod
    def read(cls, path: str | Path) -> LatencyCost:
        """Read the record."""
        return cls(str(path), load(path, Latency))

    def __call__(self, layer: Layer, precision: Precision) -> int | None:
        """What the layer took; None for a fixed one that was measured at another precision."""
        row = self.record.rows.get(layer.name)
        if row is None:
            raise FileError(
                f"{self.path} has no times of layer {layer.name!r}{suggestion(layer.name, self.record.rows)}"
            )
        if self.record.macs[layer.name] != layer.macs:
            raise FileError(
                f"{self.path} was measured with {self.record.macs[layer.name]:,} MACs in {layer.name!r}, where this "
                f"graph has {layer.macs:,}: measure with the same --input"
            )
        if precision in row:
            return row[precision].ns
        if layer.fixed:
            return None
        raise FileError(
            f"{self.path} has no time of {layer.name!r} at {precision}, only at {', '.join(map(str, row))}: measure "
            "with the same --bits and --rules"
        )
