"""What all tests share: one thread (two busy cores are slower than one), and a small graph."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from contextlib import contextmanager

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings

# No timing decides a test. A gate repeats the same examples; at the desk they are new ones every time.
settings.register_profile("desk", deadline=None)
settings.register_profile("gate", deadline=None, derandomize=True)
settings.load_profile("gate" if os.environ.get("CI") else "desk")


@pytest.fixture(autouse=True)
def crashes_say_where(request):
    """Ray takes the handlers of fatal signals away with it, and the next crash in the same process would be silent.

    No test leaves a handler of SIGCHLD behind: beside Ray's signal stack that was such a crash.
    """
    file = request.config.stash[fault_handler_stderr_fd_key]
    faulthandler.disable()
    faulthandler.enable(file)
    yield
    assert signal.getsignal(signal.SIGCHLD) in (signal.SIG_DFL, None)


@pytest.fixture(scope="session")
def ray_nodes():
    """A context in which there is a Ray cluster on this machine, whose workers find what is in a folder.

    It has a head that does no work, and two nodes that do.
    """

    @contextmanager
    def running(folder):
        with pytest.MonkeyPatch.context() as patch:
            known = os.environ.get("PYTHONPATH")  # an empty part would be the current folder
            patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *([known] if known else [])]))
            patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
            import ray
            from ray.cluster_utils import Cluster as Nodes

            cluster = Nodes(initialize_head=True, head_node_args={"num_cpus": 0})
            for _ in range(2):
                cluster.add_node(num_cpus=1)
            yield cluster
            ray.shutdown()
            cluster.shutdown()

    return running


@pytest.fixture
def graph():
    """Six layers: fixed ends, a link of two between them, and two single ones."""
    from bitplan.testing.networks import hand_made_graph

    return hand_made_graph()


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run the command line in an empty folder; gives exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # pages are as wide as on no terminal, whatever was set outside

    from bitplan.cli import main

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["bitplan", *map(str, words)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return call
