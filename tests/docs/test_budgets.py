"""docs/budgets.md: its example of a budget in measured time is followed, on this machine."""

import re

from pages import ROOT, Reader, blocks_of

import bitplan

PAGE = ROOT / "docs" / "budgets.md"


def commands_of(blocks, verb):
    return [line for block in blocks for line in block.commands if line.startswith(f"bitplan {verb} tiny_mlp:")]


def test_a_plan_keeps_to_measured_time(tmp_path, monkeypatch):
    """The budget is the one that `measure` proposes here, between both choices, as machines differ."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.syspath_prepend(tmp_path)
    blocks, reader = blocks_of(PAGE), Reader(tmp_path, short=True)
    (network,) = (block for block in blocks if block.file == "tiny_mlp.py")
    reader.follow(network)
    (measure,), (plan,) = commands_of(blocks, "measure"), commands_of(blocks, "plan")
    said = reader.type(measure)
    budget = re.search(r"Next: bitplan plan .* --budget (\S+ms)", said)[1]
    planned = reader.type(re.sub(r"--budget \S+", f"--budget {budget}", plan))
    assert f"{budget} of latency" in planned
    assert "proven best" in planned
    limit = bitplan.load(tmp_path / "plan.json").limits[0]
    assert 0 < limit.cost <= limit.capacity
