"""MLX: one entry per module, groups that divide the rows, experts stacked."""

import json

import pytest
from llms import llama_shapes, plan_for, save_llama, scanned

import bitplan
from bitplan.core.errors import InputError
from bitplan.plugins.runtimes.mlx import Mlx


def quantization(tmp_path, plan, graph, **options):
    path = bitplan.export(plan, tmp_path / "config.json", "mlx", graph=graph, force=True, **options)
    return json.loads(path.read_text())["quantization"]


def test_a_scan(tmp_path):
    plan, graph = scanned(save_llama(tmp_path / "model.safetensors"))
    written = quantization(tmp_path, plan, graph)
    assert written.pop("group_size") == 64
    assert written.pop("bits") in (2, 4)
    assert written == {
        name: {"group_size": 64, "bits": plan.precisions[name].weight_bits} for name in llama_shapes()
    }  # fmt: skip


def test_activations_that_somebody_asked_for_are_refused_or_widened(tmp_path):
    plan, graph = plan_for({"lm_head": "w8a8", "fc": "w3a16"})
    with pytest.raises(InputError, match=r"mlx cannot express lm_head at w8a8 \(8-bit activations\)"):
        quantization(tmp_path, plan, graph)
    assert quantization(tmp_path, plan, graph, widen=True)["lm_head"]["bits"] == 8


@pytest.mark.parametrize(("row", "asked", "size"), [(256, 128, 128), (192, 128, 64), (96, 64, 32), (256, 32, 32)])
def test_groups_divide_the_rows(tmp_path, row, asked, size):
    plan, graph = plan_for({"fc": "w3a16", "wide": "w3a16"}, rows={"fc": row})
    written = quantization(tmp_path, plan, graph, group_size=asked)
    assert written["fc"] == {"group_size": size, "bits": 3}
    assert written["wide"] == {"group_size": asked, "bits": 3}
    assert written["group_size"] == size  # mlx-lm leaves out every row that this does not divide


def test_rows_that_no_group_divides_stay_float(tmp_path):
    plan, graph = plan_for({"fc": "w4a16", "odd": "w4a16"}, rows={"odd": 100})
    with pytest.raises(InputError, match="odd at w4a16 .4-bit weights in rows of 100"):
        quantization(tmp_path, plan, graph)
    assert quantization(tmp_path, plan, graph, widen=True)["odd"] is False


def test_experts_are_stacked(tmp_path):
    chosen = {f"m.0.block_sparse_moe.experts.{i}.{w}": "w4a16" for i in range(2) for w in ("w1", "w2", "w3")}
    chosen |= {f"m.1.mlp.experts.{i}.up_proj": "w2a16" for i in range(2)}
    written = quantization(tmp_path, *plan_for(chosen))
    stacks = {f"m.0.block_sparse_moe.switch_mlp.{part}_proj" for part in ("gate", "down", "up")}
    assert set(written) - {"group_size", "bits"} == stacks | {"m.1.mlp.switch_mlp.up_proj"}
    mixed = plan_for(chosen | {"m.1.mlp.experts.1.up_proj": "w3a16"})
    with pytest.raises(
        InputError, match=r"experts.0.up_proj at w2a16 \(one in the target with m.1.mlp.experts.1.up_proj"
    ):
        quantization(tmp_path, *mixed)
    assert quantization(tmp_path, *mixed, widen=True)["m.1.mlp.switch_mlp.up_proj"]["bits"] == 3


def test_a_stack_in_the_checkpoint_is_refused(tmp_path):
    plan, graph = plan_for({"m.mlp.experts.down_proj": "w4a16", "fc": "w4a16"})
    with pytest.raises(InputError, match="a stack of experts"):
        quantization(tmp_path, plan, graph)


@pytest.mark.parametrize("name", ["bits", "group_size", "mode"])
def test_names_that_mlx_needs(tmp_path, name):
    with pytest.raises(InputError, match=f"module named '{name}'"):
        quantization(tmp_path, *plan_for({name: "w4a16"}))


def test_bits_that_mlx_lacks(tmp_path):
    plan, graph = plan_for({"fc": "w7a16"})
    with pytest.raises(InputError, match="fc at w7a16 .7-bit weights"):
        quantization(tmp_path, plan, graph)
    assert quantization(tmp_path, plan, graph, widen=True)["fc"]["bits"] == 8
    assert {str(precision) for precision in Mlx().read(tmp_path / "config.json").precisions.values()} == {"w8a16"}
