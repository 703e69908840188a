"""llama.cpp: names as llama.cpp's own table has them, types that its rows allow, patterns that match one tensor."""

import re
from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llms import llama_shapes, plan_for
from safetensors.torch import save_file

import bitplan
from bitplan.core.errors import InputError
from bitplan.graph.names import LinkRule, trace_checkpoint
from bitplan.graph.rules import Rules
from bitplan.plugins.runtimes.llama_cpp import LlamaCpp, tensor_of

LLAMA = [name for name in llama_shapes(blocks=12)]
MODELS = {
    "LLAMA": [*LLAMA, "tok_embeddings", "output", *(f"layers.7.attention.w{x}" for x in "qkvo"),
              *(f"layers.11.feed_forward.w{x}" for x in "123"), "model.layers.3.block_sparse_moe.gate"],
    "PHI3": ["model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj", "model.layers.2.mlp.down_proj"],
    "QWEN3": LLAMA,
    "GEMMA3": LLAMA,
    "QWEN3MOE": ["model.layers.1.mlp.gate", "model.layers.1.self_attn.o_proj"],
    "QWEN2MOE": [f"model.layers.1.mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")],
    "DEEPSEEK": [f"model.layers.1.mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")],
    "GPT2": ["wte", "transformer.wte", "h.3.attn.c_attn", "transformer.h.3.attn.c_proj", "h.3.mlp.c_fc",
             "h.3.mlp.c_proj"],
}  # fmt: skip


@pytest.mark.parametrize("model", sorted(MODELS))
def test_names_are_those_of_llama_cpp_s_own_table(model):
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[model], 12)
    for name in MODELS[model]:
        assert tensor_of(name) == table.get_name(name), name


@pytest.mark.parametrize("where", ["mlp", "block_sparse_moe"])
@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"])
def test_experts_are_one_tensor(where, part):
    merged = f"model.layers.5.{where}.experts.{part}"
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 12)
    expected = table.get_name(merged) or table.get_name(merged.replace("block_sparse_moe", "mlp"))
    if expected is None:
        expected = table.get_name(merged.replace("mlp", "block_sparse_moe"))
    assert expected is not None
    assert {tensor_of(f"model.layers.5.{where}.experts.{i}.{part}") for i in range(3)} == {expected}


def read(path):
    """What llama-quantize makes of the file: words split at the first "=", the pattern in lower case."""
    pairs = [word.split("=", 1) for word in path.read_text().split()]
    return [(re.compile(pattern.lower()), kind) for pattern, kind in pairs]


def type_of(rules, tensor):
    """The first pattern that is found in the name."""
    return next((kind for pattern, kind in rules if pattern.search(f"{tensor}.weight")), None)


def exported(tmp_path, plan, graph, **options):
    return bitplan.export(plan, tmp_path / "types.txt", "llama.cpp", graph=graph, force=True, **options)


TYPES = {
    "w2a16": "q2_K",
    "w3a16": "q3_K",
    "w4a16": "q4_K",
    "w5a16": "q5_K",
    "w6a16": "q6_K",
    "w8a16": "q8_0",
    "w16a16": "f16",
}


@given(data=st.data())
@settings(max_examples=12)
def test_every_tensor_gets_its_own_type(tmp_path_factory, data):
    chosen = {name: data.draw(st.sampled_from(sorted(TYPES)[1:]), label=name) for name in LLAMA}
    plan, graph = plan_for(chosen)
    rules = read(exported(tmp_path_factory.mktemp("types"), plan, graph))
    for name, precision in chosen.items():
        matching = [kind for pattern, kind in rules if pattern.search(f"{tensor_of(name)}.weight")]
        assert matching == [TYPES[precision]]  # also blk.1 beside blk.10 and blk.11
    assert not [rule for rule, _ in rules if rule.search("blk.0.attn_norm.weight") or rule.search("xoutput.weight")]


def block_of(kind):
    """How many weights a block of that type has in ggml."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]][0]


@pytest.mark.parametrize(
    ("row", "precision", "kind", "widened"),
    [
        (256, "w4a16", "q4_K", None),
        (288, "w4a16", "q4_0", None),
        (288, "w5a16", "q5_0", None),
        (288, "w8a16", "q8_0", None),
        (288, "w2a16", None, "q4_0"),
        (288, "w3a16", None, "q4_0"),
        (288, "w6a16", None, "q8_0"),
        (100, "w8a16", None, "f16"),
        (256, "w7a16", None, "q8_0"),
        (256, "w9a16", None, "f16"),
    ],
)
def test_rows_decide_what_is_possible(tmp_path, row, precision, kind, widened):
    plan, graph = plan_for(
        {"model.layers.0.mlp.up_proj": precision, "lm_head": "w4a16"}, rows={"model.layers.0.mlp.up_proj": row}
    )
    if kind is None:
        with pytest.raises(InputError, match=f"up_proj at {precision} .{precision[1]}-bit weights in rows of {row}"):
            exported(tmp_path, plan, graph)
    rules = read(exported(tmp_path, plan, graph, widen=kind is None))
    assert type_of(rules, "blk.0.ffn_up") == (kind or widened)
    assert row % block_of(kind or widened) == 0  # so llama-quantize does not fall back to another type


def test_the_rows_of_a_table_are_its_width(tmp_path):
    plan, graph = plan_for(
        {"model.embed_tokens": "w2a8"}, kinds={"model.embed_tokens": "embedding"}, rows={"model.embed_tokens": 512}
    )
    assert type_of(read(exported(tmp_path, plan, graph)), "token_embd") == "q2_K"


def test_names_of_a_gguf_file_are_kept(tmp_path):
    plan, graph = plan_for({"blk.3.attn_k_b": "w4a16", "token_embd": "w8a16", "output": "w6a16"})
    path = exported(tmp_path, plan, graph)
    assert LlamaCpp().read(path).precisions == dict(plan.precisions)


def test_unknown_names_are_refused(tmp_path):
    plan, graph = plan_for({"lm_head": "w4a16", "vision.blocks.0.fc": "w4a16", "a=b": "w4a16", "c d": "w16a16"})
    with pytest.raises(InputError, match=r"no tensor of llama.cpp is known for vision.blocks.0.fc, a=b, c d: "):
        exported(tmp_path, plan, graph)


def test_experts_at_different_precisions_break_one_tensor(tmp_path):
    names = [f"model.layers.0.mlp.experts.{i}.up_proj" for i in range(3)]
    plan, graph = plan_for(dict(zip(names, ("w2a16", "w4a16", "w2a16"), strict=True)))
    with pytest.raises(
        InputError, match=r"experts.0.up_proj at w2a16 \(one in the target with .*experts.1.up_proj at w4a16"
    ):
        exported(tmp_path, plan, graph)
    path = exported(tmp_path, plan, graph, widen=True)
    assert path.read_text() == "^blk\\.0\\.ffn_up_exps\\.weight$=q4_K\n"


def test_the_router_stays_as_it_is(tmp_path):
    plan, graph = plan_for({"model.layers.0.mlp.gate": "w4a16", "lm_head": "w4a16"})
    with pytest.raises(InputError, match="mlp.gate at w4a16"):
        exported(tmp_path, plan, graph)


def test_the_rule_that_the_docs_give_joins_the_experts_of_a_projection(tmp_path):
    names = [f"model.layers.{b}.mlp.experts.{i}.{w}_proj" for b in range(2) for i in range(3) for w in ("up", "down")]
    torch.manual_seed(0)
    save_file({f"{name}.weight": torch.randn(256, 256) for name in names}, tmp_path / "model.safetensors")
    pattern = r"(?<=experts\.)\d+(?=\.)"
    page = Path(__file__).parents[3] / "docs/targets/llama_cpp.md"
    assert f"--rules 'link={pattern}'" in page.read_text()
    linked = bitplan.Names(links=(LinkRule("experts", pattern),))
    graph = trace_checkpoint(tmp_path / "model.safetensors", Rules(first=None, last=None), names=linked)
    gains = bitplan.estimate("random", None, graph, choices="w2a16,w4a16")
    plan = bitplan.select(graph, gains, bitplan.price("memory", graph, "w2a16,w4a16"), budget="3bpw")
    read = LlamaCpp().read(exported(tmp_path, plan, graph)).precisions
    assert {str(precision) for precision in read.values()} == {"w2a16", "w4a16"}
    assert set(read) == {f"blk.{block}.ffn_{part}_exps" for block in range(2) for part in ("up", "down")}
