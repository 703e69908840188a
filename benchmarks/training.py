"""A training step as benchmarks measure it: its CPU time, and the memory that its process holds.

This file imports torch alone, so that it runs in the environment of every library.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""An environment in which glibc gives freed blocks of 64 kB and more back to the system at once."""

Loss = Callable[[nn.Module], Tensor]


class Trainer:
    """A model, its optimizer and one step of training."""

    def __init__(self, model: nn.Module, parameters: Any, loss: Loss) -> None:
        self.model = model
        self.loss = loss
        self.optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)

    def step(self) -> float:
        """Train once and return the CPU seconds."""
        start = time.process_time()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(self.model).backward()
        self.optimizer.step()
        return time.process_time() - start

    def memory(self) -> dict[str, float]:
        """Return the MB by which the resident memory grows: `held` until the forward pass ends, `peak` of the step.

        It needs Linux and a process that was started with GIVE_BACK, and two steps before it.
        """
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _resident("VmRSS")
        loss = self.loss(self.model)
        held = _resident("VmRSS") - before
        loss.backward()
        peak = _resident("VmHWM") - before
        self.optimizer.step()
        return {"held": held, "peak": peak}


def _resident(field: str) -> float:
    """Return a field of /proc/self/status in MB."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024 / 1e6
