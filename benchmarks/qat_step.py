"""One training step (forward, backward, SGD) of w4a4 networks relative to FP32, next to Brevitas and torchao.

    python -m benchmarks.qat_step [--rounds 15] [--batch 64] [--threads 1]

All variants of a network take turns in one process, so that a busy machine hits them alike; a figure is the
median over rounds of its time divided by FP32's of the same memory layout in the same round, with quartiles.
Bytes saved for the backward pass are counted by autograd's own hooks, each storage once.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitplan.adapters import torchvision
from bitplan.core.records import Plan
from bitplan.quant.convert import quantize
from bitplan.quant.parameters import parameter_groups

Build = Callable[[], nn.Module]


def resnet18() -> nn.Module:
    """torchvision's ResNet-18, ten classes."""
    return torchvision.build("resnet18", num_classes=10)


class Block(nn.Module):
    """A basic block of a CIFAR ResNet."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        """Two convolutions and the shortcut."""
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x), inplace=True)


def resnet20() -> nn.Module:
    widths = [(16, 16, 1)] * 3 + [
        (16, 32, 2),
        (32, 32, 1),
        (32, 32, 1),
        (32, 64, 2),
        (64, 64, 1),
        (64, 64, 1),
    ]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    blocks = [Block(*width) for width in widths]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def ours(network: Build, *, fused: bool, data_step: bool = True) -> nn.Module:
    """Quantized by bitplan: ends at 8 bits, a block's first convolution linked with its downsampling one.

    A learned step for the images makes the first convolution compute a gradient that FP32 training does not
    need; `data_step` False keeps that one step fixed.
    """
    model = network()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    ends = {names[0], names[-1]}
    links = tuple((name.replace("downsample.0", "conv1"), name) for name in names if name.endswith("downsample.0"))
    precisions = {name: "w8a8" if name in ends else "w4a4" for name in names}
    plan = Plan(model="bench", precisions=precisions, links=links, method="uniform", selector="uniform")
    quantized = quantize(model, plan, fused=fused)
    quantized.get_submodule(names[0]).input_quantizer.step.requires_grad_(data_step)
    return quantized


def brevitas(network: Build) -> nn.Module:
    """Brevitas layers with learned scales, per tensor; all inputs but the first are unsigned."""
    import brevitas.nn as qnn
    from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat, Uint8ActPerTensorFloat

    model = network()
    named = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    for place, (name, module) in enumerate(named):
        bits = 8 if place in (0, len(named) - 1) else 4
        options = {
            "bias": module.bias is not None,
            "weight_quant": Int8WeightPerTensorFloat,
            "weight_bit_width": bits,
            "weight_scaling_impl_type": "PARAMETER_FROM_STATS",
            "input_quant": Uint8ActPerTensorFloat if place else Int8ActPerTensorFloat,
            "input_bit_width": bits,
        }
        if isinstance(module, nn.Linear):
            new = qnn.QuantLinear(module.in_features, module.out_features, **options)
        else:
            new = qnn.QuantConv2d(
                module.in_channels,
                module.out_channels,
                module.kernel_size,
                stride=module.stride,
                padding=module.padding,
                **options,
            )
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
    return model


def torchao(network: Build, example: Tensor) -> nn.Module:
    """torchao's QAT for convolutions (pt2e, the x86 quantizer: 8 bits, observed scales, nothing learned)."""
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    model = network().train()
    exported = torch.export.export(model, (example,)).module(check_guards=False)
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_qat=True))
    return prepare_qat_pt2e(exported, quantizer)


class Trainer:
    """A model, its optimizer and one step of training."""

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor) -> None:
        self.model = model
        self.images, self.labels = images, labels
        self.optimizer = torch.optim.SGD(parameter_groups(model, lr=1e-3), momentum=0.9)

    def step(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()
        return time.perf_counter() - start

    def saved(self) -> float:
        """MB kept between forward and backward, parameters not counted."""
        kept: dict[int, int] = {}
        own = {p.untyped_storage().data_ptr() for p in self.model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = F.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        return sum(kept.values()) / 1e6


def trainers(network: Build, batch: int) -> dict[str, Trainer]:
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    builds: dict[str, Build] = {
        "fp32": network,
        "bitplan": lambda: ours(network, fused=False),
        "bitplan fused": lambda: ours(network, fused=True),
        "bitplan fused, data fixed": lambda: ours(network, fused=True, data_step=False),
    }
    found: dict[str, Trainer] = {}
    for name, build in builds.items():
        found[name] = Trainer(build(), images, labels)
        last = images.to(memory_format=torch.channels_last)
        found[f"{name}, channels_last"] = Trainer(build().to(memory_format=torch.channels_last), last, labels)
    others: dict[str, Build] = {
        "brevitas": lambda: brevitas(network),
        "torchao": lambda: torchao(network, images),
    }
    for name, build in others.items():
        if importlib.util.find_spec(name) is None:
            print(f"  ({name} is not installed)")
            continue
        try:
            found[name] = Trainer(build(), images, labels)
            found[name].step()
        except Exception as error:  # a third party's failure is a line in the table, not ours
            found.pop(name, None)
            print(f"  ({name} does not run here: {str(error).splitlines()[0][:90]})")
    return found


def measure(title: str, network: Build, rounds: int, batch: int) -> None:
    everyone = trainers(network, batch)
    for trainer in everyone.values():
        trainer.step()
        trainer.step()
    times: dict[str, list[float]] = {name: [] for name in everyone}
    for _ in range(rounds):
        for name, trainer in everyone.items():
            times[name].append(trainer.step())
    print(f"\n{title}, batch {batch}, {torch.get_num_threads()} thread(s)")
    print(f"{'variant':40} {'ms':>8} {'× FP32':>8} {'quartiles':>15} {'saved MB':>9}")
    for name, trainer in everyone.items():
        base = times["fp32, channels_last" if name.endswith("channels_last") else "fp32"]
        ratios = [mine / fp32 for mine, fp32 in zip(times[name], base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        median = 1e3 * statistics.median(times[name])
        print(f"{name:40} {median:8.1f} {middle:8.2f} {f'{low:.2f}-{high:.2f}':>15} {trainer.saved():9.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    measure("CIFAR ResNet-20, 32×32", resnet20, arguments.rounds, arguments.batch)
    measure("ResNet-18, 32×32", resnet18, arguments.rounds, arguments.batch)


if __name__ == "__main__":
    main()
