"""Hugging Face's Trainer and save_pretrained, on quantized networks as they are."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_bert as tiny
import torch

import bitplan

HERE = Path(__file__).parent


def test_a_training_that_was_killed_goes_on_and_ends_with_the_same_weights(tmp_path):
    whole = tmp_path / "checkpoint-2"
    with (tmp_path / "said.txt").open("w+") as said:
        killed = subprocess.Popen([sys.executable, str(HERE / "tiny_bert.py"), str(tmp_path)], stdout=said, stderr=said)
        while not (whole / "trainer_state.json").exists():  # what Trainer writes last
            assert killed.poll() is None, (tmp_path / "said.txt").read_text()
            time.sleep(0.05)
        killed.kill()
        assert killed.wait() == -signal.SIGKILL
    assert not (tmp_path / f"checkpoint-{tiny.STEPS}").exists()
    resumed, unbroken = tiny.quantized(), tiny.quantized()
    tiny.trainer(resumed, tmp_path).train(resume_from_checkpoint=str(whole))
    tiny.trainer(unbroken, tmp_path / "other", save_strategy="no").train()
    for name, value in unbroken.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    assert not torch.equal(tiny.logits(resumed), tiny.logits(tiny.quantized()))  # it did learn


def test_what_save_pretrained_wrote_is_loaded_with_equal_logits(tmp_path):
    model = tiny.quantized()
    tiny.trainer(model, tmp_path / "run", max_steps=2, save_strategy="no").train()
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    floating = type(model).from_pretrained(tmp_path / "saved")
    assert not torch.equal(tiny.logits(floating), tiny.logits(model))
    again = bitplan.load_checkpoint(tmp_path / "saved", bitplan.quantize(floating, bitplan.plan_of(model)))
    assert torch.equal(tiny.logits(again), tiny.logits(model))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's own, while it compiles
@pytest.mark.filterwarnings("ignore:.*script_method")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True},
        {"bf16": True},
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},  # inductor's own part is tried in tests/quant
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_trainers_options_work(options, tmp_path):
    model, plain = tiny.quantized(), tiny.quantized()
    tiny.trainer(model, tmp_path, max_steps=2, **options).train()
    tiny.trainer(plain, tmp_path / "plain", max_steps=2, save_strategy="no").train()
    tolerance = 0.05 if "bf16" in options else 1e-3
    torch.testing.assert_close(tiny.logits(model), tiny.logits(plain), rtol=tolerance, atol=tolerance)
    fresh = tiny.quantized()
    tiny.trainer(fresh, tmp_path, max_steps=2, **options).train(resume_from_checkpoint=True)  # nothing is left to do
    assert torch.equal(tiny.logits(fresh), tiny.logits(model))
