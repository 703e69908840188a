"""EAGL from models and files: the paper's metric, several choices, and what it says when it cannot."""

import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bitplan.core.codes import entropy
from bitplan.core.errors import InputError
from bitplan.core.precision import LEFT_ALONE, parse_choices
from bitplan.core.records import Checkpoint, Graph, Layer, Plan
from bitplan.gains.base import Context
from bitplan.gains.eagl import Eagl
from bitplan.graph.names import read_graph
from bitplan.quant.convert import quantize
from bitplan.store.files import save, sha256_of
from bitplan.weights.opened import open_checkpoint

TWO, THREE = parse_choices("w2a2,w4a4"), parse_choices("w2a2,w4a4,w8a8")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(32, 10))


@pytest.fixture
def graph():
    return Graph(
        model="tiny",
        layers=(
            Layer(name="0", kind="conv2d", macs=216, weights=216, in_features=3),
            Layer(name="2", kind="linear", macs=320, weights=320, in_features=32),
        ),
    )


def paper_entropy(weight: torch.Tensor, step: torch.Tensor, bits: int) -> float:
    low = -(2 ** (bits - 1))
    codes = (weight / step).clamp(low, -low - 1).round().view(-1).int() - low
    p = torch.bincount(codes, minlength=2**bits).float() / codes.numel() + 1e-10
    return float(-(p * p.log2()).sum())


def lsq(weight: torch.Tensor, bits: int = 4) -> torch.Tensor:
    return (2 * weight.double().abs().mean() / (2 ** (bits - 1) - 1) ** 0.5).float()


def quantized(model, graph, steps, precisions=None):
    """The model at 4 bits, as if its training had ended with these steps."""
    plan = Plan.uniform(graph, "w4a4")
    made = quantize(model, plan.model_copy(update={"precisions": plan.precisions | (precisions or {})}))
    for name, step in steps.items():
        made[int(name)].weight_quantizer.step.data.copy_(step)
    return made


def test_the_papers_metric_from_a_quantized_model(model, graph):
    steps = {name: 0.9 * lsq(model[int(name)].weight) for name in ("0", "2")}
    learned = {name: (model[int(name)].weight, step, 4) for name, step in steps.items()}
    model = quantized(model, graph, steps)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gains = Eagl().layer_gains(model, graph, TWO)
    for name, (weight, step, _) in learned.items():
        assert gains.values[name] == (0.0, pytest.approx(paper_entropy(weight, step, 4), abs=1e-6))
        assert sum(gains.histograms[name]) == weight.numel()
        assert gains.values[name][1] == entropy(gains.histograms[name])
    assert gains.counts == {"weights": 536, "learned_steps": 2}
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_several_choices_add_up_and_steps_scale(model, graph):
    steps = {name: lsq(model[int(name)].weight) for name in ("0", "2")}
    learned = {name: (model[int(name)].weight, step, 4) for name, step in steps.items()}
    model = quantized(model, graph, steps)
    gains = Eagl(bootstrap=40).layer_gains(model, graph, THREE, Context(seed=1))
    for name, (weight, step, _) in learned.items():
        at4, at8 = paper_entropy(weight, step, 4), paper_entropy(weight, step / 16, 8)
        assert gains.values[name] == (0.0, pytest.approx(at4, abs=1e-6), pytest.approx(at4 + at8, abs=2e-6))
        assert len(gains.histograms[name]) == 256
        assert 0 == gains.errors[name][0] < gains.errors[name][1] < gains.errors[name][2]
    assert gains == Eagl(bootstrap=40).layer_gains(model, graph, THREE, Context(seed=1))
    assert gains.errors != Eagl(bootstrap=40).layer_gains(model, graph, THREE, Context(seed=2)).errors


def test_a_float_model_must_say_which_steps(model, graph):
    with pytest.raises(InputError, match=r"float model.*steps=mse"):
        Eagl().layer_gains(model, graph, TWO)
    gains = Eagl(steps="lsq").layer_gains(model, graph, TWO)
    weight = model[2].weight.detach()
    assert gains.values["2"][1] == pytest.approx(paper_entropy(weight, lsq(weight), 4), abs=1e-6)
    with pytest.raises(InputError, match="no learned step for layer '0' and 1 more"):
        Eagl(steps="learned").layer_gains(model, graph, TWO)


def test_partly_learned_steps_are_not_mixed(model, graph):
    model = quantized(model, graph, {"0": torch.tensor(0.1)}, precisions={"2": LEFT_ALONE})
    with pytest.raises(InputError, match="no learned step for layer '2': choose"):
        Eagl().layer_gains(model, graph, TWO)
    assert set(Eagl(steps="mse").layer_gains(model, graph, TWO).values) == {"0", "2"}


def test_only_selectable_layers_and_zero_without_weights(model, graph):
    product = Layer(name="attention", kind="matmul", macs=9, weights=0, in_features=4)
    fixed = graph.layers[0].model_copy(update={"fixed": THREE[2], "rule": "first", "why": "first"})
    changed = Graph(model="tiny", layers=(fixed, graph.layers[1], product))
    gains = Eagl(steps="absmax").layer_gains(model, changed, TWO)
    assert set(gains.values) == {"2", "attention"}
    assert gains.values["attention"] == (0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("per", ["tensor", "channel", "group"])
@pytest.mark.parametrize("steps", [None, "lsq", "mse", "absmax"])
def test_a_file_gives_what_the_model_gives(tmp_path, model, graph, dtype, per, steps):
    model = model.to(dtype)
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    from_file = Eagl(steps, per).layer_gains(tmp_path / "m.safetensors", graph, THREE)
    assert from_file == Eagl(steps or "mse", per).layer_gains(model, graph, THREE)
    torch.save(model.state_dict(), tmp_path / "m.pth")
    assert from_file == Eagl(steps, per).layer_gains(open_checkpoint(tmp_path / "m.pth"), graph, THREE)


@pytest.mark.parametrize("places", [("2", "0"), ("call_quantizers.2", "call_quantizers.0")])
@pytest.mark.parametrize("planned", [True, False])
def test_steps_that_a_checkpoint_learned(tmp_path, graph, places, planned):
    """Learned at the plan's 4 bits (or the top choice's, without a plan), used at 4 and at 8."""
    weight = torch.randn(10, 32, generator=torch.Generator().manual_seed(0))
    tensors = {"2.weight": weight, "0.weight": torch.ones(8, 3, 3, 3)}
    steps = {f"{places[0]}.weight_quantizer.step": torch.tensor(0.31)}
    steps |= {f"{places[1]}.weight_quantizer.step": torch.tensor([1.0])}
    save_file(tensors | steps, tmp_path / "model.safetensors")
    plan, sha256 = Plan.uniform(graph, "w4a4") if planned else None, sha256_of(tmp_path / "model.safetensors")
    save(Checkpoint(plan=plan, sha256=sha256), tmp_path / "checkpoint.json")
    gains = Eagl().layer_gains(tmp_path, graph, THREE)
    scale = torch.tensor(0.31)
    at4, at8 = (scale, scale / 16) if planned else (scale * 16, scale)
    expected = paper_entropy(weight, at4, 4)
    assert gains.values["2"] == (
        0.0,
        pytest.approx(expected, abs=1e-6),
        pytest.approx(expected + paper_entropy(weight, at8, 8), abs=1e-5),
    )
    assert gains.values["0"] == (0.0, 0.0, 0.0)
    assert gains.counts["learned_steps"] == 2


def test_gpt2_channels_are_columns(tmp_path):
    """The same weights, once (in, out) under GPT-2's names and once (out, in), gain the same per channel."""
    weight = torch.randn(48, 20, generator=torch.Generator().manual_seed(0)) * torch.arange(1.0, 21)
    save_file({"h.0.mlp.c_fc.weight": weight, "h.0.other.weight": weight.T.contiguous()}, tmp_path / "a.safetensors")
    gains = Eagl(per="channel").layer_gains(tmp_path / "a.safetensors", read_graph(tmp_path / "a.safetensors"), TWO)
    assert gains.values["h.0.mlp.c_fc"] == gains.values["h.0.other"]
    tensorwise = Eagl().layer_gains(tmp_path / "a.safetensors", read_graph(tmp_path / "a.safetensors"), TWO)
    assert tensorwise.values["h.0.mlp.c_fc"] != gains.values["h.0.mlp.c_fc"]


def test_a_graph_of_another_checkpoint(tmp_path, graph):
    save_file({"0.weight": torch.ones(2, 2)}, tmp_path / "m.safetensors")
    with pytest.raises(InputError, match="no float weight of 216 elements for layer '0'"):
        Eagl().layer_gains(tmp_path / "m.safetensors", graph, TWO)


def test_nan_in_a_file_names_the_tensor(tmp_path, graph):
    tensors = {"0.weight": torch.ones(8, 3, 3, 3), "2.weight": torch.full((10, 32), float("nan"))}
    save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(InputError, match=r"'2\.weight' contain NaN"):
        Eagl().layer_gains(tmp_path / "m.safetensors", graph, TWO)


@pytest.mark.parametrize("options", [{"steps": "best"}, {"per": "row"}, {"group_size": 0}, {"bootstrap": 1}])
def test_impossible_options(options):
    with pytest.raises(InputError):
        Eagl(**options)


def test_what_is_not_a_model(graph):
    with pytest.raises(InputError, match="not dict"):
        Eagl(steps="mse").layer_gains({}, graph, TWO)


MEMORY = """
    import sys
    from pathlib import Path
    from bitplan.core.precision import parse_choices
    from bitplan.gains.eagl import Eagl
    from bitplan.graph.names import read_graph

    def peak():
        if sys.platform == "linux":  # where getrusage would count what the parent had, too
            return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024
        import resource
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**20

    before, path = peak(), sys.argv[1]
    gains = Eagl(per=sys.argv[2]).layer_gains(path, read_graph(path), parse_choices("w2a2,w4a4"))
    assert all(row == (0.0, 0.0) for row in gains.values.values()), gains.values
    assert "torch" not in sys.modules
    print(peak() - before)
"""


@pytest.mark.parametrize(("dtype", "width"), [("BF16", 2), ("F32", 4)])
def test_memory_stays_bounded(tmp_path, dtype, width):
    """A file of 600 MB (sparse: all zero) adds far less than that to the process; torch stays unloaded."""
    rows = 300_000_000 // width // 1024
    size = rows * 1024 * width
    header = {
        f"l{i}.weight": {"dtype": dtype, "shape": [rows, 1024], "data_offsets": [i * size, (i + 1) * size]}
        for i in range(2)
    }
    text = json.dumps(header).encode()
    with (tmp_path / "big.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 2 * size)
    command = [sys.executable, "-c", textwrap.dedent(MEMORY), str(tmp_path / "big.safetensors"), "tensor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 250


def test_without_a_place_for_numbas_cache(tmp_path):
    """A read-only install and home means compiling anew: the same answer."""
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    save_file({"a.weight": torch.from_numpy(values.reshape(10, 100))}, tmp_path / "m.safetensors")
    program = textwrap.dedent("""
        import sys
        if sys.argv[2] == "readonly":
            import numba.core.caching as caching
            def refuse(*_):
                raise RuntimeError("cannot cache function: no locator available")
            caching.FunctionCache.__init__ = refuse
        from bitplan.core.precision import parse_choices
        from bitplan.gains.eagl import Eagl
        from bitplan.graph.names import read_graph
        gains = Eagl().layer_gains(sys.argv[1], read_graph(sys.argv[1]), parse_choices("w2a2,w4a4"))
        print(gains.histograms)
    """)
    said = set()
    for way in ("present", "readonly"):
        command = [sys.executable, "-W", "error", "-c", program, str(tmp_path / "m.safetensors"), way]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said.add(done.stdout)
    assert len(said) == 1
