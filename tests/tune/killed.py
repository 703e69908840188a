"""A training in a process of its own, to be killed: python killed.py FOLDER OPTIMIZER OUT, slowly, saving often."""

import sys
import time

from halves import Halves, quantized
from safetensors.torch import save_file

from bitplan.core.trials import Recipe
from bitplan.tune import loop, resume
from bitplan.tune.loop import finetune_


class Slow(Halves):
    """Enough time per step to be killed in the middle of one."""

    def forward(self, model, batch):
        time.sleep(0.005)
        return super().forward(model, batch)


def recipe(optimizer):
    """Ten epochs of four steps of two pieces; with LAMB, sums over the memory of a layer matter; or in two stages."""
    if optimizer == "in two stages":
        second = Recipe(steps=20, batch_size=8, optimizer="adamw", lr=0.002, schedule="linear")
        return Recipe(epochs=5, batch_size=16, lr=0.02, then=second)
    options = {"optimizer": optimizer, "lr": 0.02, "weight_decay": 0.01, "grad_clip": 1.0}
    return Recipe(epochs=10, batch_size=16, accumulate=2, **options)


def tell(done, total, text):
    """Say that training is under way."""
    sys.stdout.write(f"{done}\n")
    sys.stdout.flush()


def main():
    folder, optimizer, out = sys.argv[1:]
    resume.SAVE_SECONDS, resume.SAVE_SHARE, loop._PAUSE = 0.0, 1.0, 0.0
    model = quantized(dropout=0.3)
    finetune_(model, Slow(), recipe(optimizer), folder=folder, progress=tell)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, out)


if __name__ == "__main__":
    main()
