"""ONNX files of strangers: data that lies elsewhere, and nodes that have modules imported or further files read."""

import os
import sys

import onnx
import pytest
import torch
from torch import nn

import bitplan
from bitplan.adapters.onnx import read
from bitplan.core.errors import FileError
from bitplan.plugins.runtimes.qonnx import QuantSession

X = torch.rand(4, 16, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)).eval()
    plan = bitplan.Plan.uniform(bitplan.trace(model, X[:1], rules=bitplan.Rules(narrow=0)), "w4a4")
    made = bitplan.quantize(model, plan)
    bitplan.calibrate_(made, [X])
    return made.eval()


@pytest.fixture(params=["onnx", "openvino", "qonnx"])
def split(request, network, tmp_path, monkeypatch):
    """Write a file whose tensors are in another, `given`, and say that they are in `said`; then go elsewhere."""

    def write(said, given):
        folder = tmp_path / "gift"
        folder.mkdir()
        options = {"batch": 0} if request.param == "qonnx" else {}
        bitplan.export(network, folder / "whole.onnx", request.param, example=X[:1], **options)
        proto = onnx.load(folder / "whole.onnx")
        place = {"location": "data.bin", "size_threshold": 0}
        onnx.save_model(proto, folder / "net.onnx", save_as_external_data=True, **place)
        given = folder / given
        given.parent.mkdir(exist_ok=True)
        os.replace(folder / "data.bin", given)
        proto = onnx.load(folder / "net.onnx", load_external_data=False)
        for tensor in proto.graph.initializer:
            tensor.external_data[0].value = said.format(folder=folder)
        (folder / "net.onnx").write_bytes(proto.SerializeToString())
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        return folder

    return write


@pytest.mark.parametrize("place", ["data.bin", "below/data.bin"])
def test_data_is_found_beside_the_file_wherever_one_is(split, network, place):
    folder = split(place, place)
    assert bitplan.verify(folder / "net.onnx", network, [X]).passed


def test_a_link_that_stays_in_the_folder_is_followed(split, network):
    folder = split("data.bin", "other.bin")
    (folder / "data.bin").symlink_to("other.bin")
    assert bitplan.verify(folder / "net.onnx", network, [X]).passed


@pytest.mark.parametrize(
    ("said", "link"),
    [
        ("../secret.bin", None),
        ("{folder}/../secret.bin", None),
        ("below/../../secret.bin", None),
        ("data.bin", "../secret.bin"),
        ("away/secret.bin", ".."),
        ("", None),
        (".", None),
        ("nothing.bin", None),
        ("\0", None),
        ("x" * 5000, None),
    ],
)
def test_data_outside_the_folder_is_not_read(split, network, said, link):
    folder = split(said, "../secret.bin")
    (folder / "below").mkdir()
    if link is not None:
        (folder / said.partition("/")[0]).symlink_to(link)
    with pytest.raises(FileError, match="which is no file in its own folder: it is not read"):
        bitplan.verify(folder / "net.onnx", network, [X])


def test_a_pipe_is_not_waited_for(split, network):
    folder = split("data.bin", "other.bin")
    os.mkfifo(folder / "data.bin")
    with pytest.raises(FileError, match="which is no file in its own folder"):
        bitplan.verify(folder / "net.onnx", network, [X])


@pytest.mark.parametrize(("key", "value"), [("offset", "-1"), ("length", str(10**9)), ("offset", "9" * 5000)])
def test_data_beyond_its_file_is_refused_before_it_is_read(split, key, value):
    folder = split("data.bin", "data.bin")
    proto = onnx.load(folder / "net.onnx", load_external_data=False)
    about = proto.graph.initializer[0].external_data
    for entry in about:
        entry.value = value if entry.key == key else entry.value
    (folder / "net.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(FileError, match="keeps data in 'data.bin' beyond its end"):
        read(folder / "net.onnx")


def test_bodies_of_branches_are_looked_into(tmp_path):
    away = onnx.TensorProto(name="w", data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
    away.external_data.add(key="location", value="/etc/passwd")
    value = onnx.helper.make_tensor_value_info("y", 1, [1])
    constant = onnx.helper.make_node("Constant", [], ["y"], value=away)
    body = onnx.helper.make_graph([constant], "body", [], [value])
    choice = onnx.helper.make_node("If", ["x"], ["y"], then_branch=body, else_branch=body)
    given = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.BOOL, [])
    graph = onnx.helper.make_graph([choice], "graph", [given], [value])
    path = tmp_path / "net.onnx"
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
    for opening in (read, QuantSession):
        with pytest.raises(FileError, match="keeps data in '/etc/passwd'"):
            opening(path)


@pytest.mark.parametrize(("domain", "kind"), [("evil", "Anything"), ("qonnx.custom_op.general", "GenericPartition")])
def test_no_module_is_imported_for_a_node_of_a_stranger(network, tmp_path, monkeypatch, domain, kind):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath(__file__).with_name('it-ran').touch()\n")
    bitplan.export(network, tmp_path / "net.onnx", "qonnx", example=X[:1])
    proto = onnx.load(tmp_path / "net.onnx")
    last = proto.graph.node[-1]
    last.domain, last.op_type = domain, kind
    proto.opset_import.append(onnx.helper.make_opsetid("evil", 1))
    (tmp_path / "net.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(FileError, match=f"a node '{kind}' of domain '{domain}'"):
        QuantSession(tmp_path / "net.onnx").run([X[:1].numpy()])
    assert "evil" not in sys.modules
    assert not (tmp_path / "it-ran").exists()
