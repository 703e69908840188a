"""Two processes train as one does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from halves import Halves, network, quantized
from safetensors.torch import load_file
from shared import RECIPE

from bitplan.tune.log import read_log
from bitplan.tune.loop import finetune_


@pytest.mark.parametrize("build", [network, quantized])
def test_two_processes_share_every_batch(build, tmp_path):
    alone = build(norm=False)
    log = finetune_(alone, Halves(), RECIPE)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    out = tmp_path / "out.safetensors"
    script = [str(Path(__file__).parent / "shared.py"), build.__name__, str(tmp_path / "run"), str(out)]
    paths = {"PYTHONPATH": str(Path(__file__).parents[1])}  # where nets.py is
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"} | paths
    subprocess.run([*launch, *script], env=environment, check=True, capture_output=True, timeout=120)
    together = load_file(out)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(together[name], value, rtol=1e-5, atol=1e-6)
    lines = read_log(tmp_path / "run/log.jsonl", up_to=99)
    assert [line.step for line in lines] == [line.step for line in log.lines]
    torch.testing.assert_close([line.loss for line in lines], [line.loss for line in log.lines], rtol=1e-5, atol=1e-6)
