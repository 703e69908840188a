"""Language models on the command line: a folder or a GGUF file in, perplexity out."""

import json

import pytest
import torch

import bitplan
from texts import trained, write_folder, write_gguf, write_text


@pytest.fixture
def folder(tmp_path):
    write_text(tmp_path / "text.txt", words=4000)
    return trained(write_folder(tmp_path / "model"), tmp_path / "text.txt")


ON_TEXT = ("--task", "text:data=text.txt,tokens=16")


def perplexity(run, *words):
    code, out, err = run("evaluate", *words, *ON_TEXT, "--json")
    assert code == 0, err
    return json.loads(out)["scores"]["perplexity"]


def test_a_folder_is_evaluated_quantized_and_evaluated_again(run, folder, tmp_path):
    code, out, err = run("evaluate", "model", *ON_TEXT)
    assert code == 0, err
    assert out.startswith("perplexity ")
    assert "on the 100 test samples of text" in out
    task = bitplan.load_task("text", data=tmp_path / "text.txt", tokenizer=folder, tokens=16)
    whole = perplexity(run, "model")
    assert whole == pytest.approx(task.score(bitplan.load_pretrained(folder)))
    found = {}
    for finish in ("nearest", "gptq"):
        words = (
            "--bits",
            "w2a16",
            "--rules",
            "narrow=0",
            "--quantizer",
            "groups:size=16,zeros=true",
            "--samples",
            "64",
        )
        code, _, err = run("quantize", "model", *words, "--rounding", finish, *ON_TEXT, "-o", finish)
        assert code == 0, err
        assert 0.5 < perplexity(run, finish) / whole < 3  # it brings its configuration and its tokenizer
        found[finish] = bitplan.load_checkpoint(tmp_path / finish)
    windows, model = torch.cat(list(task.batches("train", 9))), bitplan.load_pretrained(folder)
    with torch.no_grad():
        lost = {
            finish: (made(windows).logits - model(windows).logits).square().mean() for finish, made in found.items()
        }
    assert lost["gptq"] < 0.8 * lost["nearest"]


def test_a_folder_is_planned_by_its_names_and_the_plan_fits_its_network(run, folder):
    words = ("--bits", "w2a16,w4a16", "--budget", "3bpw", "--rules", "narrow=0", "-o", "plan.json")
    code, _, err = run("plan", "model", *words)
    assert code == 0, err
    words = ("--plan", "plan.json", "--quantizer", "groups:size=16", "--rounding", "gptq", "--samples", "8")
    code, _, err = run("quantize", "model", *words, *ON_TEXT, "-o", "mixed")
    assert code == 0, err
    assert perplexity(run, "mixed") < 100


def test_with_a_text_the_network_itself_is_planned(run, folder):
    words = ("--bits", "w2a16,w4a16", "--budget", "3bpw", "--rules", "narrow=0", "--gain", "auto:samples=8")
    code, _, err = run("plan", "model", "--gain", "drift", *words, *ON_TEXT, "-o", "plan.json")
    assert code == 0, err
    assert set(bitplan.load("plan.json").precisions.values()) >= {bitplan.Precision.parse("w2a16")}


def test_gguf_is_evaluated_and_traced(run, tmp_path):
    write_gguf(tmp_path / "m.gguf")
    write_text(tmp_path / "text.txt")
    assert 20 < perplexity(run, "m.gguf") < 50  # it has random weights, and 32 words
    code, out, err = run("steps", "trace", "m.gguf")
    assert code == 0, err
    assert "model.layers.1.mlp.down_proj" in out


def test_what_is_lacking_is_one_line(run, folder, tmp_path):
    code, _, err = run("quantize", "model", "--bits", "w3a16", "--rounding", "gptq", "-o", "out")
    assert code == 2
    assert "--rounding gptq looks at the inputs of layers: give --task or --data" in err
    code, _, err = run("evaluate", "model", "--task", "text:data=text.txt")
    assert code == 2
    assert "windows have 512 tokens, the model has positions for 64" in err
    part = folder / "model.safetensors"
    part.write_bytes(part.read_bytes()[:-100])
    code, _, err = run("evaluate", "model", *ON_TEXT)
    assert code == 2
    assert "model.safetensors is cut off" in err
    assert err.count("\n") == 1


def test_on_the_command_line_the_folder_is_not_loaded(run, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("bitplan.models.pretrained.load_pretrained", lambda path: pytest.fail("it was loaded"))
    words = ON_TEXT
    code, _, err = run(
        "plan", "model", "--gain", "moments:samples=4", "--quantizer", "groups:size=16", "--bits", "w2a16,w4a16",
        "--budget", "3bpw", "--rules", "narrow=0", *words, "-o", "plan.json",
    )  # fmt: skip
    assert code == 0, err
    assert len(set(map(str, bitplan.load(tmp_path / "plan.json").precisions.values()))) > 1


@pytest.mark.parametrize("gain", ["drift", "fisher", "auto"])
def test_a_folder_that_memory_does_not_hold_is_planned_block_by_block(run, folder, monkeypatch, gain):
    """With little memory nothing is loaded, and the plan is that of the network."""
    words = ("--bits", "w2a16,w4a16", "--budget", "3bpw", "--rules", "narrow=0", "--gain", gain, *ON_TEXT)
    code, _, err = run("plan", "model", *words, "-o", "loaded.json")
    assert code == 0, err
    monkeypatch.setattr("bitplan.core.parsing.available_memory", lambda: 1 << 16)  # the text fits
    monkeypatch.setattr("bitplan.models.pretrained.load_pretrained", None)
    code, out, err = run("plan", "model", *words, "-o", "streamed.json")
    assert code == 0, err
    assert "read block by block" in out + err
    plans = [bitplan.load(f"{name}.json").precisions for name in ("loaded", "streamed")]
    assert plans[0] == plans[1]
