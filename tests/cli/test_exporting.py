"""The commands export and verify."""

import json
import re

import pytest
import torch

import bitplan
from bitplan.models.zoo import load_model
from bitplan.store.files import save


@pytest.fixture
def checkpoint(tmp_path):
    """A small quantized model of the zoo, calibrated on its own training images."""
    torch.manual_seed(0)
    model, example = load_model("digits_transformer")
    graph = bitplan.trace(model, example, name="digits_transformer")
    quantized = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    images = next(iter(bitplan.load_task("digits").batches("train", 32)))[0]
    bitplan.calibrate_(quantized, [images])
    save(graph, tmp_path / "graph.json")
    save(bitplan.plan_of(quantized), tmp_path / "plan.json")
    return bitplan.save_checkpoint(quantized, tmp_path / "run", spec="digits_transformer")


def test_a_checkpoint_is_exported_and_verified(run, checkpoint):
    code, _, err = run("export", checkpoint, "--format", "packed", "-o", "net.safetensors", "--graph", "graph.json")
    assert code == 0
    assert err.startswith("wrote net.safetensors (")
    assert bitplan.load_packed("net.safetensors")
    code, out, _ = run("verify", "net.safetensors", "--against", checkpoint, "--task", "digits")
    assert code == 0
    assert "codes        equal in 14 layers" in out
    assert "360 of 360 equal (100.00 %)" in out
    assert "the file does what the model does" in out
    code, out, _ = run("verify", "net.safetensors", "--against", checkpoint, "--task", "digits", "--limit", 9, "--json")
    assert code == 0
    assert json.loads(out)["score"] is None


def test_onnx_from_the_command_line_and_a_file_that_differs(run, checkpoint, tmp_path):
    assert run("export", checkpoint, "--format", "onnx:opset=21", "-o", "net.onnx")[0] == 0
    code, out, _ = run("verify", "net.onnx", "--against", checkpoint, "--task", "digits", "--limit", 20, "--speed")
    assert re.search(
        r"size +\d+\.\d+ x smaller than float \([\d,]+ bytes\)\nspeed +\d+\.\d+ x the speed of float in ONNX", out
    )
    code, out, _ = run("verify", "net.onnx", "--against", checkpoint, "--task", "digits", "--limit", 20)
    assert "speed" not in out
    assert code == 0, out
    model = bitplan.load_checkpoint(checkpoint)
    with torch.no_grad():
        model.linear.weight.mul_(-1)
    other = bitplan.save_checkpoint(model, tmp_path / "other", spec="digits_transformer")
    code, out, _ = run("verify", "net.onnx", "--against", other, "--task", "digits", "--limit", 20)
    assert code == 1
    assert "codes        DIFFERENT" in out
    assert "THE FILE DIFFERS" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("export", "run", "--format", "nonsense", "-o", "x"), "unknown exporter 'nonsense'"),
        (("export", "run", "--format", "packed:opset=3", "-o", "x"), "unknown option of packed 'opset'"),
        (("export", "run", "--format", "packed", "-o", "x", "--widen"), "unknown option of packed 'widen'"),
        (("export", "run", "--format", "onnx:opset=7", "-o", "x"), "the opset is 25"),
        (("export", "run", "--format", "matmulnbits", "-o", "x"), "matmulnbits keeps activations in float"),
        (("export", "run", "--format", "packed", "-o", "here"), "here exists: choose another name, or give --force"),
        (("export", "run", "--format", "packed", "-o", "here/below"), "cannot write here/below"),
        (("export", "run", "--format", "onnx", "-o", "full"), "full is a folder, and this format writes a file"),
        (("export", "run", "--format", "vllm", "-o", "full"), "full is a folder with files in it: give the name"),
        (("export", "run", "--format", "vllm", "-o", "here"), "here is a file: give the name of a new folder"),
        (("export", "plan.json", "--format", "packed", "-o", "x"), "packed holds the network itself: give"),
        (("export", "graph.json", "--format", "packed", "-o", "x"), "this is a graph, where a plan is needed"),
        (("export", "gone", "--format", "packed", "-o", "x"), "gone is neither a plan (.json), nor a checkpoint"),
        (("verify", "gone.onnx", "--against", "run", "--task", "digits"), "there is no such file"),
        (("verify", "here", "--against", "run", "--task", "digits"), "cut off or not a packed file"),
        (("verify", "here", "--against", "run", "--task", "digit"), "unknown task 'digit'; did you mean digits"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(run, checkpoint, tmp_path, words, said):
    (tmp_path / "here").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "of.this").write_text("mine")
    code, out, err = run(*words)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert out == ""
    assert not (tmp_path / "x").exists()
    assert (tmp_path / "here").read_text() == "mine"
