"""What all modules that quantize have in common, whichever method they are of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from bitplan.core.errors import InputError

Features = Literal["sample", "batch"]
"""What N counts in the gradient scale of an input step."""

unseen = torch._C.DisableTorchFunction
"""A context in which functions of torch are called past the modes that see them (`quant/owners.py`)."""


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
