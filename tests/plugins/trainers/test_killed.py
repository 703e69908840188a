"""A training that is killed goes on elsewhere and ends as if nothing had been; Trainer's is in test_pretrained.py."""

import loops
import pytest
import tiny_bert as tiny
import torch


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # which Lightning uses
@pytest.mark.filterwarnings("ignore:.*Checkpoint directory")  # which is meant to hold what was saved
@pytest.mark.parametrize(
    ("whose", "first"),
    [
        (loops.by_lightning, "epoch-0.ckpt"),
        (loops.by_accelerate, "state-1"),
    ],
)
def test_it_ends_with_the_weights_of_an_unbroken_one(whose, first, tmp_path):
    loops.start_and_kill(whose, tmp_path / "run", until=tmp_path / "run" / first)
    steps, more = [], []
    unbroken = whose(tmp_path / "other", tick=lambda: steps.append(1))
    resumed = whose(tmp_path / "run", tick=lambda: more.append(1))
    assert 0 < len(more) < len(steps), "it went on where it was"
    for name, value in unbroken.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    assert not torch.equal(tiny.logits(resumed), tiny.logits(tiny.quantized())), "it learned"
