"""Saving and loading: whole or not there, and one clear line for everything that is wrong."""

import json
import pickle
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from bitplan.core.errors import FileError, InputError
from bitplan.core.registry import MODELS
from bitplan.quant import checkpoint
from bitplan.quant.checkpoint import load_checkpoint, save_checkpoint
from bitplan.quant.convert import options_of, plan_of, quantize
from nets import Bomb, two_convolutions

PLAN = {"0": "w8a8", "3": "w4a4"}
X = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.other = nn.Linear(4, 10)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        h = self.embed(ids)
        return self.head(h) + self.other(h)


@MODELS.register("test-checkpoint-net")
def _zoo():
    return two_convolutions(), torch.zeros(1, 2, 8, 8)


@pytest.fixture
def quantized(plan):
    model = quantize(two_convolutions(), plan(**PLAN), per_channel=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).square().mean().backward()
    optimizer.step()
    return model.eval()


@pytest.fixture
def saved(quantized, tmp_path):
    return save_checkpoint(quantized, tmp_path / "run", spec="test-checkpoint-net", graph_id="abc")


def test_round_trip_by_zoo_name_and_by_model(quantized, saved):
    assert sorted(path.name for path in saved.iterdir()) == ["checkpoint.json", "model.safetensors"]
    mine = two_convolutions()
    for model in (load_checkpoint(saved), load_checkpoint(str(saved), mine)):
        assert torch.equal(model.eval()(X), quantized(X))
        assert plan_of(model).id == plan_of(quantized).id
        assert options_of(model) == options_of(quantized)
    assert type(mine[0]) is nn.Conv2d
    about = json.loads((saved / "checkpoint.json").read_text())
    assert (about["spec"], about["graph"]) == ("test-checkpoint-net", "abc")
    assert about["versions"]["torch"] == torch.__version__


def test_float_models_too(tmp_path):
    model = two_convolutions().eval()
    loaded = load_checkpoint(save_checkpoint(model, tmp_path / "float"), two_convolutions())
    assert torch.equal(loaded.eval()(X), model(X))


def test_ties_are_stored_once_and_hold_after_loading(plan, tmp_path):
    linked = (("head", "other"),)
    model = quantize(Tied(), plan(links=linked, embed="w8a8", head="w4a4", other="w4a4"))
    ids = torch.tensor([1, 2, 3])
    model(ids)
    path = save_checkpoint(model, tmp_path / "tied")
    with safe_open(path / "model.safetensors", "pt") as file:
        assert "embed.weight" in file.keys()  # noqa: SIM118
        assert "head.weight" not in file.keys()  # noqa: SIM118
        assert "other.input_quantizer.step" not in file.keys()  # noqa: SIM118
    loaded = load_checkpoint(path, Tied())
    assert loaded.head.weight is loaded.embed.weight
    assert torch.equal(loaded(ids), model(ids))


def test_saved_steps_are_positive(quantized, tmp_path):
    quantized[0].input_quantizer.step.data.neg_()
    loaded = load_checkpoint(save_checkpoint(quantized, tmp_path / "run"), two_convolutions()).eval()
    assert loaded[0].input_quantizer.step > 0
    assert torch.equal(loaded(X), quantized(X))


def test_an_uncalibrated_model_stays_uncalibrated(plan, tmp_path):
    path = save_checkpoint(quantize(two_convolutions(), plan(**PLAN)), tmp_path / "raw")
    with pytest.raises(InputError, match="is not set"):
        load_checkpoint(path, two_convolutions()).eval()(X)


def test_a_failure_leaves_the_old_checkpoint_and_nothing_else(quantized, saved, monkeypatch):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(FileError, match=r"cannot write .*: No space left on device"):
        save_checkpoint(quantized, saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert [path.name for path in saved.parent.iterdir()] == ["run"]


def test_replaces_checkpoints_only(quantized, saved, tmp_path):
    save_checkpoint(quantized, saved)
    assert [path.name for path in saved.parent.iterdir()] == ["run"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(FileError, match="is not a checkpoint"):
        save_checkpoint(quantized, tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.tex").exists()


def test_no_zoo_name_needs_a_model(quantized, tmp_path):
    path = save_checkpoint(quantized, tmp_path / "run")
    with pytest.raises(InputError, match="give the one it belongs to, --model"):
        load_checkpoint(path)


def header(entries, data=b"", length=None):
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE = {
    "empty": b"",
    "cut header": header({"a": F32}, bytes(8))[:20],
    "length lies": header({"a": F32}, bytes(8), length=2**60),
    "length off by one": header({"a": F32}, bytes(8), length=10),
    "data missing": header({"a": F32}),
    "offsets overlap": header({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
    "offsets backwards": header({"a": {**F32, "data_offsets": [8, 0]}}, bytes(8)),
    "shape overflows": header({"a": {**F32, "shape": [2**40, 2**40]}}, bytes(8)),
    "shape lies": header({"a": {**F32, "shape": [3]}}, bytes(8)),
    "unknown type": header({"a": {**F32, "dtype": "F7"}}, bytes(8)),
    "not json": struct.pack("<Q", 8) + b"notjson!" + bytes(8),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_safetensors_are_one_line(kind, saved):
    (saved / "model.safetensors").write_bytes(HOSTILE[kind])
    with pytest.raises(FileError, match=r"^[^\n]*cut off or not a safetensors file[^\n]*$"):
        load_checkpoint(saved)


def test_truncated_anywhere(saved):
    whole = (saved / "model.safetensors").read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 40)):
        (saved / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(FileError, match=r"^[^\n]+$"):
            load_checkpoint(saved)


def test_missing_files(saved, tmp_path):
    with pytest.raises(FileError, match="there is no such file or folder"):
        load_checkpoint(tmp_path / "nowhere")
    (saved / "model.safetensors").unlink()
    with pytest.raises(FileError, match=r"cannot read .*model.safetensors: there is no such file"):
        load_checkpoint(saved)
    (saved / "checkpoint.json").unlink()
    with pytest.raises(FileError, match=r"cannot read .*checkpoint.json"):
        load_checkpoint(saved)


def test_keys_and_shapes(saved):
    with safe_open(saved / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def loading(changed):
        save_file(changed, saved / "model.safetensors")
        with pytest.raises(FileError, match=r"^[^\n]+$") as caught:
            load_checkpoint(saved)
        return str(caught.value)

    assert "lacks 3.bias" in loading({k: v for k, v in tensors.items() if k != "3.bias"})
    assert "has intruder" in loading(tensors | {"intruder": torch.zeros(1)})
    wrong = loading(tensors | {"3.bias": torch.zeros(5)})
    assert "3.bias is (5,) in the file, (2,) in the model" in wrong


def test_a_hand_edited_json_is_noticed(saved):
    text = (saved / "checkpoint.json").read_text()
    (saved / "checkpoint.json").write_text(text.replace("w4a4", "w2a2"))
    with pytest.raises(FileError, match="does not fit its content"):
        load_checkpoint(saved)


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"state_dict": s, "epoch": 3}, lambda s: {"model": s}])
def test_foreign_pth(wrap, tmp_path):
    model = two_convolutions().eval()
    torch.save(wrap({f"module.{name}": value for name, value in model.state_dict().items()}), tmp_path / "a.pth")
    assert torch.equal(load_checkpoint(tmp_path / "a.pth", two_convolutions()).eval()(X), model(X))
    with pytest.raises(InputError, match="give the one it belongs to"):
        load_checkpoint(tmp_path / "a.pth")


def test_foreign_files_from_before_batches_were_counted(tmp_path):
    old = {name: value for name, value in two_convolutions().state_dict().items() if "num_batches" not in name}
    torch.save(old, tmp_path / "old.pth")
    assert torch.equal(load_checkpoint(tmp_path / "old.pth", two_convolutions())[0].weight, old["0.weight"])


@pytest.mark.parametrize("old_format", [True, False])
def test_a_pickle_that_wants_more_is_refused(old_format, tmp_path):
    torch.save({"a": Bomb()}, tmp_path / "bomb.pth", _use_new_zipfile_serialization=not old_format)
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Bomb()))
    for name in ("bomb.pth", "plain.pth"):
        with pytest.raises(FileError, match=r"^[^\n]*wants to run code when it is read, so it is refused[^\n]*$"):
            load_checkpoint(tmp_path / name, two_convolutions())


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04garbage"])
def test_a_broken_pth_is_one_line(content, tmp_path):
    (tmp_path / "broken.pth").write_bytes(content)
    with pytest.raises(FileError, match=r"^[^\n]+$"):
        load_checkpoint(tmp_path / "broken.pth", two_convolutions())


def test_a_pth_of_something_else(tmp_path):
    torch.save([1, 2, 3], tmp_path / "list.pth")
    with pytest.raises(FileError, match="holds no state_dict"):
        load_checkpoint(tmp_path / "list.pth", two_convolutions())


def test_a_checkpoint_can_be_read_by_whom_the_user_lets_read_his_files(tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    folder = save_checkpoint(nn.Linear(2, 2), tmp_path / "net")
    assert {path.stat().st_mode for path in folder.iterdir()} == {plain.stat().st_mode}


def test_one_flipped_bit_in_the_weights_is_found(tmp_path):
    folder = save_checkpoint(nn.Linear(4, 3), tmp_path / "net")
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(FileError, match="model.safetensors is damaged"):
        load_checkpoint(folder, nn.Linear(4, 3))
