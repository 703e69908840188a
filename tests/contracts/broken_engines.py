"""Engines that break one clause each."""

from dataclasses import dataclass

from bitplan.store.engines import Failure, attempt
from bitplan.testing import check_engine


@dataclass(frozen=True)
class Right:
    """In turn, the last first."""

    def run(self, work, items):
        for item in reversed(list(items)):
            yield item, self.outcome(work, item)

    def outcome(self, work, item):
        return attempt(work, item)


@dataclass(frozen=True)
class Stopping(Right):
    def outcome(self, work, item):
        return work(item)


@dataclass(frozen=True)
class Losing(Right):
    def run(self, work, items):
        return list(Right.run(self, work, items))[1:]


@dataclass(frozen=True)
class Doubling(Right):
    def run(self, work, items):
        return [*Right.run(self, work, items), *Right.run(self, work, items)]


@dataclass(frozen=True)
class Mixing(Right):
    def run(self, work, items):
        items = list(items)
        found = [self.outcome(work, item) for item in items]
        if found:
            found[0], found[1] = found[1], found[0]
        return zip(items, found, strict=True)


@dataclass(frozen=True)
class Swallowing(Right):
    def outcome(self, work, item):
        found = attempt(work, item)
        return None if isinstance(found, Failure) else found


@dataclass(frozen=True)
class Vague(Right):
    def outcome(self, work, item):
        found = attempt(work, item)
        return Failure("it failed") if isinstance(found, Failure) else found


@dataclass(frozen=True)
class Brief(Right):
    def outcome(self, work, item):
        found = attempt(work, item)
        return Failure(found.error) if isinstance(found, Failure) else found


@dataclass(frozen=True)
class Impatient(Right):
    def run(self, work, items):
        items = list(items)
        yield items[0], self.outcome(work, items[0])
        yield from Right.run(self, work, items[1:])


@dataclass(frozen=True)
class Busy(Right):
    def run(self, work, items):
        return list(Right.run(self, work, items)) or [(0, 0)]


@dataclass(frozen=True)
class Stuck(Right):
    def __reduce__(self):
        raise TypeError("cannot be moved")


@dataclass(frozen=True, eq=False)
class Other(Right):
    """Not equal to its copy."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


BROKEN = [
    ("it has all that an engine has", lambda: check_engine(object())),
    ("it can be sent to another process", lambda: check_engine(Stuck())),
    ("it can be sent to another process", lambda: check_engine(Other())),
    ("an item that fails stops no other", lambda: check_engine(Stopping())),
    ("every item has one outcome", lambda: check_engine(Losing())),
    ("every item has one outcome", lambda: check_engine(Doubling())),
    ("an outcome comes with its own item", lambda: check_engine(Mixing())),
    ("an item that fails gives a Failure with the kind of error and its message", lambda: check_engine(Swallowing())),
    ("an item that fails gives a Failure with the kind of error and its message", lambda: check_engine(Vague())),
    ("a Failure has the traceback", lambda: check_engine(Brief())),
    ("no items are no work", lambda: check_engine(Impatient())),
    ("no items are no work", lambda: check_engine(Busy())),
]


def right():
    check_engine(Right())
