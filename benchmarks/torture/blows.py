"""What is done to sweeps: each blow starts one or two, strikes, and leaves none behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.torture.damage import damage
from benchmarks.torture.disk import Disk
from benchmarks.torture.drivers import Driver, holders
from benchmarks.torture.network import PATIENCE

if TYPE_CHECKING:
    from benchmarks.torture.campaign import Campaign

_STARTING = 25.0  # seconds in which workers of other processes have imported everything


@dataclass(frozen=True)
class Blows:
    """Each by its name; `span` is how long an undisturbed sweep takes, `disk` where one can be full."""

    span: float
    disk: Disk | None = None

    def driver(self, on: Campaign) -> None:
        """A driver that also trains is killed."""
        driver = on.start()
        self._sleep(on)
        self._kill(on, "kill: a driver", driver)

    def one_of_two(self, on: Campaign) -> None:
        """Two drivers sweep the same run; one is killed, then perhaps the other."""
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
        """A driver is stopped for longer than anybody waits, while another goes on; then it wakes up."""
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
        """Workers are killed one after the other; the driver gives their work to others."""
        driver = on.start("workers")
        for _ in range(on.chance.randint(1, 4)):
            if self._strike_holder(on, driver, "kill: a worker"):
                time.sleep(on.chance.uniform(0, 0.3))
        if on.chance.random() < 0.3 and driver.kill(group=True):
            on.tally.blows["kill: a driver and its workers at once"] += 1
        on.settle(driver)

    def ray(self, on: Campaign) -> None:
        """Ray's workers are killed, then a node of it."""
        driver = on.start("ray")
        for _ in range(3):
            self._strike_holder(on, driver, "kill: a Ray worker")
        nodes = _raylets(driver.pid)
        if len(nodes) > 1 and not driver.ended():
            os.kill(on.chance.choice(nodes[1:]), signal.SIGKILL)  # the first is the head
            on.tally.blows["kill: a Ray node"] += 1
        on.settle(driver, allowed=1)  # so Ray ends a driver whose own node was hit: as good as killed

    def clock(self, on: Campaign) -> None:
        """The disk's clock jumps by years, for leases that are held."""
        driver = on.start()
        for _ in range(on.chance.randint(1, 20)):
            time.sleep(on.chance.uniform(0, self.span / 10))
            for path in (on.run / "leases").glob("*"):
                now = time.time() + on.chance.choice((-1, 1)) * 10 ** on.chance.uniform(0, 8)
                try:
                    os.utime(path, (now, now))
                except FileNotFoundError:
                    continue
                on.tally.blows["clock jumps of a lease"] += 1
        if on.chance.random() < 0.5:
            self._kill(on, "kill: a driver", driver)
        on.settle(driver)

    def damaged(self, on: Campaign) -> None:
        """Files are damaged while nobody works, then a driver goes on, and is killed or not."""
        if not on.run.is_dir():
            return
        for _ in range(on.chance.randint(1, 2)):
            self._damage(on)
        driver = on.start()
        if on.chance.random() < 0.6:
            self._sleep(on)
            self._kill(on, "kill: a driver", driver)
        on.settle(driver)

    def damaged_meanwhile(self, on: Campaign) -> None:
        """The same, but a driver is at work."""
        driver = on.start()
        self._sleep(on)
        if on.run.is_dir():
            with contextlib.suppress(FileNotFoundError):  # it was replaced meanwhile
                self._damage(on)
        if on.chance.random() < 0.5:
            self._sleep(on)
            self._kill(on, "kill: a driver", driver)
        on.settle(driver)

    def full(self, on: Campaign) -> None:
        """The disk is full, or read-only; the sweep ends with one line, and later goes on."""
        assert self.disk is not None
        often = on.chance.random()
        blow = self.disk.read_only() if often < 0.2 else self.disk.almost_full(on.chance.randrange(0, 120_000))
        with blow:
            on.may_fill = True
            on.settle(on.start())
            on.may_fill = False
        on.tally.blows["read-only disk" if often < 0.2 else "full disk"] += 1

    def _damage(self, on: Campaign) -> None:
        names = damage(on.run, on.chance)
        on.harm(names)
        if names:
            on.tally.blows["files damaged or exchanged"] += len(names)

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


def _raylets(driver: int) -> list[int]:
    """The processes of Ray's nodes that a driver started, in the order of their start."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            if name == "raylet" and int(rest.split()[1]) == driver:
                found.append(int(stat.parent.name))
        except (OSError, ValueError, IndexError):
            continue
    return sorted(found)
