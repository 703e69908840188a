"""A network of five small linear layers, three of them to choose; and a sweep for a process that is killed.

Whichever process loads the network writes down the trainings that it begins, where a file `diary` is beside the run.
"""

import shutil
import time
from pathlib import Path

from torch import nn

from bitplan.store.run_folder import RunFolder
from bitplan.study import context, scheduling

TRAININGS_TAKE = 0.2  # seconds more, where they are written down: so that a kill can meet one

STUDY = """
name = "tiny"
task = "digits"
model = "tiny:network"
choices = ["w2a2", "w4a4"]
budgets = ["85%", "70%"]
seeds = [0, 1]
[rules]
narrow = 0
[recipe]
steps = 6
batch_size = 32
lr = 0.05
distill = 0.5
[start]
[start.float_recipe]
steps = 30
lr = 0.1
[start.recipe]
steps = 6
[[methods]]
name = "eagl"
[[methods]]
name = "uniform"
[[methods]]
name = "last_to_first"
label = "from the last"
"""


def network():
    layers = [nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32)]
    for _ in range(3):
        layers += [nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(32, 10))


def _noted(finetune):
    def noted(*given, folder, **options):
        diary = diary_of(Path(folder).parents[1])
        if diary.is_file():
            with diary.open("a") as file:
                file.write(f"{Path(folder).name}\n")
            time.sleep(TRAININGS_TAKE)
        return finetune(*given, folder=folder, **options)

    return noted


for module in (context, scheduling):
    module.finetune_ = _noted(module.finetune_)


def diary_of(run):
    """The file that says which trainings began, a line each."""
    return run.with_name("diary")


def begin_again(swept, run):
    """A copy of a finished run that has the starts and the gains but no training yet, and a diary."""
    shutil.copytree(swept, run)
    shutil.rmtree(run / "trained")
    for result in RunFolder(run).results[2:]:
        (run / "trials" / f"{result.trial.id}.json").unlink()
    diary_of(run).touch()
    return run


def sweep_telling(path, run, wire):
    """In a process of its own: sweep, telling how many trials are done at every event, then how many were trained."""
    from bitplan.study.spec import read_study
    from bitplan.study.sweep import sweep
    from bitplan.tune import resume

    resume.SAVE_SECONDS, resume.SAVE_SHARE = 0.0, 1.0
    summary = sweep(read_study(path), run, progress=lambda done, total, what: wire.send(("done", done)), trust=True)
    wire.send(("trained", summary.trained))
    wire.close()
