"""torchao reads our recipe and applies it for real."""

import json

import pytest
import torch
from llms import llama_shapes, module_tree, plan_for, save_llama, scanned
from torch import nn
from torchao.core.config import config_from_dict, config_to_dict
from torchao.quantization import FqnToConfig, quantize_

import bitplan
from bitplan.core.errors import FileError, InputError
from bitplan.core.registry import LAYERS
from bitplan.plugins.runtimes.torchao import Torchao, torchao_config
from nets import Folded, FoldedType, Gated, GatedType


def exported(tmp_path, plan, graph, **options):
    return bitplan.export(plan, tmp_path / "recipe.json", "torchao", graph=graph, **options)


def found(module):
    """The precision that torchao gave a layer, and its groups."""
    weight = module.weight
    if type(weight) is nn.Parameter:
        return "w16a16", None
    act = 8 if weight.activation_quantization else 16
    return f"w{str(weight.target_dtype).removeprefix('torch.int')}a{act}", weight.block_size[1]


def test_a_stack_of_linear_layers_is_quantized_as_planned(tmp_path):
    planned = {"0": "w2a16", "1": "w4a16", "2": "w8a16", "3": "w3a8", "4": "w16a16", "5": "w8a8", "6": "w7a16"}
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in planned))
    plan, graph = plan_for(planned, rows=dict.fromkeys(planned, 64))
    quantize_(model, torchao_config(exported(tmp_path, plan, graph)), filter_fn=None)
    assert {name: found(module)[0] for name, module in model.named_children()} == planned
    for name, module in model.named_children():
        if planned[name] != "w16a16":
            width = plan.precisions[name].weight_bits
            codes = module.weight.qdata
            assert codes.min() >= -(2 ** (width - 1))
            assert codes.max() <= 2 ** (width - 1) - 1
            assert len(codes.unique()) > 2 ** (width - 1)  # so one bit less would not hold them
    assert model(torch.randn(3, 64)).isfinite().all()


def test_a_scan_is_applied_as_planned(tmp_path):
    plan, graph = scanned(save_llama(tmp_path / "model.safetensors"))
    model = module_tree(llama_shapes())
    quantize_(model, torchao_config(exported(tmp_path, plan, graph)), filter_fn=None)
    for name, precision in plan.precisions.items():
        expected = "w8a16" if "embed" in name else str(precision)
        assert found(model.get_submodule(name)) == (expected, 32)
    assert model.model.embed_tokens(torch.tensor([3])).shape == (1, 256)


def test_rows_that_cannot_be_cut_have_one_step(tmp_path):
    plan, graph = plan_for({"a": "w4a16", "b": "w4a8", "c": "w4a16"}, rows={"a": 60, "b": 60, "c": 128})
    model = module_tree({"a": (8, 60), "b": (8, 60), "c": (8, 128)})
    quantize_(model, torchao_config(exported(tmp_path, plan, graph, group_size=64)), filter_fn=None)
    assert [found(module) for module in model.children()] == [("w4a16", 60), ("w4a8", 60), ("w4a16", 64)]


def test_the_file_is_in_torchao_s_own_form(tmp_path):
    plan, graph = plan_for({"a": "w4a16", "b": "w2a8", "c": "w16a16"})
    path = exported(tmp_path, plan, graph)
    written = json.loads(path.read_text())
    config = config_from_dict(written)
    assert isinstance(config, FqnToConfig)
    assert torchao_config(path) == config
    theirs = config_to_dict(config)["_data"]["fqn_to_config"]
    for name, ours in written["_data"]["fqn_to_config"].items():
        if ours is None:
            assert theirs[name] is None
            continue
        assert (ours["_type"], ours["_version"]) == (theirs[name]["_type"], theirs[name]["_version"])
        assert ours["_data"].items() <= theirs[name]["_data"].items()


def test_a_name_matches_itself_only(tmp_path):
    names = ["fc", "aXfc", "x+", "xx", "(fc|xx)", "re:.*", "_default", "Linear"]
    chosen = {"x+": "w2a16", "(fc|xx)": "w3a16", "re:.*": "w4a16", "_default": "w5a16", "Linear": "w6a16"}
    plan, graph = plan_for(chosen)
    model = module_tree(dict.fromkeys(names, (8, 256)))
    quantize_(model, torchao_config(exported(tmp_path, plan, graph)), filter_fn=None)
    assert {name: found(model.get_submodule(name))[0] for name in names} == dict.fromkeys(names, "w16a16") | chosen


def test_only_what_bitplan_writes_is_handed_to_torchao(tmp_path):
    path = tmp_path / "recipe.json"
    path.write_text('{"_type": "Int8WeightOnlyConfig", "_data": {}}')
    with pytest.raises(FileError, match="not a recipe for torchao"):
        torchao_config(path)


def test_gpt2_s_matrices_are_no_linear_layers(tmp_path):
    plan, graph = plan_for({"h.0.attn.c_attn": "w4a16", "fc": "w4a16"})
    with pytest.raises(InputError, match=r"h.0.attn.c_attn at w4a16 \(an? \(in, out\) matrix\)"):
        exported(tmp_path, plan, graph)


def test_layers_of_a_type_of_ones_own_have_their_place_in_a_recipe(tmp_path):
    network = nn.Sequential(nn.Linear(8, 8), Gated(8, 12), nn.ReLU(), Folded(12), nn.Linear(12, 4))
    example = torch.randn(6, 8)
    with LAYERS.registered("gated", GatedType), LAYERS.registered("folded", FoldedType):
        graph = bitplan.trace(network, example, rules=bitplan.Rules(first=None, last=None, narrow=0))
        model = bitplan.quantize(network, bitplan.Plan.uniform(graph, "w4a4"))
        bitplan.calibrate_(model, [example])
        recipe = bitplan.export(model, tmp_path / "net.json", "torchao", widen=True, group_size=4)
    held = Torchao().read(recipe).precisions
    assert {name: str(one) for name, one in held.items()} == {
        "0": "w4a8", "1": "w4a8", "3.up": "w16a16", "3.down": "w16a16", "4": "w4a8"
    }  # fmt: skip
