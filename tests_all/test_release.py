"""A release as a stranger gets it: wheel and sdist in dist/, tried in a fresh environment away from the repository.

`make release` runs it. `python -m build` makes the sdist first, and the wheel of that.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import bitplan
from newcomer import ROOT, Newcomer

SHORT = """
import re
from importlib.resources import files

text = files("bitplan.study").joinpath("demo.toml").read_text()
text = re.sub(r"^steps = \\d+", "steps = 4", text, flags=re.MULTILINE).replace("seeds = [0, 1, 2, 3, 4]", "seeds = [0]")
text = text.replace('budgets = ["85%", "70%", "60%"]\\nseeds', 'budgets = ["70%"]\\nseeds')
open("short.toml", "w").write(text)
"""
MODEL = """
import torch
from torch import nn

def factory():
    sizes = ((1, 32), (32, 64), (64, 64), (64, 128))
    body = [part for size in sizes for part in (nn.Conv2d(*size, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)), torch.rand(1, 1, 8, 8)
"""


@pytest.fixture(scope="module")
def dist():
    """Both files, made anew."""
    folder = ROOT / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    done = subprocess.run([sys.executable, "-m", "build", str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch" not in re.findall(r"Installing packages in isolated environment.*?\n(.*?)\n", done.stdout)
    return folder


@pytest.fixture(scope="module")
def stranger(dist, tmp_path_factory):
    her = Newcomer(tmp_path_factory.mktemp("stranger"))
    (wheel,) = dist.glob("*.whl")
    her.install(f"bitplan[export] @ {wheel.as_uri()}")
    (her.folder / "mine.py").write_text(MODEL)
    return her


def test_both_files_are_there_and_have_what_they_should(dist):
    names = sorted(path.name for path in dist.iterdir())
    assert names == [f"bitplan-{bitplan.__version__}-py3-none-any.whl", f"bitplan-{bitplan.__version__}.tar.gz"]
    with zipfile.ZipFile(dist / names[0]) as wheel:
        inside = set(wheel.namelist())
        metadata = wheel.read(f"bitplan-{bitplan.__version__}.dist-info/METADATA").decode()
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {name.removeprefix("src/") for name in tracked.split()} <= inside
    assert "Requires-Python: >=3.11" in metadata
    with tarfile.open(dist / names[1]) as sdist:
        parts = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    assert {"mkdocs.yml", "CITATION.cff", "docs/index.md", "studies/README.md", "src/bitplan/__init__.py"} <= parts
    assert not {name for name in parts if name.startswith((".venv", "build", "runs", "tests"))}


def test_it_is_the_installed_one(stranger):
    done = stranger.run("python", "-c", "import bitplan; print(bitplan.__version__, bitplan.__file__)")
    version, path = done.stdout.split()
    assert version == bitplan.__version__
    assert str(stranger.home) in path


def test_a_short_demonstration(stranger):
    assert stranger.run("python", "-c", SHORT).returncode == 0
    for line in ("bitplan sweep short.toml --run run", "bitplan compare run", "bitplan report run -o report.html"):
        done = stranger.type(line)
        assert done.returncode == 0, done.stderr
    assert (stranger.folder / "report.html").stat().st_size > 10_000
    assert "70%" in stranger.type("bitplan compare run").stdout


def test_a_plan_and_a_file_of_her_own_network(stranger):
    for line in (
        "bitplan plan mine:factory --budget 70% -o plan.json",
        "bitplan quantize mine:factory --plan plan.json --task digits -o mixed",
        "bitplan export mixed --format onnx -o mixed.onnx --model mine:factory",
        "bitplan verify mixed.onnx --against mixed --model mine:factory --task digits",
    ):
        done = stranger.type(line)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
