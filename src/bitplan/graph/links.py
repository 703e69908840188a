"""Linked layers: those that read the same tensor (docs/decisions/0009, 1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bitplan.core.records import Link
from bitplan.forward.values import Key


def find_links(inputs: Mapping[str, Iterable[Key]], producers: Mapping[Key, str]) -> tuple[Link, ...]:
    """Join layers that share an input, also through a third one; `inputs` in execution order."""
    readers: dict[Key, str] = {}
    leader = {name: name for name in inputs}
    through: dict[str, list[str]] = {}

    def root(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    for name, keys in inputs.items():
        for key in keys:
            first = root(readers.setdefault(key, name))
            other = root(name)
            if first != other:
                leader[other] = first
                through.setdefault(first, []).extend([*through.pop(other, []), producers[key]])
    members: dict[str, list[str]] = {}
    for name in inputs:
        members.setdefault(root(name), []).append(name)
    return tuple(
        Link(layers=tuple(names), through="; ".join(dict.fromkeys(through[first])))
        for first, names in members.items()
        if len(names) > 1
    )
