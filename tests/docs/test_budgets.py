"""docs/budgets.md: its example of a budget in measured time is followed, on this machine."""

import re

from pages import ROOT, Reader, blocks_of

import bitplan
from bitplan.plugins.runtimes import latency as measuring

PAGE = ROOT / "docs" / "budgets.md"


def typed(blocks, verb):
    return [line for block in blocks for line in block.commands if line.startswith(f"bitplan {verb} tiny_mlp:")]


def test_a_plan_keeps_to_measured_time(tmp_path, monkeypatch):
    """As the page has it, and once more between both choices, whatever they take on this machine."""
    monkeypatch.setattr(measuring, "_ROUNDS", 2)  # enough to be followed, and too few to be believed
    monkeypatch.setattr(measuring, "_BLOCKS", 2)
    monkeypatch.setattr(measuring, "_LEAST", 1e-3)
    monkeypatch.syspath_prepend(tmp_path)
    blocks, reader = blocks_of(PAGE), Reader(tmp_path, short=True)
    (network,) = (block for block in blocks if block.file == "tiny_mlp.py")
    reader.follow(network)
    (measure,), (wide, narrow) = typed(blocks, "measure"), typed(blocks, "plan")
    assert "wrote latency.json" in reader.type(measure)
    assert "5ms of latency, whole network" in reader.type(wide)
    rows = [[taken.ns for taken in row.values()] for row in bitplan.load(tmp_path / "latency.json").rows.values()]
    least, most = sum(map(min, rows)), sum(map(max, rows))
    middle = f"{(least + most) / 2e3:.3f}us"
    assert "proven best" in reader.type(re.sub(r"--budget \S+", f"--budget {middle}", narrow))
    assert least <= sum(limit.cost + limit.fixed for limit in bitplan.load(tmp_path / "plan.json").limits) <= most
