"""The two modules that quantize: one for weights, one for inputs (which linked layers share).

Both are LSQ's, with a learned step. Other methods (`quant/methods/`) derive theirs from them, and say of each how it
makes codes of values, and which levels the codes stand for.
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
from bitplan.core.naming import inside
from bitplan.quant.lsq import MASK, codes, first_step, lsq, positive
from bitplan.quant.observe import Observation

# --- What all modules that quantize have in common, whichever method they are of.

Features = Literal["sample", "batch"]
"""What N counts in the gradient scale of an input step."""

unseen = torch._C.DisableTorchFunction
"""A context in which functions of torch are called past the modes that see them (`quant/call_interception.py`)."""


class QuantizingModule(nn.Module):
    """A model that is cast to half precision keeps their steps, as codes depend on them.

    The buffer `saved_bits` puts the bits into every state dict, so that one of another plan is refused. It is a float
    because averages of networks (EMA) are computed of all tensors.
    """

    saved_bits: Tensor

    uniform = True
    """Whether levels are multiples of a step (plus `offset` of it), and the code of an input is the nearest of them."""
    decay = 0.0
    """The weight decay of what is learned here, which is that of no other parameter."""

    @property
    def bits(self) -> int:
        """So many bits a value has."""
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
            made = fn(tensor)
            return tensor.to(made.device) if made.dtype in (torch.float16, torch.bfloat16) else made

        super()._apply(wide, recurse)
        return self


def gradient_scale(sharing: int, high: int) -> float:
    """What a step's gradient is multiplied by, 1/√(N·Qp) for N values that share it (LSQ, section 2.2)."""
    return 1 / math.sqrt(max(1, sharing) * high)


def why_no_multiples(quantizer: QuantizingModule) -> str:
    """Why levels are not the multiples of a step that other programs know; empty where they are."""
    if not quantizer.uniform:
        return "its levels are not equally far apart"
    if getattr(quantizer, "grouped", False):
        return "groups of its inputs have steps of their own"
    return "none of its levels is zero, with zero=true one is" if getattr(quantizer, "offset", 0.0) else ""


class WeightQuantizer(QuantizingModule):
    """Signed codes with one step, or one per output channel: weight → fake-quantized, of the same shape.

    A step with one dimension more than the weight belongs to groups: the weight's first axis is split for it.
    """

    integer = False
    """Whether the bias added to its products is rounded to their grid (`quant/scales.py`)."""
    offset = 0.0
    """What is added to a code before it is multiplied by the step: ½ where no level is zero."""
    follows: ClassVar[bool] = False
    """Whether levels follow from the weight itself, so that `step` is 0 (`plugins/quantizers/derived_scale.py`)."""
    grouped: ClassVar[bool] = False
    """Whether groups of inputs have steps of their own, so that only whole weights are quantized."""

    def __init__(self, bits: int, step: Tensor, *, learned: bool = True) -> None:
        super().__init__()
        self.bits = bits
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
    def values(self, codes: Tensor) -> Tensor:
        """What codes of a whole weight stand for, where levels do not follow from it."""
        return (codes + self.offset) * self.steps_for(codes)

    @torch.no_grad()
    def in_use(self, weight: Tensor) -> Tensor:
        """The steps that this weight is quantized with, of the shape of `step`."""
        return positive(self.step.detach())

    def pinned(self, weight: Tensor) -> WeightQuantizer:
        """What quantizes values that are on the levels of this weight already."""
        return self

    @torch.no_grad()
    def levels(self, weight: Tensor) -> Tensor:
        """What every code of `range` stands for: (codes,) where all of the weight has one set, else (…, codes)."""
        low, high = self.range
        codes = torch.arange(low, high + 1, device=weight.device, dtype=torch.float32)
        return (codes + self.offset) * self.steps_for(weight).unsqueeze(-1)

    @torch.no_grad()
    def steps_for(self, weight: Tensor) -> Tensor:
        """The steps in use, a scalar or of a shape that broadcasts against the weight's codes."""
        step = self.in_use(weight)
        if step.dim() <= weight.dim():
            return step
        groups = step.shape[0]  # step (groups, 1, …)
        rows_each = weight.shape[0] // groups
        return step.expand(groups, rows_each, *step.shape[2:]).flatten(0, 1)

    @torch.no_grad()
    def take_(self, kept: WeightQuantizer) -> None:
        """Go on with the steps of another quantizer of the same bits, where both have such; from one per channel to
        one, with their mean."""
        if kept.follows == self.follows and kept.uniform:
            before = kept.step.detach()
            fits = before.shape == self.step.shape or before.numel() == 1
            self.step.copy_(before.expand_as(self.step) if fits else before.mean())

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


class InputQuantizer(QuantizingModule):
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
        """Make the tensor that says how far levels are apart."""
        self.step = nn.Parameter(torch.ones(()), requires_grad=learned)

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
        with unseen():
            return self._quantized(v, *self._range, times)

    def _quantized(self, v: Tensor, low: int, high: int, times: int) -> Tensor:
        """What the levels from `low` to `high` make of values, with gradients for both."""
        count = v.numel() * times
        if self.features == "sample" and v.dim() > 1:
            count //= max(1, v.shape[0])
        scale = gradient_scale(count, high)
        return lsq(v, self.step, low, high, scale, masked=self.masked)

    @torch.no_grad()
    def codes(self, v: Tensor) -> Tensor:
        """The codes of values, as floats."""
        assert self.range is not None, "it is calibrated before codes are asked for"
        return codes(v, self.step, *self.range)

    @torch.no_grad()
    def levels(self) -> Tensor:
        """What every code of `range` stands for: (codes,)."""
        assert self.range is not None, "it is calibrated before levels are asked for"
        low, high = self.range
        return torch.arange(low, high + 1, device=self.signed.device) * positive(self.step.detach())

    def new_observation(self) -> Observation:
        """An empty memory of what `settle_` asks for."""
        return Observation(None)

    @torch.no_grad()
    def settle_(self, seen: Observation) -> None:
        """Set sign and step from what was seen."""
        signed = seen.lowest < 0
        _, high = code_range(self.bits, signed)
        step = self._first_step(seen, high)
        self._settle_at_(signed, positive(step).item() if step > 0 else 1 / high)

    def _first_step(self, seen: Observation, high: int) -> Tensor:
        """The step to begin with: LSQ's."""
        return first_step(torch.tensor(seen.mean_magnitude), high)

    def _settle_at_(self, signed: bool, step: float) -> None:
        self.step.fill_(step)
        self.signed.fill_(float(signed))
        self._range = code_range(self.bits, signed)

    @torch.no_grad()
    def take_(self, kept: InputQuantizer) -> None:
        """Go on with what another quantizer of the same bits has learned: all of it where it is of this kind."""
        if self.state_dict().keys() == kept.state_dict().keys():
            self.load_state_dict(kept.state_dict())
        elif kept.range is not None and kept.uniform:
            self._settle_at_(kept.range[0] < 0, positive(kept.step.detach()).item())

    @torch.no_grad()
    def rescale_(self, bits: int) -> None:
        """Change the precision and multiply the step by 2^(b1−b2); the sign stays."""
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


def _grouped(weight: Tensor, step: Tensor) -> Tensor:
    """A weight (rows, …) as (groups, rows of each, …) where the step belongs to groups."""
    return weight if step.dim() <= weight.dim() else weight.view(step.shape[0], -1, *weight.shape[1:])


# --- One name in a state dict for each tensor of a quantizer, however many layers share it.


def save_once_(model: nn.Module) -> None:
    """Let the state dict of a model, or of whatever wraps it, name the tensors of its quantizers once."""
    model.register_state_dict_post_hook(_leave_out)
    model.register_load_state_dict_pre_hook(_fill_in)


def further_names(model: nn.Module) -> dict[str, str]:
    """Every name of a quantizer's tensor that a state dict leaves out, and the one under which it is there."""
    first: dict[nn.Module, str] = {}
    further: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, WeightQuantizer | InputQuantizer) and first.setdefault(module, path) != path:
            names = [*module._parameters, *module._buffers]
            further |= {inside(path, name): inside(first[module], name) for name in names}
    return further


def state_in_full(model: nn.Module) -> dict[str, Tensor]:
    """The model's state under all names, in the order of a state dict."""
    state: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        module._save_to_state_dict(state, inside(path, ""), True)
    return state


# Both are found by their names when a model is unpickled.
def _leave_out(model: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    for name in further_names(model):
        state.pop(prefix + name, None)


def _fill_in(model: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for name, first in further_names(model).items():
        known = state.get(prefix + first, state.get(prefix + name))
        if known is not None:
            state[prefix + first] = state[prefix + name] = known
