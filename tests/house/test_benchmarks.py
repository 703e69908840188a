"""The rows that benchmarks offer, and the page that is made of them."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def beside_benchmarks(monkeypatch):
    """`benchmarks` is no part of the package."""
    monkeypatch.syspath_prepend(str(ROOT))


def bench():
    return importlib.import_module("benchmarks.__main__"), importlib.import_module("benchmarks.rows")


def test_a_row_says_its_ratio_and_whether_its_target_is_met():
    row = bench()[1].Row
    against = row("one", 3.0, 2.0, "a peer", "ms", target=1.5)
    assert (against.ratio, against.met) == (1.5, True)
    assert against.cells() == ("one", "3.00 ms", "2.00 ms (a peer)", "1.50", "≤ 1.50", "yes")
    assert row("one", 3.0, 2.0, "a peer", target=1.4).met is False
    assert row("median of ratios", 3.0, 2.0, "a peer", target=1.4, times=1.3).met is True
    alone = row("two", 6.0, target=5)
    assert (alone.ratio, alone.met) == (None, False)
    assert alone.cells()[2:] == ("–", "–", "≤ 5.00 s", "no")
    assert row("three", 1.0, against="torchao does not run here").cells()[2:] == (
        "torchao does not run here",
        "–",
        "–",
        "–",
    )


def test_a_section_that_is_measured_again_leaves_the_others(tmp_path, monkeypatch, capsys):
    main, rows = bench()
    told = {"eagl": 1.0, "startup": 2.0}
    monkeypatch.setattr(main, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(main, "section", lambda name: f"## {name}\n\n{rows.table([rows.Row(name, told[name])])}\n")
    monkeypatch.setattr(main, "ALL", ("startup", "eagl"))
    main.main([])
    first = main.PAGE.read_text()
    assert first.index("## startup") < first.index("## eagl")
    told["eagl"] = 7.0
    main.main(["eagl"])
    assert main.PAGE.read_text() == first.replace("1.00 s", "7.00 s")
    assert "7.00 s" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no benchmark eagle; there are startup, eagl"):
        main.main(["eagle"])


def test_what_fails_is_said_and_not_raised(monkeypatch):
    main, _ = bench()
    broken = ROOT / "benchmarks" / "no_such_benchmark.py"
    assert not broken.exists()
    assert "did not run here: ModuleNotFoundError" in main.section("no_such_benchmark")
    assert "benchmarks.no_such_benchmark" not in sys.modules
