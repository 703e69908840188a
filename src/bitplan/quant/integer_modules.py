"""What the modules of a copy that computes in integers do as they run: layers, norms that are part of one, sequences.

Without data, and with quantizers off, all of them do what those of the quantized network do.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.modules.module import _has_any_global_hook

from bitplan.adapters.torch import uncompiled
from bitplan.core.errors import InputError
from bitplan.quant.kernels import NOTHING, ConvolutionKernel, CutOff, Kernel
from bitplan.quant.layers import Adopted, family
from bitplan.quant.quantizers import InputQuantizer, unseen

_NORMED: Final = "_bitplan_normed"


class IntegerLayer(Adopted):
    """A layer that is computed by its kernel, for inference only."""

    kernel: Kernel
    channels_last: bool
    normed: bool = False
    while_adopted = ("kernel", "channels_last", "normed")

    @uncompiled
    def forward(self, x: Tensor) -> Tensor:
        """Compute in integers; without data, or with quantizers off, as its quantized counterpart does."""
        quantizer = self.quantizer
        if is_fake(x) or not quantizer.enabled:
            counterpart = family(self)
            assert counterpart is not None
            assert counterpart.quantized is not None
            out: Tensor = counterpart.quantized.forward(self, x)
            return out
        if self.training or quantizer.observation is not None:
            raise InputError(
                "this copy computes in integers, which cannot be trained or calibrated: do that with the quantized "
                "model, and make a copy of it again, with integer(model)"
            )
        if x.device.type != "cpu":
            raise InputError(f"a copy that computes in integers runs on the CPU, and its input is on {x.device}")
        with unseen():
            out = _NoGradient.apply(x, self._computed) if _needs_gradient(x) else self._computed(x)
            return _normed(out) if self.normed else out

    @property
    def quantizer(self) -> InputQuantizer:
        """What its input passes through."""
        found: InputQuantizer = self.input_quantizer  # type: ignore[assignment]
        return found

    def _computed(self, x: Tensor) -> Tensor:
        out = self.kernel(x).to(x.dtype)
        both = out.dim() == 4 and (self.channels_last or not x.is_contiguous())
        return out if both else out.contiguous()


class PassedNorm(Adopted):
    """A batch normalization that is part of the convolution before it, where that one was computed by its kernel."""

    @uncompiled
    def forward(self, x: Tensor) -> Tensor:
        """Give back what is normalized already, as another tensor: what becomes of it is not."""
        return x[...] if getattr(x, _NORMED, False) else super().forward(x)


class IntegerSequence(Adopted):
    """Modules one after the other, with as little as possible between the kernels of convolutions that meet there."""

    parts: tuple[list[nn.Module], list[nn.Module | _Together]] | None = None
    """The modules as they were, and what they are run as; a copy finds out by itself."""

    while_adopted = ("parts",)

    def forward(self, x: Any) -> Any:
        """Run all modules; those that torch compiles, or that somebody may look at, one by one."""
        if torch.compiler.is_compiling() or is_fake(x) or _has_any_global_hook():
            return super().forward(x)
        modules = _unrolled(self)
        if self.parts is None or self.parts[0] != modules:
            vars(self)["parts"] = modules, _parts_of(modules)
        assert self.parts is not None
        for part in self.parts[1]:
            x = part(x)
        return x

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "parts"}


class _Together:
    """Convolutions in two dimensions that read each other, with norms that are part of them and ReLUs between them.

    Each cuts off itself what the ReLU behind it would; `behind` has one for each convolution, or None.
    """

    def __init__(self, modules: list[Any], behind: list[nn.Module | None]) -> None:
        self._modules = modules
        self._attributes = [vars(module) for module in modules]
        self._layers = [module for module in modules if isinstance(module, IntegerLayer)]
        self._quantizers = [layer.quantizer for layer in self._layers]
        self._steps = [(layer.kernel, cutting) for layer, cutting in zip(self._layers, behind, strict=True)]
        self._ends_normed = modules[-1] is self._layers[-1] and self._layers[-1].normed

    def __call__(self, x: Tensor) -> Tensor:
        """Run the kernels, or, where that would not be the same or somebody looks at what is between, all modules."""
        if _are_watched(self._attributes) or not self._computes(x):
            for module in self._modules:
                x = module(x)
            return x
        with unseen():
            for kernel, cutting in self._steps:
                x = kernel(x, _cut_off_by(cutting))  # type: ignore[call-arg]
            return _normed(x) if self._ends_normed else x

    def _computes(self, x: Tensor) -> bool:
        """Tell whether every layer would compute in integers what it gets where x is the first one's input."""
        if x.dtype is not torch.float32 or x.dim() != 4 or not x.is_cpu or _needs_gradient(x):
            return False
        at_work = all(one.enabled and one.observation is None for one in self._quantizers)
        return at_work and not any(layer.training for layer in self._layers)


def _unrolled(sequence: nn.Module) -> list[Any]:
    """The modules of a sequence, with those of the sequences in it in their places."""
    found: list[Any] = []
    for module in sequence._modules.values():
        if isinstance(module, IntegerSequence) and not _are_watched([vars(module)]):
            found += _unrolled(module)
        else:
            found.append(module)
    return found


def _parts_of(modules: list[Any]) -> list[nn.Module | _Together]:
    """The modules, those of convolutions that follow each other together."""
    parts: list[nn.Module | _Together] = []
    place = 0
    while place < len(modules):
        start, behind = place, []
        while place < len(modules) and _can_be_joined(modules[place]):
            layer, place = modules[place], place + 1
            if layer.normed and place < len(modules) and isinstance(modules[place], PassedNorm):
                place += 1
            cuts = place < len(modules) and type(modules[place]) in _CUTTING
            behind.append(modules[place] if cuts else None)
            place += cuts
        parts.append(_Together(modules[start:place], behind) if behind else modules[place])
        place += not behind
    return parts


def _can_be_joined(module: Any) -> bool:
    kernel = module.kernel if isinstance(module, IntegerLayer) and module.channels_last else None
    return isinstance(kernel, ConvolutionKernel) and len(kernel.stride) == 2 and not kernel.may_give_nan


def _cut_off_by(module: Any) -> CutOff:
    """What one of _CUTTING cuts off now; its limits may be changed."""
    if module is None:
        return NOTHING
    return _RELU if type(module) is nn.ReLU else CutOff("hardtanh", (module.min_val, module.max_val))


def _are_watched(modules: list[dict[str, Any]]) -> bool:
    """Tell by their attributes whether somebody sees, or changes, what one of some modules is given or gives."""
    return any(own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own for own in modules)


def _normed(x: Tensor) -> Tensor:
    """Mark a tensor as normalized already, for the norm that will be given it."""
    setattr(x, _NORMED, True)
    return x


def _needs_gradient(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


_RELU: Final = CutOff("relu")
_CUTTING: Final = (nn.ReLU, nn.ReLU6, nn.Hardtanh)


class _NoGradient(torch.autograd.Function):
    """Says so where a gradient is asked for, instead of giving none in silence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, compute: Any) -> Tensor:
        out: Tensor = compute(x)
        return out

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise InputError("this copy computes in integers, which has no gradient: take it through the quantized model")
