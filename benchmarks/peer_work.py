"""What one library does, in an environment of its own: `benchmarks/peers.py` starts it and asks by lines.

It imports bitplan only where bitplan itself is asked. A line is the name of a task; the answer is a line of
JSON. All libraries are given the same networks, seeds and images, and one thread.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training import Trainer

IMAGES = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))  # to choose by
BATCH = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(1))  # to train on
LABELS = torch.arange(64) % 10
HIGH, LOW = 8, 4  # bits that are chosen from; every library can do both

Step = Callable[[], None]


def import_torchvision() -> None:
    """Also where its compiled operators do not load; before any library does it."""
    try:
        import torchvision
    except RuntimeError:
        for module in [one for one in sys.modules if one.split(".")[0] == "torchvision"]:
            del sys.modules[module]
        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}", "(Tensor a, Tensor b, float c) -> Tensor")
        import torchvision  # noqa: F401


def network(name: str, classes: int) -> nn.Module:
    """torchvision's, with random weights."""
    import torchvision

    torch.manual_seed(0)
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes)
    return model


# Ours


def bitplan_choose() -> None:
    """From the float network to a plan: trace, calibrate, drift of every group, exact selection."""
    import bitplan

    bitplan.choose(
        network("resnet50", 1000).eval(),
        IMAGES[:1],
        batches=[IMAGES],
        budget="75%",
        choices=f"w{LOW}a{LOW},w{HIGH}a{HIGH}",
    )


def bitplan_train() -> tuple[nn.Module, list[Any]]:
    """w4a4 with learned steps."""
    import bitplan
    from bitplan.quant.parameters import parameter_groups

    model = network("resnet18", 10)
    quantized = bitplan.quantize(model, bitplan.Plan.uniform(bitplan.trace(model, BATCH[:1]), "w4a4"))
    return quantized, parameter_groups(quantized, lr=1e-3)


# NVIDIA's ModelOpt


def _modelopt_bits(bits: int) -> dict[str, Any]:
    quantizers = [{"quantizer_name": "*", "enable": False}]
    for kind in ("weight", "input"):
        quantizers.append({"quantizer_name": f"*{kind}_quantizer", "cfg": {"num_bits": bits, "axis": None}})
    return {"quant_cfg": quantizers, "algorithm": "max"}


def modelopt_choose() -> None:
    """`auto_quantize` by gradients, its default; its budget is one of weight bits."""
    import modelopt.torch.quantization as mtq

    mtq.auto_quantize(
        network("resnet50", 1000), constraints={"effective_bits": 6.0},
        quantization_formats=[_modelopt_bits(LOW), _modelopt_bits(HIGH)], data_loader=[IMAGES],
        forward_step=lambda model, batch: model(batch),
        loss_func=lambda output, _: F.cross_entropy(output, torch.arange(len(IMAGES))),
        num_calib_steps=1, num_score_steps=1,
    )  # fmt: skip


def modelopt_train() -> tuple[nn.Module, Any]:
    """w4a4 with fixed ranges: it learns no step."""
    import modelopt.torch.quantization as mtq

    model = mtq.quantize(network("resnet18", 10), _modelopt_bits(4), forward_loop=lambda model: model(BATCH))
    return model, model.parameters()


# Qualcomm's AIMET


def _aimet(model: nn.Module, images: Tensor, bits: int) -> Any:
    from aimet_torch.quantsim import QuantizationSimModel

    sim = QuantizationSimModel(
        model.eval(), dummy_input=images[:1], default_param_bw=bits, default_output_bw=bits, in_place=True
    )
    sim.compute_encodings(lambda model: model(images))
    return sim


def aimet_choose() -> None:
    """Its greedy search by output error (SQNR) in both phases; it has no budget, and gives all points."""
    from aimet_torch.common.defs import CallbackFunc, QuantizationDataType
    from aimet_torch.mixed_precision import choose_mixed_precision

    model = network("resnet50", 1000).eval()
    with torch.no_grad():
        exact = model(IMAGES)
    integer = QuantizationDataType.int
    sim = _aimet(model, IMAGES, HIGH)

    def score(model: nn.Module, _: Any) -> float:
        with torch.no_grad():
            return float(
                10 * torch.log10(exact.square().mean() / (model(IMAGES) - exact).square().mean().clamp_min(1e-20))
            )

    with tempfile.TemporaryDirectory() as folder:
        choose_mixed_precision(
            sim, IMAGES[:1], [((bits, integer), (bits, integer)) for bits in (HIGH, LOW)], CallbackFunc(score),
            CallbackFunc(score), None, folder, True, CallbackFunc(lambda model, _: model(IMAGES)),
        )  # fmt: skip


def aimet_train() -> tuple[nn.Module, Any]:
    """w4a4 with learned encodings."""
    model: nn.Module = _aimet(network("resnet18", 10), BATCH, 4).model
    return model, model.parameters()


# Sony's MCT


def mct_choose() -> None:
    """Mixed precision for weights in half the bytes of 8 bits, by its cheaper measure (the mean square error)."""
    import model_compression_toolkit as mct

    model = network("resnet50", 1000).eval()
    config = mct.core.CoreConfig(
        mixed_precision_config=mct.core.MixedPrecisionQuantizationConfig(
            num_of_images=len(IMAGES), use_hessian_based_scores=False,
        ),
    )  # fmt: skip
    weights = sum(one.weight.numel() for one in model.modules() if isinstance(one, nn.Conv2d | nn.Linear))
    mct.ptq.pytorch_post_training_quantization(
        model, lambda: iter([[IMAGES.numpy()]]), core_config=config,
        target_resource_utilization=mct.core.ResourceUtilization(weights_memory=weights * 0.75),
    )  # fmt: skip


def mct_train() -> tuple[nn.Module, Any]:
    """Its QAT: weights by learned thresholds, per channel, batch norms folded, activations at 8 bits."""
    import model_compression_toolkit as mct

    model, _ = mct.qat.pytorch_quantization_aware_training_init_experimental(
        network("resnet18", 10).eval(), lambda: iter([[BATCH.numpy()]])
    )[:2]
    return model, model.parameters()


# Intel's NNCF


def nncf_train() -> tuple[nn.Module, Any]:
    """w8a8 with learned ranges: `nncf.quantize` has no 4 bits for activations."""
    import nncf

    model = nncf.quantize(network("resnet18", 10).eval(), nncf.Dataset([BATCH]), subset_size=1)
    return model, model.parameters()


CHOOSING = {"bitplan": bitplan_choose, "modelopt": modelopt_choose, "aimet": aimet_choose, "mct": mct_choose}
TRAINING: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "bitplan": bitplan_train, "modelopt": modelopt_train, "aimet": aimet_train, "mct": mct_train, "nncf": nncf_train,
}  # fmt: skip


def trainer(model: nn.Module, parameters: Any) -> Trainer:
    """Return what trains a network; FP32 and quantized ones are trained alike."""
    return Trainer(model.train(), parameters, lambda model: F.cross_entropy(model(BATCH), LABELS))


def answer(library: str, task: str, state: dict[str, Trainer]) -> dict[str, Any]:
    """`choose`: CPU seconds. `step` and `memory`: CPU seconds or MB of an FP32 step and of a quantized one."""
    if task == "choose":
        start = time.process_time()
        CHOOSING[library]()
        return {"seconds": time.process_time() - start}
    if not state:
        model = network("resnet18", 10)
        state |= {"fp32": trainer(model, model.parameters()), "quantized": trainer(*TRAINING[library]())}
        for _ in range(2):  # some compile, observe or set up at first
            for one in state.values():
                one.step()
    return {name: one.memory() if task == "memory" else {"seconds": one.step()} for name, one in state.items()}


def serve(answer: Callable[[str], dict[str, Any]]) -> None:
    """Answer what is asked until nothing more is; what libraries print goes to the errors."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_torchvision()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        try:
            found = answer(line.strip())
        except Exception as error:  # a library's failure is a line of the page
            found = {"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"}
        said.write(json.dumps(found) + "\n")
        said.flush()


def main(library: str) -> None:
    """Do what one library does."""
    state: dict[str, Trainer] = {}
    serve(lambda task: answer(library, task, state))


if __name__ == "__main__":
    main(sys.argv[1])
