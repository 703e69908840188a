"""verify: it finds equal what is equal, says where a tie made a difference, and catches what is wrong."""

import networks
import numpy as np
import pytest
import torch
from networks import batch_like, made
from torch import nn
from verifying import (
    EXAMPLE,
    assert_a_right_file_passes,
    assert_layers_are_watched_in_order,
    assert_masked_scores_are_no_difference,
    assert_ties_are_told,
    changed,
    mlp,
    scaled,
)

import bitplan
from bitplan.adapters.onnxruntime import Session
from bitplan.core.errors import FileError, InputError
from bitplan.core.verdicts import Verdict


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    model = made(mlp(), EXAMPLE, {"0": "w4a16", "2": "w2a2"})
    folder = tmp_path_factory.mktemp("exported")
    bitplan.export(model, folder / "m.onnx", "onnx", example=EXAMPLE)
    bitplan.export(model, folder / "m.safetensors", "packed")
    return model, folder


@pytest.mark.parametrize("name", ["m.onnx", "m.safetensors"])
def test_a_right_file_passes(exported, name):
    assert_a_right_file_passes(exported, name)


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


def test_a_difference_that_begins_at_a_tie_is_told_from_one_that_does_not(exported):
    assert_ties_are_told(exported, "m.onnx", ["0.step"], Session)


def test_layers_that_run_twice_and_linked_ones_are_watched_in_order(tmp_path):
    assert_layers_are_watched_in_order(tmp_path, "onnx", Session)


def test_masked_attention_scores_are_no_difference(tmp_path):
    assert_masked_scores_are_no_difference(tmp_path, "onnx", Session)


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
    with pytest.raises(InputError, match="ONNX Runtime cannot run the graph on these inputs .*Expected: 8"):
        Session(folder / "m.onnx").run([np.zeros((1, 9), np.float32)])
    other = made(nn.Sequential(nn.Linear(8, 4)), EXAMPLE, "w8a8")
    with pytest.raises(InputError, match=r"outputs of shapes \[\(1, 3\)\], the model \[\(1, 4\)\]"):
        bitplan.verify(folder / "m.onnx", other, [batch_like(EXAMPLE, 1)])
