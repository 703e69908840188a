"""Networks that use their weights in ways of their own: every planned layer runs quantized, layer by layer."""

import importlib

import pytest
import torch

import bitplan
from bitplan.adapters.timm import build
from bitplan.adapters.torchvision import torchvision
from bitplan.quant.convert import quantizers_of

SMALL = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8, "num_classes": 5}
# name, options, size of images, and a layer that its network does not simply call
NETWORKS = {
    "beit": ("beit_base_patch16_224", SMALL, 32, "blocks.0.attn.qkv"),
    "eva02": ("eva02_base_patch14_224", SMALL | {"qkv_fused": True}, 32, "blocks.0.attn.qkv"),
    "swin v2": (
        "swinv2_tiny_window8_256",
        {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2), "num_classes": 5},
        32,
        "layers.0.blocks.0.attn.qkv",
    ),
    "mvit v2": ("mvitv2_tiny", {"img_size": 32, "num_classes": 5}, 32, "stages.0.blocks.0.attn.rel_pos_h"),
    "efficientvit": ("efficientvit_b0", {"num_classes": 5}, 32, "stages.2.blocks.1.context_module.main.matmul"),
    "normalizer-free": ("nf_resnet26", {"num_classes": 5}, 32, "stem.conv"),
}


def network(name, options):
    if name == "mvitv2_tiny":
        torchvision()  # before anything of timm is imported
        mvit = importlib.import_module("timm.models.mvitv2")
        sizes = mvit.MultiScaleVitCfg(depths=(1, 1), embed_dim=(16, 32), num_heads=1)
        model = mvit.MultiScaleVit(sizes, **options)
    else:
        model = build(name, **options)[0]
    with torch.no_grad():
        for parameter in model.parameters():  # some begin at zero, and would hide what comes before them
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.eval()


@pytest.fixture(params=NETWORKS)
def made(request):
    name, options, size, special = NETWORKS[request.param]
    torch.manual_seed(0)
    model, images = network(name, options), torch.rand(2, 3, size, size)
    graph = bitplan.trace(model, images, rules=bitplan.Rules(narrow=0))
    assert special in graph.uses
    plan = bitplan.Plan.uniform(graph, "w4a4")
    assert not [layer.name for layer in graph.layers if plan.precisions[layer.name].left_alone]
    quantized = bitplan.quantize(model, plan, example=images)
    bitplan.calibrate_(quantized, [images])
    return quantized.eval(), images, special


def test_every_layer_is_proven_and_every_step_changes_the_answer(made):
    model, images, special = made
    proof = bitplan.prove(model, images)
    assert proof.quantized.keys() == bitplan.plan_of(model).precisions.keys()
    assert all(proof.quantized.values())
    assert not proof.in_float
    steps = {layer: [q.step for q in (both.weight, *both.inputs) if q] for layer, both in quantizers_of(model).items()}
    model(images).square().sum().backward()
    assert all(step.grad is not None and step.grad.isfinite().all() for own in steps.values() for step in own)
    with torch.no_grad():
        before = model(images)
        steps[special][0].mul_(3)
        assert not torch.equal(model(images), before), f"{special} runs in float"


def test_files_and_copies_compute_the_same(made, tmp_path):
    model, images, _ = made
    with torch.no_grad():
        expected = model(images)
        again = bitplan.load_checkpoint(bitplan.save_checkpoint(model, tmp_path / "net"), strip(model))
        assert torch.equal(again.eval()(images), expected)
        assert bitplan.plan_of(again) == bitplan.plan_of(model)


def strip(model):
    """The float network that a quantized one was."""
    plan = bitplan.plan_of(model)
    nothing = {layer: bitplan.Precision.parse("w16a16") for layer in plan.precisions}
    return bitplan.quantize(model, plan.model_copy(update={"precisions": nothing}))
