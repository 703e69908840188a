"""A small network for `verify`, files of it that are changed, and what holds of every kind of file."""

import networks
import numpy as np
import onnx
import torch
from networks import batch_like, made
from torch import nn

import bitplan
from bitplan.core.verdicts import Verdict
from bitplan.exporters.divergence import ActivationComparison

EXAMPLE = torch.empty(1, 8)


def mlp():
    return nn.Sequential(
        nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 3)
    )


def changed(folder, change, name="m.onnx"):
    proto = onnx.load(folder / name)
    change({tensor.name: tensor for tensor in proto.graph.initializer})
    onnx.save(proto, folder / "changed.onnx")
    return folder / "changed.onnx"


def scaled(tensor, factor):
    values = onnx.numpy_helper.to_array(tensor) * np.float32(factor)
    tensor.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float32), tensor.name))


def assert_a_right_file_passes(exported, name):
    model, folder = exported
    model.train()
    verdict = bitplan.verify(folder / name, model, [batch_like(EXAMPLE, 6), (batch_like(EXAMPLE, 4, seed=2),)])
    assert verdict.passed
    assert (verdict.samples, verdict.predictions, verdict.layers, verdict.unexplained) == (10, 10, 3, 0)
    assert verdict.codes_equal
    assert model.training
    assert Verdict.from_json(verdict.to_json()) == verdict
    assert bitplan.verify(folder / name, model, [batch_like(EXAMPLE, 6)] * 3, limit=7).samples == 12


def assert_ties_are_told(exported, name, steps, runtime):
    """The input is chosen so that a value lies between two codes; the file's weights' steps move by an ulp or so."""
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
            for step in steps:
                scaled(tensors[step], factor)

        return ActivationComparison(changed(folder, change, name), model, runtime)

    with torch.no_grad():
        arguments = ((halfway,), {})
        tied = [nudge(1 + sign * 1e-5).begins_at_tie(*arguments, tolerance=1e-7) for sign in (-1, 1)]
        far = nudge(1.4).begins_at_tie((batch,), {}, tolerance=1e-4)
    assert any(tied)
    assert not far


def assert_layers_are_watched_in_order(tmp_path, to, runtime):
    model = made(networks.Words(), networks.IDS, "w2a2")
    path = bitplan.export(model, tmp_path / "w.onnx", to, example=networks.IDS)
    with torch.no_grad():
        assert ActivationComparison(path, model, runtime).begins_at_tie(
            (batch_like(networks.IDS, 1),), {}, tolerance=1e-4
        )


def assert_masked_scores_are_no_difference(tmp_path, to, runtime):
    """Masks pass our quantizer as they are; in the file they are put back behind it."""
    bert, example = networks.bert()
    model = made(bert, example, "w4a4")
    path = bitplan.export(model, tmp_path / "b.onnx", to, example=example)
    padded = batch_like(example, 1)
    padded["attention_mask"][:, -3:] = 0
    with torch.no_grad():
        assert ActivationComparison(path, model, runtime).begins_at_tie((), padded, tolerance=1e-4)
