"""Hugging Face's Trainer and save_pretrained, on quantized networks as they are."""

import os

import pytest
import tiny_bert as tiny
import torch
from accelerate.state import AcceleratorState

import bitplan


@pytest.fixture(autouse=True)
def _own_settings_of_accelerate():
    """A Trainer that compiles says so in the environment, and every Accelerator after it in this process would too."""
    before = set(os.environ)
    yield
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        if name not in before:
            del os.environ[name]
    AcceleratorState._reset_state(reset_partial_state=True)


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
