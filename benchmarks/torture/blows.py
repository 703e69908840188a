"""Blows to sweeps: each starts one or two drivers, strikes, and sees that none is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.torture.drivers import Driver, holders
from benchmarks.torture.network import PATIENCE

if TYPE_CHECKING:
    from benchmarks.torture.campaign import Campaign

_STARTING = 25.0  # seconds in which workers of other processes have imported everything


@dataclass(frozen=True)
class Blows:
    """Each blow by its name; `span` is the time of an undisturbed sweep."""

    span: float

    def driver(self, on: Campaign) -> None:
        """Kill a driver that also trains."""
        driver = on.start()
        self._sleep(on)
        self._kill(on, "kill: a driver", driver)

    def one_of_two(self, on: Campaign) -> None:
        """Let two drivers sweep the same run; kill one, then perhaps the other."""
        both = [on.start(), on.start()]
        self._sleep(on)
        on.chance.shuffle(both)
        if both[0].kill():
            on.tally.blows["kill: one of two drivers"] += 1
        if on.chance.random() < 0.9:
            self._sleep(on)
            self._kill(on, "kill: one of two drivers", both[1])
        on.settle(*both)

    def frozen(self, on: Campaign) -> None:
        """Stop a driver for longer than anybody waits while another goes on; then wake it up."""
        driver = on.start()
        self._sleep(on)
        if not driver.ended():
            os.kill(driver.pid, signal.SIGSTOP)
        on.tally.blows["freeze: a driver, while another goes on"] += 1
        other = on.start()
        time.sleep(on.chance.uniform(0.5, 1.5) * PATIENCE)
        if on.chance.random() < 0.5:
            other.ended(wait=self.span + 2 * PATIENCE)
        if not driver.ended():
            os.kill(driver.pid, signal.SIGCONT)
        if on.chance.random() < 0.3:
            self._kill(on, "kill: a driver that was frozen", driver)
        on.settle(driver, other)

    def workers(self, on: Campaign) -> None:
        """Kill workers one after the other; the driver gives their work to others."""
        driver = on.start("workers")
        for _ in range(on.chance.randint(1, 4)):
            if self._strike_holder(on, driver, "kill: a worker"):
                time.sleep(on.chance.uniform(0, 0.3))
        if on.chance.random() < 0.3 and driver.kill(group=True):
            on.tally.blows["kill: a driver and its workers at once"] += 1
        on.settle(driver)

    def damaged(self, on: Campaign) -> None:
        """Damage files while nobody works, or while a driver does; then another goes on, and is killed or not."""
        if on.chance.random() < 0.5:
            self.driver(on)
        if not on.run.is_dir():
            return
        driver = on.start() if on.chance.random() < 0.5 else None
        with contextlib.suppress(FileNotFoundError, IndexError):  # replaced meanwhile, or none is there yet
            for _ in range(on.chance.randint(1, 2)):
                name = damage(on.run, on.chance)
                on.harm(name)
                on.tally.blows["files damaged"] += 1
        driver = driver or on.start()
        if on.chance.random() < 0.5:
            self._sleep(on)
            self._kill(on, "kill: a driver", driver)
        on.settle(driver)

    def full(self, on: Campaign) -> None:
        """Refuse to write files above a size, as a full disk does; the sweep ends with one line, and later goes on."""
        on.may_fill = True
        on.settle(on.start(largest_file=on.chance.randrange(5_000, 60_000)))
        on.may_fill = False
        on.tally.blows["full disk"] += 1

    def _sleep(self, on: Campaign) -> None:
        time.sleep(self.span * 0.6 * on.chance.random() ** 2)  # early more often than late: one run takes many blows

    def _kill(self, on: Campaign, what: str, driver: Driver) -> None:
        if driver.kill():
            on.tally.blows[what] += 1
        on.settle(driver)

    def _strike_holder(self, on: Campaign, driver: Driver, what: str) -> bool:
        """SIGKILL a process that holds a lease and is not the driver, once there is one."""
        until = time.monotonic() + _STARTING
        while time.monotonic() < until and not driver.ended():
            others = [pid for pid in holders(on.run) if pid != driver.pid]
            if others:
                try:
                    os.kill(on.chance.choice(others), signal.SIGKILL)
                except ProcessLookupError:
                    continue
                on.tally.blows[what] += 1
                return True
            time.sleep(0.001)
        return False


def damage(run: Path, chance: random.Random) -> str:
    """Flip a bit of a file, cut it off, empty it or fill it with garbage; return its name in the run."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and not _is_spared(path, run)]
    path = chance.choice(files)
    content = bytearray(path.read_bytes())
    way = chance.choice(("flip", "cut", "empty", "garbage"))
    if way == "flip" and content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    elif way == "cut" and content:
        del content[chance.randrange(len(content)) :]
    else:
        content = bytearray(chance.randbytes(chance.randrange(1, 5000)) if way == "garbage" else b"")
    path.write_bytes(content)
    return str(path.relative_to(run))


def _is_spared(path: Path, run: Path) -> bool:
    """Return True for temporary files and for those that were set aside before."""
    name = str(path.relative_to(run))
    return ".damaged" in name or any(piece.startswith(".") for piece in name.split("/"))
