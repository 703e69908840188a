"""The statistics of an activation that calibration collects: sign, mean magnitude, a percentile of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bitplan.quant.lsq import is_dense

_SAMPLE = 1 << 20  # the most values per batch that a percentile is taken of
_LOOP = 1 << 14  # the fewest values that are worth a compiled loop


class Observation:
    """Running statistics over all batches; without a `percentile` none is computed."""

    def __init__(self, percentile: float | None) -> None:
        self._percentile = percentile
        self.count = 0
        self.total = 0.0
        self.lowest = math.inf
        self.percentiles: list[float] = []

    @torch.no_grad()
    def add(self, v: Tensor) -> bool:
        """Add one batch; return False if it has NaN or infinite values."""
        if v.numel() == 0:
            return True
        values = v.detach().float()
        total, lowest = _sum_and_lowest(values)
        if not math.isfinite(total):
            return False
        self.count += v.numel()
        self.total += total
        self.lowest = min(self.lowest, lowest)
        if self._percentile is not None:
            self.percentiles.append(_percentile(values, self._percentile))
        return True

    @property
    def mean_magnitude(self) -> float:
        """The mean of |v| over all batches."""
        return self.total / max(1, self.count)

    @property
    def percentile_magnitude(self) -> float:
        """The percentile of |v|, averaged over batches."""
        return sum(self.percentiles) / max(1, len(self.percentiles))

    def agreed(self) -> Observation:
        """Return the statistics over all processes of a distributed run, so that replicas start with equal scales."""
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
            return self
        device = torch.device("cuda") if distributed.get_backend() == "nccl" else torch.device("cpu")
        sums = torch.tensor(
            [self.count, self.total, self.percentile_magnitude, 1.0], dtype=torch.float64, device=device
        )
        lowest = torch.tensor(self.lowest, dtype=torch.float64, device=device)
        distributed.all_reduce(sums)
        distributed.all_reduce(lowest, op=distributed.ReduceOp.MIN)
        whole = Observation(self._percentile)
        whole.count, whole.total, whole.lowest = int(sums[0].item()), sums[1].item(), lowest.item()
        whole.percentiles = [(sums[2] / sums[3]).item()]
        return whole


def _sum_and_lowest(values: Tensor) -> tuple[float, float]:
    if not _is_for_loops(values):
        return values.abs().sum(dtype=torch.float64).item(), values.min().item()
    from bitplan.quant import numba_loops

    return numba_loops.sum_and_lowest(values)


def _percentile(values: Tensor, percentile: float) -> float:
    """Return the percentile of the magnitudes, of an even sample if there are many values; it is one of them."""
    every = math.ceil(values.numel() / _SAMPLE)
    sample = values if every == 1 else values.flatten()[::every].contiguous()
    rank = max(1, math.ceil(sample.numel() * percentile / 100))
    if not _is_for_loops(sample):
        return sample.abs().flatten().kthvalue(rank).values.item()
    from bitplan.quant import numba_loops

    return numba_loops.order_statistic(sample, rank)


def _is_for_loops(values: Tensor) -> bool:
    return values.numel() >= _LOOP and values.device.type == "cpu" and type(values) is Tensor and is_dense(values)
