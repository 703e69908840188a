"""The blocks of a network in a file, one by one: each is read once, and run on every state that waits for it.

A network that is never in memory whole can so be run hundreds of times, changed a little each time, for a few passes
over its file; and be run back through its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from bitplan.core.errors import InputError
from bitplan.models.streamed import ReadUnit, units_of
from bitplan.weights.opened import OpenedCheckpoint

Run = Callable[[], Any]
"""Runs the network on one batch."""


@dataclass(frozen=True)
class _StateForm:
    """Things in a tree, one of which is the state that blocks hand on; its place there."""

    leaves: tuple[Any, ...]
    tree: TreeSpec
    place: int

    @classmethod
    def around(cls, things: Any, is_state: Callable[[Any], bool]) -> _StateForm | None:
        """The form of things among which there is one state; None if there are none, or several."""
        leaves, tree = tree_flatten(things)
        places = [place for place, leaf in enumerate(leaves) if is_state(leaf)]
        if len(places) != 1:
            return None
        leaves[places[0]] = None
        return cls(tuple(leaves), tree, places[0])

    @classmethod
    def at(cls, things: Any, place: int) -> _StateForm:
        """The form of things whose state is at that place, of which no other tensor is of use to anybody."""
        leaves, tree = tree_flatten(things)
        return cls(tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves), tree, place)

    def holding(self, state: Tensor) -> Any:
        """The same with another state."""
        return tree_unflatten([*self.leaves[: self.place], state, *self.leaves[self.place + 1 :]], self.tree)


@dataclass(frozen=True)
class BlockCalls:
    """What one batch gives to blocks beside their state: the first state, and what was made before the first block."""

    first: Tensor
    given: tuple[_StateForm, ...]
    before: dict[int, Any]


class _LastBlock(Exception):
    """The last block was called."""


class BlockChain:
    """A network without data whose blocks hand one tensor on, from the first block of its list to the last.

    `first` runs one batch as ever and finds out whether that is so.
    """

    def __init__(self, network: nn.Module, opened: OpenedCheckpoint) -> None:
        self._units = units_of(network, opened)
        self.blocks = [unit for unit in self._units if unit.is_block]
        self.after: list[ReadUnit] = []
        self._made: list[_StateForm] = []  # by blocks
        self._place: int | None = None
        self._name = str(opened.path)

    @torch.no_grad()
    def first(self, run: Run) -> Any:
        """What the network answers; how blocks are called is remembered."""
        seen: list[tuple[int, Any, Any]] = []

        def act(number: int, own: Callable[..., Any], *args: Any, **named: Any) -> Any:
            with self._units[number].reading():
                made = own(*args, **named)
            seen.append((number, (args, named), made))
            return made

        with self._acting(act):
            answers = run()
        self._understand(seen)
        return answers

    def _understand(self, seen: list[tuple[int, Any, Any]]) -> None:
        """Refuse a network whose blocks do anything but hand one tensor on."""
        order = [number for number, _, _ in seen]
        every = [number for number, unit in enumerate(self._units) if unit.is_block]
        start = order.index(every[0]) if every and every[0] in order else 0
        blocks = seen[start : start + len(every)]
        others = set(every).intersection([*order[:start], *order[start + len(every) :]])
        chained = bool(every) and [number for number, _, _ in blocks] == every and not others
        places, handed = set[int](), set[int]()
        for (_, _, made), (_, given, _) in pairwise(blocks):
            form = _StateForm.around(made, partial(_among, tree_flatten(given)[0]))
            back = None if form is None else _StateForm.around(given, partial(_is, tree_flatten(made)[0][form.place]))
            chained = chained and back is not None
            if form is not None and back is not None:
                places.add(back.place)
                handed.add(form.place)
        if not chained or len(places) > 1 or len(handed) > 1:
            raise InputError(
                f"the network of {self._name} is not blocks that hand one tensor on, so that it cannot be run block by "
                "block: load it (bitplan.load_pretrained), and estimate from that"
            )
        self._place = next(iter(places), None)
        self._made = [_StateForm.at(made, next(iter(handed), 0)) for _, _, made in blocks]
        self.after = [self._units[number] for number in dict.fromkeys(order[start + len(every) :])]

    @torch.no_grad()
    def calls(self, run: Run) -> BlockCalls:
        """How one batch calls the blocks; none of them runs."""
        before: dict[int, Any] = {}
        given: list[_StateForm] = []
        first: list[Tensor] = []

        def act(number: int, own: Callable[..., Any], *args: Any, **named: Any) -> Any:
            unit = self._units[number]
            if not unit.is_block:
                with unit.reading():
                    before[number] = own(*args, **named)
                return before[number]
            state = first[0] if first else self._state((args, named))
            first[:] = [state]
            form = _StateForm.around((args, named), partial(_is, state))
            assert form is not None, "it was when the first batch ran"
            given.append(form)
            if len(given) == len(self.blocks):
                raise _LastBlock
            return self._made[len(given) - 1].holding(state)

        with self._acting(act):
            try:
                run()
            except _LastBlock:
                return BlockCalls(first[0], tuple(given), before)
        raise InputError(f"the blocks of {self._name} did not all run: load the network, and estimate from that")

    def _state(self, things: Any) -> Tensor:
        """What the first block is given as its state: what others are given in that place."""
        leaves = tree_flatten(things)[0]
        floats = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        state: Tensor = floats[0] if self._place is None else leaves[self._place]
        return state

    def run(self, number: int, calls: BlockCalls, state: Tensor) -> Tensor:
        """What a block, which must have its data, makes of a state."""
        args, named = calls.given[number].holding(state)
        made = self.blocks[number].module(*args, **named)
        out: Tensor = tree_flatten(made)[0][self._made[number].place]
        return out

    def answers(self, calls: BlockCalls, state: Tensor, run: Run) -> Any:
        """What the network makes of the last block's state; what comes after blocks must have its data."""
        blocks = iter(self._made)

        def act(number: int, own: Callable[..., Any], *args: Any, **named: Any) -> Any:
            if self._units[number].is_block:
                return next(blocks).holding(state)
            return calls.before[number] if number in calls.before else own(*args, **named)

        with self._acting(act):
            return run()

    @contextmanager
    def reading_after(self) -> Iterator[None]:
        """What comes after the blocks has its data until the block ends."""
        with ExitStack() as stack:
            for unit in self.after:
                stack.enter_context(unit.reading())
            yield

    @contextmanager
    def _acting(self, act: Callable[..., Any]) -> Iterator[None]:
        """`act` in the place of every unit's forward: told its number, what it would do, and its arguments."""
        before = [vars(unit.module).get("forward") for unit in self._units]
        for number, unit in enumerate(self._units):
            vars(unit.module)["forward"] = partial(act, number, unit.module.forward)
        try:
            yield
        finally:
            for unit, own in zip(self._units, before, strict=True):
                del vars(unit.module)["forward"]
                if own is not None:
                    vars(unit.module)["forward"] = own


def _is(state: Tensor, leaf: Any) -> bool:
    return leaf is state


def _among(things: list[Any], leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and any(leaf is thing for thing in things)
