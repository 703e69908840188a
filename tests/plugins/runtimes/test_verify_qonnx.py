"""verify with QONNX files: it finds equal what is equal, and catches what is wrong."""

import importlib.util

import numpy as np
import onnx
import pytest
import torch
from networks import batch_like, made
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
from bitplan.core.errors import FileError, MissingExtra
from bitplan.plugins.runtimes.qonnx import QuantSession


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    model = made(mlp(), EXAMPLE, {"0": "w4a16", "2": "w2a2"})
    folder = tmp_path_factory.mktemp("exported")
    bitplan.export(model, folder / "q.onnx", "qonnx", example=EXAMPLE)
    return model, folder


def test_a_right_file_passes(exported):
    assert_a_right_file_passes(exported, "q.onnx")


def test_a_difference_that_begins_at_a_tie_is_told_from_one_that_does_not(exported):
    """The file stores values, not codes."""
    assert_ties_are_told(exported, "q.onnx", ["0.weight_quant.scale", "0.weight"], QuantSession)


def test_layers_that_run_twice_and_linked_ones_are_watched_in_order(tmp_path):
    assert_layers_are_watched_in_order(tmp_path, "qonnx", QuantSession)


def test_masked_attention_scores_are_no_difference(tmp_path):
    assert_masked_scores_are_no_difference(tmp_path, "qonnx", QuantSession)


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
