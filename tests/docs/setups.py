"""What the pages take as given: `model`, `loader` and the like, made small; files where a page names them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bitplan
import texts

CLASSES, SIDE = 10, 16


class Network(nn.Module):
    """Some convolutions and a classifier."""

    def __init__(self):
        super().__init__()
        sizes = [(3, 32), (32, 64), (64, 128), (128, 128)]
        self.body = nn.Sequential(*(part for size in sizes for part in (nn.Conv2d(*size, 3, padding=1), nn.ReLU())))
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def usual(folder):
    """A float network and its data, which most pages speak of; and what they name on the command line."""
    torch.manual_seed(0)
    model, images = Network().eval(), torch.rand(32, 3, SIDE, SIDE)
    labels = torch.randint(CLASSES, (32,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=8)
    save_file({f"layers.{n}.weight": torch.randn(256, 256) for n in range(4)}, folder / "model.safetensors")
    return {
        "bitplan": bitplan, "torch": torch, "nn": nn, "F": nn.functional, "model": model, "images": images,
        "labels": labels, "example": images[:1], "batches": [images[:8], images[8:16]], "loader": loader,
    }  # fmt: skip


def quantized(folder, precision="w4a4"):
    """The same, where the page speaks of a quantized network."""
    names = usual(folder)
    graph = bitplan.trace(names["model"], names["example"], rules=bitplan.Rules().for_choices(precision))
    model = bitplan.quantize(names["model"], bitplan.Plan.uniform(graph, precision))
    if not precision.endswith("a16"):
        bitplan.calibrate_(model, names["batches"])
    return names | {"model": model.eval(), "graph": graph, "batch": names["images"]}


def weights_only(folder):
    """A network whose inputs are left alone."""
    return quantized(folder, "w4a16")


def packed(folder):
    """A network of the zoo."""
    model = bitplan.load_model("resnet20")[0].eval()
    graph = bitplan.trace(model, torch.rand(1, 3, 32, 32))
    start = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(start, [torch.rand(4, 3, 32, 32)])
    return {"model": start.eval(), "graph": graph, "my_model": model}


def qonnx(folder):
    """A file in QONNX's dialect, and images for it."""
    names = quantized(folder)
    bitplan.export(names["model"], folder / "net.onnx", to="qonnx", example=names["example"])
    return {"images": names["example"].numpy()}


def torchao(folder):
    """A recipe for a network of linear layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    plan = bitplan.choose(model, torch.rand(1, 256), budget="3bpw", choices="w2a16,w4a16", gain="random", cost="memory")
    graph = bitplan.trace(model, torch.rand(1, 256))
    bitplan.export(plan, folder / "recipe.json", to="torchao", graph=graph, widen=True)
    return {"model": model}


def language(folder):
    """A language model in a file, and a text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(texts.SIZES, "max_position_embeddings", 512)
        texts.write_gguf(folder / "model.gguf")
    texts.write_text(folder / "wiki.txt", words=2800)
    return {"bitplan": bitplan}


SETUPS = {
    "docs/language.md": language,
    "docs/targets/onnx.md": weights_only,
    "docs/targets/openvino.md": quantized,
    "docs/targets/packed.md": packed,
    "docs/targets/qonnx.md": qonnx,
    "docs/targets/torchao.md": torchao,
}
