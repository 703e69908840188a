"""What a gain gives for layers, before they are summed into groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LayerGains:
    """One value per choice for each selectable layer; perhaps standard errors and the top histograms."""

    values: Mapping[str, tuple[float, ...]]
    errors: Mapping[str, tuple[float, ...]] | None = None
    histograms: Mapping[str, tuple[int, ...]] | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
