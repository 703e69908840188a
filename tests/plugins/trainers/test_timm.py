"""docs/trainers/timm.md as it stands: a start, the runner, a training by timm's functions, resumed, and back."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import bitplan
from bitplan.adapters.timm import timm

timm()  # it imports torchvision, which may need help
import timm_script  # noqa: E402

HERE = Path(__file__).parent
PAGE = (HERE.parents[2] / "docs" / "trainers" / "timm.md").read_text()


@pytest.fixture
def data(tmp_path):
    """Dark images and bright ones."""
    random = np.random.default_rng(0)
    for split in ("train", "validation"):
        for label, light in (("dark", 60), ("bright", 190)):
            (tmp_path / "data" / split / label).mkdir(parents=True)
            for index in range(8):
                pixels = (light + random.integers(-50, 50, (timm_script.SIDE, timm_script.SIDE, 3))).astype("uint8")
                Image.fromarray(pixels).save(tmp_path / "data" / split / label / f"{index}.png")
    return tmp_path / "data"


def run(arguments, folder):
    helped = "import runpy, sys; from bitplan.adapters.timm import timm; timm(); del sys.argv[0]; "
    code = helped + "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_page_from_a_start_to_a_folder_of_bitplans(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start, runner, back = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names = {"classes": 2, "batches": [torch.randn(4, 3, timm_script.SIDE, timm_script.SIDE)]}
    exec(compile(start, "timm.md", "exec"), names)
    (tmp_path / "quantized.py").write_text(runner)
    (tmp_path / "train.py").write_text((HERE / "timm_script.py").read_text())
    commands = re.search(r"^```\n(python .*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1].replace("\\\n", "")
    first, resumed = (line.partition("#")[0] for line in commands.splitlines())
    _, *arguments = shlex.split(first.replace("DATA", str(data)))
    unbroken = [argument.replace("w4a4", "unbroken") for argument in arguments]
    run(unbroken, tmp_path)
    run([*arguments, "--epochs", "1"], tmp_path)
    run([*arguments, *shlex.split(resumed.partition("…")[2])], tmp_path)
    exec(compile(back, "timm.md", "exec"), names)
    trained = bitplan.load_checkpoint("trained", names["model"])
    assert bitplan.plan_of(trained) == bitplan.plan_of(names["start"])
    moved = [name for name, value in names["start"].state_dict().items() if not value.equal(trained.state_dict()[name])]
    assert any(name.endswith("weight_quantizer.step") for name in moved), "it learned steps"
    names["timm"].models.load_checkpoint(trained, "output/unbroken/last.pth.tar", use_ema=True)
    trained.eval()
    bright, dark = (torch.full((1, 3, timm_script.SIDE, timm_script.SIDE), value) for value in (1.0, -1.0))
    assert torch.isfinite(trained(bright) - trained(dark)).all(), "averages of steps are steps"
