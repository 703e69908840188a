"""Files of weights: read what is sound, say in one line what is not."""

import json
import os
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bitplan.core.errors import FileError
from bitplan.quant.checkpoint import save_checkpoint
from bitplan.weights.opened import learned_step, natural_key, open_checkpoint

WEIGHTS = {
    "b.weight": torch.arange(6.0).reshape(2, 3),
    "a.weight": torch.ones(4, 2).bfloat16(),
    "a.bias": torch.ones(4).half(),
}


def write(path, header, data: bytes, *, length: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(begin, end, shape=(4,), dtype="U8"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def check(checkpoint, expected=WEIGHTS):
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        assert checkpoint.tensors[name].shape == tuple(tensor.shape)
        assert checkpoint.tensors[name].floats().tolist() == tensor.float().flatten().tolist()


def refused(path, *words):
    with pytest.raises(FileError) as raised:
        open_checkpoint(path)
    message = str(raised.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_safetensors(tmp_path):
    save_file(WEIGHTS, tmp_path / "m.safetensors")
    check(open_checkpoint(tmp_path / "m.safetensors"))
    save_file(WEIGHTS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "m.safetensors").unlink()
    check(open_checkpoint(tmp_path))
    os.rename(tmp_path / "model.safetensors", tmp_path / "other.safetensors")
    check(open_checkpoint(str(tmp_path)))


def test_our_reader_agrees_with_the_library_on_every_type(tmp_path):
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]
    tensors = {f"t{i}": torch.ones(3, dtype=kind) for i, kind in enumerate(kinds)} | {"none": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "m.safetensors")
    opened = open_checkpoint(tmp_path / "m.safetensors").tensors
    assert {name: tensor.shape for name, tensor in opened.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert all(opened[f"t{i}"].data.size == 3 for i in range(len(kinds)))


def test_a_header_that_leaves_tensors_unaligned(tmp_path):
    values = np.arange(5, dtype=np.float32)
    for pad in range(4):
        text = json.dumps({"w": entry(0, 20, (5,), "F32")}).encode() + b" " * pad
        path = write(tmp_path / "m.safetensors", text, values.tobytes())
        assert open_checkpoint(path).tensors["w"].floats().tolist() == values.tolist()


HOSTILE = {
    "empty": (b"", "0 bytes"),
    "short": (b"\1\2\3", "3 bytes"),
    "length lies": ((1000).to_bytes(8, "little") + b"{}", "should be 1,000 bytes"),
    "absurd length": (b"\xff" * 8 + b"{}", "at most 100,000,000"),
    "just over the cap": ((100_000_001).to_bytes(8, "little"), "at most 100,000,000"),
    "not JSON": ((4).to_bytes(8, "little") + b"nope", "not JSON"),
    "not text": ((4).to_bytes(8, "little") + b"\xff\xfe\xff\xfe", "not JSON"),
    "deep": ((90_000).to_bytes(8, "little") + b"[" * 90_000, "not JSON"),
    "endless number": ((5008).to_bytes(8, "little") + b'{"a":' + b"1" * 5002 + b"}", "of 5002 digits"),
    "a list": ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
}


@pytest.mark.parametrize("case", sorted(HOSTILE))
def test_hostile_beginnings(tmp_path, case):
    content, words = HOSTILE[case]
    (tmp_path / "m.safetensors").write_bytes(content)
    refused(tmp_path / "m.safetensors", "m.safetensors", words)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": entry(0, 4), "b": entry(3, 7)}, "'a' and 'b' overlap"),
        ({"a": entry(0, 8, (8,)), "b": entry(2, 4, (2,))}, "overlap"),
        ({"a": entry(0, 4), "b": entry(0, 4)}, "overlap"),
        ({"a": entry(6, 10)}, "'a' lies at [6, 10], outside the 8 bytes"),
        ({"a": entry(4, 0)}, "outside"),
        ({"a": entry(-4, 0)}, "outside"),
        ({"a": entry(0, 4, (5,))}, "'a' (U8, 5) has 4 bytes"),
        ({"a": entry(0, 4, (4,), "F32")}, "'a' (F32, 4) has 4 bytes"),
        ({"a": entry(0, 4, (-2, -2))}, "impossible shape"),
        ({"a": entry(0, 4, (2**62, 2**62))}, "impossible shape"),
        ({"a": entry(0, 4, (True, 4))}, "impossible shape"),
        ({"a": entry(0, 4, (4.0,))}, "impossible shape"),
        ({"a": {"dtype": "U8", "shape": "4", "data_offsets": [0, 4]}}, "impossible shape"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0]}}, "lies at [0]"),
        ({"a": {"dtype": 8, "shape": [4], "data_offsets": [0, 4]}}, "no type"),
        ({"a": {"shape": [4]}}, "'a' lacks"),
        ({"a": None}, "'a' lacks"),
        (
            b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}',
            "'a' stands twice",
        ),
        ({}, "no tensors"),
    ],
)
def test_hostile_headers(tmp_path, header, words):
    refused(write(tmp_path / "m.safetensors", header, bytes(8)), words)


@pytest.mark.parametrize("cut", [1, 10, 40, 100])
def test_a_file_cut_off(tmp_path, cut):
    save_file(WEIGHTS, tmp_path / "m.safetensors")
    content = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "m.safetensors").write_bytes(content[:-cut])
    refused(tmp_path / "m.safetensors", "cut off or not a safetensors file")


@pytest.fixture
def sharded(tmp_path):
    names = sorted(WEIGHTS)
    for i, name in enumerate(names):
        save_file({name: WEIGHTS[name]}, tmp_path / f"model-{i}.safetensors")
    index = {"weight_map": {name: f"model-{i}.safetensors" for i, name in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_shards(sharded):
    check(open_checkpoint(sharded))
    check(open_checkpoint(sharded / "model.safetensors.index.json"))


def test_a_shard_is_missing(sharded):
    (sharded / "model-1.safetensors").unlink()
    refused(sharded, "shard model-1.safetensors", "missing")


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"ghost": "model-0.safetensors"}, "'ghost' is in model-0.safetensors, but it is not"),
        ({"a.bias": "../model-0.safetensors"}, "not a file beside it"),
        ({"a.bias": ".."}, "not a file beside it"),
        ({"a.bias": 3}, "not a file beside it"),
        ([], "no weight_map"),
        ({"a": "x", "b": 1}, "not a file beside it"),
    ],
)
def test_a_wrong_index(sharded, weight_map, words):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(sharded, words)
    (sharded / "model.safetensors.index.json").write_text("{")
    refused(sharded, "index.json: cut off")


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("ending", ["pth", "pt", "bin", "th"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state, "best": 0.5},
        lambda state: {"state_dict": {f"module.{name}": value for name, value in state.items()}},
        lambda state: {"model": {"state_dict": state}},
    ],
)
def test_pytorch_files(tmp_path, old, ending, wrap):
    torch.save(wrap(WEIGHTS), tmp_path / f"m.{ending}", _use_new_zipfile_serialization=not old)
    opened = open_checkpoint(tmp_path / f"m.{ending}")
    check(opened)
    assert list(opened.tensors) == list(WEIGHTS)


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/bitplan-evil",)


@pytest.mark.parametrize("old", [False, True])
def test_a_pickle_that_wants_more(tmp_path, old):
    torch.save({"state_dict": WEIGHTS, "extra": Evil()}, tmp_path / "m.pth", _use_new_zipfile_serialization=not old)
    refused(tmp_path / "m.pth", "wants to run code", "system", "state_dict")
    (tmp_path / "m.pt").write_bytes(pickle.dumps(Evil()))
    refused(tmp_path / "m.pt")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "m.bin", _use_new_zipfile_serialization=not old)
    refused(tmp_path / "m.bin", "wants to run code", "Linear")
    assert not os.path.exists("/tmp/bitplan-evil")


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\3\4 not a zip", b"\x80\x02garbage"])
def test_what_is_no_pytorch_file(tmp_path, content):
    (tmp_path / "m.pth").write_bytes(content)
    refused(tmp_path / "m.pth", "m.pth")


def test_a_pytorch_file_cut_off(tmp_path):
    torch.save(WEIGHTS, tmp_path / "m.pth")
    content = (tmp_path / "m.pth").read_bytes()
    (tmp_path / "m.pth").write_bytes(content[: len(content) // 2])
    refused(tmp_path / "m.pth")
    torch.save({"epoch": 3}, tmp_path / "m.pt")
    refused(tmp_path / "m.pt", "no state_dict")
    torch.save([1, 2], tmp_path / "m.th")
    refused(tmp_path / "m.th", "no state_dict")


def packed(*names, dtype=torch.int32):
    return {name: torch.zeros(4, 4, dtype=dtype) for name in names}


@pytest.mark.parametrize(
    ("tensors", "form"),
    [
        (packed("l.0.q.qweight", "l.0.q.qzeros", "l.0.q.g_idx"), "GPTQ"),
        (packed("l.0.q.qweight", "l.0.q.qzeros", "l.0.q.scales"), "AWQ"),
        (packed("q.weight", "q.weight.quant_state.bitsandbytes__nf4", dtype=torch.uint8), "bitsandbytes"),
        (packed("q.weight", "q.SCB", dtype=torch.int8), "bitsandbytes"),
        (packed("q.weight_packed"), "compressed-tensors"),
        (packed("experts.gate_up_proj_blocks", dtype=torch.uint8), "MXFP4"),
        (packed("q.weight", "q.weight_scale_inv", dtype=torch.float32), "FP8"),
        ({"q.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, "FP8"),
        (packed("q.weight", dtype=torch.int8), "'q.weight' as integers (I8)"),
    ],
)
@pytest.mark.parametrize("ending", ["safetensors", "pth"])
def test_packed_formats_by_name(tmp_path, tensors, form, ending):
    path = tmp_path / f"m.{ending}"
    save_file(tensors, path) if ending == "safetensors" else torch.save(tensors, path)
    refused(path, form, "float weights")


def test_an_unknown_type(tmp_path):
    header = {"q.weight": entry(0, 8, (4, 4), "F4")}
    refused(write(tmp_path / "m.safetensors", header, bytes(8)), "'q.weight' as F4")


def test_other_files_by_name(tmp_path):
    (tmp_path / "m.bin").write_bytes(b"GGUF\3\0\0\0")
    refused(tmp_path / "m.bin", "GGUF")
    (tmp_path / "m.onnx").write_bytes(b"\x08\x07")
    refused(tmp_path / "m.onnx", "m.onnx is an ONNX file: give the PyTorch model")
    refused(tmp_path / "none.safetensors", "there is no such file or folder")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "neither model.safetensors nor")


def test_integer_buffers_are_no_weights(tmp_path):
    save_file(
        {"embeddings.position_ids": torch.zeros(1, 9, dtype=torch.int64), "q.weight": torch.ones(2, 2)},
        tmp_path / "m.safetensors",
    )
    assert len(open_checkpoint(tmp_path / "m.safetensors").tensors) == 2


def test_natural_order_and_learned_steps(tmp_path):
    assert sorted(["l.10.a", "l.9.b", "l.9.a", "l.x"], key=natural_key) == ["l.9.a", "l.9.b", "l.10.a", "l.x"]
    save_file({"q.weight": torch.ones(2, 2), "q.weight_quantizer.step": torch.tensor(0.5)}, tmp_path / "m.safetensors")
    tensors = open_checkpoint(tmp_path / "m.safetensors").tensors
    assert learned_step("q", tensors).floats().tolist() == [0.5]
    assert learned_step("k", tensors) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"plan": {"bitplan": "graph"}}'])
def test_a_broken_description(tmp_path, text):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    (tmp_path / "checkpoint.json").write_text(text)
    refused(tmp_path, "checkpoint.json")


def test_a_damaged_checkpoint_of_ours_is_not_planned_from(tmp_path):
    folder = save_checkpoint(torch.nn.Linear(4, 3), tmp_path / "net")
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(FileError, match="model.safetensors is damaged"):
        open_checkpoint(folder)
