"""A Ray cluster of several nodes, on this machine, that loses a node or its driver."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from errands import Errand, Square, shelf

from bitplan.core.errors import InputError
from bitplan.store.jobs import run_jobs
from bitplan.store.ray_cluster import Cluster

HERE = Path(__file__).parent


@pytest.fixture
def nodes(ray_nodes):
    with ray_nodes(HERE) as cluster:
        yield cluster


def wait_for(count, folder):
    until = time.monotonic() + 60
    while len(list(folder.glob("[!.]*.json"))) < count:
        assert time.monotonic() < until, "nothing is happening"
        time.sleep(0.02)


def strangers_folder(home):
    """A folder with modules of names that workers import."""
    folder = home / "stranger"
    folder.mkdir()
    for name in ("bitplan", "pydantic", "numpy", "errands"):
        (folder / f"{name}.py").write_text(f"open({str(home / 'it-ran')!r}, 'w').close()")
    return folder


def test_a_node_and_the_driver_may_die_and_no_finished_job_is_done_again(tmp_path, nodes):
    folder = tmp_path / "jobs"
    command = [
        sys.executable,
        str(HERE / "drive.py"),
        str(tmp_path),
        "12",
        "0.2",
        "cluster",
        f"address={nodes.address}",
    ]
    driver = subprocess.Popen(command, cwd=strangers_folder(tmp_path))
    wait_for(3, folder)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    finished = {path.name: path.read_bytes() for path in folder.glob("[!.]*.json")}
    (tmp_path / "diary").mkdir(exist_ok=True)
    work = Square(tmp_path / "diary", seconds=0.2)
    jobs = [Errand(number=number) for number in range(12)]
    outcomes = {}
    for job, outcome in run_jobs(work, jobs, shelf=shelf(tmp_path), engine=Cluster(address=nodes.address)):
        outcomes[job.number] = outcome.value
        if len(outcomes) == len(finished) + 3:
            nodes.remove_node(next(node for node in nodes.worker_nodes), allow_graceful=False)
    assert outcomes == {number: number**2 for number in range(12)}
    assert finished.items() <= {path.name: path.read_bytes() for path in folder.iterdir()}.items()
    again = [number for number in range(12) if work.times(number) > 1]
    assert not (tmp_path / "it-ran").exists(), "nothing is imported from the folder that the driver was started in"
    assert len(again) <= 2 + 1  # what ran when the driver was killed, and when the node was
    for name in finished:
        number = json.loads(finished[name])["value"] ** 0.5
        assert work.times(int(number)) == 1


def test_an_address_where_nothing_answers_is_one_line():
    with pytest.raises(InputError, match="no Ray cluster answers at '127.0.0.1:1'"):
        list(Cluster(address="127.0.0.1:1").run(abs, [1]))


@pytest.mark.parametrize(
    ("environment", "joined"), [({}, "local"), ({"RAY_ADDRESS": "10.0.0.1:6379"}, "10.0.0.1:6379")]
)
def test_a_cluster_of_others_on_this_machine_is_not_joined_unasked(environment, joined, monkeypatch):
    """Ray's own default joins the last cluster that anybody started here."""
    import ray

    from bitplan.store.ray_cluster import _connected

    asked = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, **_: asked.append(address))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    _connected(None)
    assert asked == [joined]
