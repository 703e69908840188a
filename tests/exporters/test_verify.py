"""verify: it finds equal what is equal, says where a tie made a difference, and catches what is wrong."""

import networks
import onnx
import pytest
import torch
from networks import batch_like, made
from torch import nn

import bitplan
from bitplan.core.errors import FileError, InputError
from bitplan.core.verdicts import Verdict
from bitplan.exporters.ties import Taps

EXAMPLE = torch.empty(1, 8)


def mlp():
    return nn.Sequential(
        nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 3)
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model = made(mlp(), EXAMPLE, {"0": "w4a16", "2": "w2a2"})
    folder = tmp_path_factory.mktemp("exported")
    bitplan.export(model, folder / "m.onnx", "onnx", example=EXAMPLE)
    bitplan.export(model, folder / "m.safetensors", "packed")
    return model, folder


@pytest.mark.parametrize("name", ["m.onnx", "m.safetensors"])
def test_a_right_file_passes(exported, name):
    model, folder = exported
    model.train()
    verdict = bitplan.verify(folder / name, model, [batch_like(EXAMPLE, 6), (batch_like(EXAMPLE, 4, seed=2),)])
    assert verdict.passed
    assert (verdict.samples, verdict.predictions, verdict.layers, verdict.unexplained) == (10, 10, 3, 0)
    assert verdict.codes_equal
    assert model.training
    assert Verdict.from_json(verdict.to_json()) == verdict
    assert bitplan.verify(folder / name, model, [batch_like(EXAMPLE, 6)] * 3, limit=7).samples == 12


def changed(folder, change):
    proto = onnx.load(folder / "m.onnx")
    change({tensor.name: tensor for tensor in proto.graph.initializer})
    onnx.save(proto, folder / "changed.onnx")
    return folder / "changed.onnx"


def test_a_wrong_code_and_a_wrong_step_are_caught(exported):
    model, folder = exported

    def flip(tensors):
        raw = bytearray(tensors["2.codes"].raw_data)
        raw[0] ^= 1
        tensors["2.codes"].raw_data = bytes(raw)

    def stretch(tensors):
        step = onnx.numpy_helper.to_array(tensors["2.input_quantizer.step"]) * 1.3
        tensors["2.input_quantizer.step"].CopyFrom(onnx.numpy_helper.from_array(step, "2.input_quantizer.step"))

    batch = [batch_like(EXAMPLE, 20)]
    assert not bitplan.verify(changed(folder, flip), model, batch).codes_equal
    verdict = bitplan.verify(changed(folder, stretch), model, batch)
    assert verdict.codes_equal
    assert verdict.unexplained > 0
    assert verdict.ties == 0
    assert not verdict.passed


def test_a_difference_that_begins_at_a_tie_is_told_from_one_that_does_not(exported):
    """The input is chosen so that a value lies between two codes; the file's weights' step is moved by an ulp or so."""
    model, folder = exported
    model.eval()
    step = model[2].input_quantizer.step.item()
    batch = batch_like(EXAMPLE, 1)
    with torch.no_grad():
        hidden = model[1](model[0](batch))
        unit = int(hidden[0].argmax())
        halfway = batch * (1.5 * step / hidden[0, unit])  # a16 before it, so the sum scales with the input

    def nudge(factor):
        def change(tensors):
            scale = onnx.numpy_helper.to_array(tensors["0.step"]) * torch.tensor(factor).numpy()
            tensors["0.step"].CopyFrom(onnx.numpy_helper.from_array(scale.astype("float32"), "0.step"))

        return Taps(changed(folder, change), model)

    with torch.no_grad():
        arguments = ((halfway,), {})
        tied = [nudge(1 + sign * 1e-5).begins_at_tie(*arguments, tolerance=1e-7) for sign in (-1, 1)]
        far = nudge(1.4).begins_at_tie((batch,), {}, tolerance=1e-4)
    assert any(tied)
    assert not far


def test_layers_that_run_twice_and_linked_ones_are_watched_in_order(tmp_path):
    model = made(networks.Words(), networks.IDS, "w2a2")
    path = bitplan.export(model, tmp_path / "w.onnx", "onnx", example=networks.IDS)
    with torch.no_grad():
        assert Taps(path, model).begins_at_tie((batch_like(networks.IDS, 1),), {}, tolerance=1e-4)


def test_scores_of_both_are_measured_on_a_task(tmp_path):
    task = bitplan.load_task("digits")
    model, example = networks.digits_transformer()
    train = [images for images, _ in task.batches("train", 64)][:2]
    quantized = made(model, example, "w4a4", data=train[0])
    path = bitplan.export(quantized, tmp_path / "t.safetensors", "packed")
    verdict = bitplan.verify(path, quantized, task)
    assert verdict.samples == task.size("test")
    assert verdict.score == verdict.reference == task.score(quantized)
    assert verdict.metric == "top-1"
    assert verdict.close == verdict.samples


def test_bad_input_is_one_line(exported, tmp_path):
    model, folder = exported
    with pytest.raises(InputError, match="no sample to compare"):
        bitplan.verify(folder / "m.onnx", model, [])
    with pytest.raises(FileError, match="no such file"):
        bitplan.verify(tmp_path / "gone.onnx", model, [batch_like(EXAMPLE, 1)])
    other = made(nn.Sequential(nn.Linear(8, 4)), EXAMPLE, "w8a8")
    with pytest.raises(InputError, match="outputs of other shapes"):
        bitplan.verify(folder / "m.onnx", other, [batch_like(EXAMPLE, 1)])
