"""Look at data: set input steps and signs, and, if asked, batch normalization's statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from bitplan.adapters.torch import inference
from bitplan.core.errors import InputError
from bitplan.forward.batches import run_batch
from bitplan.quant.convert import Forward, is_quantized, quantizers_of
from bitplan.quant.proof import Unreached, report_unreached
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.quant.sites import Quantizers


def calibrate_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    refresh_norms: bool = False,
    unreached: Unreached = "raise",
) -> None:
    """Set the sign and the step of every input quantizer from a few batches.

    All batches are seen with inputs left alone, weights quantized, in inference mode. Batches are read as those of
    `task`, unless `forward(model, batch)` says otherwise: an input, a tuple whose last part holds labels, or a mapping
    of keyword arguments. Batches without samples, or of zeros only, are an error.
    Batch normalization keeps its running statistics; `refresh_norms` then replaces them by averages over the
    batches, seen once more with everything quantized. Layers that no batch came to are an error, or, where the task
    does not use them (`unreached="warn"`), a warning.
    """
    kept = list(batches) if refresh_norms else batches
    run = forward or run_batch
    quantizers = [module for module in model.modules() if isinstance(module, InputQuantizer)]
    with _record_runs(model) as ran:
        set_steps_(quantizers, model, kept, run)
    report_unreached(
        [layer for layer, both in _quantizers_by_layer(model).items() if not _has_run(both, ran)], unreached
    )
    if refresh_norms:
        _refresh_norms_(model, kept, run)


def set_steps_(quantizers: Sequence[InputQuantizer], model: nn.Module, batches: Iterable[Any], run: Forward) -> None:
    """Set the signs and steps of these input quantizers of a model; others quantize as they do."""
    with _observe_with(quantizers), _watch_inputs(model) as given, inference(model), torch.no_grad():
        count = 0
        for batch in batches:
            run(model, batch)
            count += 1
        if not count:
            raise InputError("calibration got no batches: give at least one")
        given.check()
        for quantizer in quantizers:
            assert quantizer.observation is not None
            seen = quantizer.observation.agreed()
            if seen.count:
                quantizer.settle_(seen)


def _quantizers_by_layer(model: nn.Module) -> dict[str, Quantizers]:
    return quantizers_of(model) if is_quantized(model) else {}


def _has_run(both: Quantizers, ran: set[nn.Module]) -> bool:
    """Tell whether a layer ran: its weight was quantized and its input observed, by this process or another."""
    inputs = both.inputs[:2]  # a product's operands; between two products there may be no softmax
    return (both.weight is None or both.weight in ran) and all(one in ran or one.range is not None for one in inputs)


@contextmanager
def _record_runs(model: nn.Module) -> Iterator[set[nn.Module]]:
    """Yield the set of quantizers that have run, until the block ends."""
    ran: set[nn.Module] = set()
    quantizers = [module for module in model.modules() if isinstance(module, WeightQuantizer | InputQuantizer)]
    hooks = [quantizer.register_forward_hook(lambda module, *_: ran.add(module)) for quantizer in quantizers]
    try:
        yield ran
    finally:
        for hook in hooks:
            hook.remove()


class _InputCheck:
    """Counts the values that a model gets, and checks that some are not zero."""

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
        """Raise an error if no scale can follow from the data; ids of words may all be 0."""
        if self.called and not self.count:
            raise InputError("calibration got no samples: its batches are empty, give some of the data")
        if self.has_floats and not self.has_others:
            raise InputError("calibration got nothing but zeros, from which no step follows: give some of the data")


@contextmanager
def _watch_inputs(model: nn.Module) -> Iterator[_InputCheck]:
    """Watch the arguments of a model until the block ends."""
    given = _InputCheck()
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


@contextmanager
def _observe_with(quantizers: Sequence[InputQuantizer]) -> Iterator[None]:
    for quantizer in quantizers:
        quantizer.observation = quantizer.new_observation()
    try:
        yield
    finally:
        for quantizer in quantizers:
            quantizer.observation = None
