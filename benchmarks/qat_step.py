"""One training step (forward, backward, SGD) of w4a4 networks relative to FP32, next to Brevitas and torchao.

    python -m benchmarks.qat_step [--rounds 15] [--batch 64] [--threads 1]

All variants of a network take turns in one process, so that a busy machine hits them alike; a figure is the
median over rounds of its time divided by FP32's of the same memory layout in the same round, with quartiles.
Times are the processor's, in a process that keeps what it frees, as bitplan's own do (`benchmarks/freed.py` says what
that saves): FP32 and peers keep theirs too.

Memory is measured in another process, which gives freed memory back at once (`benchmarks/training.py`): the MB by which
its resident memory grows until the forward pass ends (`held`), and at most during a step (`peak`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitplan
from benchmarks.rows import Row, table
from benchmarks.training import GIVE_BACK, Loss, Trainer
from bitplan.adapters import torchvision
from bitplan.core.malloc_tuning import keep_freed_memory
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


def ours(network: Build) -> nn.Module:
    """Quantized by bitplan: ends at 8 bits, a block's first convolution linked with its downsampling one."""
    model = network()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    ends = {names[0], names[-1]}
    links = tuple((name.replace("downsample.0", "conv1"), name) for name in names if name.endswith("downsample.0"))
    precisions = {name: "w8a8" if name in ends else "w4a4" for name in names}
    plan = Plan(model="bench", precisions=precisions, links=links, method="uniform", selector="uniform")
    return quantize(model, plan)


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


def _trainer(model: nn.Module, loss: Loss) -> Trainer:
    return Trainer(model, parameter_groups(model, lr=1e-3), loss)


def on_images(network: Build, batch: int, size: int = 32, *, everyone: bool) -> dict[str, Trainer]:
    """All variants of a network for images; or only ours in the usual layout, and Brevitas."""
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))
    last = images.to(memory_format=torch.channels_last)
    builds: dict[str, Build] = {
        "fp32": network,
        "bitplan": lambda: ours(network),
    }
    found: dict[str, Trainer] = {}
    for name, build in builds.items():
        found[name] = _trainer(build(), lambda model: F.cross_entropy(model(images), labels))
        if everyone:
            moved = build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            found[f"{name}, channels_last"] = _trainer(moved, lambda model: F.cross_entropy(model(last), labels))
    others: dict[str, Build] = {"brevitas": lambda: brevitas(network)}
    if everyone:
        others["torchao"] = lambda: torchao(network, images)
    for name, build in others.items():
        if importlib.util.find_spec(name) is None:
            print(f"  ({name} is not installed)")
            continue
        try:
            found[name] = _trainer(build(), lambda model: F.cross_entropy(model(images), labels))
            found[name].step()
        except Exception as error:  # a third party's failure is a line in the table, not ours
            found.pop(name, None)
            print(f"  ({name} does not run here: {str(error).splitlines()[0][:90]})")
    return found


def on_text(batch: int, tokens: int = 128) -> dict[str, Trainer]:
    """MiniLM-L6 answering questions, in the plan that `trace` makes, dropout as it comes."""
    model, example = bitplan.load_model("minilm-l6")
    plan = Plan.uniform(bitplan.trace(model, example), "w4a4")
    ids, places = torch.randint(0, 30_000, (batch, tokens)), torch.randint(0, tokens, (batch,))
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def loss(model: nn.Module) -> Tensor:
        out: Tensor = model(**asked, start_positions=places, end_positions=places).loss
        return out

    networks = {"fp32": model, "bitplan": quantize(model, plan)}
    return {name: _trainer(network.train(), loss) for name, network in networks.items()}


NETWORKS: dict[str, Callable[[], dict[str, Trainer]]] = {
    "ResNet-18 w4a4, 64 images of 32 × 32": lambda: on_images(resnet18, 64, everyone=False),
    "ResNet-18 w4a4, 32 images of 160 × 160": lambda: on_images(resnet18, 32, 160, everyone=False),
    "MiniLM-L6 w4a4, 16 × 128 tokens": lambda: on_text(16),
}
TIMED = ("ResNet-18 w4a4, 64 images of 32 × 32", "MiniLM-L6 w4a4, 16 × 128 tokens")
_MOST = 1.25  # of the time of a step in FP32


def measured(everyone: dict[str, Trainer], rounds: int) -> dict[str, list[float]]:
    """Seconds of every variant in every round, after two steps of each."""
    for trainer in everyone.values():
        trainer.step()
        trainer.step()
    times: dict[str, list[float]] = {name: [] for name in everyone}
    for _ in range(rounds):
        for name, trainer in everyone.items():
            times[name].append(trainer.step())
    return times


def memory(title: str) -> dict[str, dict[str, float]]:
    """Return `held` and `peak` of every variant, measured in a process that gives freed memory back."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.qat_step", "--memory", title]
    environment = os.environ | GIVE_BACK | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    figures: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure_memory(everyone: dict[str, Trainer]) -> dict[str, dict[str, float]]:
    """Return `held` and `peak` of every variant, after two steps of each."""
    measured(everyone, 0)
    return {name: trainer.memory() for name, trainer in everyone.items()}


def show(title: str, everyone: dict[str, Trainer], rounds: int) -> None:
    """Print the times of one network."""
    times = measured(everyone, rounds)
    print(f"\n{title}, {torch.get_num_threads()} thread(s)")
    print(f"{'variant':40} {'ms':>8} {'× FP32':>8} {'quartiles':>15}")
    for name in everyone:
        base = times["fp32, channels_last" if name.endswith("channels_last") else "fp32"]
        ratios = [mine / fp32 for mine, fp32 in zip(times[name], base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        median = 1e3 * statistics.median(times[name])
        print(f"{name:40} {median:8.1f} {middle:8.2f} {f'{low:.2f}-{high:.2f}':>15}")


def time_rows(title: str, rounds: int) -> list[Row]:
    """Return the time against FP32's, and against Brevitas's if that runs."""
    times = measured(NETWORKS[title](), rounds)
    made = [_line(f"{title}, a training step", times, "bitplan", "fp32", _MOST)]
    if "brevitas" in times:
        made.append(_line(f"{title}, a training step", times, "bitplan", "brevitas", 1.0))
    return made


def memory_rows(title: str) -> list[Row]:
    """Memory until the forward pass ends and at most during a step, against FP32's and Brevitas's."""
    figures, made = memory(title), []
    for field, what in (("held", "held after the forward pass"), ("peak", "the most that a step holds")):
        for peer, against, target in (("fp32", "FP32", 1.10), ("brevitas", "brevitas", 1.00)):
            if peer in figures:
                ours, theirs = figures["bitplan"][field], figures[peer][field]
                made.append(Row(f"{title}, {what}", ours, theirs, against, "MB", target))
    return made


def _line(what: str, times: dict[str, list[float]], name: str, peer: str, target: float) -> Row:
    ratio = statistics.median(mine / theirs for mine, theirs in zip(times[name], times[peer], strict=True))
    ours, theirs = (1e3 * statistics.median(times[one]) for one in (name, peer))
    return Row(what, ours, theirs, peer.replace("fp32", "FP32"), "ms", target, times=ratio)


def rows(rounds: int = 9) -> list[Row]:
    """Times, then memory, of ResNet-18 and MiniLM-L6."""
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = [row for title in TIMED for row in time_rows(title, rounds)]
        return times + [row for title in NETWORKS for row in memory_rows(title)]


def main() -> None:
    """Print tables of all variants, or the memory of one network as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", choices=NETWORKS, metavar="NETWORK", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    if arguments.memory:
        print(json.dumps(measure_memory(NETWORKS[arguments.memory]())))
        return
    keep_freed_memory()
    for title, network in (("CIFAR ResNet-20", resnet20), ("ResNet-18", resnet18)):
        everyone = on_images(network, arguments.batch, everyone=True)
        show(f"{title}, 32×32, batch {arguments.batch}", everyone, arguments.rounds)
    show("MiniLM-L6, 16 × 128 tokens", on_text(16), arguments.rounds)
    print("\n" + table([row for title in NETWORKS for row in memory_rows(title)]))


if __name__ == "__main__":
    main()
