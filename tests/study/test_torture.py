"""A short torture: kills of everything, damage and full disks; the long one is `python -m benchmarks.torture`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_a_short_torture_loses_nothing(tmp_path):
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "benchmarks.torture", "--kills", "8", "--seed", "5"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("files lost", "files wrong", "trainings done twice", "wrong tables", "sweeps that broke"):
        assert f"| **{kind}** | **0** |" in done.stdout
    assert int(done.stdout.split("**kills in all** | **")[1].split("*")[0]) >= 8


@pytest.fixture
def reader(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.torture import reader

    return reader


def test_the_independent_reader_agrees_with_ours_on_a_sound_run_and_names_what_is_not(reader, swept, tmp_path):
    run = shutil.copytree(swept, tmp_path / "run")
    found = reader.look(run, swept)
    assert not found.wrong
    assert {f"trials/{name}.json" for name in reader.table(run)} <= found.finished.keys()
    one, other = sorted((run / "trained").iterdir())[:2]
    one.write_bytes(other.read_bytes())
    start = next((run / "starts").glob("*/model.safetensors"))
    start.write_bytes(start.read_bytes()[:-1] + b"!")
    plan = next((run / "plans").iterdir())
    plan.write_text("{")
    names = {str(path.relative_to(run)) for path in (one, start, plan)}
    assert reader.look(run, swept).wrong.keys() == names
