"""Networks are timed as a whole; the times of layers add up to them, and become a cost like any other."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import bitplan
from bitplan.cli.app import app
from bitplan.core.errors import FileError, InputError
from bitplan.core.latencies import Latency, Rounds
from bitplan.plugins.runtimes import latency as measuring
from bitplan.plugins.runtimes.latency import measure

ALL = bitplan.Rules(first=None, last=None, narrow=0)
CHOICES = "w4a4,w8a8,w16a16"


class Block(nn.Module):
    """Two convolutions around an addition, then attention's two products, then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.query = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.stem(x)).relu()
        y = y + self.conv(y)
        tokens = y.flatten(2).transpose(1, 2)
        scores = torch.matmul(self.query(tokens), tokens.transpose(1, 2)).softmax(-1)
        return self.head(torch.matmul(scores, tokens).mean(1))


@pytest.fixture
def quick(monkeypatch):
    """Rounds that are too short to say how long anything takes, and long enough to say what."""
    monkeypatch.setattr(measuring, "_BLOCKS", 2)
    monkeypatch.setattr(measuring, "_ROUNDS", 2)
    monkeypatch.setattr(measuring, "_LEAST", 1e-4)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    model, example = Block().eval(), torch.randn(1, 3, 8, 8)
    return model, example, bitplan.trace(model, example, rules=ALL, name="block")


@pytest.mark.parametrize("on", ["onnxruntime", "openvino", "torch"])
def test_times_of_layers_add_up_to_those_of_whole_networks(on, network, quick):
    model, example, graph = network
    found = measure(model, example, on, choices=CHOICES, graph=graph)
    assert list(found.rows) == [layer.name for layer in graph.layers]
    assert set(found.whole) == set(found.about.choices)
    assert found.mixed is not None
    lowered = {layer.name for group in graph.selectable[::2] for layer in group.layers}
    mixed = [row[0 if name in lowered else -1] for name, row in ((n, list(r.values())) for n, r in found.rows.items())]
    if found.mixed.among_others not in (0.5, 1.0):  # at the least that raising a layer adds, or it adds nothing at all
        assert sum(one.ns for one in mixed) == pytest.approx(found.mixed.taken.ns, rel=1e-3)
    assert found.mixed.among_others >= 0.5
    products = {"matmul", "matmul_1"}
    assert set(found.beside) == (products if on == "torch" else set())
    timed = [layer for layer in found.rows if layer not in found.beside]
    assert all(taken.ns > 0 for layer in timed for taken in found.rows[layer].values())
    assert Latency.from_json(found.to_json()) == found


def test_a_product_that_the_runtime_joins_with_its_activation_keeps_its_time(quick):
    """ONNX Runtime calls such a node otherwise."""
    model = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 4)).eval()
    example = torch.randn(1, 64)
    graph = bitplan.trace(model, example, rules=bitplan.Rules(narrow=0), name="joined")
    found = measure(model, example, "onnxruntime", choices="w8a8,w16a16", graph=graph)
    assert all(taken.ns > 0 for row in found.rows.values() for taken in row.values()), found.rows


def test_weights_alone_in_blocks_of_few_bits(network, quick):
    model, example, graph = network
    found = measure(model, example, "matmulnbits", choices="w2a16,w8a16", graph=graph, options={"block_size": 16})
    assert found.about.options == {"block_size": 16}
    assert all(found.rows[layer][choice].ns > 0 for layer in ("query", "head") for choice in found.about.choices)


def test_a_plan_keeps_to_milliseconds_by_it(network, quick, tmp_path):
    model, example, graph = network
    found = measure(model, example, "openvino", choices="w8a8,w16a16", graph=graph)
    path = bitplan.save(found, tmp_path / "time.json")
    costs = bitplan.price(str(path), graph, "w8a8,w16a16")
    assert costs.unit == "ns"
    assert costs.name == "time"
    aside = sum(costs.fixed.values())
    low, high = (sum(row[place] for row in costs.rows.values()) + aside for place in (0, 1))
    least = sum(min(row) for row in costs.rows.values()) + aside  # what is measured need not fall with bits
    budget = f"{(least + max(low, high)) / 2e6:.6f}ms"
    gains = bitplan.estimate("uniform", None, graph, choices="w8a8,w16a16")
    plan = bitplan.select(graph, gains, [costs], budget=[budget])
    spent = sum(found.rows[layer][precision].ns for layer, precision in plan.precisions.items())
    assert spent <= (least + max(low, high)) / 2 + 1


def with_mixed(rounds, seconds):
    """The same rounds, and those of a mixed network that took so long."""
    layers = rounds.layers | {"mixed": {"0": (seconds,), "1": (seconds,)}}
    return Rounds(whole=rounds.whole | {"mixed": (seconds, seconds)}, layers=layers)


def test_choices_that_take_the_same_time_cost_the_same():
    from bitplan.core.latencies import Measuring
    from bitplan.plugins.runtimes.latency import latency_of

    model, example = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.zeros(1, 4)
    graph = bitplan.trace(model, example, rules=ALL)
    about = Measuring(
        model="two", graph=graph.id, on="x", runtime="x 1", machine="this", threads=1, batch=1, integer=False,
        choices=("w2a2", "w4a4", "w16a16"),
    )  # fmt: skip
    times = {"w2a2": 0.0100, "w4a4": 0.0101, "w16a16": 0.03}
    rounds = Rounds(
        whole={name: (one, one) for name, one in times.items()},
        layers={name: {"0": (one / 4, one / 2), "1": (one / 2, one)} for name, one in times.items()},
    )
    found = latency_of(about, graph, [rounds], {})
    together = latency_of(about, graph, [with_mixed(rounds, 0.026)], {"0": about.choices[0], "1": about.choices[-1]})
    expected = 10.05e6 / 3 + 20e6
    assert together.mixed.expected == pytest.approx(expected, abs=2)
    added = 20e6 - 10.05e6 * 2 / 3  # by raising the second layer
    assert together.mixed.among_others == pytest.approx(1 + (26e6 - expected) / added, rel=1e-6)
    assert together.rows["0"][about.choices[0]].ns + together.rows["1"][about.choices[-1]].ns == pytest.approx(
        26e6, abs=2
    )
    quicker = latency_of(about, graph, [with_mixed(rounds, 0.022)], {"0": about.choices[0], "1": about.choices[-1]})
    assert quicker.rows["0"][about.choices[0]].ns + quicker.rows["1"][about.choices[-1]].ns == pytest.approx(
        22e6, abs=2
    )
    free = latency_of(about, graph, [with_mixed(rounds, 0.005)], {"0": about.choices[0], "1": about.choices[-1]})
    assert free.mixed.among_others == 0.5  # raising a layer is never taken to be free
    assert [[str(choice) for choice in group] for group in found.alike] == [["w2a2", "w4a4"]]
    low, same, high = found.rows["0"].values()
    assert low == same
    assert (low.ns, high.ns) == (round(10.05e6 / 3), 10_000_000)  # a third of the whole: the best rounds count
    assert found.whole[about.choices[0]].share == pytest.approx(0.75)


def test_a_killed_measurement_goes_on_where_it_was(network, quick, tmp_path):
    model, example, graph = network
    folder = tmp_path / "kept"
    write = "with atomic_file(sys.argv[1]) as half: half.touch(); os.kill(os.getpid(), 9)"
    imports = "import os, sys; from bitplan.store.files import atomic_file"
    subprocess.run([sys.executable, "-c", f"{imports}\n{write}", folder / "measuring.json"], check=False)
    assert len(list(folder.iterdir())) == 1, "half of a file"

    def die(done, total, what):
        if what == "timing" and (folder / "rounds-0.json").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(model, example, "openvino", choices=CHOICES, graph=graph, folder=folder, progress=die)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(before) >= {"measuring.json", "w4a4.onnx", "w16a16.onnx", "mixed.onnx", "rounds-0.json"}
    assert "rounds-1.json" not in before
    found = measure(model, example, "openvino", choices=CHOICES, graph=graph, folder=folder)
    assert {name: (folder / name).read_bytes() for name in before} == before
    kept = json.loads(before["rounds-0.json"])
    assert found.rounds == 2 * len(kept["whole"]["w4a4"])
    with pytest.raises(FileError, match="another threads"):
        measure(model, example, "openvino", choices=CHOICES, graph=graph, folder=folder, threads=2)
    (folder / "rounds-0.json").write_text(before["rounds-0.json"].decode().replace("0.0", "0.1", 1))
    with pytest.raises(FileError, match="rounds"):
        measure(model, example, "openvino", choices=CHOICES, graph=graph, folder=folder)


def test_what_does_not_fit_is_refused_in_one_line(network, quick, tmp_path):
    model, example, graph = network
    with pytest.raises(InputError, match="unknown runtime 'onnxruntim'.*onnxruntime"):
        measure(model, example, "onnxruntim", graph=graph)
    with pytest.raises(InputError, match="block_size: options are those of a file's format"):
        measure(model, example, "torch", graph=graph, options={"block_size": 3})
    found = measure(model, example, "torch", choices="w8a8,w16a16", graph=graph)
    path = str(bitplan.save(found, tmp_path / "time.json"))
    with pytest.raises(FileError, match="no time of 'stem' at w4a4, only at w8a8, w16a16"):
        bitplan.price(path, graph, "w4a4,w8a8")
    larger = bitplan.trace(model, torch.zeros(1, 3, 16, 16), rules=ALL)
    with pytest.raises(FileError, match="MACs in 'stem'.*same --input"):
        bitplan.price(path, larger, "w8a8,w16a16")
    with pytest.raises(FileError, match="no times of layer"):
        bitplan.price(path, bitplan.trace(nn.Sequential(nn.Linear(3, 3)), torch.zeros(1, 3), rules=ALL), "w8a8,w16a16")
    plan = bitplan.save(bitplan.Plan.uniform(graph, "w8a8"), tmp_path / "plan.json")
    with pytest.raises(FileError, match="this is a plan, where a latency is needed"):
        bitplan.price(str(plan), graph, "w8a8,w16a16")


def test_the_command_writes_what_plan_takes(quick, tmp_path):
    runner, path = CliRunner(), tmp_path / "time.json"
    typed = ["digits_resnet", "--bits", "w8a8,w16a16", "--rules", "narrow=0"]
    done = runner.invoke(app, ["measure", *typed, "--on", "openvino", "-o", str(path)])
    assert done.exit_code == 0, done.output
    assert "to go" in done.output
    assert "its layers add up to" in done.output
    assert not (tmp_path / "time.json.measuring").exists()
    found = bitplan.load(path, Latency)
    budget = f"{found.whole[found.about.choices[-1]].taken.ns * 1000 / 1e6:.4f}ms"
    told = ["--gain", "uniform", "--cost", str(path), "--budget", budget, "--budget", "memory=60%"]
    planned = runner.invoke(app, ["plan", *typed, *told])
    assert planned.exit_code == 0, planned.output
    assert "binding: memory; there is room in time" in planned.output


def test_layers_of_a_small_network_are_looked_at_a_few_times_only(quick):
    class Instant:
        asked = 0

        def run(self) -> None: ...

        def profile(self, runs: int) -> list[dict[str, float]]:
            self.asked = runs
            return [{"conv": 1e-6}] * runs

    small = Instant()
    found = measuring._rounds({"w4a4": small}, threads=1)
    assert small.asked == len(found.layers["w4a4"]["conv"]) == measuring._ROUNDS * measuring._LOOKS
