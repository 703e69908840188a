"""A training that is killed goes on in another process, whosever loop it is, and ends as if nothing had been."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import loops
import pytest
import tiny_bert as tiny
import torch

SCRIPT = Path(__file__).parent / "loops.py"


def start_and_kill(whose, folder, until):
    """Start that loop in a process of its own, and kill it once the file is there."""
    said = folder.parent / "said.txt"
    with said.open("w") as words:
        command = [sys.executable, str(SCRIPT), whose.__name__, str(folder)]
        with subprocess.Popen(command, stdout=words, stderr=words) as killed:
            while not until.exists():
                assert killed.poll() is None, said.read_text()
                time.sleep(0.02)
            killed.kill()
    assert killed.returncode == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # which Lightning uses
@pytest.mark.filterwarnings("ignore:.*Checkpoint directory")  # which is meant to hold what was saved
@pytest.mark.parametrize(
    ("whose", "first"),
    [
        (loops.by_hugging_face, "checkpoint-2/trainer_state.json"),  # what Trainer writes last
        (loops.by_lightning, "epoch-0.ckpt"),
        (loops.by_accelerate, "state-1"),
    ],
)
def test_it_ends_with_the_weights_of_an_unbroken_one(whose, first, tmp_path):
    start_and_kill(whose, tmp_path / "run", until=tmp_path / "run" / first)
    steps, more = [], []
    unbroken = whose(tmp_path / "other", tick=lambda: steps.append(1))
    resumed = whose(tmp_path / "run", tick=lambda: more.append(1))
    assert 0 < len(more) < len(steps), "it went on where it was"
    for name, value in unbroken.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    assert not torch.equal(tiny.logits(resumed), tiny.logits(tiny.quantized())), "it learned"
