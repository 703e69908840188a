"""Look at data: set input steps and signs, and, if asked, batch normalization's statistics."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from bitplan.adapters.torch import inference
from bitplan.core.errors import InputError
from bitplan.quant.convert import Forward, is_quantized, quantizers_of
from bitplan.quant.factory import Quantizers
from bitplan.quant.proof import Unreached, complain
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer


def calibrate_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    refresh_norms: bool = False,
    unreached: Unreached = "raise",
) -> None:
    """Set the sign and the step of every input quantizer from a few batches.

    All batches are seen with inputs left alone, weights quantized, in inference mode. A batch is a tensor, a
    tuple of positional or a mapping of keyword arguments, unless `forward(model, batch)` says otherwise; labels behind
    what the model takes, as loaders give them, are left out. Batches without samples, or of zeros only, are an error.
    Batch normalization keeps its running statistics; `refresh_norms` then replaces them by averages over the
    batches, seen once more with everything quantized. Layers that no batch came to are an error, or, where the task
    does not use them (`unreached="warn"`), a warning.
    """
    kept = list(batches) if refresh_norms else batches
    run = forward or called
    quantizers = [module for module in model.modules() if isinstance(module, InputQuantizer)]
    with _observing(quantizers), _noting(model) as ran, _watching(model) as given, inference(model), torch.no_grad():
        count = 0
        for batch in kept:
            run(model, batch)
            count += 1
        if not count:
            raise InputError("calibration got no batches: give at least one")
        given.check()
        _settle_(quantizers)
    complain([layer for layer, both in _layers(model).items() if not _reached(both, ran)], unreached)
    if refresh_norms:
        _refresh_norms_(model, kept, run)


def _settle_(quantizers: list[InputQuantizer]) -> None:
    for quantizer in quantizers:
        assert quantizer.observation is not None
        seen = quantizer.observation.agreed()
        if seen.count:
            quantizer.settle_(seen)


def _layers(model: nn.Module) -> dict[str, Quantizers]:
    return quantizers_of(model) if is_quantized(model) else {}


def _reached(both: Quantizers, ran: set[nn.Module]) -> bool:
    """Tell whether a layer ran: its weight was taken, and its input seen, by this process or another."""
    inputs = both.inputs[:2]  # a product's operands; between two products there may be no softmax
    return (both.weight is None or both.weight in ran) and all(one in ran or one.range is not None for one in inputs)


@contextmanager
def _noting(model: nn.Module) -> Iterator[set[nn.Module]]:
    """The quantizers that ran, until the block ends."""
    ran: set[nn.Module] = set()
    quantizers = [module for module in model.modules() if isinstance(module, WeightQuantizer | InputQuantizer)]
    hooks = [quantizer.register_forward_hook(lambda module, *_: ran.add(module)) for quantizer in quantizers]
    try:
        yield ran
    finally:
        for hook in hooks:
            hook.remove()


class _Given:
    """What a model was given so far: how many values, whether floats are among them, and whether any is not zero."""

    def __init__(self) -> None:
        self.called, self.count, self.has_floats, self.has_others = False, 0, False, False

    def look(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Take in the arguments of one call."""
        self.called = True
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self.count += value.numel()
                self.has_floats |= value.is_floating_point()
                self.has_others = self.has_others or value.is_meta or bool(value.any())

    def check(self) -> None:
        """Refuse what no step follows from; ids of words may all be 0."""
        if self.called and not self.count:
            raise InputError("calibration got no samples: its batches are empty, give some of the data")
        if self.has_floats and not self.has_others:
            raise InputError("calibration got nothing but zeros, from which no step follows: give some of the data")


@contextmanager
def _watching(model: nn.Module) -> Iterator[_Given]:
    """What a model is given until the block ends."""
    given = _Given()
    hook = model.register_forward_pre_hook(given.look, prepend=True, with_kwargs=True)
    try:
        yield given
    finally:
        hook.remove()


def _refresh_norms_(model: nn.Module, batches: Iterable[Any], run: Forward) -> None:
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    norms = [norm for norm in norms if norm.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    with inference(model), torch.no_grad():
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # torch's word for a plain average
            norm.train()
        try:
            for batch in batches:
                run(model, batch)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum


def called(model: nn.Module, batch: Any) -> Any:
    """Run a model on a batch."""
    positional, keyword = arguments_of(model, batch)
    return model(*positional, **keyword)


def arguments_of(model: nn.Module, batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """What a model is called with for a batch: a tensor, a tuple of positional or a mapping of keyword arguments.

    Where a tuple has one part more than the model takes, the last one is taken for the labels and left out.
    """
    if isinstance(batch, Mapping):
        return (), batch
    if not isinstance(batch, tuple | list):
        return (batch,), {}
    if _takes(model, batch):
        return batch, {}
    if len(batch) > 1 and _takes(model, batch[:-1]):
        return batch[:-1], {}
    taken = ", ".join(inspect.signature(model.forward).parameters)
    raise InputError(
        f"a batch has {len(batch)} parts and {type(model).__name__} takes ({taken}): give batches of inputs alone, "
        "such as [batch[0] for batch in loader]"
    )


def _takes(model: nn.Module, parts: Sequence[Any]) -> bool:
    """Tell whether a model can be called with these positional arguments."""
    try:
        inspect.signature(model.forward).bind(*parts)
    except TypeError:
        return False
    return True


@contextmanager
def _observing(quantizers: list[InputQuantizer]) -> Iterator[None]:
    for quantizer in quantizers:
        quantizer.observation = quantizer.new_observation()
    try:
        yield
    finally:
        for quantizer in quantizers:
            quantizer.observation = None
