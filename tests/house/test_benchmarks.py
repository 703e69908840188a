"""The rows of benchmarks, and the page that is made of them."""

import importlib
import shutil
import subprocess
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


def test_a_whole_run_keeps_the_peers_and_nothing_else_of_the_page_before(tmp_path, monkeypatch):
    main, rows = bench()
    page = tmp_path / "page.md"
    table = rows.table([rows.Row("a step", 1.2, 2.3, "modelopt", "× FP32", 1.0)])
    main.put(page, {"peers": f"## peers\n\n{table}\n", "select": "## select\n\nof before\n"})
    monkeypatch.setattr(main, "section", lambda name: f"## {name}\n\nof now\n")
    monkeypatch.setattr(main, "ALL", ("eagl",))
    main.main(["--write", str(page)])
    text = page.read_text()
    assert "of before" not in text
    assert text.index("## eagl\n\nof now") < text.index("## peers")
    assert "1 lines, 1 of them with a target; 1 meet it." in text


def test_a_process_holds_as_much_as_in_floats():
    """Resident memory, not what hooks count: a closure may keep tensors that no hook sees."""
    qat_step = importlib.import_module("benchmarks.qat_step")
    figures = qat_step.memory("ResNet-18 w4a4, 64 images of 32 × 32")
    for field, most in (("held", 1.1), ("peak", 1.2)):
        assert 20 < figures["bitplan"][field] <= most * figures["fp32"][field]


def test_an_environment_that_would_bring_cuda_is_refused():
    peers = importlib.import_module("benchmarks.peers")
    install = [{"metadata": {"name": name}} for name in ("torch", "nvidia-cublas-cu12", "triton", "nvidia-modelopt")]
    with pytest.raises(peers.Absent, match="nvidia-cublas-cu12 and 1 more"):
        peers._check({"install": install})
    peers._check({"install": [install[0], install[3]]})


def test_what_fails_is_said_and_not_raised(monkeypatch):
    main, _ = bench()
    broken = ROOT / "benchmarks" / "no_such_benchmark.py"
    assert not broken.exists()
    assert "did not run here: ModuleNotFoundError" in main.section("no_such_benchmark")
    assert "benchmarks.no_such_benchmark" not in sys.modules


def test_the_page_begins_with_what_is_met_and_what_is_not(tmp_path, monkeypatch, capsys):
    main, rows = bench()
    row = rows.Row
    made = {
        "select": [row("one budget", 2.0, 4.0, "HiGHS", "ms", 1.2), row("two budgets", 9.0, 3.0, "HiGHS", "ms", 1.2)],
        "gains": [row("a network | in parts", 1.0), row("a slow one", 7.0, target=3.1)],
    }  # fmt: skip
    monkeypatch.setattr(main, "PAGE", tmp_path / "not this one.md")
    monkeypatch.setattr(main, "ALL", ("select", "gains", "eagl"))
    failed = "did not run here: ImportError: no peer"

    def section(name):
        return f"## {name}\n\nWhat it is.\n\n{rows.table(made[name]) if name in made else failed}\n"

    monkeypatch.setattr(main, "section", section)
    page = tmp_path / "page.md"
    main.main(["--write", str(page)])
    text = page.read_text()
    head = text[: text.index("## select")]
    assert "4 lines, 3 of them with a target; 1 meet it." in head
    assert "Did not run: eagl." in head
    assert "- select: two budgets: 3.00 of 3.00 ms (HiGHS), target ≤ 1.20" in head
    assert "- gains: a slow one: 7.00 s, target ≤ 3.10 s" in head
    assert "one budget" not in head
    assert not main.PAGE.exists()
    made["select"][1] = row("two budgets", 1.0, 3.0, "HiGHS", "ms", 1.2)
    main.main(["--write", str(page), "select"])
    again = page.read_text()
    assert "4 lines, 3 of them with a target; 2 meet it." in again
    assert again.count("# Performance") == again.count("## gains") == 1
    assert "two budgets" not in again[: again.index("## select")]
    assert "2 meet it" in capsys.readouterr().out


def test_the_command_measures_in_processes_of_their_own_and_writes_the_page(tmp_path):
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name in ("__init__.py", "__main__.py", "rows.py"):
        shutil.copy(ROOT / "benchmarks" / name, folder)
    (folder / "select.py").write_text(
        '"""Made up."""\nfrom benchmarks.rows import Row\n'
        'def rows():\n    return [Row("a line", 2.0, 4.0, "a peer", target=0.6)]\n'
    )
    (folder / "eagl.py").write_text('"""Broken."""\ndef rows():\n    raise ValueError("no such peer")\n')
    command = [sys.executable, "-m", "benchmarks", "--write", "page.md", "select", "eagl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    page = (tmp_path / "page.md").read_text()
    assert "Made up. `python -m benchmarks select`" in page
    assert "| a line | 2.00 s | 4.00 s (a peer) | 0.50        | ≤ 0.600 | yes |" in page
    assert "did not run here: ValueError: no such peer" in page
    assert "1 lines, 1 of them with a target; 1 meet it." in page
    assert "Did not run: eagl." in done.stdout
