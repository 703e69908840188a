"""Blocks that run one after the other, each on what the one before made: a later one can be run alone, from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor, nn

from bitplan.quant.moments import Enough
from bitplan.quant.quantizers import WeightQuantizer

Run = Callable[[Any], Any]
"""Runs the network on a batch."""
_HERE = object()  # where in its arguments a block is given what the one before made


class Chain:
    """The blocks of a list, and for each batch with what they were called, and what the next one is to be given."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = list(blocks)
        self.next = 0
        self._calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = []
        self._made: list[Tensor] = []

    def place(self, module: nn.Module) -> int | None:
        """The number of the block that a module is in."""
        inside = (number for number, block in enumerate(self.blocks) if any(one is module for one in block.modules()))
        return next(inside, None)

    def record_(self, run: Run, batches: Sequence[Any]) -> bool:
        """Run every batch up to the last block; tell whether each was given what the one before made, and ran once."""
        self._calls, self._made, self.next = [], [], 0
        for batch in batches:
            calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
            results: list[Any] = []
            with _noting(self.blocks, calls, results), suppress(Enough):
                run(batch)
            if [block for block, *_ in calls] != self.blocks or len(results) != len(calls):
                return False
            given = [_given(args, kwargs) for _, args, kwargs in calls]
            passed = all(one is first(made) for one, made in zip(given[1:], results[:-1], strict=True))
            if not passed or given[0] is None:
                return False
            self._calls.append([_opened(call, one) for call, one in zip(calls, given, strict=True)])
            self._made.append(given[0])
        return True

    def reach_(self, number: int) -> None:
        """Run what is in front of a block on every batch, as far as it has not been since it was recorded."""
        assert number >= self.next, "what came before is not kept"
        while self.next < number:
            self._made = [self._ran(self.next, batch) for batch in range(len(self._made))]
            self.next += 1

    def run_(self, number: int) -> None:
        """Run one block on every batch, after `reach_`; it may end early with `Enough`."""
        for batch in range(len(self._made)):
            with suppress(Enough):
                self._ran(number, batch)

    def _ran(self, number: int, batch: int) -> Tensor:
        args, kwargs = self._calls[batch][number]
        made = self._made[batch]
        given = (made if one is _HERE else one for one in args)
        named = {name: made if one is _HERE else one for name, one in kwargs.items()}
        result = first(self.blocks[number](*given, **named))
        assert result is not None
        return result


def find_chains(model: nn.Module) -> list[Chain]:
    """Lists of modules of which several have quantized weights, the outermost ones."""
    found: list[Chain] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or module in inside:
            continue
        blocks = list(module.children())
        if len(set(blocks)) == len(blocks) and sum(map(_is_quantized, blocks)) > 1:
            found.append(Chain(blocks))
            inside.update(module.modules())
    return found


def first(made: Any) -> Tensor | None:
    """The tensor that a block makes, or the first of several things."""
    one = made[0] if isinstance(made, tuple | list) and made else made
    return one if isinstance(one, Tensor) else None


def _is_quantized(block: nn.Module) -> bool:
    return any(isinstance(module, WeightQuantizer) for module in block.modules())


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor of numbers that a block is called with first."""
    tensors = (one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.is_floating_point())
    return next(tensors, None)


def _opened(
    call: tuple[nn.Module, tuple[Any, ...], dict[str, Any]], given: Tensor | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call without what the block before made."""
    _, args, kwargs = call
    return tuple(_HERE if one is given else one for one in args), {
        name: _HERE if one is given else one for name, one in kwargs.items()
    }


@contextmanager
def _noting(blocks: Sequence[nn.Module], calls: list[Any], results: list[Any]) -> Iterator[None]:
    """Note what blocks are called with and what they make, until the last one has."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((module, args, kwargs))

    def after(last: bool, module: nn.Module, args: Any, out: Any) -> None:
        results.append(out)
        if last:
            raise Enough

    hooks = [block.register_forward_pre_hook(before, with_kwargs=True) for block in blocks]
    hooks += [block.register_forward_hook(partial(after, block is blocks[-1])) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
