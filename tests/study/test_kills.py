"""Workers and nodes are killed while they train: the sweep goes on, repeats nothing and ends with the same table."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from tiny import begin_again, diary_of

from bitplan.reports.tables import frontier
from bitplan.store.engines import Local
from bitplan.store.lease import read_lease
from bitplan.store.ray_cluster import Cluster
from bitplan.store.run_folder import RunFolder
from bitplan.study.sweep import sweep

HERE = Path(__file__).parent
PATIENCE = 600.0  # Ray takes minutes to start on a busy machine


@pytest.fixture(scope="module")
def nodes(ray_nodes):
    with ray_nodes(HERE) as cluster:
        yield cluster


class Killer(threading.Thread):
    """Strikes while trainings run: at a random moment after so many of them are finished, once for each number given.

    Remembers what was finished at that moment, and how long the diary was.
    """

    def __init__(self, run, after, strike, seed):
        super().__init__()
        self.run_folder, self.after, self.strike, self.chance = run, after, strike, random.Random(seed)
        self.seen = []

    def run(self):
        for count in self.after:
            self.wait_until(lambda count=count: len(finished(self.run_folder, "trained")) >= count)
            time.sleep(self.chance.uniform(0, 0.3))
            there = finished(self.run_folder, "trained") | finished(self.run_folder, "trials")
            self.seen.append((there, diary_of(self.run_folder).read_text()))
            self.strike(self)

    @staticmethod
    def wait_until(happened):
        until = time.monotonic() + PATIENCE
        while not (found := happened()):
            assert time.monotonic() < until, "nothing is happening"
            time.sleep(0.01)
        return found


def finished(run, kind):
    """The records that are there: path → bytes and time."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (run / kind).glob("[!.]*.json")}


def kill_a_worker(killer):
    """kill -9 of a process that holds the lease of a training."""
    leases = killer.wait_until(lambda: held_leases(killer.run_folder))
    holder = killer.chance.choice(leases).holder
    assert holder.pid != os.getpid(), "the driver does not train"
    os.kill(holder.pid, signal.SIGKILL)


def held_leases(run):
    """The leases of trainings, but for those of holders that are dead."""
    signs = map(read_lease, sorted((run / "leases").glob("trained-*")))
    return [sign for sign in signs if sign is not None and not sign.holder.gone]


def swept_under_fire(swept, run, engine, strike, *, after, seed):
    """Sweep while somebody kills, and check all that must hold whoever was hit."""
    begin_again(swept, run)
    killer = Killer(run, after, strike, seed)
    killer.start()
    summary = sweep(RunFolder(run).study, run, engine=engine, trust=True)
    killer.join()
    assert len(killer.seen) == len(after), "every blow was struck"
    assert (summary.done, summary.failed) == (18, ())
    now = finished(run, "trained") | finished(run, "trials")
    diary = diary_of(run).read_text()
    for there, before in killer.seen:
        assert there.items() <= now.items(), "what was finished stays as it was"
        later = set(diary.removeprefix(before).split())
        assert not later & {path.stem for path in there}, "and is not trained again"
    trainings = {path.stem for path in (swept / "trained").glob("*.json")}
    assert {path.stem for path in finished(run, "trained")} == set(diary.split()) == trainings
    assert summary.trained == len(trainings)
    assert len(diary.split()) <= len(trainings) + len(after), "a blow costs one training that was under way"
    assert frontier(RunFolder(run)).texts() == frontier(RunFolder(swept)).texts()
    assert not held_leases(run)


@pytest.mark.parametrize("seed", [0])
def test_local_workers_are_killed(swept, tmp_path, seed):
    swept_under_fire(swept, tmp_path / "run", Local(workers=2), kill_a_worker, after=(0, 4), seed=seed)


@pytest.mark.parametrize("seed", [1])
def test_ray_workers_are_killed(swept, tmp_path, nodes, seed):
    engine = Cluster(address=nodes.address)
    swept_under_fire(swept, tmp_path / "run", engine, kill_a_worker, after=(1, 5), seed=seed)


@pytest.mark.parametrize("seed", [2])
def test_a_ray_node_is_killed(swept, tmp_path, nodes, seed):
    engine = Cluster(address=nodes.address)

    def kill_a_node(killer):
        node = killer.chance.choice(sorted(nodes.worker_nodes, key=lambda node: node.node_id))
        nodes.remove_node(node, allow_graceful=False)

    swept_under_fire(swept, tmp_path / "run", engine, kill_a_node, after=(3,), seed=seed)
