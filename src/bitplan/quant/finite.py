"""NaN and infinite values are refused by name: as codes they would be plausible finite numbers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parameter import is_lazy

from bitplan.core.errors import InputError
from bitplan.core.naming import layer_of, layer_of_quantizer, split_name

_STATISTICS = "running_mean"


def check_finite(model: nn.Module) -> None:
    """Refuse parameters and buffers that are NaN or infinite, by the layer's name; tensors without data pass."""
    for name, parameter in model.named_parameters():
        check_values(name, parameter)
    for name, buffer, is_mask in _kept_buffers(model):
        check_values(name, buffer.clamp_min(torch.finfo(buffer.dtype).min) if is_mask else buffer)


def check_values(name: str, tensor: Tensor) -> None:
    """Refuse a tensor of that name in the model's state if a value of it is NaN or infinite; it is read once."""
    if not tensor.is_floating_point() or tensor.layout != torch.strided or is_lazy(tensor):
        return
    if tensor.is_meta or is_fake(tensor) or not tensor.numel():
        return
    values = tensor.detach()
    values = values.float() if values.element_size() == 1 else values  # torch has no extremes of float8
    if torch.stack(values.aminmax()).isfinite().all():
        return
    count = values.numel() - int(values.isfinite().sum())
    layer = layer_of_quantizer(name) or (layer_of(name) if layer_of(name) != name else split_name(name)[0]) or name
    raise InputError(
        f"layer {layer!r}: {count:,} of {values.numel():,} values of {name} are NaN or infinite, and no code stands "
        "for such: load or train the network again"
    )


def _kept_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """The float buffers in the model's state, and whether they may hold −∞, as masks do and statistics do not."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}".lstrip("."), buffer, _STATISTICS not in module._buffers
