"""The loops of three libraries; each calls `tick` before a step and goes on from what its folder holds.

`loops.py WHOSE FOLDER` runs one of them slowly, to be killed.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import accelerate
import tiny_bert as tiny

import bitplan
from bitplan.adapters.torchvision import torchvision
from bitplan.plugins.trainers.lightning import Quantization
from bitplan.plugins.trainers.transformers import BitplanConfig

torchvision()  # torchmetrics, which Lightning imports, imports it, and it may need help
import lightning  # noqa: E402

EPOCHS = 3


def newest(folder, pattern):
    """What was saved last; a name ends in its number."""
    return max(Path(folder).glob(pattern), key=lambda path: int(path.stem.split("-")[-1]), default=None)


def start_and_kill(whose, folder, until):
    """Start that loop in a process of its own, and kill it once the file is there, and whole if it is JSON."""
    said = folder.parent / "said.txt"
    with said.open("w") as words:
        command = [sys.executable, __file__, whose.__name__, str(folder)]
        with subprocess.Popen(command, stdout=words, stderr=words) as killed:
            while not is_whole(until):
                assert killed.poll() is None, said.read_text()
                time.sleep(0.02)
            killed.kill()
    assert killed.returncode == -signal.SIGKILL


def is_whole(path):
    """Whether a file is there, and all of it where that can be told."""
    try:
        return path.exists() and (path.suffix != ".json" or bool(json.loads(path.read_text())))
    except json.JSONDecodeError:
        return False


def configured(folder):
    """The tiny BERT from a float folder beside, quantized by a config."""
    beside = Path(folder).parent / f"{Path(folder).name}-float"
    tiny.network().save_pretrained(beside)
    config = BitplanConfig(bitplan.plan_of(tiny.quantized()))
    model = tiny.transformers.AutoModelForSequenceClassification.from_pretrained(beside, quantization_config=config)
    bitplan.calibrate_(model, [{"input_ids": tiny.inputs()["input_ids"]}])
    return model


def by_config(folder, tick=lambda: None):
    """Trainer's, on a model that was quantized by its configuration."""
    return by_hugging_face(folder, tick, configured(folder))


def by_hugging_face(folder, tick=lambda: None, model=None):
    """Trainer's: a checkpoint after every step, with dropout, whose random numbers it saves."""

    class Ticking(tiny.transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            tick()

    model = model or tiny.quantized()
    trainer = tiny.trainer(model, folder)
    trainer.optimizer = tiny.optimizer(model)
    trainer.add_callback(Ticking())
    whole = [state.parent.name for state in Path(folder).glob("checkpoint-*/trainer_state.json")]  # written last
    trainer.train(resume_from_checkpoint=str(Path(folder) / max(whole)) if whole else None)
    return model


class Module(lightning.LightningModule):
    """A network in Lightning's clothes."""

    def __init__(self, network=None, tick=lambda: None):
        super().__init__()
        self.network, self.tick = network or tiny.quantized(dropout=0), tick

    def training_step(self, batch, index):
        self.tick()
        loss = self.network(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return tiny.optimizer(self)


def lightnings_trainer(**options):
    """Lightning's, on the processor and silent."""
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    return lightning.Trainer(accelerator="cpu", **quiet | options)


def by_lightning(folder, tick=lambda: None):
    """Lightning's, quantized by the callback: a checkpoint after every epoch."""
    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        folder, "epoch-{epoch}", save_top_k=-1, auto_insert_metric_name=False
    )
    quantization = Quantization(bitplan.plan_of(tiny.quantized()), part="network")
    module = Module(tiny.network(dropout=0), tick)
    trainer = lightnings_trainer(max_epochs=EPOCHS, callbacks=[saving, quantization])
    trainer.fit(module, tiny.loader(), ckpt_path=newest(folder, "epoch-*.ckpt"))
    return module.network


def prepared():
    """accelerate's four: itself, model, optimizer and data."""
    accelerator = accelerate.Accelerator(cpu=True)
    model = tiny.quantized(dropout=0)
    return accelerator, *accelerator.prepare(model, tiny.optimizer(model), tiny.loader())


def train(accelerator, model, optimizer, data, tick=lambda: None):
    """One epoch of accelerate's loop."""
    for batch in data:
        tick()
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()


def by_accelerate(folder, tick=lambda: None):
    """accelerate's: its state after every epoch, under its name once it is whole."""
    accelerator, *parts = prepared()
    state, done = newest(folder, "state-*"), 0
    if state is not None:
        accelerator.load_state(state)
        done = int(state.name.split("-")[-1])
    for epoch in range(done + 1, EPOCHS + 1):
        train(accelerator, *parts, tick=tick)
        accelerator.save_state(Path(folder) / "unfinished")
        (Path(folder) / "unfinished").rename(Path(folder) / f"state-{epoch}")
    return accelerator.unwrap_model(parts[0])


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2], tick=lambda: time.sleep(0.3))
