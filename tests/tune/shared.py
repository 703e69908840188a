"""A training shared by several processes: python -m torch.distributed.run … shared.py NETWORK FOLDER OUT."""

import os
import sys

import halves
from safetensors.torch import save_file

from bitplan.core.trials import Recipe
from bitplan.tune.loop import finetune_

RECIPE = Recipe(epochs=3, batch_size=16, lr=0.1, accumulate=2, grad_clip=1.0)

if __name__ == "__main__":
    model = getattr(halves, sys.argv[1])(norm=False)
    finetune_(model, halves.Halves(), RECIPE, folder=sys.argv[2])
    if os.environ["RANK"] == "0":
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, sys.argv[3])
