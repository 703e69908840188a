"""From a model and a budget in bytes to a file for llama.cpp, vLLM or ONNX Runtime, by commands alone."""

import json

import pytest
import torch

import bitplan
from bitplan.adapters.gguf import pre_tokenizer_name, read_tensors
from bitplan.plugins.llm.gguf import align_bytes
from texts import trained, write_folder, write_gguf, write_text, write_tokenizer

SIZES = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16}
TEXT = ("--task", "text:data=text.txt,tokens=16")


@pytest.fixture
def folder(tmp_path, capsys):
    write_text(tmp_path / "text.txt", words=3000)
    made = trained(write_folder(tmp_path / "model", **SIZES), tmp_path / "text.txt", steps=30)
    capsys.readouterr()  # bars of transformers'
    return made


def done(run, *words):
    code, out, err = run(*words)
    assert code == 0, err
    return out, err


def test_from_a_budget_in_bytes_to_a_file_that_llama_cpp_runs(run, folder, tmp_path):
    code, _, err = run("plan", "model", "--budget", "10kB", "--target", "gguf", "--rules", "narrow=0")
    assert code == 2
    assert "budget 10kB cannot be met: with every layer at its lowest precision the gguf file takes" in err
    assert "Raise the budget to at least" in err
    assert "--rules 'fix=model.embed_tokens=w4a16'" in err or "--rules 'fix=lm_head=w4a16'" in err
    assert err.count("\n") == 1
    words = ("--target", "gguf", "--rules", "narrow=0", "--gain", "drift:samples=8", *TEXT)
    out, _ = done(run, "plan", "model", "--budget", "70kB", *words, "-o", "plan.json")
    assert "bytes of tensors" in out
    plan = bitplan.load("plan.json")
    assert plan.target == "gguf"
    assert {"w2a16"} < {str(one) for one in plan.precisions.values()}  # w4 or w8 too
    found = done(run, "quantize", "model", "--plan", "plan.json", "-o", "mixed")
    assert "--quantizer gguf" in found[1]
    done(run, "export", "mixed", "--format", "gguf", "-o", "mixed.gguf")
    (limit,) = plan.limits
    taken = sum(align_bytes(one.bytes) for one in read_tensors(tmp_path / "mixed.gguf").values())
    assert limit.cost + limit.fixed == taken <= 70_000
    words = ("--against", "mixed", *TEXT)
    out, _ = done(run, "verify", "mixed.gguf", *words, "--json")
    verdict = json.loads(out)
    assert verdict["codes_equal"]
    assert verdict["score"] == pytest.approx(verdict["reference"], rel=0.02)
    out, _ = done(run, "verify", "mixed.gguf", *words, "--limit", "4")
    assert "as near as its runtime can: llama.cpp rounds activations" in out
    out, _ = done(run, "evaluate", "mixed", *TEXT, "--json")
    assert json.loads(out)["scores"]["perplexity"] == pytest.approx(verdict["reference"])


def test_a_frontier_counts_the_bytes_of_a_file_too(run, folder):
    """Its plans are those that `plan` makes at the same budgets."""
    words = ("--target", "gguf", "--rules", "narrow=0", "--gain", "weight_error")
    out, _ = done(run, "show", "frontier", "model", "--budgets", "70kB,6bpw", *words, "--json")
    found = json.loads(out)["plans"]
    for budget, one in zip(("70kB", "6bpw"), found, strict=True):
        done(run, "plan", "model", "--budget", budget, *words, "-o", f"{budget}.json")
        plan = bitplan.load(f"{budget}.json")
        assert one["target"] == "gguf"
        assert one["precisions"] == {layer: str(precision) for layer, precision in plan.precisions.items()}
        assert one["limits"][0]["cost"] == plan.limits[0].cost
    code, _, err = run("show", "frontier", "model", *words, "--cost", "memory")
    assert (code, err.count("\n")) == (2, 1)
    assert "a frontier has one cost" in err


@pytest.mark.parametrize(
    ("target", "to", "name"),
    [("vllm:size=32,zeros=true", "vllm", "served"), ("matmulnbits:size=32", "matmulnbits", "m.onnx")],
)
def test_other_targets_get_the_grouping_that_they_store(run, folder, tmp_path, target, to, name):
    done(run, "plan", "model", "--budget", "6.5bpw", "--target", target, "--rules", "narrow=0", "-o", "plan.json")
    plan = bitplan.load("plan.json")
    links = {tuple(sorted(name.rsplit(".", 1)[1] for name in link)) for link in plan.links}
    assert links == {("k_proj", "q_proj", "v_proj"), ("gate_proj", "up_proj")}  # from names, without a forward pass
    done(run, "quantize", "model", "--plan", "plan.json", "-o", "mixed")
    done(run, "export", "mixed", "--format", to, "-o", name)
    assert (tmp_path / name).exists()
    if to == "vllm":
        assert {"config.json", "model.safetensors", "tokenizer.json"} == {
            one.name for one in (tmp_path / name).iterdir()
        }
        code, _, err = run("export", "mixed", "--format", to, "-o", name)
        assert code == 2
        assert "served" in err


BAD = {
    ("plan", "model", "--budget", "4bpw", "--target", "ggfu"): "unknown target 'ggfu'; did you mean gguf?",
    ("plan", "model", "--budget", "4bpw", "--target", "vllm"): "rows of 64 are no multiple: take --target vllm:size=64",
    ("plan", "model", "--budget", "4bpw", "--target", "gguf", "--bits", "w2a2,w8a8"): "gguf leaves activations alone",
    (
        "plan",
        "odd.gguf",
        "--budget",
        "4bpw",
        "--target",
        "gguf",
    ): "is of type I8, which cannot be turned into floats here",
    ("plan", "cut.gguf", "--budget", "4bpw", "--target", "gguf"): "cut off or damaged",
    (
        "evaluate",
        "model",
    ): "needs --task: The task (data, loss and score)",
}


def test_bad_input_is_one_line(run, folder, tmp_path, capsys):
    import gguf

    write_gguf(tmp_path / "odd.gguf", {"ffn_up.weight": gguf.GGMLQuantizationType.I8})
    (tmp_path / "cut.gguf").write_bytes(write_gguf(tmp_path / "whole.gguf").read_bytes()[:-5000])
    for words, said in BAD.items():
        code, _, err = run(*words)
        assert code == 2, words
        assert said in err, words
        assert err.count("\n") == 1, err
    write_folder(tmp_path / "parts", shards=True, **SIZES)
    capsys.readouterr()
    shard = sorted((tmp_path / "parts").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-64])
    code, _, err = run("plan", "parts", "--budget", "5bpw", "--target", "gguf")
    assert code == 2
    assert f"{shard.name} is cut off" in err
    assert err.count("\n") == 1


WEIGHTS_ALONE = ("--bits", "w2a16,w4a16", "--budget", "3bpw", "--rules", "narrow=0")
LONG = ("--task", "text:data=text.txt,tokens=128")
SHORT = "the {} split of short.txt has {} tokens, fewer than a window of 32: give a longer text, or set tokens to less"
STRANGE = "the tokenizer of other gave the token 77, and the model knows 32: take the tokenizer of the model"


@pytest.fixture
def odd(tmp_path, capsys):
    """A text shorter than a window, a tokenizer of more words than the model has, and a model with a weight lost."""
    write_text(tmp_path / "text.txt", words=600)
    write_text(tmp_path / "short.txt", words=20)
    write_tokenizer(tmp_path / "other", known=[f"w{number}" for number in range(60)])
    (tmp_path / "odd.txt").write_text(" ".join(f"w{number % 60} king" for number in range(600)))
    model = bitplan.load_pretrained(write_folder(tmp_path / "model", **SIZES))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = float("nan")
    model.save_pretrained(write_tokenizer(tmp_path / "lost"))
    capsys.readouterr()


LOST = "error: layer 'model.layers.1.mlp.down_proj': 1 of 16,384 values of model.layers.1.mlp.down_proj.weight are NaN"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("evaluate", "model", "--task", "text:data=short.txt,tokens=32"), SHORT.format("test", 8)),
        (
            ("plan", "model", *WEIGHTS_ALONE, "--task", "text:data=short.txt,tokens=32"),
            SHORT.format("train", 12),
        ),
        (("evaluate", "model", *LONG), "windows have 128 tokens, the model has positions for 64"),
        (("plan", "model", *WEIGHTS_ALONE, *LONG), "error: windows have 128 tokens, the model has"),
        (("evaluate", "model", "--task", "text:data=odd.txt,tokens=16,tokenizer=other"), STRANGE),
        *(
            (("plan", "model", *WEIGHTS_ALONE, "--gain", gain, "--task",
              "text:data=odd.txt,tokens=16,tokenizer=other"), f"error: {STRANGE}")
            for gain in ("drift", "fisher", "moments")
        ),
        (("evaluate", "lost", *TEXT), "error: the loss is NaN in 15 of 15 windows of text.txt: look at the network's"),
        (("plan", "lost", *WEIGHTS_ALONE, "--gain", "drift", *TEXT), LOST),
        (("plan", "lost", *WEIGHTS_ALONE, "--gain", "fisher", *TEXT), LOST),
        (
            ("plan", "lost", *WEIGHTS_ALONE, "--gain", "moments", *TEXT),
            "error: what layer 'model.layers.1.mlp.down_proj' gives out is NaN or infinite",
        ),
        (
            ("plan", "lost", *WEIGHTS_ALONE, "--gain", "weight_error"),
            "error: the weights of layer 'model.layers.1.mlp.down_proj' are NaN or infinite",
        ),
    ],
)  # fmt: skip
def test_texts_and_networks_that_do_not_fit_are_one_line(run, odd, words, said):
    code, _, err = run(*words)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1


def test_budgets_of_bare_weights_say_so_beside_groups(run, odd):
    words = ("plan", "model", *WEIGHTS_ALONE, "--gain", "equal_bits", "--quantizer")
    told = "3bpw counts weights alone: --target packed:size=16,zeros=true also counts the scales of groups and all else"
    assert told in done(run, *words, "groups:size=16,zeros=true")[1]
    assert "counts weights alone" not in done(run, *words, "lsq")[1]


def test_siblings_are_linked_in_networks_and_in_files(folder):
    model = bitplan.load_pretrained(folder)
    example = {"input_ids": bitplan.load_task("text", tokens=16).example()["input_ids"]}
    traced, named = bitplan.trace(model, example), bitplan.trace(bitplan.open_checkpoint(folder))
    expected = {
        frozenset(f"model.layers.{block}.{part}_proj" for part in parts)
        for block in range(2)
        for parts in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up"))
    }
    assert {frozenset(link.layers) for link in traced.links} == expected
    assert {frozenset(link.layers) for link in named.links} == expected


def test_how_a_text_is_cut_outlives_reading_and_writing(run, tmp_path):
    """A tokenizer.json does not say its name in llama.cpp, so the configuration keeps it."""
    source = write_gguf(tmp_path / "model.gguf")
    assert pre_tokenizer_name(source) == "default"  # which no tokenizer.json of these byte pairs would say
    words = (
        "--bits",
        "w4a16,w8a16",
        "--budget",
        "6.5bpw",
        "--target",
        "gguf",
        "--gain",
        "equal_bits",
        "--rules",
        "narrow=0",
    )
    done(run, "plan", "model.gguf", *words, "-o", "plan.json")
    done(run, "quantize", "model.gguf", "--plan", "plan.json", "-o", "mixed")
    done(run, "export", "mixed", "--format", "gguf", "-o", "again.gguf")
    assert pre_tokenizer_name(tmp_path / "again.gguf") == "default"
