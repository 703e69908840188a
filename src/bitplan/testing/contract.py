"""A contract is a list of clauses, and the first that does not hold is said in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from bitplan.core.errors import InputError
from bitplan.core.registry import find_missing_members


class BrokenContract(AssertionError):
    """A clause does not hold: what broke it, the clause, and what was found instead."""


class NeedsMore(InputError):
    """A contract cannot be tried without something that only the author can give, such as a model for a task."""


@dataclass(frozen=True)
class Contract:
    """The contract of one thing, such as "gain widths"."""

    thing: str

    def clause(self, clause: str, holds: bool, found: object = "") -> None:
        """Go on if the clause holds; `found` says what is there instead."""
        __tracebackhide__ = True  # pytest then shows who asked
        if not holds:
            shown = f" ({_one_line(found)})" if str(found) else ""
            raise BrokenContract(f"{self.thing} breaks its contract: {clause}{shown}")

    @contextmanager
    def works(self, clause: str) -> Iterator[None]:
        """Whatever is raised in this block breaks the clause."""
        try:
            yield
        except BrokenContract:
            raise
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            raise BrokenContract(f"{self.thing} breaks its contract: {clause} ({_one_line(found)})") from error

    def has_all_of(self, thing: object, protocol: type, what: str) -> None:
        """The clause that a thing has everything that a protocol asks for."""
        __tracebackhide__ = True
        missing = find_missing_members(thing, protocol)
        self.clause(f"it has all that {what} has", not missing, f"no {', no '.join(missing)}")

    @contextmanager
    def leaves_as_it_was(self, model: nn.Module) -> Iterator[None]:
        """The clause that a model is bit for bit the same after the block: tensors, gradients and modes."""
        before = {name: value.detach().clone() for name, value in model.state_dict().items()}
        modes = {name: module.training for name, module in model.named_modules()}
        yield
        after = model.state_dict()
        changed = [name for name, value in before.items() if name not in after or not torch.equal(after[name], value)]
        clause = "the model stays as it was"
        self.clause(clause, not changed and after.keys() == before.keys(), f"{', '.join(changed[:3])} changed")
        graded = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        self.clause(clause, not graded, f"{', '.join(graded[:3])} got a gradient")
        switched = [name or "it" for name, module in model.named_modules() if modes.get(name) != module.training]
        self.clause("each module of the model stays in its mode", not switched, f"{', '.join(switched[:3])} switched")


def _one_line(found: object) -> str:
    return " ".join(str(found).split())[:300]
