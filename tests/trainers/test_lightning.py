"""Lightning, on quantized networks as they are."""

import pytest
import tiny_bert as tiny
import torch

import bitplan
from bitplan.adapters.torchvision import torchvision

torchvision()  # torchmetrics, which Lightning imports, imports it, and it may need help
import lightning  # noqa: E402


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = tiny.quantized(dropout=0)

    def training_step(self, batch, index):
        return self.network(**batch).loss

    def configure_optimizers(self):
        return tiny.optimizer(self.network)


def fit(module, epochs, precision, checkpoint=None):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", precision=precision, **quiet)
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
