"""torture: campaign after campaign, until so many processes were killed."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.torture.blows import Blows
from benchmarks.torture.campaign import Campaign
from benchmarks.torture.disk import Disk
from benchmarks.torture.network import DIARIES, STUDY
from benchmarks.torture.tally import Tally
from bitplan.study.spec import read_study
from bitplan.study.sweep import sweep

KINDS = {"driver": 30, "one_of_two": 20, "frozen": 1, "clock": 2, "damaged": 4, "damaged_meanwhile": 4, "workers": 1}
"""How often each blow is struck, as shares."""


def torture(
    home: Path,
    *,
    kills: int,
    seed: int = 0,
    ray: int = 0,
    kinds: dict[str, int] = KINDS,
    tell: Callable[[str], object] = lambda _: None,
) -> Tally:
    """Strike until so many kills; `ray` is how many of the runs are swept on Ray."""
    torch.set_num_threads(1)
    os.environ[DIARIES] = str(home)
    (home / "study.toml").write_text(STUDY)
    study = read_study(home / "study.toml")
    sound, tally, chance = home / "sound", Tally(), random.Random(seed)
    sweep(study, sound, trust=True)  # nobody disturbs this one; and everything is imported now
    begin = time.perf_counter()
    sweep(study, home / "timed", trust=True)
    span = time.perf_counter() - begin
    tell(f"an undisturbed sweep takes {span:.2f} s")
    disk = Disk.mounted(home / "disk")
    for number in itertools.count():
        if tally.kills >= kills or tally.faults:
            break
        here = disk if number % 2 else None
        campaign = Campaign(study, (here.folder if here else home) / f"run{number}", sound, chance, tally)
        if number < ray:
            campaign.fight(Blows(span), {"ray": 1}, tally.kills + 1)
        else:
            campaign.fight(Blows(span, here), {**kinds, "full": 4} if here else kinds, kills)
        tell(f"run {number}: {tally.kills} kills, {dict(tally.faults) or 'nothing lost or wrong'}")
        shutil.rmtree(campaign.run)
    if disk:
        disk.unmount()
    return tally
