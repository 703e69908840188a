"""packed: codes bit by bit, the same model back, and a file as small as the plan says."""

import json

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from networks import IDS, IMAGES, Mixed, Words, batch_like, made
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import bitplan
from bitplan.core.errors import FileError, InputError
from bitplan.exporters.bit_packing import pack, packed_bytes, unpack
from bitplan.exporters.packed import Packed, predict_bytes
from bitplan.models.zoo import load_model
from nets import Net


@given(bits=st.integers(2, 12), count=st.integers(0, 40), seed=st.integers(0, 99))
def test_codes_come_back_from_as_few_bytes_as_they_need(bits, count, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (count,), generator=generator, dtype=torch.int16)
    packed = pack(codes, bits)
    assert packed.numel() == packed_bytes(count, bits) == -(-count * bits // 8)
    assert torch.equal(unpack(packed, bits, count).short(), codes)


def test_four_two_bit_codes_share_a_byte_the_first_in_the_lowest_bits():
    assert pack(torch.tensor([-2, -1, 0, 1], dtype=torch.int8), 2).tolist() == [0b11100100]


def test_pieces_join_without_a_seam():
    codes = torch.randint(-4, 4, ((1 << 20) + 5,), dtype=torch.int8)
    assert torch.equal(unpack(pack(codes, 3), 3, codes.numel()), codes)


@pytest.mark.parametrize("options", [{}, {"per_channel": True}, {"method": "faq"}], ids=str)
@pytest.mark.parametrize(
    ("network", "example"), [(Mixed, IMAGES), (Words, IDS)], ids=lambda value: getattr(value, "__name__", "")
)
@pytest.mark.parametrize("precisions", ["w2a2", "w3a5", "w8a8", "w2a16", "w16a4", "w12a9"])
def test_the_model_comes_back_with_bit_identical_outputs(tmp_path, network, example, precisions, options):
    model = made(network(), example, precisions, **options)
    bitplan.export(model, tmp_path / "net.safetensors", "packed")
    again = bitplan.load_packed(tmp_path / "net.safetensors", network()).eval()
    batch = batch_like(example, 5, seed=7)
    with torch.no_grad():
        assert torch.equal(model(batch), again(batch))
    assert bitplan.plan_of(again) == bitplan.plan_of(model)
    codes, other = bitplan.integer_weights(model), bitplan.integer_weights(again)
    assert all(torch.equal(codes[layer], other[layer]) for layer in codes)


def test_the_model_of_the_zoo_that_a_file_names_is_built(tmp_path):
    model, example = load_model("digits_transformer")
    quantized = made(model, example, "w4a4")
    graph = bitplan.trace(model, example)
    path = bitplan.export(quantized, tmp_path / "t.safetensors", "packed", graph=graph, spec="digits_transformer")
    batch = batch_like(example, 3)
    with torch.no_grad():
        assert torch.equal(quantized(batch), bitplan.load_packed(path).eval()(batch))
    with safe_open(path, "pt") as file:
        assert bitplan.Graph.from_json(file.metadata()["graph"]) == graph


def test_the_file_is_as_large_as_the_plan_says(tmp_path):
    """The tensors take exactly what the plan predicts; with the header a real network stays within 2 %."""
    torch.manual_seed(0)
    model, example = load_model("resnet50")
    graph = bitplan.trace(model, example)
    gains = bitplan.estimate("uniform", None, graph)
    plan = bitplan.select(graph, gains, bitplan.price("bmac", graph), budget=0.7)
    quantized = bitplan.quantize(model, plan)
    path = bitplan.export(quantized, tmp_path / "r.safetensors", "packed", graph=graph)
    weights = sum(-(-layer.weights * plan.precisions[layer.name].weight_bits // 8) for layer in graph.layers)
    named = {f"{layer.name}.weight" for layer in graph.layers}
    others = sum(t.numel() * t.element_size() for n, t in quantized.state_dict().items() if n not in named)
    assert predict_bytes(quantized) == pytest.approx(weights + others, rel=1e-3)  # a shared step is stored once
    assert weights + others <= path.stat().st_size * 1.001
    assert path.stat().st_size == pytest.approx(weights + others, rel=0.02)
    header = int.from_bytes(path.read_bytes()[:8], "little") + 8
    assert path.stat().st_size - header == predict_bytes(quantized)


def test_weights_that_are_tied_are_stored_once(tmp_path):
    model = tied(made(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.empty(1, 16)))
    path = bitplan.export(model, tmp_path / "t.safetensors", "packed")
    base = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    base[2].weight = base[0].weight
    again = bitplan.load_packed(path, base).eval()
    batch = torch.randn(4, 16)
    with torch.no_grad():
        assert torch.equal(model(batch), again(batch))
    assert set(Packed().read(path).codes) == {"0", "2"}
    with torch.no_grad():
        model[2].weight_quantizer.step.mul_(1.5)
    with pytest.raises(InputError, match=r"layers 0, 2 share 0.weight but quantize it differently"):
        bitplan.export(model, tmp_path / "u.safetensors", "packed")
    assert not (tmp_path / "u.safetensors").exists()


def test_tied_weights_with_other_zero_points_are_refused(tmp_path):
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model = tied(made(network, torch.empty(1, 64), "w4a8", method="groups:size=32,zeros=true"))
    model[2].weight_quantizer.zero.copy_(model[0].weight_quantizer.zero)
    bitplan.export(model, tmp_path / "t.safetensors", "packed")
    model[2].weight_quantizer.zero.add_(1)
    with pytest.raises(InputError, match=r"layers 0, 2 share 0.weight but quantize it differently"):
        bitplan.export(model, tmp_path / "u.safetensors", "packed")


def tied(model):
    model[2].weight = model[0].weight
    with torch.no_grad():
        model[2].weight_quantizer.step.copy_(model[0].weight_quantizer.step)
    return model


def test_weights_that_are_not_contiguous_come_back(tmp_path):
    base = nn.Sequential(nn.Linear(6, 6))
    base[0].weight = nn.Parameter(torch.randn(6, 6).t())
    model = made(base, torch.empty(1, 6), "w8a8")
    again = bitplan.load_packed(bitplan.export(model, tmp_path / "n.safetensors", "packed"), base)
    assert torch.equal(bitplan.integer_weights(model)["0"], bitplan.integer_weights(again)["0"])


def low_rank(inner):
    class LowRank(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(6, 2))

        def forward(self, weight):
            return weight + self.up @ self.down

    nn.utils.parametrize.register_parametrization(inner, "weight", LowRank())
    return inner


COMPUTED = {
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
    "low-rank": lambda: low_rank(nn.Linear(6, 6)),
    "scaled": lambda: Net(
        lambda net, x: F.linear(x, net.w * net.scale),
        w=nn.Parameter(torch.randn(6, 6)),
        scale=nn.Parameter(torch.ones(1)),
    ),
    "standardized": lambda: Net(
        lambda net, x: F.linear(x, (net.w - net.w.mean()) / net.w.std()), w=nn.Parameter(torch.randn(6, 6))
    ),
}


@pytest.mark.parametrize("options", [{}, {"per_channel": True}], ids=str)
@pytest.mark.parametrize("way", COMPUTED)
def test_computed_weights_come_back_exactly_and_their_codes_are_there(tmp_path, way, options):
    def base(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 6), COMPUTED[way](), nn.Linear(6, 3))

    example, batch = torch.empty(1, 6), torch.randn(8, 6)
    model = made(base(0), example, "w3a4", **options)
    with torch.no_grad():
        expected = model(batch)
    path = bitplan.export(model, tmp_path / "n.safetensors", "packed")
    again = bitplan.load_packed(path, base(1)).eval()
    with torch.no_grad():
        assert torch.equal(again(batch), expected)
    found = Packed().read(path).codes
    for codes in (bitplan.integer_weights(model), bitplan.integer_weights(again)):
        assert codes.keys() == found.keys()
        assert all(torch.equal(codes[layer], found[layer]) for layer in codes)
    header = int.from_bytes(path.read_bytes()[:8], "little") + 8
    assert path.stat().st_size - header == predict_bytes(model)
    assert bitplan.verify(path, model, [batch]).codes_equal


def test_bad_files_are_refused_in_one_line(tmp_path):
    model = made(Mixed(), IMAGES)
    path = bitplan.export(model, tmp_path / "m.safetensors", "packed")
    whole = path.read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "short").write_bytes(whole[:5])
    (tmp_path / "text").write_text("hello, this is no safetensors file")
    save_file({"a": torch.zeros(2)}, tmp_path / "plain")
    with safe_open(path, "pt") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, tmp_path / "newer", metadata={**header, "bitplan": "9"})
    save_file(tensors, tmp_path / "odd", metadata={**header, "packed": json.dumps({"x": 1})})
    for name, said in {
        "cut": "cut off", "short": "cut off", "text": "cut off", "plain": "not one that bitplan packed",
        "newer": "packed format 9", "odd": "cut off or not a packed file", "gone": "there is no such file",
    }.items():  # fmt: skip
        with pytest.raises(FileError, match=said) as caught:
            bitplan.load_packed(tmp_path / name, Mixed())
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="names no model of the zoo"):
        bitplan.load_packed(path)


def test_another_model_is_refused(tmp_path):
    path = bitplan.export(made(Mixed(), IMAGES), tmp_path / "m.safetensors", "packed")
    wider, half = Mixed(), Mixed().half()
    wider.head = nn.Linear(16, 11)
    with pytest.raises(FileError, match=r"head.bias is \(10,\) in the file, \(11,\) in the model"):
        bitplan.load_packed(path, wider)
    with pytest.raises(InputError, match="unknown layer"):
        bitplan.load_packed(path, nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(FileError, match="float32 in the file, float16 in the model"):
        bitplan.load_packed(path, half)


def test_a_file_in_the_way_is_kept_unless_forced_and_a_folder_that_is_no_folder_is_said(tmp_path):
    model = made(nn.Sequential(nn.Linear(4, 4)), torch.empty(1, 4), "w8a8")
    target = tmp_path / "here"
    target.write_text("mine")
    with pytest.raises(FileError, match="exists: choose another name"):
        bitplan.export(model, target, "packed")
    assert target.read_text() == "mine"
    with pytest.raises(FileError, match="cannot write"):
        bitplan.export(model, target / "below.safetensors", "packed")
    bitplan.export(model, target, "packed", force=True)
    assert bitplan.load_packed(target, nn.Sequential(nn.Linear(4, 4)))
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(InputError, match="not quantized"):
        bitplan.export(nn.Linear(2, 2), tmp_path / "x", "packed")
    with pytest.raises(InputError, match="give the quantized model"):
        bitplan.export(bitplan.plan_of(model), tmp_path / "x", "packed")
