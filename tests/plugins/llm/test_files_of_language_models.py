"""Files for language models hold the codes of the network, take the bytes that were foretold, and run alike."""

import json
import random

import gguf
import numpy as np
import onnx
import pytest
import torch
from safetensors import safe_open

import bitplan
from bitplan.adapters.gguf import floats_of, names_in_gguf, read_tensors
from bitplan.adapters.torchvision import torchvision
from bitplan.adapters.transformers import transformers
from bitplan.core.errors import InputError
from bitplan.costs.files import FileCost, read_form, target_names
from bitplan.models.file_tensors import file_cost
from bitplan.plugins.llm.gguf import BLOCK_TYPES, Coded, Gguf, align_bytes, codes_in
from bitplan.plugins.llm.vllm import Vllm
from bitplan.quant.convert import quantizers_of, weights_of
from texts import llama

torchvision()

EXAMPLE = {"input_ids": torch.arange(16)[None] % 32}
WIDE = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16, "vocab_size": 96}


def planned(model, choices, rules=None, drawn=0):
    """A graph, and a plan that gives its groups any of the choices."""
    graph = bitplan.trace(model, EXAMPLE, rules=(rules or bitplan.Rules(narrow=0)).for_choices(choices))
    draw, plan = random.Random(drawn), bitplan.Plan.uniform(graph, choices.split(",")[-1])
    drawn = {group.name: bitplan.Precision.parse(draw.choice(choices.split(","))) for group in graph.selectable}
    chosen = {layer.name: drawn[group.name] for group in graph.selectable for layer in group.layers}
    return graph, plan.model_copy(update={"precisions": plan.precisions | chosen})


def predicted(target, model, graph, plan):
    """The bytes of the file that are foretold for a plan."""
    cost = file_cost(target, model)
    layers = sum(cost(layer, plan.precisions[layer.name]) for layer in graph.layers)
    return layers + sum(cost.beside(graph).values())


def values_of(model):
    """What the network multiplies by: codes times steps."""
    quantizers, weights = quantizers_of(model), weights_of(model)
    return {
        name: quantizers[name].weight.values(codes) for name, codes in bitplan.integer_weights(model).items()
    }, weights


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("drawn", [0, 1])
def test_gguf_holds_the_codes_and_the_bytes_that_were_foretold(tmp_path, zeros, drawn):
    model, target = llama(**WIDE, tie_word_embeddings=bool(drawn)), "gguf:zeros=true" if zeros else "gguf"
    graph, plan = planned(model, "w4a16,w5a16,w8a16", drawn=drawn)
    if not zeros:
        downs = {name: bitplan.Precision.parse("w2a16") for name in plan.precisions if name.endswith("down_proj")}
        plan = plan.model_copy(update={"precisions": plan.precisions | downs})
    made = bitplan.quantize(model, plan, method=read_form(target).method)
    path = bitplan.export(made, tmp_path / "m.gguf", "gguf")
    held = read_tensors(path)
    assert predicted(target, model, graph, plan) == sum(align_bytes(one.bytes) for one in held.values())
    data = gguf.GGUFReader(path)
    assert path.stat().st_size == data.data_offset + sum(align_bytes(one.bytes) for one in held.values())
    names = names_in_gguf("llama", 2, [f"{layer}.weight" for layer in plan.precisions])
    values, _ = values_of(made)
    for layer, value in values.items():
        own = names[f"{layer}.weight"]
        heads = {"attn_q": 4, "attn_k": 2}.get(own.split(".")[-2])
        expected = value if heads is None else value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        assert np.array_equal(floats_of(held[own]), expected.numpy()), layer  # codes times step, exactly
    back, codes = Gguf().read(path), bitplan.integer_weights(made)
    assert back.codes.keys() == codes.keys()
    assert all(torch.equal(back.codes[name], codes[name]) for name in codes)
    kinds = {held[names[f"{name}.weight"]].kind for name in codes}
    assert kinds <= set(BLOCK_TYPES)
    assert ("TQ2_0" in kinds) != zeros


@pytest.mark.parametrize("kind", sorted(BLOCK_TYPES))
def test_blocks_are_those_of_llama_cpp(kind):
    draw = np.random.default_rng(0)
    bits, size, *_ = BLOCK_TYPES[kind]
    codes = draw.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, 2 * size)).astype(np.int8)
    steps = draw.integers(1, 64, (3, 2)).astype(np.float32) / 1024
    zeros = draw.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, 2)).astype(np.float32) if kind[-1] == "1" else None
    whole = [None if one is None else np.repeat(one, size, 1) for one in (steps, zeros)]
    coded = Coded(codes, whole[0], whole[1], bits)
    assert coded.fits(kind)
    blocks = coded.blocks(kind)
    expected = (codes - (0 if whole[1] is None else whole[1])) * whole[0]
    assert np.array_equal(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]), expected)
    assert np.array_equal(codes_in(blocks, kind, bits), codes)
    assert not coded._replace(steps=whole[0] * np.float32(1.0001)).fits(kind)  # no float16


def test_llama_cpp_runs_the_file_as_pytorch_runs_the_network(tmp_path):
    model = llama(**WIDE, use_cache=False)
    _, plan = planned(model, "w4a16,w8a16")
    made = bitplan.quantize(model, plan, method="gguf")
    path = bitplan.export(made, tmp_path / "m.gguf", "gguf")
    rows = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(0))
    run = Gguf().opened(path, made).network
    with torch.no_grad():
        ours, theirs, floats = made(input_ids=rows).logits, run(rows), model(input_ids=rows).logits
    assert theirs.shape == ours.shape
    off, lost = (ours - theirs).abs().max(), (ours - floats).abs().max()
    assert off < 0.02 * ours.abs().max() < lost * 10
    assert off < 0.5 * lost
    verdict = bitplan.verify(path, made, [{"input_ids": rows}])
    assert verdict.codes_equal
    assert "8 bits" in verdict.rounds
    with torch.no_grad():
        made.model.layers[0].mlp.down_proj.weight.mul_(-1)
    assert not bitplan.verify(path, made, [{"input_ids": rows}]).passed


def test_what_no_type_holds_is_refused_by_name_or_widened_aloud(tmp_path, caplog):
    model = llama(**WIDE)
    _, plan = planned(model, "w3a16,w4a16")
    made = bitplan.quantize(model, plan, method="groups:size=32,half=true")
    with pytest.raises(InputError, match=r"holds exactly: model.layers.\d.*at 3 bits in rows of \d+ as Q4_0"):
        bitplan.export(made, tmp_path / "m.gguf", "gguf")
    assert not (tmp_path / "m.gguf").exists()
    path = bitplan.export(made, tmp_path / "m.gguf", "gguf", widen=True)
    assert "widened for gguf: model.layers" in caplog.text
    codes = bitplan.integer_weights(made)
    assert all(torch.equal(found, codes[name]) for name, found in Gguf().read(path).codes.items())
    learned = bitplan.quantize(model, plan)
    with pytest.raises(InputError, match="as floats"):
        bitplan.export(learned, tmp_path / "n.gguf", "gguf")


def test_a_source_gives_its_header_and_its_types(tmp_path):
    from texts import write_gguf

    source = write_gguf(tmp_path / "source.gguf", {"token_embd.weight": gguf.GGMLQuantizationType.Q8_0})
    model = bitplan.load_pretrained(source)
    rules = bitplan.Rules(narrow=0, first="w16a16", last="w16a16", embeddings="w16a16")
    graph, plan = planned(model, "w4a16,w8a16", rules)
    made = bitplan.quantize(model, plan, method="gguf")
    path = bitplan.export(made, tmp_path / "m.gguf", "gguf", origin=str(source))
    before, after = read_tensors(source), read_tensors(path)
    assert before.keys() == after.keys()
    assert after["token_embd.weight"].kind == "Q8_0"
    assert np.array_equal(after["token_embd.weight"].data, before["token_embd.weight"].data)
    tokens = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"].contents()
    assert tokens == gguf.GGUFReader(source).fields["tokenizer.ggml.tokens"].contents()
    cost = file_cost("gguf", model, source)
    fixed = bitplan.price(cost, graph, "w4a16,w8a16").fixed
    assert fixed["model.embed_tokens"] == align_bytes(before["token_embd.weight"].bytes)
    with pytest.raises(InputError, match="origin=nowhere.gguf is no GGUF file"):
        bitplan.export(made, tmp_path / "n.gguf", "gguf", origin="nowhere.gguf")


UNCHOSEN = bitplan.Rules(narrow=0, first="w16a16", last="w16a16", embeddings="w16a16")


@pytest.mark.parametrize(
    ("target", "drawn"), [("vllm:size=32", 0), ("vllm:size=64,zeros=true", 1), ("vllm:size=16", 2)]
)
def test_a_checkpoint_for_vllm_is_read_by_its_package(tmp_path, target, drawn):
    model = llama(**WIDE)
    graph, plan = planned(model, "w3a16,w4a16,w8a16", UNCHOSEN, drawn)
    made = bitplan.quantize(model, plan, method=read_form(target).method)
    folder = bitplan.export(made, tmp_path / "packed", "vllm")
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert predicted(target, model, graph, plan) == sum(t.numel() * t.element_size() for t in tensors.values())
    back, codes = Vllm().read(folder), bitplan.integer_weights(made)
    assert back.codes.keys() == codes.keys()
    assert all(torch.equal(back.codes[name], codes[name]) for name in codes)
    values, _ = values_of(made)
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(json.loads((folder / "config.json").read_text())["quantization_config"])
    for group in config.config_groups.values():
        for name in group.targets:
            own = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
            own["weight_scale"] = own["weight_scale"].float()
            found = PackedQuantizationCompressor.decompress(own, group)
            assert torch.equal(found["weight"], values[name]), name


def test_transformers_loads_a_checkpoint_for_vllm_with_the_same_outputs(tmp_path):
    model = llama(**WIDE)
    _, plan = planned(model, "w4a16,w8a16", UNCHOSEN)
    made = bitplan.quantize(model, plan, method="groups:size=32,half=true,zeros=true")
    folder = bitplan.export(made, tmp_path / "packed", "vllm")
    library = transformers("a test")
    loaded = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        ours, theirs = made(**EXAMPLE).logits, loaded(**EXAMPLE).logits
    assert torch.allclose(ours, theirs, atol=1e-5 * float(ours.abs().max()))


def test_siblings_that_differ_are_refused_by_name(tmp_path):
    model = llama(**WIDE)
    _, plan = planned(model, "w4a16,w8a16", UNCHOSEN)
    first = "model.layers.0.self_attn"
    other = {f"{first}.q_proj": "w4a16", f"{first}.k_proj": "w8a16", f"{first}.v_proj": "w4a16"}
    changed = plan.precisions | {name: bitplan.Precision.parse(one) for name, one in other.items()}
    links = tuple(link for link in plan.links if f"{first}.q_proj" not in link)
    made = bitplan.quantize(
        model, plan.model_copy(update={"precisions": changed, "links": links}), method="groups:size=32,half=true"
    )
    with pytest.raises(InputError, match=r"self_attn.q_proj at w4a16 \(one in the target with .*k_proj at w8a16"):
        bitplan.export(made, tmp_path / "packed", "vllm")
    folder = bitplan.export(made, tmp_path / "packed", "vllm", widen=True)
    back, codes = Vllm().read(folder), bitplan.integer_weights(made)
    assert all(torch.equal(back.codes[name], codes[name]) for name in codes)
    assert str(back.precisions[f"{first}.q_proj"]) == "w8a16"


@pytest.mark.parametrize(
    ("choices", "zeros"), [("w2a16,w4a16,w8a16", False), ("w2a16,w4a16,w8a16", True), ("w3a16,w8a16", True)]
)
def test_matmulnbits_takes_groups(tmp_path, choices, zeros):
    model = llama(**WIDE, tie_word_embeddings=zeros, use_cache=False)
    for number, norm in enumerate(value for name, value in model.named_parameters() if "norm" in name):
        norm.data.mul_(1 + number / 8)  # ONNX stores equal ones once
    target = f"matmulnbits:size=32,zeros={str(zeros).lower()}"
    graph, plan = planned(model, choices, drawn=1)
    made = bitplan.quantize(model, plan, method=read_form(target).method)
    path = bitplan.export(made, tmp_path / "m.onnx", "matmulnbits", example=EXAMPLE)
    verdict = bitplan.verify(path, made, [EXAMPLE])
    assert verdict.passed, verdict
    named = {layer.name for layer in graph.layers} | {name for name, _ in model.named_parameters()}
    own = ("blocks", "step", "zero", "codes")
    sizes = {
        one.name: len(one.raw_data)
        for one in onnx.load(path).graph.initializer
        if one.name in named or (one.name.rpartition(".")[0] in named and one.name.rpartition(".")[2] in own)
    }
    assert predicted(target, model, graph, plan) == sum(sizes.values()), sizes


@pytest.mark.parametrize("target", ["packed", "packed:size=16,zeros=true", "packed:size=0"])
def test_a_packed_file_takes_what_was_foretold(tmp_path, target):
    model = llama(**WIDE, tie_word_embeddings=True)
    graph, plan = planned(model, "w2a16,w3a16,w8a16", drawn=2)
    made = bitplan.quantize(model, plan, method=read_form(target).method)
    path = bitplan.export(made, tmp_path / "m.safetensors", "packed")
    with safe_open(path, "pt") as file:
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert predicted(target, model, graph, plan) == sum(t.numel() * t.element_size() for t in held.values())


def test_smollm2_s_shapes(tmp_path):
    """One block of SmolLM2 at its own sizes: rows of 576 and 1,536, nine heads, three of keys."""
    choices = "w2a16,w4a16,w8a16"
    sizes = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=1, head_dim=64, vocab_size=64)
    model = llama(**sizes, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
    graph, _ = planned(model, choices)
    costs = bitplan.price(file_cost("gguf", model), graph, choices)
    gains = bitplan.estimate("uniform", None, graph, choices=costs.choices)
    plan = bitplan.select(graph, gains, costs, budget="3.9bpw")
    assert {name for name, one in plan.precisions.items() if one.weight_bits == 2} == {"model.layers.0.mlp.down_proj"}
    assert plan.target == "gguf"
    made = bitplan.quantize(model, plan, method="gguf")
    path = bitplan.export(made, tmp_path / "m.gguf", "gguf")
    (limit,) = plan.limits
    assert limit.cost + sum(costs.fixed.values()) == sum(align_bytes(one.bytes) for one in read_tensors(path).values())
    with pytest.raises(
        InputError,
        match=r"budget 3.8bpw cannot be met: .* gguf file takes 3.89bpw. Raise the budget to at least 3.90bpw",
    ):
        bitplan.select(graph, gains, costs, budget="3.8bpw")


def test_forms_are_read_as_they_are_written():
    assert set(target_names()) == {"gguf", "matmulnbits", "packed", "vllm"}
    for name in target_names():
        assert read_form(name).written == name
    assert read_form("vllm:size=64,zeros=true").written == "vllm:size=64,zeros=true"
    refused = {
        "vlm": "unknown target 'vlm'; did you mean vllm?",
        "gguf:size=3": "unknown option of gguf 'size'",
        "vllm:size=many": "size is 'many', and is written as size=128",
        "matmulnbits:size=24": "a block is 16, 32, 64, 128 … inputs, not 24",
    }
    for written, said in refused.items():
        with pytest.raises(InputError, match=said):
            read_form(written)


def test_rows_that_do_not_fit_are_refused_by_name():
    model = llama(**WIDE | {"hidden_size": 48, "head_dim": 12})
    graph, _ = planned(model, "w4a16,w8a16", UNCHOSEN)
    with pytest.raises(
        InputError,
        match=r"layer 'model.layers.0.self_attn.q_proj' at w4a16: blocks of gguf have 32 weights, of which rows of 48",
    ):
        bitplan.price(FileCost(read_form("gguf")), graph, "w4a16,w8a16")
    with pytest.raises(InputError, match=r"take --target vllm:size=16"):
        bitplan.price(FileCost(read_form("vllm")), graph, "w4a16,w8a16")
    with pytest.raises(InputError, match=r"gguf leaves activations alone, and w4a4 does not"):
        bitplan.price(
            FileCost(read_form("gguf")),
            bitplan.trace(llama(**WIDE), EXAMPLE, rules=bitplan.Rules(narrow=0)),
            "w4a4,w8a8",
        )
