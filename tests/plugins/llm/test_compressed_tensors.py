"""compressed-tensors itself reads our recipe and applies it to a network."""

import json

import pytest
import torch
from llms import llama_shapes, module_tree, plan_for, save_llama, scanned

import bitplan
from bitplan.adapters.torchvision import torchvision
from bitplan.core.errors import InputError
from bitplan.core.rules import Rules

torchvision()  # transformers, which compressed-tensors imports, needs it to be whole

from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config  # noqa: E402
from compressed_tensors.quantization.lifecycle.forward import fake_quantize  # noqa: E402


def config_of(tmp_path, plan, graph, **options):
    path = bitplan.export(plan, tmp_path / "config.json", "compressed-tensors", graph=graph, force=True, **options)
    return QuantizationConfig.model_validate(json.loads(path.read_text())["quantization_config"])


def schemes(model):
    return {
        name: module.quantization_scheme
        for name, module in model.named_modules()
        if getattr(module, "quantization_scheme", None)
    }


def bits(scheme):
    return f"w{scheme.weights.num_bits}a{scheme.input_activations.num_bits if scheme.input_activations else 16}"


def test_a_scan_is_applied_as_planned(tmp_path):
    plan, graph = scanned(save_llama(tmp_path / "model.safetensors"), rules=Rules(narrow=0, last="w8a8"))
    model = module_tree(llama_shapes())
    apply_quantization_config(model, config_of(tmp_path, plan, graph))
    expected = {name: str(precision) for name, precision in plan.precisions.items()}
    assert {name: bits(scheme) for name, scheme in schemes(model).items()} == expected | {"model.embed_tokens": "w8a16"}
    assert set(expected.values()) == {"w2a16", "w4a16", "w8a8", "w8a16"}


@pytest.mark.parametrize(
    ("precision", "row", "strategy", "group"),
    [
        ("w4a16", 256, "group", 128),
        ("w4a8", 384, "group", 128),
        ("w2a16", 100, "channel", None),
        ("w8a8", 256, "channel", None),
    ],
)
def test_steps_per_group_or_per_channel(tmp_path, precision, row, strategy, group):
    plan, graph = plan_for({"a.fc": precision}, rows={"a.fc": row})
    model = module_tree({"a.fc": (8, row)})
    apply_quantization_config(model, config_of(tmp_path, plan, graph))
    scheme = model.a.fc.quantization_scheme
    assert (bits(scheme), scheme.weights.strategy, scheme.weights.group_size) == (precision, strategy, group)
    if scheme.input_activations:
        assert (scheme.input_activations.strategy, scheme.input_activations.dynamic) == ("token", True)
    columns = 1 if group is None else row // group
    assert model.a.fc.weight_scale.shape == (8, columns)
    steps = torch.full_like(model.a.fc.weight_scale, 0.05)
    codes = fake_quantize(model.a.fc.weight.detach() * 1000, steps, torch.zeros_like(steps), scheme.weights) / 0.05
    top = 2 ** (plan.precisions["a.fc"].weight_bits - 1)
    assert (codes.min().round(), codes.max().round()) == (-top, top - 1)


def test_layers_at_16_bits_are_ignored(tmp_path):
    plan, graph = plan_for({"a.fc": "w4a16", "lm_head": "w16a16"})
    config = config_of(tmp_path, plan, graph)
    assert config.ignore == ["lm_head"]
    model = module_tree({"a.fc": (8, 256), "lm_head": (8, 256), "not_planned": (8, 256)})
    apply_quantization_config(model, config)
    assert list(schemes(model)) == ["a.fc"]


def test_a_name_matches_itself_only(tmp_path):
    names = ["a.fc", "Linear", "aXfc", "a.fc2", "x+", "(a|b)"]
    plan, graph = plan_for({"Linear": "w2a16", "a.fc": "w4a16", "x+": "w3a16"})
    model = module_tree(dict.fromkeys(names, (8, 256)))
    apply_quantization_config(model, config_of(tmp_path, plan, graph))
    assert {name: bits(scheme) for name, scheme in schemes(model).items()} == {
        "Linear": "w2a16", "a.fc": "w4a16", "x+": "w3a16"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("names", "together"),
    [
        (("m.self_attn.q_proj", "m.self_attn.k_proj"), True),
        (("m.mlp.gate_proj", "m.mlp.up_proj"), True),
        (("m.mlp.experts.0.w1", "m.mlp.experts.7.w2"), True),
        (("m.encoder_attn.k_proj", "m.encoder_attn.v_proj"), True),
        (("m.encoder_attn.q_proj", "m.encoder_attn.k_proj"), False),
        (("m.self_attn.q_proj", "m.self_attn.o_proj"), False),
        (("m.0.self_attn.q_proj", "m.1.self_attn.q_proj"), False),
        (("m.mlp.gate_proj", "m.mlp.down_proj"), False),
    ],
)
def test_what_is_fused_needs_one_precision(tmp_path, names, together):
    plan, graph = plan_for(dict(zip(names, ("w2a16", "w4a16"), strict=True)))
    if not together:
        assert len(config_of(tmp_path, plan, graph).config_groups) == 2
        return
    with pytest.raises(InputError, match=f"{names[0]} at w2a16 .one in the target with {names[1]} at w4a16"):
        config_of(tmp_path, plan, graph)
    groups = config_of(tmp_path, plan, graph, widen=True).config_groups
    assert [(bits(group), group.targets) for group in groups.values()] == [("w4a16", list(names))]
