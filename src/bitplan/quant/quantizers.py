"""The two modules that hold a step: one for weights, one for inputs (which linked layers share)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, Self

import torch
from torch import Tensor, nn

from bitplan.core.codes import code_range
from bitplan.core.errors import InputError
from bitplan.quant.lsq import MASK, codes, first_step, lsq, positive
from bitplan.quant.observe import Observation

Method = Literal["lsq", "faq"]
Features = Literal["sample", "batch"]

unseen = torch._C.DisableTorchFunction
"""A context in which functions of torch are called past the modes that see them (`quant/owners.py`)."""


class _Quantizer(nn.Module):
    """What both have in common: a model that is cast to half precision keeps their steps, as codes depend on them."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def wide(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            return tensor.to(made.device) if made.dtype in (torch.float16, torch.bfloat16) else made

        super()._apply(wide, recurse)
        return self


class WeightQuantizer(_Quantizer):
    """Signed codes with one step, or one per output channel: weight → fake-quantized, of the same shape.

    A step with one dimension more than the weight belongs to groups: the weight's first axis is split for it.
    """

    integer = False
    """Whether the bias added to its products is rounded to their grid (`quant/grids.py`)."""

    def __init__(self, bits: int, step: Tensor, *, learned: bool = True, fused: bool = False) -> None:
        super().__init__()
        self.bits = bits
        self.fused = fused
        self.enabled = True
        self.step = nn.Parameter(step.detach().clone(), requires_grad=learned)
        self.first_step: Callable[[Tensor], Tensor] | None = None
        """How the step follows from a weight that is known only as the network runs, until it has."""

    @property
    def range(self) -> tuple[int, int]:
        """Lowest and highest code."""
        return code_range(self.bits, signed=True)

    def forward(self, weight: Tensor, *, numel: int | None = None, step: Tensor | None = None) -> Tensor:
        """Quantize a weight, or rows of it: then `numel` is the whole weight's, `step` the rows' steps."""
        if not self.enabled:
            return weight
        with unseen():
            if self.first_step is not None:
                self._start(weight)
            step = self.step if step is None else step
            low, high = self.range
            elements = weight.numel() if numel is None else numel
            scale = _gradient_scale(elements // max(1, self.step.numel()), high)
            if step.dim() <= weight.dim():
                return lsq(weight, step, low, high, scale, fused=self.fused)
            return lsq(_grouped(weight, step), step, low, high, scale).view(weight.shape)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _start(self, weight: Tensor) -> None:
        assert self.first_step is not None
        step = self.first_step(weight)
        if step.shape != self.step.shape:
            raise InputError(
                f"a weight that is computed as {tuple(weight.shape)} cannot have steps of its own for "
                f"{self.step.numel()} channels: quantize with per_channel=False"
            )
        self.step.copy_(step)
        self.first_step = None

    @torch.no_grad()
    def codes(self, weight: Tensor) -> Tensor:
        """The integer codes of a weight: int8 up to 8 bits, else int16."""
        rounded = codes(_grouped(weight.detach(), self.step), self.step, *self.range)
        return rounded.reshape(weight.shape).to(torch.int8 if self.bits <= 8 else torch.int16)

    @torch.no_grad()
    def steps_for(self, weight: Tensor) -> Tensor:
        """The steps in use, a scalar or of a shape that broadcasts against the weight's codes."""
        step = positive(self.step.detach())
        if step.dim() <= weight.dim():
            return step
        groups = step.shape[0]  # step (groups, 1, …)
        rows_each = weight.shape[0] // groups
        return step.expand(groups, rows_each, *step.shape[2:]).flatten(0, 1)

    @torch.no_grad()
    def rescale_(self, bits: int) -> None:
        """Change the precision and multiply the step by 2^(b1−b2), so that the range stays where it was."""
        self.step.mul_(2.0 ** (self.bits - bits))
        self.bits = bits

    def _load_from_state_dict(self, *arguments, **options) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN002, ANN003
        super()._load_from_state_dict(*arguments, **options)
        self.first_step = None

    def extra_repr(self) -> str:
        """Bits and number of steps."""
        return f"bits={self.bits}, steps={self.step.numel()}"


class InputQuantizer(_Quantizer):
    """One step for an activation; its value and its sign come from calibration or the first training batch.

    The buffer `signed` is −1 until then, afterwards 0 or 1; a buffer follows checkpoints, averages and
    replicas.
    """

    signed: Tensor

    def __init__(
        self,
        bits: int,
        name: str,
        *,
        method: Method = "lsq",
        percentile: float = 99.9,
        features: Features = "sample",
        fused: bool = False,
        masked: bool = False,
    ) -> None:
        super().__init__()
        self.bits = bits
        self.name = name
        self.method = method
        self.percentile = percentile
        self.features = features
        self.fused = fused
        self.masked = masked
        self.enabled = True
        self.observation: Observation | None = None
        self.step = nn.Parameter(torch.ones(()), requires_grad=method == "lsq")
        self.register_buffer("signed", torch.tensor(-1.0))
        self._range: tuple[int, int] | None = None

    @property
    def range(self) -> tuple[int, int] | None:
        """Lowest and highest code, or None until the sign is known."""
        if self._range is None:
            self._read_sign()
        return self._range

    @property
    def quantizes(self) -> bool:
        """Whether a step is set and in use: not while it is switched off or calibrating."""
        return self.enabled and self.observation is None and self._range is not None

    def forward(self, v: Tensor, *, times: int = 1) -> Tensor:
        """Fake-quantize; while calibrating, look and pass on. `times` says how often for each sample."""
        if not self.enabled or not v.is_floating_point():
            return v
        if self.observation is not None:
            self._look(self.observation, v)
            return v
        if self._range is None:
            self._start(v)
        if self._range is None:  # nothing was said of its size yet
            return v
        low, high = self._range
        count = v.numel() * times
        if self.features == "sample" and v.dim() > 1:
            count //= max(1, v.shape[0])
        scale = _gradient_scale(count, high)
        with unseen():
            return lsq(v, self.step, low, high, scale, fused=self.fused, masked=self.masked)

    def new_observation(self) -> Observation:
        """An empty memory of what `settle_` asks for: a percentile only for FAQ."""
        return Observation(self.percentile if self.method == "faq" else None)

    @torch.no_grad()
    def settle_(self, seen: Observation) -> None:
        """Set sign and step from what was seen: LSQ's first step, or for FAQ a percentile of |v| over Qp."""
        signed = seen.lowest < 0
        low, high = code_range(self.bits, signed)
        if self.method == "lsq":
            step = first_step(torch.tensor(seen.mean_magnitude), high)
        else:
            step = torch.tensor(seen.percentile_magnitude / high)
        self.step.fill_(positive(step).item() if step > 0 else 1 / high)
        self.signed.fill_(float(signed))
        self._range = (low, high)

    @torch.no_grad()
    def rescale_(self, bits: int) -> None:
        """Change the precision and multiply the step by 2^(b1−b2); the sign stays."""
        self.step.mul_(2.0 ** (self.bits - bits))
        self.bits = bits
        self._range = None
        self._read_sign()

    # It reads values, so it is not compiled; it runs once, which costs one graph break in the first step.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _start(self, v: Tensor) -> None:
        self._read_sign()
        if self._range is not None or v.numel() == 0 or v.is_meta:  # tensors without data say nothing of their size
            return
        if not self.training:
            if not v.any():  # zeros, such as a first hidden state: any step leaves them as they are
                return
            raise InputError(
                f"the input step of layer {self.name!r} is not set: call calibrate_(model, batches), or "
                "train for one batch, before the model is evaluated"
            )
        seen = self.new_observation()
        self._look(seen, v)
        seen = seen.agreed()
        if seen.mean_magnitude > 0:
            self.settle_(seen)

    def _look(self, seen: Observation, v: Tensor) -> None:
        if not seen.add(v[v >= MASK] if self.masked else v):
            raise InputError(
                f"the input of layer {self.name!r} has NaN or infinite values, so its step cannot be set; "
                "check the data and the layers before it"
            )

    def _read_sign(self) -> None:
        if self.signed.is_meta or self.signed.item() < -0.5:
            return
        self._range = code_range(self.bits, signed=self.signed.item() > 0.5)

    def _load_from_state_dict(self, *arguments, **options) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN002, ANN003
        super()._load_from_state_dict(*arguments, **options)
        self._range = None
        self._read_sign()

    def extra_repr(self) -> str:
        """Bits and sign."""
        if self._range is None:
            return f"bits={self.bits}, not calibrated"
        lowest, _ = self._range
        return f"bits={self.bits}, {'signed' if lowest else 'unsigned'}"


def _gradient_scale(sharing: int, high: int) -> float:
    """What a step's gradient is multiplied by, 1/√(N·Qp) for N values that share it (LSQ, section 2.2)."""
    return 1 / math.sqrt(max(1, sharing) * high)


def _grouped(weight: Tensor, step: Tensor) -> Tensor:
    """A weight (rows, …) as (groups, rows of each, …) where the step belongs to groups."""
    return weight if step.dim() <= weight.dim() else weight.view(step.shape[0], -1, *weight.shape[1:])


def weight_step(weight: Tensor, bits: int, dims: tuple[int, ...], percentile: float | None = None) -> Tensor:
    """The first step of a weight, reduced over `dims`: LSQ's, or for FAQ a percentile of |w| over Qp.

    Weights that are all zero (or none) get the step of weights as an initializer makes them, 1/√fan-in.
    """
    if weight.is_complex():
        raise InputError(
            "the plan quantizes weights that are complex numbers, which have no steps: make it from a graph of this "
            "model, with trace(model, example), which leaves them alone"
        )
    _, high = code_range(bits, signed=True)
    fan_in = math.prod(weight.shape[1:]) if weight.dim() > 1 else weight.numel()
    magnitude = _magnitude(weight.detach(), dims, percentile)
    magnitude = torch.where(magnitude > 0, magnitude, 1 / math.sqrt(max(1, fan_in)))
    step = first_step(magnitude, high) if percentile is None else magnitude / high
    return step.reshape(()) if len(dims) == weight.dim() else step


def _magnitude(weight: Tensor, dims: tuple[int, ...], percentile: float | None) -> Tensor:
    """The mean of |w| over `dims`, or a percentile of it; these axes have length 1 then."""
    shape = [1 if axis in dims else size for axis, size in enumerate(weight.shape)]
    if weight.numel() == 0:
        return torch.zeros(shape)
    magnitudes = weight.float().abs()
    if percentile is None:
        return magnitudes.mean(dim=dims, keepdim=True)
    kept = [axis for axis in range(weight.dim()) if axis not in dims]
    rows = magnitudes.permute(*kept, *dims).flatten(len(kept))  # (kept axes …, values that share a step)
    rank = max(1, math.ceil(rows.shape[-1] * percentile / 100))
    return rows.kthvalue(rank, dim=-1).values.view(shape)
