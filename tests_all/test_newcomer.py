"""A newcomer's first hour: the wheel in a fresh environment and an empty folder, the README line by line.

`make test-all` runs it; it installs torch anew, and takes minutes.
"""

import re
import subprocess
import sys

import pytest

from newcomer import ROOT, Newcomer

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.partition("  #")[0].strip()
    for kind, block in BLOCKS
    for line in block.splitlines()
    if not kind and line.startswith("bitplan ")
]
QUICK_START, WHOLE_FLOW = (block for kind, block in BLOCKS if kind == "python")
NETWORKS = {
    "small CNN": """
model = nn.Sequential(
    nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Conv2d(64, 128, 3), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
)
example = torch.randn(1, 3, 32, 32)
""",
    "MLP": """
inner = [part for _ in range(3) for part in (nn.Linear(64, 64), nn.ReLU())]
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), *inner, nn.Linear(64, 2))
example = torch.randn(1, 20)
""",
    "transformer": """
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
example = torch.randn(1, 16, 64)
""",
    "timm's, by name": """
import bitplan  # which also imports torchvision where its binary does not fit a CPU's torch
model, example = bitplan.load_model("timm/resnet10t")[0], torch.randn(1, 3, 64, 64)
""",
    "her own factory's": """
from package.module import factory
model, example = factory()
""",
}
MODULE = """
import torch
from torch import nn

def factory():
    inner = [part for _ in range(3) for part in (nn.Linear(96, 96), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), *inner, nn.Linear(96, 4)), torch.randn(1, 64)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run(build, check=True)
    (made,) = folder.glob("bitplan-*.whl")
    return made


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """Her environment with nothing but the wheel, and files of hers."""
    her = Newcomer(tmp_path_factory.mktemp("newcomer"))
    her.install(str(wheel))
    (her.folder / "package").mkdir()
    (her.folder / "package" / "module.py").write_text(MODULE)
    return her


@pytest.fixture(scope="module")
def newcomer(bare, wheel):
    """The same with the extras that the README installs."""
    extras = re.search(r"pip install '(bitplan\[[\w,]+\])'", README)[1]
    bare.install(f"{extras} @ {wheel.as_uri()}")
    code = "import torch; from safetensors.torch import save_file as save\n"
    code += "save({f'layers.{n}.weight': torch.randn(256, 256) for n in range(4)}, 'model.safetensors')"
    assert bare.run("python", "-c", code).returncode == 0
    return bare


def test_the_wheel_alone_plans_for_her_network_and_says_what_is_missing_for_others(bare):
    done = bare.run("bitplan", "plan", "package.module:factory", "--budget", "70%")
    assert done.returncode == 0, done.stderr
    assert "gains: auto takes eagl" in done.stderr
    for line, library in (
        ("bitplan plan resnet50 --budget 70%", "torchvision"),
        ("bitplan steps trace timm/resnet18", "timm"),
    ):
        done = bare.type(line)
        assert done.returncode == 2
        name = line.split()[2]
        wanted = f"the model {name} needs {library}, which is not installed: pip install 'bitplan[vision]'"
        assert done.stderr == f"error: {wanted}\n"


@pytest.mark.parametrize("network", NETWORKS.values(), ids=list(NETWORKS))
def test_the_quick_start_works_for_any_network(newcomer, network):
    after = "mixed.train()(torch.cat([example, example]))\nprint(plan)\nprint(len(set(plan.precisions.values())))"
    done = newcomer.run("python", "-c", f"import torch\nfrom torch import nn\n{network}\n{QUICK_START}\n{after}")
    assert done.returncode == 0, done.stderr
    assert "gains: auto takes eagl" in done.stdout
    assert int(done.stdout.splitlines()[-1]) >= 2, "a mixed plan"


def test_the_whole_flow_in_python(newcomer):
    setup = f"import bitplan, torch\nfrom torch import nn\n{NETWORKS['small CNN']}"
    setup += "model.eval()\nbatches = [torch.randn(8, 3, 32, 32)]\n"
    done = newcomer.run("python", "-c", setup + WHOLE_FLOW)
    assert done.returncode == 0, done.stderr
    assert (newcomer.folder / "mixed.onnx").stat().st_size > 0


def test_there_are_commands_to_run():
    assert len(COMMANDS) >= 12
    assert all(line.split()[0] == "bitplan" for line in COMMANDS)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_readme(newcomer, line):
    """In its order: later ones read what earlier ones wrote."""
    done = newcomer.type(line)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
