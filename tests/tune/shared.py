"""A training shared by several processes: python -m torch.distributed.run … shared.py FOLDER OUT."""

import os
import sys

from halves import Halves, network
from safetensors.torch import save_file

from bitplan.core.trials import Recipe
from bitplan.tune.loop import finetune_

RECIPE = Recipe(epochs=3, batch_size=16, lr=0.1, accumulate=2, grad_clip=1.0)

if __name__ == "__main__":
    model = network(norm=False)
    finetune_(model, Halves(), RECIPE, folder=sys.argv[1])
    if os.environ["RANK"] == "0":
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, sys.argv[2])
