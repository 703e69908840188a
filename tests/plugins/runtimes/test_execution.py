"""Who executes a file: each exporter says so of its own, a stranger's too, and of recipes that nothing does."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from networks import batch_like, made
from safetensors.torch import load_file, save_file
from torch import nn

import bitplan
from bitplan.core.errors import FileError, InputError
from bitplan.core.registry import EXPORTERS
from bitplan.exporters.base import Execution, Exporter, ReadBack, exporter_of
from bitplan.exporters.onnx import Onnx
from bitplan.exporters.onnx_graph import Draft
from bitplan.exporters.packed import Packed
from bitplan.plugins.runtimes.matmulnbits import MatMulNBits
from bitplan.plugins.runtimes.qonnx import Qonnx

EXAMPLE = torch.empty(1, 8)
BATCH = batch_like(EXAMPLE, 6)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    return made(net, EXAMPLE, {"0": "w4a16", "2": "w4a16", "4": "w4a16"})


@dataclass(frozen=True)
class Plain(Exporter):
    """Every tensor as it is, beside the plan's codes: a format that nobody else has."""

    wrong: bool = False
    needs_model: ClassVar[bool] = True

    def write(self, source, path):
        codes = {f"codes.{layer}": codes for layer, codes in bitplan.integer_weights(source.model).items()}
        state = {f"state.{name}": value.clone() for name, value in source.model.state_dict().items()}
        if self.wrong:
            state["state.4.bias"] += 1
        save_file(state | codes, path, {"plain": source.plan.to_json()})

    def read(self, path):
        with torch.no_grad():
            tensors = load_file(path)
        codes = {name.removeprefix("codes."): codes for name, codes in tensors.items() if name.startswith("codes.")}
        return ReadBack(dict.fromkeys(codes, bitplan.Precision.parse("w4a16")), codes)

    @classmethod
    def recognizes(cls, path):
        return path.suffix == ".plain"

    def opened(self, path, model):
        filled = bitplan.quantize(model, bitplan.plan_of(model)).eval()
        state = {name.removeprefix("state."): value for name, value in load_file(path).items() if "state." in name}
        filled.load_state_dict(state)
        return Execution(filled)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_strangers_exporter_is_verified_too(model, tmp_path, wrong):
    with EXPORTERS.registered("plain", Plain):
        path = bitplan.export(model, tmp_path / "net.plain", "plain", wrong=wrong)
        verdict = bitplan.verify(path, model, [BATCH])
        assert (verdict.samples, verdict.codes_equal, verdict.passed) == (6, True, not wrong)
        assert (verdict.ties, verdict.unexplained) == (0, 6 * wrong)
    with pytest.raises(
        FileError, match="cut off or not a packed file, nor one for compressed-tensors, gguf, llama.cpp"
    ):
        bitplan.verify(path, model, [BATCH])


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("net.onnx", Onnx, {}),
        ("net.onnx", Qonnx, {}),
        ("net.onnx", MatMulNBits, {"widen": True}),
        ("net.safetensors", Packed, {}),
        ("net.onnx.bin", Packed, {}),
    ],
)
def test_each_file_has_one_exporter_and_says_which(model, tmp_path, name, kind, options):
    path = bitplan.export(model, tmp_path / name, kind(**options), example=EXAMPLE)
    assert type(exporter_of(path)) is kind
    assert [other for other in EXPORTERS if EXPORTERS.get(other).recognizes(path)] == [EXPORTERS.name_of(kind())]
    assert bitplan.verify(path, model, [BATCH]).passed


def test_a_dialect_of_ones_own_is_not_taken_for_another(model, tmp_path):
    @dataclass(frozen=True)
    class Mine(Exporter):
        needs_model: ClassVar[bool] = True

        def write(self, source, path):
            draft = Draft(source, 21)
            weights = draft.weights
            draft.replace("Weight", lambda node, about: [_constant(draft, weights[about["layer"]], node)])
            draft.save(source, path, exporter="mine")

        def read(self, path):
            return Onnx().read(path)

    path = bitplan.export(model, tmp_path / "net.onnx", Mine(), example=EXAMPLE)
    assert not any(EXPORTERS.get(name).recognizes(path) for name in EXPORTERS)


def _constant(draft, weight, node):
    return draft.node("Identity", (draft.floats(weight.layer, weight.codes * weight.steps),), node.output[0], node.name)


@pytest.mark.parametrize("to", ["compressed-tensors", "torchao", "llama.cpp", "mlx"])
def test_a_recipe_says_that_nothing_executes_it(tmp_path, to):
    plan = bitplan.Plan(model="net", precisions={"lm_head": "w4a16"}, method="by hand", selector="none")
    path = bitplan.export(plan, tmp_path / "recipe", to)
    net = made(nn.Sequential(nn.Linear(8, 3)), EXAMPLE, "w8a8")
    said = f"{path} is a recipe for {to}, which {to} executes and bitplan does not"
    with pytest.raises(InputError, match=said) as caught:
        bitplan.verify(path, net, [BATCH])
    assert "\n" not in str(caught.value)
    assert [name for name in EXPORTERS if EXPORTERS.get(name).recognizes(path)] == [to]


def test_an_exporter_that_says_nothing_of_execution_is_told_so(model, tmp_path):
    @dataclass(frozen=True)
    class Mute(Plain):
        @classmethod
        def recognizes(cls, path):
            return path.suffix == ".mute"

        def opened(self, path, model):
            return Exporter.opened(self, path, model)

    path = bitplan.export(model, tmp_path / "net.mute", Mute())
    with (
        EXPORTERS.registered("mute", Mute),
        pytest.raises(InputError, match="is for mute, which nothing here executes"),
    ):
        bitplan.verify(path, model, [BATCH])


def test_two_exporters_for_one_file_are_named(model, tmp_path):
    @dataclass(frozen=True)
    class Greedy(Plain):
        @classmethod
        def recognizes(cls, path):
            return True

    path = bitplan.export(model, tmp_path / "net.safetensors", "packed")
    with EXPORTERS.registered("greedy", Greedy), pytest.raises(FileError, match="may be for greedy or for packed"):
        bitplan.verify(path, model, [BATCH])


def test_what_is_not_derived_from_exporter_is_told_how(model, tmp_path):
    @dataclass(frozen=True)
    class Bare:
        def write(self, source, path):
            path.write_text("")

        def read(self, path):
            return ReadBack({})

    said = "Bare is no exporter, for it has no needs_model and no suffix and .* no opened: derive it from .*Exporter"
    with pytest.raises(InputError, match=said):
        bitplan.export(model, tmp_path / "x", Bare())
    assert not (tmp_path / "x").exists()
    with EXPORTERS.registered("bare", Bare):
        with pytest.raises(InputError, match=said):
            bitplan.export(model, tmp_path / "x", "bare")
        packed = bitplan.export(model, tmp_path / "net.safetensors", "packed")
        assert bitplan.verify(packed, model, [BATCH]).passed, "one that cannot write cannot have written this"
