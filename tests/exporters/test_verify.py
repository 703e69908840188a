"""verify: it finds equal what is equal, says where a tie made a difference, and catches what is wrong."""

import importlib.util

import networks
import numpy as np
import onnx
import pytest
import torch
from networks import batch_like, made
from torch import nn

import bitplan
from bitplan.adapters.onnxruntime import Session
from bitplan.core.errors import FileError, InputError, MissingExtra
from bitplan.core.verdicts import Verdict
from bitplan.exporters.divergence import Taps
from bitplan.plugins.runtimes.qonnx import QuantSession

EXAMPLE = torch.empty(1, 8)


def mlp():
    return nn.Sequential(
        nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 3)
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    model = made(mlp(), EXAMPLE, {"0": "w4a16", "2": "w2a2"})
    folder = tmp_path_factory.mktemp("exported")
    bitplan.export(model, folder / "m.onnx", "onnx", example=EXAMPLE)
    bitplan.export(model, folder / "m.safetensors", "packed")
    bitplan.export(model, folder / "q.onnx", "qonnx", example=EXAMPLE)
    return model, folder


@pytest.mark.parametrize("name", ["m.onnx", "m.safetensors", "q.onnx"])
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


def test_a_loader_of_inputs_and_labels_does(exported):
    model, folder = exported
    inputs = batch_like(EXAMPLE, 6)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, torch.zeros(6)), batch_size=3)
    assert bitplan.verify(folder / "m.onnx", model, loader) == bitplan.verify(folder / "m.onnx", model, inputs.split(3))


def test_where_ties_decide_too_much_the_model_is_compared_with_itself(exported, monkeypatch):
    """Here both agree, so the bar is raised out of reach."""
    model, folder = exported
    assert bitplan.verify(folder / "m.onnx", model, [batch_like(EXAMPLE, 6)]).control is None
    monkeypatch.setattr("bitplan.core.verdicts.ENOUGH", 1.1)
    before = {name: (value.dtype, value.clone()) for name, value in model.state_dict().items()}
    verdict = bitplan.verify(folder / "m.onnx", model, iter([batch_like(EXAMPLE, 6), batch_like(EXAMPLE, 4, seed=2)]))
    assert (verdict.control, verdict.control_samples) == (1.0, 10)
    assert verdict.passed
    assert not verdict.enough
    after = model.state_dict()
    assert all(
        after[name].dtype == dtype and torch.equal(after[name], value) for name, (dtype, value) in before.items()
    )


@pytest.mark.parametrize(
    ("equal", "control", "passed"),
    [
        (9_990, None, True),
        (9_989, None, False),
        (9_700, 0.97, True),
        (9_660, 0.97, True),
        (9_500, 0.97, False),
        (9_985, 1.0, True),  # a thousand samples without a difference do not show that there is none in ten thousand
        (9_970, 1.0, False),
    ],
)
def test_a_file_must_be_as_near_to_the_model_as_the_model_is_to_itself(equal, control, passed):
    counts = {"samples": 10_000, "close": 0, "ties": 100, "unexplained": 0, "predictions": 10_000}
    more = {"largest": 0.1, "tolerance": 1e-4, "control": control, "control_samples": 1_000 if control else 0}
    verdict = Verdict(file="m.onnx", codes_equal=True, layers=3, predictions_equal=equal, **counts, **more)
    assert verdict.passed == passed
    assert not verdict.model_copy(update={"unexplained": 1}).passed
    assert not verdict.model_copy(update={"codes_equal": False}).passed


def changed(folder, change, name="m.onnx"):
    proto = onnx.load(folder / name)
    change({tensor.name: tensor for tensor in proto.graph.initializer})
    onnx.save(proto, folder / "changed.onnx")
    return folder / "changed.onnx"


def scaled(tensor, factor):
    values = onnx.numpy_helper.to_array(tensor) * np.float32(factor)
    tensor.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float32), tensor.name))


def test_a_wrong_code_and_a_wrong_step_are_caught(exported):
    model, folder = exported

    def flip(tensors):
        raw = bytearray(tensors["2.codes"].raw_data)
        raw[0] ^= 1
        tensors["2.codes"].raw_data = bytes(raw)

    def stretch(tensors):
        scaled(tensors["2.input_quantizer.step"], 1.3)

    batch = [batch_like(EXAMPLE, 20)]
    assert not bitplan.verify(changed(folder, flip), model, batch).codes_equal
    verdict = bitplan.verify(changed(folder, stretch), model, batch)
    assert verdict.codes_equal
    assert verdict.unexplained > 0
    assert verdict.ties == 0
    assert not verdict.passed


def test_a_wrong_qonnx_file_is_caught(exported):
    model, folder = exported
    batch = [batch_like(EXAMPLE, 20)]
    path = changed(folder, lambda tensors: scaled(tensors["2.weight"], -1), "q.onnx")
    verdict = bitplan.verify(path, model, batch)
    assert not verdict.codes_equal
    assert not verdict.passed
    verdict = bitplan.verify(
        changed(folder, lambda tensors: scaled(tensors["2.input_quantizer.scale"], 1.3), "q.onnx"), model, batch
    )
    assert verdict.codes_equal
    assert verdict.unexplained > 0
    assert (verdict.ties, verdict.passed) == (0, False)


@pytest.mark.parametrize(
    ("name", "step", "runtime"), [("m.onnx", "0.step", Session), ("q.onnx", "0.weight_quant.scale", QuantSession)]
)
def test_a_difference_that_begins_at_a_tie_is_told_from_one_that_does_not(exported, name, step, runtime):
    """The input is chosen so that a value lies between two codes; the file's weights' step is moved by an ulp or so."""
    model, folder = exported
    model.eval()
    middle = 1.5 * model[2].input_quantizer.step.item()
    batch = batch_like(EXAMPLE, 1)
    with torch.no_grad():
        hidden = model[1](model[0](batch))
        unit = int(hidden[0].argmax())
        halfway = batch * (middle / hidden[0, unit])  # a16 before it, so the sum scales with the input

    def nudge(factor):
        def change(tensors):
            scaled(tensors[step], factor)
            if name == "q.onnx":  # it stores values, not codes
                scaled(tensors["0.weight"], factor)

        return Taps(changed(folder, change, name), model, runtime)

    with torch.no_grad():
        arguments = ((halfway,), {})
        tied = [nudge(1 + sign * 1e-5).begins_at_tie(*arguments, tolerance=1e-7) for sign in (-1, 1)]
        far = nudge(1.4).begins_at_tie((batch,), {}, tolerance=1e-4)
    assert any(tied)
    assert not far


@pytest.mark.parametrize(("to", "runtime"), [("onnx", Session), ("qonnx", QuantSession)])
def test_layers_that_run_twice_and_linked_ones_are_watched_in_order(tmp_path, to, runtime):
    model = made(networks.Words(), networks.IDS, "w2a2")
    path = bitplan.export(model, tmp_path / "w.onnx", to, example=networks.IDS)
    with torch.no_grad():
        assert Taps(path, model, runtime).begins_at_tie((batch_like(networks.IDS, 1),), {}, tolerance=1e-4)


@pytest.mark.parametrize(("to", "runtime"), [("onnx", Session), ("qonnx", QuantSession)])
def test_masked_attention_scores_are_no_difference(tmp_path, to, runtime):
    """Masks pass our quantizer as they are; in the file they are put back behind it."""
    bert, example = networks.bert()
    model = made(bert, example, "w4a4")
    path = bitplan.export(model, tmp_path / "b.onnx", to, example=example)
    padded = batch_like(example, 1)
    padded["attention_mask"][:, -3:] = 0
    with torch.no_grad():
        assert Taps(path, model, runtime).begins_at_tie((), padded, tolerance=1e-4)


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


def test_a_missing_qonnx_is_one_line(exported, monkeypatch):
    model, folder = exported
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "qonnx" else found(name))
    with pytest.raises(MissingExtra, match=r"running QONNX needs qonnx, .* pip install 'bitplan\[export\]'"):
        bitplan.verify(folder / "q.onnx", model, [batch_like(EXAMPLE, 1)])


def test_a_qonnx_file_takes_any_batch_and_says_what_it_cannot_run(exported):
    model, folder = exported
    session = QuantSession(folder / "q.onnx")
    model.eval()
    for count in (1, 5):
        batch = batch_like(EXAMPLE, count)
        with torch.no_grad():
            np.testing.assert_allclose(session.run([batch.numpy()])[0], model(batch).numpy(), rtol=1e-5, atol=1e-6)
    newest = onnx.IR_VERSION
    with pytest.raises(FileError, match="qonnx cannot run this graph"):
        session.run([np.zeros((1, 9), np.float32)])
    assert newest == onnx.IR_VERSION


def test_bad_input_is_one_line(exported, tmp_path):
    model, folder = exported
    with pytest.raises(InputError, match="no sample to compare"):
        bitplan.verify(folder / "m.onnx", model, [])
    with pytest.raises(FileError, match="no such file"):
        bitplan.verify(tmp_path / "gone.onnx", model, [batch_like(EXAMPLE, 1)])
    with pytest.raises(InputError, match="ONNX Runtime cannot run the graph on these inputs .*Expected: 8"):
        Session(folder / "m.onnx").run([np.zeros((1, 9), np.float32)])
    other = made(nn.Sequential(nn.Linear(8, 4)), EXAMPLE, "w8a8")
    with pytest.raises(InputError, match=r"outputs of shapes \[\(1, 3\)\], the model \[\(1, 4\)\]"):
        bitplan.verify(folder / "m.onnx", other, [batch_like(EXAMPLE, 1)])
