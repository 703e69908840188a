"""Which tensors are the same: the same part of the same storage, not written to in between.

Two views are the same value when they cover the same elements, in whatever order or shape; a copy (`contiguous`,
a cast) is the same value as its source. A storage that is written to holds a new value from then on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

Region = tuple[tuple[int, int], ...] | None
Key = tuple[int, int, int, Region]
"""Storage, how often it was written to, offset, and the covered strides (None: all of it)."""


class Values:
    """Follows storages through a forward pass: what each holds, and what it was made from."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice
        self._writes: dict[int, int] = {}
        self._copied_from: dict[Key, Key] = {}
        self._producers: dict[tuple[int, int], str] = {}
        self._sources: dict[int, frozenset[str]] = {}
        self._activations: set[int] = set()
        self._origins: dict[int, Any] = {}

    def storage(self, tensor: torch.Tensor) -> int:
        """Return a number that only this tensor and its views have."""
        storage = tensor.untyped_storage()
        address: int = storage._cdata
        self._kept.setdefault(address, storage)
        return address

    def key(self, tensor: torch.Tensor) -> Key:
        """What tells this value from others, following copies back to their source."""
        storage = self.storage(tensor)
        writes = self._writes.get(storage, 0)
        covered = _covered(tensor)
        in_one_piece = covered == ((tensor.numel(), 1),)
        as_long = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        key: Key = (storage, writes, int(tensor.storage_offset()), covered)
        if in_one_piece and as_long:  # all of the storage
            key = (storage, writes, 0, None)
        return self._copied_from.get(key, key)

    def producer(self, key: Key) -> str:
        """Where the value was made, in words."""
        return self._producers.get(key[:2], "a constant")

    def is_activation(self, tensor: torch.Tensor) -> bool:
        """Tell whether the tensor depends on the model's input or is the output of a layer."""
        return self.storage(tensor) in self._activations

    def sources(self, tensor: torch.Tensor) -> frozenset[str]:
        """The parameters that a tensor was computed from, if it is not an activation."""
        return self._sources.get(self.storage(tensor), frozenset())

    def origin(self, tensor: torch.Tensor) -> Any:
        """What was noted of how a tensor came about that is not an activation; None of a parameter."""
        return self._origins.get(self.storage(tensor))

    def add_parameter(self, tensor: torch.Tensor, name: str) -> None:
        """Start to follow a parameter, or anything else under a name of its own."""
        self._activations.discard(self.storage(tensor))
        self._sources[self.storage(tensor)] = frozenset({name})

    def add_input(self, tensor: torch.Tensor, label: str) -> None:
        """Start to follow an input of the model."""
        self._activations.add(self.storage(tensor))
        self._producers[(self.storage(tensor), 0)] = label

    def copied(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Note that `target` holds the same numbers as `source`."""
        if source.numel() == target.numel() and source.is_floating_point() and target.is_floating_point():
            self._copied_from[self.key(target)] = self.key(source)

    def made(
        self,
        outputs: Iterable[torch.Tensor],
        inputs: Iterable[torch.Tensor],
        by: str,
        layer: bool,
        origin: Any = None,
    ) -> None:
        """Note new tensors: activations if an input is one (or a layer made them), else still parameters."""
        read = [self.storage(tensor) for tensor in inputs]
        active = layer or self._any_active(read)
        sources = self._sources_of(read)
        new = {self.storage(tensor) for tensor in outputs}.difference(read)  # others are views of what was read
        for storage in new:
            self._producers[(storage, 0)] = by
            self._origins[storage] = origin
            self._inherit(storage, active, sources)

    def wrote(
        self, targets: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor], by: str, origin: Any = None
    ) -> None:
        """Note that tensors were written to in place: every view of them has a new value."""
        read = [self.storage(tensor) for tensor in inputs]
        active = self._any_active(read)
        sources = self._sources_of(read)
        for storage in {self.storage(tensor) for tensor in targets}:
            writes = self._writes.get(storage, 0) + 1
            self._writes[storage] = writes
            self._producers[(storage, writes)] = by
            self._origins[storage] = origin
            self._inherit(storage, active, sources)

    def _any_active(self, storages: Iterable[int]) -> bool:
        return not self._activations.isdisjoint(storages)

    def _sources_of(self, storages: Iterable[int]) -> frozenset[str]:
        return frozenset[str]().union(*(self._sources.get(storage, frozenset()) for storage in storages))

    def _inherit(self, storage: int, active: bool, sources: frozenset[str]) -> None:
        if active:
            self._activations.add(storage)
            self._sources.pop(storage, None)
        elif sources:
            self._sources[storage] = sources


def _covered(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """The (size, stride) pairs of a tensor whatever the order of its dimensions, joined where they adjoin."""
    dimensions = zip(tensor.stride(), tensor.size(), strict=True)
    joined: list[tuple[int, int]] = []  # (size, stride)
    for stride, size in sorted((stride, size) for stride, size in dimensions if size != 1):
        if joined and stride == joined[-1][0] * joined[-1][1]:  # it goes on where the one before ends
            inner_size, inner_stride = joined.pop()
            joined.append((inner_size * size, inner_stride))
        else:
            joined.append((size, stride))
    return tuple(joined) or ((1, 1),)
