"""Two doors, one reader: what `plan FILE` takes, `--weights FILE` takes, and what one refuses, the other refuses."""

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bitplan
from bitplan.core.errors import FileError
from bitplan.weights.opened import open_checkpoint
from bitplan.weights.torch_tensors import read_weights
from nets import Bomb

NESTED = ("state_dict", "model", "model_state_dict", "net", "module")
PREFIXES = ("", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module.")
INDEX = "model.safetensors.index.json"


class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)  # counts its batches in int64
        self.head = nn.Linear(4, 5).half()
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scale", torch.tensor(3.0, dtype=torch.float64))
        self.register_buffer("none", torch.zeros(0, 2))


STATE = Net(seed=1).state_dict()


def prefixed(prefix, state=STATE):
    return {prefix + name: value for name, value in state.items()}


def pickled(content, name="net.pth", **options):
    def make(folder):
        torch.save(content, folder / name, **options)
        return folder / name

    return make


def safe(state, name="net.safetensors"):
    def make(folder):
        save_file({key: value.clone() for key, value in state.items()}, folder / name)
        return folder / name

    return make


def folder_of(*files):
    """The folder itself, with these files in it."""

    def make(folder):
        for file in files:
            file(folder)
        return folder

    return make


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def shards(write, ending, index=INDEX, *, name_the_index=False, prefix=""):
    """Every tensor in a file of its own, and their index."""

    def make(folder):
        listed = {}
        for number, (name, value) in enumerate(prefixed(prefix).items()):
            listed[name] = f"part-{number}.{ending}"
            write({name: value}, listed[name])(folder)
        (folder / index).write_text(json.dumps({"weight_map": listed}))
        return folder / index if name_the_index else folder

    return make


TAKEN = (
    {f"pth {ending}": pickled(STATE, f"net.{ending}") for ending in ("pth", "pt", "bin", "th", "ckpt")}
    | {"older pth": pickled(STATE, _use_new_zipfile_serialization=False)}
    | {f"pth with {prefix}": pickled(prefixed(prefix)) for prefix in PREFIXES}
    | {f"pth under {key}": pickled({key: STATE, "epoch": 3, "optimizer": {"lr": 0.1}}) for key in NESTED}
    | {f"pth under {key}, {prefix}": pickled({key: prefixed(prefix)}) for key in NESTED for prefix in PREFIXES}
    | {f"pth under {key} twice": pickled({"state_dict": {key: STATE}}) for key in NESTED}
    | {"pth of compiled parts": pickled({name.replace(".", "._orig_mod.", 1): value for name, value in STATE.items()})}
    | {"pth with a number among the tensors": pickled(STATE | {"epoch": 3})}
    | {f"safetensors with {prefix}": safe(prefixed(prefix)) for prefix in PREFIXES}
    | {
        "safetensors under another ending": safe(STATE, "net.bin"),
        "safetensors that says json": safe(STATE, "net.json"),
        "pth that says json": pickled(STATE, "net.json"),
        "folder of model.safetensors": folder_of(safe(STATE, "model.safetensors"), text("config.json", "{}")),
        "folder of shards": shards(safe, "safetensors"),
        "shards by their index": shards(safe, "safetensors", name_the_index=True),
        "shards by an index of another name": shards(safe, "safetensors", "my.index.json", name_the_index=True),
        "shards of PyTorch's": shards(pickled, "bin", "pytorch_model.bin.index.json", name_the_index=True),
        "shards with module.": shards(safe, "safetensors", prefix="module."),
        "shards beside a whole file": folder_of(shards(safe, "safetensors"), pickled({}, "pytorch_model.bin")),
        "folder of pytorch_model.bin": folder_of(pickled(STATE, "pytorch_model.bin"), pickled({}, "training_args.bin")),
        "folder of a single pth": folder_of(pickled({"net": prefixed("module.")}, "best.pth"), text("log.txt", "")),
        "folder of a single safetensors": folder_of(safe(STATE, "best.safetensors")),
    }
)


@pytest.mark.parametrize("case", TAKEN)
def test_both_doors_take_the_same_files(tmp_path, case):
    path = TAKEN[case](tmp_path)
    graph = bitplan.trace(path, rules=bitplan.Rules(narrow=0))
    assert {layer.name for layer in graph.layers} == {"stem", "head"}
    bitplan.estimate("eagl", path, bitplan.trace(path, rules=bitplan.Rules(narrow=0, first=None, last=None)))
    assert {name: tensor.shape for name, tensor in open_checkpoint(path).tensors.items()} == {
        name: tuple(value.shape) for name, value in STATE.items()
    }
    model = Net(seed=2)
    bitplan.load_weights_(model, path)
    for filled in (model, bitplan.load_checkpoint(path, Net(seed=3))):
        for name, value in filled.state_dict().items():
            assert torch.equal(value, STATE[name]), name
            assert value.dtype == STATE[name].dtype


def raw(name, content):
    def make(folder):
        (folder / name).write_bytes(content)
        return folder / name

    return make


def cut(make, share):
    def less(folder):
        path = make(folder)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])
        return path

    return less


def without(make, name):
    def less(folder):
        path = make(folder)
        (folder / name).unlink()
        return path

    return less


def own_packed(folder):
    net = nn.Sequential(nn.Linear(8, 8))
    graph = bitplan.trace(net, torch.empty(1, 8))
    return bitplan.export(
        bitplan.quantize(net, bitplan.Plan.uniform(graph, "w4a16")), folder / "a.safetensors", "packed"
    )


CODES = {"head.weight": torch.ones(5, 4, dtype=torch.int8)}
ITSELF = {}
ITSELF["model"] = ITSELF
REFUSED = {
    "nothing": lambda folder: folder / "none.pth",
    "empty folder": lambda folder: folder,
    "folder of two": folder_of(pickled(STATE, "a.pth"), pickled(STATE, "b.pth")),
    "empty pth": raw("a.pth", b""),
    "text": raw("a.pth", b"hello"),
    "half a pth": cut(pickled(STATE), 0.5),
    "half a safetensors": cut(safe(STATE), 0.5),
    "no state_dict": pickled([1, 2]),
    "no tensors": pickled({"state_dict": {"epoch": 3}}),
    "nested in itself": pickled(ITSELF),
    "bomb": pickled({"state_dict": STATE, "extra": Bomb()}),
    "plain bomb": raw("a.pth", pickle.dumps(Bomb())),
    "whole model": pickled(Net(seed=1)),
    "integers": safe(STATE | CODES),
    "pickled integers": pickled(STATE | CODES),
    "fp8": pickled(STATE | {"head.weight": torch.ones(5, 4).to(torch.float8_e4m3fn)}),
    "complex": pickled(STATE | {"head.weight": torch.ones(5, 4, dtype=torch.complex64)}),
    "packed by bitplan": own_packed,
    "packed": safe({"head.qweight": torch.ones(5, 4, dtype=torch.int32)}),
    "sparse": pickled(STATE | {"head.weight": torch.eye(5).to_sparse()}),
    "gguf": raw("a.bin", b"GGUF\3\0\0\0"),
    "onnx": raw("a.onnx", b"\x08\x07"),
    "missing shard": without(shards(safe, "safetensors"), "part-1.safetensors"),
    "index of itself": lambda folder: (text(INDEX, json.dumps({"weight_map": {"a": INDEX}}))(folder), folder)[1],
    "json": raw("a.json", b'{"weight": [1, 2]}'),
    "json by another name": raw("a.pth", b' {"a": {"b": 1}}'),
    "short json": raw("a.json", b"{}"),
    "no index": lambda folder: (text(INDEX, "{}")(folder), folder)[1],
}


@pytest.mark.parametrize("case", REFUSED)
def test_both_doors_refuse_the_same_files_in_the_same_words(tmp_path, case):
    path = REFUSED[case](tmp_path)
    with pytest.raises(FileError) as planned:
        bitplan.trace(path)
    with pytest.raises(FileError) as loaded:
        bitplan.load_weights_(Net(seed=2), path)
    assert str(planned.value) == str(loaded.value)
    assert "\n" not in str(planned.value)
    assert ("wants to run code" in str(planned.value)) == ("bomb" in case or case == "whole model")


@pytest.mark.parametrize("make", [safe(prefixed("module.")), pickled(prefixed("module."))])
def test_a_layer_is_found_under_the_name_with_its_wrapper_too(tmp_path, make):
    """A model may call a part of its own `module`; then its graph has the names that the file had."""
    opened = open_checkpoint(make(tmp_path))
    assert opened.weight("module.head").floats().tolist() == STATE["head.weight"].float().flatten().tolist()
    assert opened.weight("module.neck") is None


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
@pytest.mark.parametrize("make", [safe, pickled])
@pytest.mark.parametrize("part", ["module", "_orig_mod"])
def test_a_model_with_a_part_that_it_calls_module_or_compiles_is_filled_from_either_file(tmp_path, part, make, prefix):
    path = make(prefixed(prefix))(tmp_path)
    model = nn.Module()
    setattr(model, part, Net(seed=2))
    for filled in (bitplan.load_checkpoint(path, model), model):
        if filled is model:
            bitplan.load_weights_(model, path)
        assert all(torch.equal(value, STATE[name]) for name, value in getattr(filled, part).state_dict().items())


def test_names_that_would_be_one_without_a_wrapper_stay_as_they_are(tmp_path):
    twice = {"head.weight": torch.ones(5, 4), "head._orig_mod.weight": torch.zeros(5, 4)}
    assert set(open_checkpoint(pickled(twice)(tmp_path)).tensors) == set(twice)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.middle = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.words.weight


def test_what_a_model_ties_may_stand_in_a_file_once(tmp_path):
    """As Hugging Face's files have it, and bitplan's own."""
    own = bitplan.save_checkpoint(Tied(), tmp_path / "own")
    once = {name: value for name, value in Tied().state_dict().items() if name != "head.weight"}
    for path in (own, safe(once)(tmp_path)):
        assert {layer.name for layer in bitplan.trace(path).layers} == {"words", "middle"}
        model = Tied()
        bitplan.load_weights_(model, path)
        assert torch.equal(model.head.weight, read_weights(path)["words.weight"])
    lacking = safe({name: value for name, value in once.items() if name != "words.weight"}, "less.safetensors")
    with pytest.raises(FileError, match="lacks words.weight"):
        bitplan.load_weights_(Tied(), lacking(tmp_path))


def test_a_checkpoint_of_bitplans_keeps_the_names_that_its_plan_has(tmp_path):
    inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = nn.Module()
    model.module = inner
    path = bitplan.save_checkpoint(model, tmp_path / "own")
    assert set(open_checkpoint(path).tensors) == set(model.state_dict())


def test_what_is_loaded_may_be_written_to_and_leaves_the_file_alone(tmp_path):
    path = safe(STATE)(tmp_path)
    before = path.read_bytes()
    for tensor in read_weights(path).values():
        tensor.zero_()
    assert path.read_bytes() == before
