"""Batch normalization that an integer kernel takes into the convolution before it.

y = k·(z + b − μ) + β with k = γ/√(σ² + ε), where z are the products and b the bias of the convolution. Where k > 0, z
becomes y by other steps, step_w·k, and by a shift (b − μ)·k + β. That is rounded to multiples of step_x·step_w·k, by
the statistics of the batch in training and by the running ones in inference, so a folded convolution is exact.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bitplan.quant.grids import LARGEST, grid_of, rounded
from bitplan.quant.layers import Adopted, adopt_, release_
from bitplan.quant.lsq import FLOOR
from bitplan.quant.quantizers import unseen

CONVOLUTION = "convolution"
"""Where a norm refers to the convolution before it, which is no part of it."""


class NormLayer(Adopted):
    """x (B, channels, …) → the same shape, whatever else the base's forward does beside normalizing."""

    convolution: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base's forward while its normalization is ours."""
        with _Normalizing(self):
            return super().forward(*args, **kwargs)


class _Normalizing(TorchFunctionMode):
    """Puts `normalized` in the place of torch's function."""

    def __init__(self, norm: NormLayer) -> None:
        super().__init__()
        self._norm = norm

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            return self.normalized(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def normalized(  # the signature is torch's
        self,
        x: Tensor,  # (B, channels, …)
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Normalize as torch does, with a positive scale and a shift on the grid."""
        norm = self._norm
        grid = _grid(norm)
        with unseen():
            scale = _scale(norm, grid)
        if grid is None or (training and x.numel() <= x.shape[1]):  # one value is no batch, which torch refuses
            return F.batch_norm(x, running_mean, running_var, scale, bias, training, momentum, eps)
        with unseen():
            if training:
                out, mean, inverse = torch.native_batch_norm(
                    x, scale, bias, running_mean, running_var, True, momentum, eps
                )
                shift = _correction(norm, grid, scale, mean, inverse)
                return out.add_(shift.to(out.dtype).view(-1, *[1] * (x.dim() - 2)))
            assert running_mean is not None
            assert running_var is not None
            assert bias is not None
            shift = _correction(norm, grid, scale, running_mean, (running_var + eps).rsqrt())
            return F.batch_norm(x, running_mean, running_var, scale, bias + shift.to(bias.dtype), False, momentum, eps)


def follow_(norm: nn.Module, convolution: nn.Module) -> None:
    """Let a norm round its shift to the grid of the convolution before it, whose bias then is a part of that shift.

    Channels with a negative scale change sign, in the convolution and in the norm: together they compute what they did.
    """
    figures, layer = _figures(norm), _figures(convolution)
    with torch.no_grad():
        sign = torch.where(figures["weight"] < 0, -1.0, 1.0)
        for values in (figures["weight"], figures["running_mean"], layer.get("bias")):
            if values is not None:
                values.mul_(sign.to(values.dtype))
        layer["weight"].mul_(sign.to(layer["weight"].dtype).view(-1, *[1] * (layer["weight"].dim() - 1)))
    adopt_(norm, NormLayer)
    vars(norm)[CONVOLUTION] = convolution


def unfollow_(norm: NormLayer) -> None:
    """Give a norm back its class; it keeps the scale that was in use."""
    weight = _figures(norm)["weight"]
    with torch.no_grad():
        weight.copy_(_scale(norm, _grid(norm)))
    release_(norm)
    vars(norm).pop(CONVOLUTION)


def settle_norm_(norm: NormLayer) -> None:
    """Make scale and shift, as inference rounds them, the norm's own figures: a plain norm then computes the same."""
    figures, grid = _figures(norm), _grid(norm)
    with torch.no_grad():
        if grid is not None:
            scale = _scale(norm, grid)
            inverse = (figures["running_var"] + _epsilon(norm)).rsqrt()
            figures["bias"].add_(_correction(norm, grid, scale, figures["running_mean"], inverse))
    unfollow_(norm)


def _correction(norm: NormLayer, grid: Tensor, scale: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """What rounding adds to the shift, (channels); without gradient, so that it passes straight through."""
    with torch.no_grad():
        wide = torch.promote_types(grid.dtype, scale.dtype)
        factor = scale.to(wide) * inverse.to(wide)
        shift = _bias(norm) - mean.to(wide) + _figures(norm)["bias"].to(wide) / factor
        return (rounded(shift, grid) - shift) * factor


def _scale(norm: NormLayer, grid: Tensor | None) -> Tensor:
    """γ as it is in use: |γ|, and so large that the code of the shift fits; the gradient is that of |γ|, 1 at 0."""
    figures = _figures(norm)
    gamma, beta = figures["weight"], figures["bias"].detach()
    size = gamma * torch.where(gamma < 0, -1.0, 1.0).to(gamma.dtype)
    least = torch.full_like(beta, FLOOR)
    if grid is not None:
        deviation = (figures["running_var"].detach() + _epsilon(norm)).sqrt()
        least = torch.maximum(least, beta.abs() * deviation / (grid * LARGEST))
    return size + (torch.maximum(size.detach(), least) - size.detach()).to(gamma.dtype)


def _grid(norm: NormLayer) -> Tensor | None:
    return grid_of(norm.convolution.input_quantizer, norm.convolution.weight_quantizer)  # type: ignore[arg-type]


def _bias(norm: NormLayer) -> Tensor | float:
    bias = norm.convolution.bias
    return bias.detach() if isinstance(bias, Tensor) else 0.0


def _epsilon(norm: nn.Module) -> float:
    epsilon = norm.eps
    assert isinstance(epsilon, float)
    return epsilon


def _figures(module: nn.Module) -> dict[str, Any]:
    """The parameters and statistics of a module by name."""
    return {**module._parameters, **module._buffers}
