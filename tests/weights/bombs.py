"""Small files that claim to be large, each with the command that reads it; as a program it reads one, says its peak."""

import json
import resource
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

GB = 1 << 30


def archive(path, pickled, storage=b"\0" * 4, packing=zipfile.ZIP_STORED):
    """An archive as torch.save writes it, around any pickle."""
    with zipfile.ZipFile(path, "w", packing) as out:
        out.writestr("archive/data.pkl", pickled)
        out.writestr("archive/byteorder", b"little")
        out.writestr("archive/data/0", storage)
        out.writestr("archive/version", b"3\n")


def text(value):
    """The pickle opcode of a text."""
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def calls(function, *arguments):
    """The opcodes that call a function."""
    return b"c" + function.encode() + b"\n(" + b"".join(arguments) + b"tR"


def tensor(size, stride):
    """A tensor of that shape over one number."""
    stored = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x01tQ"
    numbers = [b"\x8a\x08" + struct.pack("<q", value) for value in (size, stride)]
    shape, steps = (b"(" + number + b"t" for number in numbers)
    return calls(
        "torch._utils\n_rebuild_tensor_v2", stored, b"K\0", shape, steps, b"\x89", b"ccollections\nOrderedDict\n)R"
    )


def compressed_pickle(path):
    """2 MB that unpack to 2 GB."""
    head, tail = b"\x80\x02}" + text("a.weight"), b"Ns."
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        with out.open("archive/data.pkl", "w", force_zip64=True) as entry:
            entry.write(head)
            for _ in range(2 << 10):
                entry.write(b"N0" * (1 << 19))
            entry.write(tail)
        out.writestr("archive/version", b"3\n")


def compressed_numbers(path):
    """A sound network of zeros whose numbers are compressed."""
    archive(path, b"\x80\x02}" + text("a.weight") + tensor(1 << 20, 1) + b"s.", b"\0" * (4 << 20), zipfile.ZIP_DEFLATED)


def doubling(path):
    """A text whose bytes are doubled thirty-three times."""
    chain = calls("_codecs\nencode", text("x"), text("latin1"))
    for _ in range(33):
        chain = calls("_codecs\nencode", chain, text("hex"))
    archive(path, b"\x80\x02}" + text("a") + chain + b"s.")


def copying(path):
    """A text of a million bytes of which eight thousand copies are made."""
    copy = b"h\1h\2h\3\x86R"
    archive(
        path,
        b"\x80\x02c_codecs\nencode\nq\1"
        + text("x" * 1_000_000)
        + b"q\2"
        + text("latin1")
        + b"q\3]("
        + copy * 8000
        + b"e.",
    )


def repeating(path):
    """One number that a shape repeats two thousand million times."""
    archive(path, b"\x80\x02}" + text("a.weight") + tensor(2 * GB, 0) + b"s.")


def unfilled(path):
    """A tensor of a thousand million numbers that were never there."""
    number = b"\x8a\x08" + struct.pack("<q", GB)
    archive(path, b"\x80\x02}" + text("a.weight") + calls("torch\nTensor", number) + b"s.")


def laughing(path):
    """Mappings of a thousand names for one mapping of a thousand names for one …"""
    level = b"}" + text("a.weight") + tensor(1, 1) + b"s"
    for _ in range(3):
        level = level + b"q\5}(" + b"".join(text(str(place)) + b"h\5" for place in range(1000)) + b"u"
    archive(path, b"\x80\x02" + level + b".")


def header(path):
    """safetensors whose shapes and places are larger than the file."""
    entry = {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}
    content = json.dumps({"a.weight": entry}).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content)


def long_text(path):
    """A text of 3 GB, of which the disk holds nothing."""
    with path.open("wb") as file:
        file.write(b'{"bitplan": "graph", "')
        file.truncate(3 * GB)


def many_lists(path):
    """A text of 90 MB that would become thirty million lists."""
    path.write_bytes(b"[" + b"[]," * (30 << 20) + b"[]]")


def empty_weight(path):
    """ONNX whose codes have a shape and no bytes."""
    import onnx
    import torch

    import bitplan

    net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
    graph = bitplan.trace(net, torch.zeros(1, 8))
    made = bitplan.quantize(net, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(made, [torch.ones(4, 8)])
    bitplan.export(made, path, "onnx", example=torch.zeros(1, 8))
    model = onnx.load(path)
    codes = next(one for one in model.graph.initializer if one.name.endswith(".codes"))
    codes.dims[:] = [1 << 17, 1 << 16]
    path.write_bytes(model.SerializeToString())


def gguf_header(path, kind, *values):
    """The header of a GGUF file that has no tensors and one value, of that kind."""
    key = b"llama.block_count"
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<I", kind) + b"".join(values)
    )


def array(path):
    """A GGUF file of a few bytes that claims an array of 2^50 numbers."""
    gguf_header(path, 9, struct.pack("<IQ", 4, 1 << 50))


def sparse_array(path):
    """A GGUF file of which the disk holds nothing that claims, and has, an array of 2^36 numbers."""
    gguf_header(path, 9, struct.pack("<IQ", 0, 1 << 36))
    with path.open("r+b") as file:
        file.truncate(1 << 37)


def blocks(path):
    """A GGUF file that claims four thousand million blocks."""
    gguf_header(path, 4, struct.pack("<I", (1 << 32) - 1))


def sparse_graph(path):
    """An ONNX file of 300 GB, of which the disk holds nothing."""
    with path.open("wb") as file:
        file.truncate(300 * GB)


def sparse_numbers(path):
    """safetensors of 300 GB, of which the disk holds the header."""
    size = 300 * GB
    content = json.dumps({"a.weight": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content)
    with path.open("r+b") as file:
        file.truncate(8 + len(content) + size)


def described(path, **changes):
    """A network of Hugging Face's of 80 kB whose configuration says something else."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from texts import with_config, write_folder

    with_config(write_folder(path.parent), **changes)


def layers(path):
    """A configuration of ten million layers."""
    described(path, num_hidden_layers=10_000_000)


def large_text(path):
    """300 GB of text that transformers reads beside a network, of which the disk holds nothing."""
    described(path)
    with path.open("r+b") as file:
        file.truncate(300 * GB)


def words(path):
    """A configuration of a thousand million words."""
    described(path, vocab_size=1_000_000_000)


def pretrained(path):
    """What `quantize` does with a network of transformers'."""
    import bitplan

    bitplan.load_pretrained(path if path.suffix == ".gguf" else path.parent)


def skeleton(path):
    """What methods do that read it block by block."""
    from bitplan.models.streamed import skeleton_of
    from bitplan.weights.opened import open_checkpoint

    skeleton_of(open_checkpoint(path.parent))


def weights(path):
    """What `quantize --weights` does with a file."""
    import torch

    import bitplan

    bitplan.load_weights_(torch.nn.Sequential(torch.nn.Linear(8, 8)), path)


def exported(path):
    """What `verify` does with a file."""
    from bitplan.exporters.base import exporter_of

    exporter_of(path).read(path)


def record(path):
    """What `validate` does with a file."""
    from bitplan.core.record import Record
    from bitplan.store.files import load

    load(path, Record)


BOMBS = {
    "compressed_pickle": (compressed_pickle, "b.pth", weights),
    "compressed_numbers": (compressed_numbers, "b.pth", weights),
    "doubling": (doubling, "b.pth", weights),
    "copying": (copying, "b.pth", weights),
    "repeating": (repeating, "b.pth", weights),
    "unfilled": (unfilled, "b.pth", weights),
    "laughing": (laughing, "b.pth", weights),
    "header": (header, "b.safetensors", weights),
    "long_text": (long_text, "b.json", record),
    "many_lists": (many_lists, "b.json", record),
    "empty_weight": (empty_weight, "b.onnx", exported),
    "array": (array, "b.gguf", pretrained),
    "sparse_array": (sparse_array, "b.gguf", pretrained),
    "blocks": (blocks, "b.gguf", exported),
    "sparse_graph": (sparse_graph, "b.onnx", exported),
    "sparse_numbers": (sparse_numbers, "b.safetensors", weights),
    "layers": (layers, "config.json", pretrained),
    "streamed_layers": (layers, "config.json", skeleton),
    "words": (words, "config.json", pretrained),
    "large_text": (large_text, "generation_config.json", pretrained),
}


def peak():
    """The most memory that this process has held, in MB; getrusage would count what its parent held before it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10


def assert_refused(program, bombs, name, folder, *, most):
    """Read a bomb in a process of its own."""
    make, file, _ = bombs[name]
    path = folder / file
    make(path)
    command = [sys.executable, str(program), name, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    outcome = json.loads(done.stdout)
    assert outcome["said"].startswith("refused: ")
    assert file in outcome["said"] or name == "pixels"  # whose name the data set adds
    assert outcome["grown"] < most


def main(bombs):
    """Make the bomb that the command line names, or read it and write down what that took and said."""
    from bitplan.core.errors import InputError

    name, place = sys.argv[1], Path(sys.argv[2])
    if sys.argv[3:] == ["make"]:
        bombs[name][0](place)
        sys.exit()
    read = bombs[name][2]
    import torch  # noqa: F401

    resource.setrlimit(resource.RLIMIT_AS, (12 * GB, -1))
    before, said = peak(), "read"
    try:
        read(place)
    except InputError as error:
        said = f"refused: {error}"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps({"grown": peak() - before, "said": said}))


if __name__ == "__main__":
    main(BOMBS)
