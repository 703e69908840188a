"""onnx: packed integers, the checker's approval, and ONNX Runtime's answers equal to PyTorch's."""

import logging

import networks
import onnx
import pytest
import torch
from networks import IMAGES, Mixed, assert_holds_the_codes, batch_like, made
from torch import nn

import bitplan
from bitplan.adapters.onnxruntime import Session
from bitplan.core.errors import FileError, InputError
from bitplan.exporters import onnx_graph
from bitplan.exporters.divergence import list_tensors
from bitplan.exporters.onnx import Onnx

CNN_TO_BERT = ["mixed", "words", "digits_resnet", "digits_transformer", "pspnet", "bert", "vit", "mobilenet"]
ODD = {"left": "w3a5", "right": "w3a5", "each": "w2a6", "up": "w5a2", "point": "w7a9", "head": "w12a16"}


def run(path, batch, *, optimize=True):
    session = Session(path, threads=1, optimize=optimize)
    arrays = {name: value.numpy() for name, value in batch.items()} if isinstance(batch, dict) else [batch.numpy()]
    return [torch.from_numpy(array) for array in session.run(arrays)]


def answers(model, batch):
    with torch.no_grad():
        return list_tensors(model(**batch) if isinstance(batch, dict) else model(batch))


def assert_same(model, path, example, count=3):
    batch = batch_like(example, count, seed=5)
    for own, other in zip(answers(model, batch), run(path, batch), strict=True):
        assert other.shape == own.shape
        assert float(own.std()) > 1e-3, "equal zeros prove nothing"
        torch.testing.assert_close(other, own, rtol=0, atol=2e-5 * float(own.abs().max()))


@pytest.mark.parametrize("kernels", ["integer", "float"])
@pytest.mark.parametrize("name", CNN_TO_BERT)
def test_a_mixed_network_runs_in_onnx_runtime_with_equal_answers(tmp_path, name, kernels):
    model, example = getattr(networks, name)()
    quantized = made(model, example, "mixed")
    path = bitplan.export(quantized, tmp_path / "net.onnx", "onnx", example=example, kernels=kernels)
    assert_holds_the_codes(Onnx(), path, quantized)
    for count in (1, 3):  # the batch dimension is free
        assert_same(quantized, path, example, count)


@pytest.fixture(scope="module", params=["integer", "float"])
def odd(tmp_path_factory, request):
    """Precisions that no type has, at both opsets, one step per channel."""
    model = made(Mixed(), IMAGES, ODD, per_channel=True)
    folder = tmp_path_factory.mktemp("odd")
    forms = {opset: Onnx(opset=opset, kernels=request.param) for opset in (25, 21)}
    return model, {
        opset: bitplan.export(model, folder / f"{opset}.onnx", form, example=IMAGES) for opset, form in forms.items()
    }


@pytest.mark.parametrize("opset", [25, 21])
def test_precisions_between_types_stay_exact(odd, opset):
    model, paths = odd
    assert_holds_the_codes(Onnx(opset=opset), paths[opset], model)
    assert_same(model, paths[opset], IMAGES)
    types = {onnx.TensorProto.DataType.Name(t.data_type) for t in onnx.load(paths[opset]).graph.initializer}
    assert ("INT2" in types) == (opset == 25)


def test_both_opsets_give_the_same_bits(odd):
    _, paths = odd
    batch = batch_like(IMAGES, 4)
    assert torch.equal(run(paths[25], batch, optimize=False)[0], run(paths[21], batch, optimize=False)[0])


def test_weights_are_stored_packed(tmp_path):
    model = made(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.empty(1, 64), {"0": "w2a2"})
    path = bitplan.export(model, tmp_path / "n.onnx", "onnx", example=torch.empty(1, 64))
    sizes = {tensor.name: len(tensor.raw_data) for tensor in onnx.load(path).graph.initializer}
    assert sizes["0.codes"] == 64 * 64 // 4
    assert path.stat().st_size < 64 * 64 * (2 + 8) / 8 + 4096  # no float copy beside


@pytest.mark.parametrize("kernels", ["integer", "float"])
def test_batch_norms_fold_into_steps_and_give_the_same_answers(tmp_path, kernels):
    """Also where a scale is negative or zero: codes are multiplied by steps, not divided."""
    base = Mixed()
    networks.scramble_norms_(base)
    with torch.no_grad():
        base.norms.weight[2], base.norms.weight[3] = -0.7, 0
    model = made(base, IMAGES, "w4a16", train=False)
    exported = {
        fold: bitplan.export(model, tmp_path / f"{fold}.onnx", "onnx", example=IMAGES, fold=fold, kernels=kernels)
        for fold in (False, True)
    }
    for fold, path in exported.items():
        left = [node for node in onnx.load(path).graph.node if node.op_type == "BatchNormalization"]
        assert len(left) == (0 if fold else 2)
        assert_holds_the_codes(Onnx(), path, model)
    batch = batch_like(IMAGES, 4)
    torch.testing.assert_close(run(exported[True], batch)[0], run(exported[False], batch)[0], rtol=0, atol=1e-5)


def test_a_batch_norm_that_cannot_be_folded_stays_and_is_named(tmp_path, caplog):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x):
            return self.norm(self.conv(self.conv(x)))

    model = made(Twice(), IMAGES, "w4a4")
    with caplog.at_level(logging.WARNING):
        path = bitplan.export(model, tmp_path / "n.onnx", "onnx", example=IMAGES)
    assert "after conv is not folded: its weight is used more than once" in caplog.text
    assert "BatchNormalization" in {node.op_type for node in onnx.load(path).graph.node}
    assert_same(model, path, IMAGES)


def test_options_that_cannot_be_are_refused():
    with pytest.raises(InputError, match="opset is 25"):
        Onnx(opset=20)
    with pytest.raises(InputError, match="the kernels are integer or float, not 'fast'"):
        Onnx(kernels="fast")


class Odd(nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x)


class Peeks(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize(("part", "said"), [(Odd, "layer '1.0'"), (Peeks, "layer '1.0'")])
def test_what_onnx_lacks_is_refused_by_name(tmp_path, capfd, part, said):
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(part()), nn.Linear(4, 4))
    model = made(net, torch.empty(1, 4)) if part is Odd else calibrated(net)
    with pytest.raises(InputError, match=f"ONNX cannot hold {said}") as caught:
        bitplan.export(model, tmp_path / "n.onnx", "onnx", example=torch.empty(1, 4))
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def calibrated(net):
    plan = bitplan.Plan(model="n", precisions={"0": "w4a4", "2": "w4a4"}, method="-", selector="-")
    model = bitplan.quantize(net, plan)
    bitplan.calibrate_(model, [torch.randn(8, 4)])
    return model


def test_models_that_are_not_ready_are_refused(tmp_path, monkeypatch):
    net, example = nn.Sequential(nn.Linear(4, 4)), torch.empty(1, 4)
    model = made(net, example, "w8a8")
    with pytest.raises(InputError, match="give an example of its input"):
        bitplan.export(model, tmp_path / "n.onnx", "onnx")
    fresh = bitplan.quantize(net, bitplan.plan_of(model))
    with pytest.raises(InputError, match="input scale of layer '0' is not set"):
        bitplan.export(fresh, tmp_path / "n.onnx", "onnx", example=example)
    with pytest.raises(InputError, match=r"0.weight is float16: .* call model.float\(\)"):
        bitplan.export(made(net, example, "w8a8").half(), tmp_path / "n.onnx", "onnx", example=example)
    monkeypatch.setattr(onnx_graph, "LARGEST", 10)
    with pytest.raises(InputError, match="a single ONNX file ends at 2 GB"):
        bitplan.export(model, tmp_path / "n.onnx", "onnx", example=example)


def test_weights_that_are_computed_or_shared_or_not_contiguous_work(tmp_path):
    base = nn.Sequential(nn.Linear(6, 6), nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 6))
    base[0].weight = nn.Parameter(torch.randn(6, 6).t())
    base[2].weight = base[0].weight
    model = made(base, torch.empty(1, 6), {"1": "w4a4"})
    path = bitplan.export(model, tmp_path / "n.onnx", "onnx", example=torch.empty(1, 6))
    assert_holds_the_codes(Onnx(), path, model)
    assert_same(model, path, torch.empty(1, 6))


def test_other_files_are_refused_in_one_line(tmp_path, odd):
    whole = odd[1][25].read_bytes()
    (tmp_path / "cut.onnx").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.onnx").write_text("hello")
    proto = onnx.load_model_from_string(whole)
    del proto.metadata_props[:]
    onnx.save(proto, tmp_path / "foreign.onnx")
    for name, said in {"cut": "cut off", "text": "cut off", "foreign": "not one that bitplan wrote"}.items():
        with pytest.raises(FileError, match=said) as caught:
            Onnx().read(tmp_path / f"{name}.onnx")
        assert "\n" not in str(caught.value)
    with pytest.raises(FileError, match="no such file"):
        Onnx().read(tmp_path / "gone.onnx")


def test_a_graph_that_contradicts_its_plan_is_refused(tmp_path, odd):
    proto = onnx.load(odd[1][25])
    entry = next(prop for prop in proto.metadata_props if prop.key == "bitplan.plan")
    entry.value = entry.value.replace('"w2a6"', '"w2a7"').replace(f'"id": "{bitplan.plan_of(odd[0]).id}", ', "")
    onnx.save(proto, tmp_path / "n.onnx")
    with pytest.raises(FileError, match="the input of 'each' has 6 bits, the plan says w2a7"):
        Onnx().read(tmp_path / "n.onnx")
