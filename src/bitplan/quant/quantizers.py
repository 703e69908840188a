"""The two modules that quantize: one for weights, one for inputs (which linked layers share).

Both are LSQ's, with a learned scale. Other methods derive theirs from them, and say for each how values become integer
values, and which levels these stand for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from bitplan.adapters.torch import uncompiled
from bitplan.core.codes import code_range
from bitplan.core.errors import InputError
from bitplan.core.naming import join_names
from bitplan.quant.lsq import MASK, codes, first_scale, lsq, positive_scale
from bitplan.quant.observe import Observation

# What all modules that quantize have in common, whichever method they are of.

Features = Literal["sample", "batch"]
"""What N counts in the gradient scale of an input step."""

unseen = torch._C.DisableTorchFunction
"""A context in which functions of torch are called past the modes that see them (`quant/call_interception.py`)."""


class QuantizingModule(nn.Module):
    """A quantizer, of any method. Casting a model to half precision keeps its scales, which integer values depend on.

    The buffer `saved_bits` puts the bits into every state dict, so that one of another plan is refused. It is a float
    because averages of networks (EMA) are computed of all tensors.
    """

    saved_bits: Tensor

    uniform = True
    """True if levels are multiples of a scale (plus `offset` of it), and an input gets the nearest of them."""
    decay = 0.0
    """The weight decay of the parameters of this quantizer alone."""

    @property
    def bits(self) -> int:
        """The number of bits of a value."""
        return self._bits

    @bits.setter
    def bits(self, bits: int) -> None:
        self._bits = bits
        if "saved_bits" in self._buffers:
            self.saved_bits.fill_(bits)
        else:
            self.register_buffer("saved_bits", torch.tensor(float(bits)))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any, **options: Any) -> None:
        saved = state_dict.get(f"{prefix}saved_bits")
        if saved is not None and not saved.is_meta and round(saved.item()) != self.bits:
            path = prefix.removesuffix(".")
            raise InputError(
                f"{path} has {round(saved.item())} bits in this state dict and {self.bits} in the model: quantize the "
                "float model by the plan that the state dict was saved under, then load it"
            )
        super()._load_from_state_dict(state_dict, prefix, *others, **options)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def wide(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            return tensor.to(changed.device) if changed.dtype in (torch.float16, torch.bfloat16) else changed

        super()._apply(wide, recurse)
        return self


def gradient_scale(sharing: int, high: int) -> float:
    """Return the factor of a scale's gradient, 1/√(N·Qp) for N values that share it (LSQ, section 2.2)."""
    return 1 / math.sqrt(max(1, sharing) * high)


def why_not_uniform(quantizer: QuantizingModule) -> str:
    """Return the reason why levels are not multiples of a scale, as other programs need; empty if they are."""
    if not quantizer.uniform:
        return "its levels are not equally far apart"
    if getattr(quantizer, "grouped", False):
        return "groups of its inputs have scales of their own"
    return "none of its levels is zero, with zero=true one is" if getattr(quantizer, "offset", 0.0) else ""


class WeightQuantizer(QuantizingModule):
    """Signed integer values with one scale, or one per output channel: weight → fake-quantized, of the same shape.

    A scale with one dimension more than the weight belongs to groups: the weight's first axis is split for it.
    """

    integer = False
    """True if the bias added to its products is rounded to their grid (`quant/scales.py`)."""
    offset = 0.0
    """The term added to an integer value before it is multiplied by the scale: ½ if no level is zero."""
    follows: ClassVar[bool] = False
    """True if levels follow from the weight itself, so that `step` is 0 (`plugins/quantizers/derived_scale.py`)."""
    grouped: ClassVar[bool] = False
    """True if groups of inputs have scales of their own, so that only whole weights are quantized."""

    def __init__(self, bits: int, step: Tensor, *, learned: bool = True) -> None:
        super().__init__()
        self.bits = bits
        self.enabled = True
        self.step = nn.Parameter(step.detach().clone(), requires_grad=learned)
        self.first_step: Callable[[Tensor], Tensor] | None = None
        """Computes the scale of a weight that is known only as the network runs; None once it has."""

    @property
    def range(self) -> tuple[int, int]:
        """Lowest and highest integer value."""
        return code_range(self.bits, signed=True)

    def forward(self, weight: Tensor, *, numel: int | None = None, step: Tensor | None = None) -> Tensor:
        """Quantize a weight, or rows of it: then `numel` is the whole weight's, `step` the rows' scales."""
        if not self.enabled:
            return weight
        with unseen():
            if self.first_step is not None:
                self._start(weight)
            step = self.step if step is None else step
            low, high = self.range
            elements = weight.numel() if numel is None else numel
            scale = gradient_scale(elements // max(1, self.step.numel()), high)
            if step.dim() <= weight.dim():
                return lsq(weight, step, low, high, scale)
            return lsq(_grouped(weight, step), step, low, high, scale).view(weight.shape)

    @uncompiled
    @torch.no_grad()
    def _start(self, weight: Tensor) -> None:
        assert self.first_step is not None
        step = self.first_step(weight)
        if step.shape != self.step.shape:
            raise InputError(
                f"a weight that is computed as {tuple(weight.shape)} cannot have scales of its own for "
                f"{self.step.numel()} channels: quantize with per_channel=False"
            )
        self.step.copy_(step)
        self.first_step = None

    @torch.no_grad()
    def codes(self, weight: Tensor) -> Tensor:
        """Return the integer values of a weight: int8 up to 8 bits, else int16."""
        rounded = codes(_grouped(weight.detach(), self.step), self.step, *self.range)
        return rounded.reshape(weight.shape).to(torch.int8 if self.bits <= 8 else torch.int16)

    @torch.no_grad()
    def values(self, codes: Tensor) -> Tensor:
        """Return the values that the integers of a whole weight stand for, unless levels follow from it."""
        return (codes + self.offset) * self.steps_for(codes)

    @torch.no_grad()
    def in_use(self, weight: Tensor) -> Tensor:
        """Return the scales that this weight is quantized with, of the shape of `step`."""
        return positive_scale(self.step.detach())

    def pinned(self, weight: Tensor) -> WeightQuantizer:
        """Return the quantizer of values that are on the levels of this weight already."""
        return self

    @torch.no_grad()
    def levels(self, weight: Tensor) -> Tensor:
        """Return the value of every integer in `range`: (integers,) if the weight has one set, else (…, integers)."""
        low, high = self.range
        codes = torch.arange(low, high + 1, device=weight.device, dtype=torch.float32)
        return (codes + self.offset) * self.steps_for(weight).unsqueeze(-1)

    @torch.no_grad()
    def steps_for(self, weight: Tensor) -> Tensor:
        """Return the scales in use, a scalar or of a shape that broadcasts against the weight's integer values."""
        step = self.in_use(weight)
        if step.dim() <= weight.dim():
            return step
        groups = step.shape[0]  # step (groups, 1, …)
        rows_each = weight.shape[0] // groups
        return step.expand(groups, rows_each, *step.shape[2:]).flatten(0, 1)

    @torch.no_grad()
    def take_(self, kept: WeightQuantizer) -> None:
        """Go on with the scales of another quantizer of the same bits, if both have such.

        From one scale per channel to one scale, take the mean.
        """
        if kept.follows == self.follows and kept.uniform:
            before = kept.step.detach()
            fits = before.shape == self.step.shape or before.numel() == 1
            self.step.copy_(before.expand_as(self.step) if fits else before.mean())

    @torch.no_grad()
    def rescale_(self, bits: int) -> None:
        """Change the precision and multiply the scale by 2^(b1−b2), so that the range stays where it was."""
        self.step.mul_(2.0 ** (self.bits - bits))
        self.bits = bits

    def _load_from_state_dict(self, *arguments, **options) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN002, ANN003
        super()._load_from_state_dict(*arguments, **options)
        self.first_step = None

    def extra_repr(self) -> str:
        """Return bits and number of scales."""
        return f"bits={self.bits}, scales={self.step.numel()}"


class InputQuantizer(QuantizingModule):
    """One scale for an activation; its value and its sign come from calibration or the first training batch.

    The buffer `signed` is −1 until then, afterwards 0 or 1; a buffer follows checkpoints, averages and
    replicas.
    """

    signed: Tensor

    def __init__(
        self,
        bits: int,
        name: str,
        *,
        features: Features = "sample",
        masked: bool = False,
        learned: bool = True,
    ) -> None:
        super().__init__()
        self.bits = bits
        self.name = name
        self.features = features
        self.masked = masked
        self.enabled = True
        self.observation: Observation | None = None
        self._hold_(learned)
        self.register_buffer("signed", torch.tensor(-1.0))
        self._range: tuple[int, int] | None = None

    def _hold_(self, learned: bool) -> None:
        """Create the tensor that holds the scale."""
        self.step = nn.Parameter(torch.ones(()), requires_grad=learned)

    @property
    def range(self) -> tuple[int, int] | None:
        """Lowest and highest integer value, or None until the sign is known."""
        if self._range is None:
            self._read_sign()
        return self._range

    @property
    def quantizes(self) -> bool:
        """True if a scale is set and in use: not while the quantizer is switched off or calibrating."""
        return self.enabled and self.observation is None and self._range is not None

    def forward(self, v: Tensor, *, times: int = 1) -> Tensor:
        """Fake-quantize a tensor; while calibrating, observe it and pass it on. `times` is how often per sample."""
        if not self.enabled or not v.is_floating_point():
            return v
        if self.observation is not None:
            self._look(self.observation, v)
            return v
        if self._range is None:
            self._start(v)
        if self._range is None:  # nothing was said of its size yet
            return v
        with unseen():
            return self._quantized(v, *self._range, times)

    def _quantized(self, v: Tensor, low: int, high: int, times: int) -> Tensor:
        """Quantize to the levels from `low` to `high`, with gradients for values and scale."""
        count = v.numel() * times
        if self.features == "sample" and v.dim() > 1:
            count //= max(1, v.shape[0])
        scale = gradient_scale(count, high)
        return lsq(v, self.step, low, high, scale, masked=self.masked)

    @torch.no_grad()
    def codes(self, v: Tensor) -> Tensor:
        """Return the integer values of a tensor, as floats."""
        assert self.range is not None, "it is calibrated before codes are asked for"
        return codes(v, self.step, *self.range)

    @torch.no_grad()
    def levels(self) -> Tensor:
        """Return the value of every integer in `range`: (integers,)."""
        assert self.range is not None, "it is calibrated before levels are asked for"
        low, high = self.range
        return torch.arange(low, high + 1, device=self.signed.device) * positive_scale(self.step.detach())

    def new_observation(self) -> Observation:
        """Return an empty observation of the statistics that `settle_` needs."""
        return Observation(None)

    @torch.no_grad()
    def settle_(self, seen: Observation) -> None:
        """Set sign and scale from an observation."""
        signed = seen.lowest < 0
        _, high = code_range(self.bits, signed)
        step = self._first_step(seen, high)
        self._settle_at_(signed, positive_scale(step).item() if step > 0 else 1 / high)

    def _first_step(self, seen: Observation, high: int) -> Tensor:
        """Return the first scale: LSQ's."""
        return first_scale(torch.tensor(seen.mean_magnitude), high)

    def _settle_at_(self, signed: bool, step: float) -> None:
        self.step.fill_(step)
        self.signed.fill_(float(signed))
        self._range = code_range(self.bits, signed)

    @torch.no_grad()
    def take_(self, kept: InputQuantizer) -> None:
        """Go on with the state of another quantizer of the same bits: all of it if it is of this kind."""
        if self.state_dict().keys() == kept.state_dict().keys():
            self.load_state_dict(kept.state_dict())
        elif kept.range is not None and kept.uniform:
            self._settle_at_(kept.range[0] < 0, positive_scale(kept.step.detach()).item())

    @torch.no_grad()
    def rescale_(self, bits: int) -> None:
        """Change the precision and multiply the scale by 2^(b1−b2); the sign stays."""
        self.step.mul_(2.0 ** (self.bits - bits))
        self.bits = bits
        self._range = None
        self._read_sign()

    # It reads values, so it is not compiled; it runs once, which costs one graph break in the first step.
    @uncompiled
    def _start(self, v: Tensor) -> None:
        self._read_sign()
        if self._range is not None or v.numel() == 0 or v.is_meta:  # tensors without data say nothing of their size
            return
        if not self.training:
            if not v.any():  # zeros, such as a first hidden state: any step leaves them as they are
                return
            raise InputError(
                f"the input scale of layer {self.name!r} is not set: call calibrate_(model, batches), or "
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
                f"the input of layer {self.name!r} has NaN or infinite values, so its scale cannot be set; "
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
        """Return bits and sign."""
        if self._range is None:
            return f"bits={self.bits}, not calibrated"
        lowest, _ = self._range
        return f"bits={self.bits}, {'signed' if lowest else 'unsigned'}"


def _grouped(weight: Tensor, step: Tensor) -> Tensor:
    """Return a weight (rows, …) as (groups, rows of each, …) if the scale belongs to groups."""
    return weight if step.dim() <= weight.dim() else weight.view(step.shape[0], -1, *weight.shape[1:])


# One name in a state dict for each tensor of a quantizer, however many layers share it.


def save_once_(model: nn.Module) -> None:
    """Let the state dict of a model, and of its wrappers, name the tensors of its quantizers once."""
    model.register_state_dict_post_hook(_leave_out)
    model.register_load_state_dict_pre_hook(_fill_in)


def find_shared_names(model: nn.Module) -> dict[str, str]:
    """Map every name of a quantizer's tensor that a state dict leaves out to the name under which it is there."""
    first: dict[nn.Module, str] = {}
    further: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, WeightQuantizer | InputQuantizer) and first.setdefault(module, path) != path:
            names = [*module._parameters, *module._buffers]
            further |= {join_names(path, name): join_names(first[module], name) for name in names}
    return further


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's state under all names, in the order of a state dict."""
    state: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        module._save_to_state_dict(state, join_names(path, ""), True)
    return state


# Both are found by their names when a model is unpickled.
def _leave_out(model: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    for name in find_shared_names(model):
        state.pop(prefix + name, None)


def _fill_in(model: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for name, first in find_shared_names(model).items():
        known = state.get(prefix + first, state.get(prefix + name))
        if known is not None:
            state[prefix + first] = state[prefix + name] = known
