"""Mappings and lists that cannot be changed: what the fields of records hold, at every depth.

They are a dict and a list to everything that reads them, equal to plain ones, and are written and pickled as such.
"""

from __future__ import annotations

from typing import Any, NoReturn

MAY_HOLD = frozenset({dict, list, tuple})
"""The types that are not frozen yet, or may hold something that is not."""


def freeze(value: Any) -> Any:
    """Return the value with all mappings and lists in it, and in its tuples, made unchangeable."""
    if type(value) is dict:
        return FrozenDict({key: freeze(item) if type(item) in MAY_HOLD else item for key, item in value.items()})
    if type(value) is list:
        return FrozenList(map(freeze, value))
    if type(value) is tuple and not MAY_HOLD.isdisjoint(map(type, value)):
        return tuple(map(freeze, value))
    return value


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise TypeError(
        "a record does not change: make a new one, record.model_copy(update={…}) or dict(…) of this mapping"
    )


class FrozenDict(dict[Any, Any]):
    """A dict that stays as it is; `|` makes a new plain one."""

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)

    def __deepcopy__(self, _: Any) -> FrozenDict:
        return self


class FrozenList(list[Any]):
    """A list that stays as it is; `+` makes a new plain one."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = append = clear = extend = _refuse
    insert = pop = remove = reverse = sort = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenList, (list(self),)

    def __deepcopy__(self, _: Any) -> FrozenList:
        return self
