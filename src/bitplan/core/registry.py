"""Names → things that can be exchanged, found by registration or by a Python entry point.

bitplan's own entries are entry points too (`pyproject.toml`), so listing the names imports none of them.
"""

from __future__ import annotations

import dataclasses
import inspect
import numbers
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from bitplan.core.errors import InputError, UnknownName

T = TypeVar("T")


class Registry:
    """One kind of exchangeable thing."""

    def __init__(self, what: str, several: str = "", hint: str = "") -> None:
        self.what, self.several = what, several or f"{what}s"
        self.hint = hint or f"`bitplan list {self.several}` shows all"
        self.group = f"bitplan.{self.several}"
        self._registered: dict[str, Any] = {}

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        found: dict[str, EntryPoint] = {}
        for point in entry_points(group=self.group):
            if point.name in found and found[point.name].value != point.value:
                raise InputError(
                    f"two packages bring a {self.what} named {point.name!r}: {found[point.name].value} "
                    f"and {point.value}; uninstall one"
                )
            found[point.name] = point
        return found

    def register(self, name: str) -> Callable[[T], T]:
        """Add the decorated thing under a name that is not taken."""

        def add(thing: T) -> T:
            if name in self:
                raise InputError(f"the {self.what} {name!r} exists already; choose another name")
            self._registered[name] = thing
            return thing

        return add

    @contextmanager
    def registered(self, name: str, thing: Any) -> Iterator[None]:
        """Have a thing under a name for a while, as tests do."""
        self.register(name)(thing)
        try:
            yield
        finally:
            del self._registered[name]

    @property
    def known(self) -> tuple[tuple[str, Any], ...]:
        """Every name with what stands behind it, not imported: another value where something was registered since."""
        return tuple(sorted({**self._installed, **self._registered}.items(), key=lambda entry: entry[0]))

    def __contains__(self, name: object) -> bool:
        return name in self._registered or name in self._installed

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._registered, *self._installed}))

    def get(self, name: str) -> Any:
        """The thing of that name, imported now if an entry point brings it."""
        if name in self._registered:
            return self._registered[name]
        if name not in self._installed:
            raise UnknownName(self.what, name, self, hint=self.hint)
        point = self._installed[name]
        try:
            return point.load()
        except (ImportError, AttributeError) as error:
            raise InputError(f"the {self.what} {name!r} ({point.value}) does not load: {error}") from error

    def make(self, name: str, options: Mapping[str, Any]) -> Any:
        """The thing of that name, a dataclass, with these options; an unknown, missing or impossible one is said."""
        factory = self.get(name)
        known = [option.name for option in dataclasses.fields(factory)]
        for option in options:
            if option not in known:
                raise UnknownName(f"option of {name}", option, known)
        _check_kinds(name, factory, options)
        try:
            return factory(**options)
        except TypeError as error:
            raise InputError(f"{name}: {error}") from None

    def name_of(self, thing: Any) -> str:
        """The name that a thing's class is registered under; of one that is not, the class's own in lower case."""
        kind = type(thing)
        for name, registered in self._registered.items():
            if registered is kind:
                return name
        own = f"{kind.__module__}:{kind.__qualname__}"
        return next((name for name, point in self._installed.items() if point.value == own), kind.__name__.lower())


class Registries:
    """Several kinds whose entries go by one name: whoever names one need not know of which kind it is."""

    def __init__(self, *kinds: Registry) -> None:
        self.kinds = kinds

    def __contains__(self, name: object) -> bool:
        return any(name in kind for kind in self.kinds)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({name for kind in self.kinds for name in kind}))

    def get(self, name: str) -> Any:
        """The thing of that name, of whichever kind; an unknown one is said beside all that are there."""
        return self._kind(name).get(name)

    def make(self, name: str, options: Mapping[str, Any]) -> Any:
        """The same with these options."""
        return self._kind(name).make(name, options)

    def _kind(self, name: str) -> Registry:
        kind = next((kind for kind in self.kinds if name in kind), None)
        if kind is None:
            first = self.kinds[0]
            lists = " and ".join(f"`bitplan list {kind.several}`" for kind in self.kinds)
            raise UnknownName(first.what, name, self, hint=f"{lists} show all")
        return kind

    def name_of(self, thing: Any) -> str:
        """The name that a thing's class is registered under; of one that is not, the class's own in lower case."""
        names = [kind.name_of(thing) for kind in self.kinds]
        return next((name for name, kind in zip(names, self.kinds, strict=True) if name in kind), names[0])


def _check_kinds(name: str, factory: Any, options: Mapping[str, Any]) -> None:
    """Refuse a text where a number is meant, and the like: options stand in files, and are used much later."""
    try:
        hints = get_type_hints(factory)
    except NameError:  # of a name that only a type checker imports: nothing is known
        return
    for option, value in options.items():
        hint = hints[option]
        kinds = set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint}
        if kinds <= _PLAIN.keys() and not any(_PLAIN[kind](value) for kind in kinds):
            wanted = " or ".join(words for kind, words in _WORDS.items() if kind in kinds)
            raise InputError(f"{name}: {option} is {value!r}, and must be {wanted}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


_PLAIN: Mapping[Any, Callable[[Any], bool]] = {
    int: _is_whole,
    float: lambda value: isinstance(value, numbers.Real) and not isinstance(value, bool),
    bool: lambda value: isinstance(value, bool),
    str: lambda value: isinstance(value, str | os.PathLike),
    NoneType: lambda value: value is None,
}
"""Kinds of values that can be told from each other → whether a value is one."""

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}

GAINS = Registry("gain")
SEARCHES = Registry("search", "searches")
RELAXATIONS = Registry("relaxation")
CHOOSERS = Registries(GAINS, SEARCHES, RELAXATIONS)
"""All that `estimate` knows by name."""
JUDGES = Registry("judge")
COSTS = Registry("cost")
SELECTORS = Registry("selector")
MODELS = Registry("model")
TASKS = Registry("task")
EXPORTERS = Registry("exporter")
ENGINES = Registry("engine")
LAYERS = Registry("layer")
QUANTIZERS = Registry("quantizer")
COMMANDS = Registry("command")
"""Commands of the command line that others bring: "name", or "group.name" for one within a group."""
_KINDS = (
    GAINS, SEARCHES, RELAXATIONS, JUDGES, COSTS, SELECTORS, MODELS, TASKS, EXPORTERS, ENGINES, LAYERS, QUANTIZERS,
)  # fmt: skip
REGISTRIES = {registry.several: registry for registry in _KINDS}

# How parts of bitplan find what plugins bring to them, by the same entry points; `bitplan list` does not show these.
STREAMED = Registry("method for a folder of weights", "streamed", "bitplan.plugins.llm has them: install bitplan anew")
"""Names of gains → a class of the same methods, made of the gain, for a network that is never in memory whole."""
ROUNDINGS = Registry("finish", "roundings", "round needs nothing, bitplan.plugins.ptq brings tune")
"""Names → functions that finish the weights of a quantized network, called as `compensate_` is."""
EXECUTIONS = Registry("execution", hint="bitplan.plugins.integer computes in integers: install bitplan anew")
"""Names → functions of a quantized model and an example that return a copy which computes in another way."""
CONTRACTS = Registry("contract", hint="it belongs to a plugin that is not installed")
"""Names such as check_search → functions like those of `bitplan.testing`, for the kinds that plugins bring."""


# --- Is a thing what it should be? Which members of a protocol it lacks, and the one line that says so.


def find_missing_members(thing: object, protocol: Any) -> list[str]:
    """The members of a protocol that a thing does not have, or has as None; those of the protocol's bases first."""
    return [member for member in _members(protocol) if getattr(thing, member, None) is None]


def check_is(thing: object, protocol: Any, what: str) -> None:
    """Refuse a thing that lacks a member; deriving from the protocol brings those that have defaults."""
    missing = find_missing_members(thing, protocol)
    if missing:
        name = thing.__name__ if inspect.isclass(thing) else type(thing).__name__
        home = f"{protocol.__module__}.{protocol.__name__}"
        raise InputError(
            f"{name} is no {what}, for it has no {' and no '.join(missing)}: derive it from {home} (docs/extend.md)"
        )


def _members(protocol: Any) -> list[str]:
    """The public names that a protocol and its bases declare."""
    declared: dict[str, None] = {}
    for base in reversed(protocol.__mro__):
        if base.__module__ != "typing":  # Protocol itself, and Generic
            declared |= dict.fromkeys((*vars(base).get("__annotations__", {}), *vars(base)))
    return [name for name in declared if not name.startswith("_")]
