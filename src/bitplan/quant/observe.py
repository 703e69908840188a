"""What calibration remembers of an activation: sign, mean magnitude, a percentile of the magnitude."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SAMPLE = 1 << 20  # the most values per batch that a percentile is taken of


class Observation:
    """Running figures over all batches seen; `percentile` None leaves that one out."""

    def __init__(self, percentile: float | None) -> None:
        self._percentile = percentile
        self.count = 0
        self.total = 0.0
        self.lowest = math.inf
        self.percentiles: list[float] = []

    @torch.no_grad()
    def add(self, v: Tensor) -> bool:
        """Take in one batch; False if it has NaN or infinite values."""
        if v.numel() == 0:
            return True
        values = v.detach().float()
        magnitude = values.abs()
        total = magnitude.sum(dtype=torch.float64).item()
        if not math.isfinite(total):
            return False
        self.count += v.numel()
        self.total += total
        self.lowest = min(self.lowest, values.min().item())
        if self._percentile is not None:
            sample = magnitude.flatten()[:: math.ceil(v.numel() / _SAMPLE)]
            rank = max(1, math.ceil(sample.numel() * self._percentile / 100))
            self.percentiles.append(sample.kthvalue(rank).values.item())
        return True

    @property
    def mean_magnitude(self) -> float:
        """Mean of |v| over everything seen."""
        return self.total / max(1, self.count)

    @property
    def percentile_magnitude(self) -> float:
        """The percentile of |v|, averaged over batches."""
        return sum(self.percentiles) / max(1, len(self.percentiles))

    def agreed(self) -> Observation:
        """The same figures on every process of a distributed run, so that replicas start with equal steps."""
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
