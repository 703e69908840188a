"""Lightning, on quantized networks as they are."""

import pytest
import tiny_bert as tiny
import torch
from loops import Module, lightnings_trainer

import bitplan


def fit(module, epochs, precision, checkpoint=None):
    trainer = lightnings_trainer(max_epochs=epochs, precision=precision, enable_checkpointing=False)
    trainer.fit(module, tiny.loader(), ckpt_path=checkpoint)
    return trainer


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # which Lightning uses
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_checkpoint_goes_on_where_it_was(precision, tmp_path):
    unbroken, broken, resumed = Module(), Module(), Module()
    fit(unbroken, 2, precision)
    fit(broken, 1, precision).save_checkpoint(tmp_path / "half.ckpt")
    fit(resumed, 2, precision, checkpoint=tmp_path / "half.ckpt")
    for name, value in unbroken.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    loaded = bitplan.load_checkpoint(tmp_path / "half.ckpt", broken)
    assert torch.equal(tiny.logits(loaded.network), tiny.logits(broken.network))
    assert not torch.equal(tiny.logits(resumed.network), tiny.logits(broken.network))
