"""Look at data: set input steps and signs, and, if asked, batch normalization's statistics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bitplan.adapters.torch import inference
from bitplan.core.errors import InputError
from bitplan.quant.quantizers import InputQuantizer

_log = logging.getLogger(__name__)
Forward = Callable[[nn.Module, Any], Any]


def calibrate_(
    model: nn.Module, batches: Iterable[Any], *, forward: Forward | None = None, refresh_norms: bool = False
) -> None:
    """Set the sign and the step of every input quantizer from a few batches.

    All batches are seen with inputs left alone, weights quantized, in inference mode. A batch is a tensor, a
    tuple of positional or a mapping of keyword arguments, unless `forward(model, batch)` says otherwise.
    Batch normalization keeps its running statistics; `refresh_norms` then replaces them by averages over the
    batches, seen once more with everything quantized.
    """
    kept = list(batches) if refresh_norms else batches
    run = forward or _call
    quantizers = [module for module in model.modules() if isinstance(module, InputQuantizer)]
    with _observing(quantizers), inference(model), torch.no_grad():
        count = 0
        for batch in kept:
            run(model, batch)
            count += 1
        if not count:
            raise InputError("calibration got no batches: give at least one")
        _settle_(quantizers)
    if refresh_norms:
        _refresh_norms_(model, kept, run)


def _settle_(quantizers: list[InputQuantizer]) -> None:
    for quantizer in quantizers:
        assert quantizer.observation is not None
        seen = quantizer.observation.agreed()
        if seen.count:
            quantizer.settle_(seen)
        else:
            _log.warning("calibration never reached the input of layer %s", quantizer.name)


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


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


@contextmanager
def _observing(quantizers: list[InputQuantizer]) -> Iterator[None]:
    for quantizer in quantizers:
        quantizer.observation = quantizer.new_observation()
    try:
        yield
    finally:
        for quantizer in quantizers:
            quantizer.observation = None
