"""torch: what several folders do with modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
from torch import nn
from torch._compile import _disable_dynamo

from bitplan.core.errors import InputError
from bitplan.core.naming import layer_of_quantizer
from bitplan.core.parsing import available_memory, first_line

Function = TypeVar("Function", bound=Callable[..., object])


def uncompiled(function: Function) -> Function:
    """A function that `torch.compile` leaves alone: `torch.compiler.disable`, which imports the compiler at once."""
    return cast(Function, _disable_dynamo(function))


def multiplies_bf16(device: torch.device) -> bool:
    """Whether a device has products of bfloat16; an x86 processor without them takes longer than in 32 bits."""
    look = getattr(torch.cpu, "get_capabilities", dict) if device.type == "cpu" else dict
    told: dict[str, object] = look()
    return told.get("architecture") != "x86_64" or bool(told.get("avx512_bf16") or told.get("amx_bf16"))


@contextmanager
def modes_kept(*models: nn.Module) -> Iterator[None]:
    """Every module of these models is in the mode it was, training or inference, when the block ends."""
    before = [(module, module.training) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """The model in inference mode until the block ends."""
    with modes_kept(model):
        model.eval()
        yield


@contextmanager
def parameters_without_data() -> Iterator[None]:
    """Parameters of modules that are made in the block have shapes and no data; buffers, such as tables, have both."""
    register = nn.Module.register_parameter

    def without_data(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # one without data may be tied, and stays what it is
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = without_data  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def usable_device(name: str) -> torch.device:
    """The device of that name, if it is there: found out before anything long begins."""
    try:
        device = torch.device(name)
    except RuntimeError:  # which lists twenty that nobody has
        raise InputError(f"torch knows no device {name!r}: here there is {_devices()}") from None
    if device.type == "meta":
        raise InputError(f"the device {name!r} holds no data: here there is {_devices()}")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch has no one word for it
        said = first_line(error).partition(". ")[0]
        raise InputError(f"the device {name!r} cannot be used: {said}; here there is {_devices()}") from None
    return device


def _devices() -> str:
    """Those that are there."""
    cards = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return ", ".join(["cpu", *cards, *(["mps"] if torch.backends.mps.is_available() else [])])


def device_of(model: nn.Module) -> torch.device:
    """Where a model is; one without parameters is on the CPU."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def free_memory(device: torch.device) -> int:
    """The bytes that are free where a device keeps its tensors; 1 GB where nobody tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory() or 1 << 30


def float_type(model: nn.Module) -> torch.dtype:
    """The type that a model computes in: that of its first weight; steps of quantizers are float32 in any model."""
    weights = (value for name, value in model.named_parameters() if layer_of_quantizer(name) is None)
    return next((weight.dtype for weight in weights if weight.is_floating_point()), torch.get_default_dtype())


def as_floats_of(model: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """A float tensor in the type that a model computes in; other tensors as they are."""
    return tensor.to(float_type(model)) if tensor.is_floating_point() else tensor


def is_half(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of float16 or bfloat16."""
    return tensor.dtype in (torch.float16, torch.bfloat16)


def widen_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of 16 bits in 32, as others are: scores whose small differences or sums count need more digits."""
    return tensor.float() if is_half(tensor) else tensor


def multiplies_bytes() -> bool:
    """Whether this CPU has instructions for products of bytes; where torch cannot tell, they are taken to be there."""
    known: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    if known.get("architecture") != "x86_64":
        return True
    return any(known.get(name) for name in ("avx512_vnni", "avx_vnni", "amx_int8"))
