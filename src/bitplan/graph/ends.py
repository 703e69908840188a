"""Which layer of a file is the first and which the last, where its order or its shapes tell.

PyTorch's files keep the order in which a network's modules were made, which is mostly that of their calls: there the
ends of the file are those of the network. Where names are sorted, as in safetensors, only shapes tell: the first layer
reads what no other makes, such as an image, or is the largest table; the last one makes what no other reads. Where that
leaves two candidates, or none, an end is not known.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

IMAGE = 4
"""The most channels that an image has."""

_READ_IN_PARTS = ("embedding", "recurrent", "parameter")


class Ends(NamedTuple):
    """The names of the layers that read a network's input and of its heads; none where they are not known."""

    first: frozenset[str]
    last: frozenset[str]


class Sizes(NamedTuple):
    """A layer of a file as far as its shape tells: how many features it reads and makes; a table reads rows."""

    name: str
    kind: str
    inputs: int
    outputs: int

    @property
    def is_table(self) -> bool:
        """Whether it looks rows up instead of multiplying."""
        return self.kind == "embedding"

    @property
    def widths(self) -> set[int]:
        """What a layer behind it may read; of a recurrent one three or four gates make one output, or two of them."""
        gates = (1, 3, 4) if self.kind == "recurrent" else (1,)
        return {width for gate in gates for width in (self.outputs // gate, 2 * self.outputs // gate)[: len(gates)]}


def find_ends(layers: Sequence[Sizes], linked: Iterable[str], *, in_order: bool) -> Ends:
    """The ends of these layers; `linked` ones read their tensor together with others, so none of them is the last."""
    if in_order:
        return Ends(_names(_first_in_order(layers)), _names(_last_in_order(layers)))
    names = [layer.name for layer in layers]
    first, last = _readers_of_the_input(layers), _makers_of_the_output(layers, frozenset(linked))
    return Ends(_names(_only(first, _lowest_numbers(names))), _names(_only(last, _highest_numbers(names))))


def _names(end: str | None) -> frozenset[str]:
    return frozenset() if end is None else frozenset({end})


def _first_in_order(layers: Sequence[Sizes]) -> str | None:
    """The first layer of a file, unless the network reads both tokens and images, in whatever order."""
    both = layers[0].is_table and _readers_of_images(layers)
    return None if both else layers[0].name


def _last_in_order(layers: Sequence[Sizes]) -> str | None:
    """The last layer of a file, unless it makes what others read: then a table may come behind it once more."""
    last = layers[-1]
    tables = any(layer.is_table for layer in layers)
    return None if last.is_table or (tables and last.outputs in _read(layers)) else last.name


def _readers_of_the_input(layers: Sequence[Sizes]) -> list[str]:
    rows = max((layer.inputs for layer in layers if layer.is_table), default=0)
    tables = [layer.name for layer in layers if layer.is_table and layer.inputs == rows]
    made = set[int]().union(*(layer.widths for layer in layers))
    readers = [layer.name for layer in layers if not layer.is_table and layer.inputs not in made]
    return tables + (_readers_of_images(layers) or _unrepeated(readers))


def _readers_of_images(layers: Sequence[Sizes]) -> list[str]:
    """The convolutions over the fewest channels, as far as they are no part that a network repeats."""
    for channels in range(1, IMAGE + 1):
        found = [layer.name for layer in layers if layer.kind.startswith("conv") and layer.inputs == channels]
        if _unrepeated(found):
            return _unrepeated(found)
    return []


def _makers_of_the_output(layers: Sequence[Sizes], linked: frozenset[str]) -> list[str]:
    """Layers whose outputs none can read as they are. Gates and packed projections (q, k and v) are read in parts."""
    read = _read(layers)
    unread = [layer for layer in layers if layer.outputs not in read and layer.kind not in _READ_IN_PARTS]
    unread = [layer for layer in unread if layer.outputs not in (2 * layer.inputs, 3 * layer.inputs)]
    return _unrepeated([layer.name for layer in unread if layer.name not in linked])


def _read(layers: Sequence[Sizes]) -> set[int]:
    return {layer.inputs for layer in layers if not layer.is_table}


def _unrepeated(names: Sequence[str]) -> list[str]:
    """The names that differ from all others by more than numbers: no parts that a network repeats."""
    families: dict[str, list[str]] = defaultdict(list)
    for name in names:
        families[_family(name)].append(name)
    return [family[0] for family in families.values() if len(family) == 1]


def _only(found: Sequence[str], possible: set[str]) -> str | None:
    return found[0] if len(found) == 1 and found[0] in possible else None


def _lowest_numbers(names: Sequence[str]) -> set[str]:
    """Of names that differ only in numbers the lowest, in their natural order: a later one is not the first."""
    return set({_family(name): name for name in reversed(names)}.values())


def _highest_numbers(names: Sequence[str]) -> set[str]:
    return set({_family(name): name for name in names}.values())


def _family(name: str) -> str:
    return re.sub(r"\d+", "#", name)
