"""Jobs are done once, whoever is killed whenever."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from errands import Errand, Square, Squared, shelf

from bitplan.store import lease
from bitplan.store.engines import Failure
from bitplan.store.jobs import run_jobs
from bitplan.store.lease import Holder, SilentHolders, hold_lease, read_lease

HERE = Path(__file__).parent


@pytest.fixture
def work(tmp_path):
    (tmp_path / "diary").mkdir()
    return Square(tmp_path / "diary")


def errands(count):
    return [Errand(number=number) for number in range(count)]


def drive(folder, count, seconds, *engine):
    """Start a driver process."""
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, str(HERE / "drive.py"), str(folder), str(count), str(seconds), *engine],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )


def answers(driver):
    out, _ = driver.communicate(timeout=120)
    assert driver.returncode == 0
    return json.loads(out)


def diary(folder):
    """How often each number was worked on."""
    counts = {}
    for line in (folder / "diary").iterdir():
        number = int(line.name.split("-")[0])
        counts[number] = counts.get(number, 0) + 1
    return counts


def test_what_is_done_is_read_not_done_again(tmp_path, work):
    jobs = errands(3)
    first = dict(run_jobs(work, jobs[:2], shelf=shelf(tmp_path)))
    again = dict(run_jobs(work, jobs, shelf=shelf(tmp_path)))
    assert first == {job: Squared(value=job.number**2) for job in jobs[:2]}
    assert again == {job: Squared(value=job.number**2) for job in jobs}
    assert [work.times(n) for n in range(3)] == [1, 1, 1]
    assert not list((tmp_path / "leases").iterdir())


def test_the_same_job_given_twice_is_done_once(tmp_path, work):
    assert len(list(run_jobs(work, errands(1) * 2, shelf=shelf(tmp_path)))) == 1
    assert work.times(0) == 1


def test_a_failure_is_not_kept(tmp_path, work):
    failing = Square(work.diary, fails=frozenset({1}))
    outcomes = {job.number: outcome for job, outcome in run_jobs(failing, errands(2), shelf=shelf(tmp_path))}
    assert isinstance(outcomes[1], Failure)
    assert dict(run_jobs(work, errands(2), shelf=shelf(tmp_path)))[errands(2)[1]].value == 1


@pytest.mark.parametrize("remake", [True, False])
def test_an_outcome_that_was_damaged_is_set_aside_and_only_its_job_done_again(tmp_path, work, caplog, remake):
    jobs = errands(3)
    list(run_jobs(work, jobs, shelf=shelf(tmp_path)))
    path = shelf(tmp_path).path(jobs[1].id)
    cut = path.read_text()[:20]
    path.write_text(cut)
    outcomes = dict(run_jobs(work, jobs, shelf=shelf(tmp_path), remake=remake))
    assert [outcomes[jobs[n]].value for n in (0, 2)] == [0, 4]
    assert path.with_name(f"{path.name}.damaged").read_text() == cut, "it is never deleted"
    assert f"{path.name}: cut off" in caplog.text
    assert [work.times(n) for n in range(3)] == [1, 1 + remake, 1]
    assert shelf(tmp_path).lost() == (set() if remake else {jobs[1].id})
    if remake:
        assert outcomes[jobs[1]].value == 1
    else:
        assert (outcomes[jobs[1]].fault, path.exists()) == ("damage", False)


def test_two_drivers_at_once_do_each_job_once(tmp_path):
    both = [drive(tmp_path, 12, 0.05, "local") for _ in range(2)]
    assert [answers(one) for one in both] == [[n * n for n in range(12)]] * 2
    assert diary(tmp_path) == dict.fromkeys(range(12), 1)


@pytest.mark.parametrize("engine", [("local",), ("local", "workers=2")])
def test_a_killed_driver_loses_nothing_that_was_finished(tmp_path, engine):
    draw = random.Random(0)
    finished = set()
    for _ in range(3):
        driver = drive(tmp_path, 10, 0.15, *engine)
        until = time.monotonic() + 60
        wanted = min(len(finished) + 1 + draw.randrange(2), 9)
        while len(list(tmp_path.glob("jobs/[!.]*"))) < wanted and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(draw.random() * 0.1)
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
        finished |= {path.name for path in tmp_path.glob("jobs/[!.]*")}
    assert answers(drive(tmp_path, 10, 0.15, *engine)) == [n * n for n in range(10)]
    assert finished <= {path.name for path in (tmp_path / "jobs").iterdir()}
    assert sum(diary(tmp_path).values()) <= 10 + 3 * 2  # each kill can cost what was under way
    left = [read_lease(path) for path in (tmp_path / "leases").iterdir() if not path.name.startswith(".")]
    assert all(sign.holder.gone for sign in left), "whoever was killed between outcome and lease leaves one behind"


def foreign(path, token="t"):
    """A lease of a process on another machine."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(Holder("elsewhere", 1, "1", token))))


def test_a_lease_is_exclusive_and_ends_with_its_block(tmp_path):
    path = tmp_path / "leases" / "a"
    with hold_lease(path) as mine, hold_lease(path) as theirs:
        assert (mine, theirs) == (True, False)
        assert read_lease(path).holder.pid == os.getpid()
    assert not path.exists()
    with hold_lease(path) as again:
        assert again


def test_a_silent_holder_is_taken_over_after_some_patience_only(tmp_path):
    path = tmp_path / "leases" / "a"
    foreign(path)
    watch = SilentHolders(patience=0.05)
    assert watch.stale(path) is None
    time.sleep(0.06)
    os.utime(path)  # a sign of life
    assert watch.stale(path) is None
    time.sleep(0.06)
    assert watch.stale(path) == "t"
    with hold_lease(path) as impatient:
        assert not impatient
    with hold_lease(path, stale="another") as wrong:
        assert not wrong
    with hold_lease(path, stale="t") as mine:
        assert mine


def test_a_holder_whose_process_ended_is_taken_over_at_once(tmp_path):
    path = tmp_path / "a"
    imports = "import os; from pathlib import Path; from bitplan.store.lease import hold_lease"
    code = f"{imports}\nwith hold_lease(Path({str(path)!r})): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code], check=False)
    assert read_lease(path).holder.gone
    with hold_lease(path) as mine:
        assert mine


def test_of_many_who_take_over_one_succeeds(tmp_path):
    for attempt in range(20):
        path = tmp_path / f"{attempt}"
        foreign(path)
        start, end, won = threading.Barrier(6, timeout=30), threading.Barrier(6, timeout=30), []

        def take(path=path, start=start, end=end, won=won):
            start.wait()
            with hold_lease(path, stale="t") as mine:
                won.append(mine)
                end.wait()

        threads = [threading.Thread(target=take) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(won) == 1


def test_a_lease_is_kept_alive_while_it_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "PATIENCE", 0.1)
    with hold_lease(tmp_path / "a"):
        before = read_lease(tmp_path / "a").touched
        time.sleep(0.1)
        assert read_lease(tmp_path / "a").touched > before


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, work):
    (tmp_path / "leases").write_text("in the way")
    outcome = dict(run_jobs(work, errands(1), shelf=shelf(tmp_path)))[errands(1)[0]]
    assert isinstance(outcome, Failure)
    assert outcome.error.startswith("WriteError: cannot write")


def empty(path):
    path.touch()


def garbage(path):
    path.write_bytes(b"\xff\x00\x17" * 40)


def nested(path):
    path.write_text("[" * 5000)


def endless(path):
    path.write_text('{"machine": "' + "m" * 10**6)


def of_wrong_types(path):
    path.write_text(json.dumps(asdict(Holder("elsewhere", 1, "1", "t")) | {"pid": "../../etc"}))


def leading_elsewhere(path):
    path.write_text(json.dumps(asdict(Holder("elsewhere", 1, "1", "../../t"))))


def folder(path):
    path.mkdir()
    (path / "inside").touch()


def pipe(path):
    os.mkfifo(path)


def dangling(path):
    path.symlink_to("nowhere")


UNREADABLE = [empty, garbage, nested, endless, of_wrong_types, leading_elsewhere, folder, pipe, dangling]


@pytest.mark.parametrize("make", UNREADABLE)
def test_an_unreadable_lease_is_taken_over_like_a_silent_one_and_said(tmp_path, work, monkeypatch, caplog, make):
    monkeypatch.setattr(lease, "PATIENCE", 0.3)
    place = shelf(tmp_path).lease(errands(1)[0].id)
    place.parent.mkdir()
    make(place)
    begin = time.monotonic()
    outcomes = [outcome.value for _, outcome in run_jobs(work, errands(3), shelf=shelf(tmp_path))]
    assert sorted(outcomes) == [0, 1, 4]
    assert time.monotonic() - begin > 0.3, "it may be somebody's: not at once"
    assert [work.times(n) for n in range(3)] == [1, 1, 1]
    assert f"{place.name} cannot be read" in caplog.text
    assert f"{place.name} shows no sign of life" in caplog.text
    assert not os.path.lexists(place)


def test_an_unreadable_lease_that_is_touched_is_somebodys(tmp_path):
    path, watch = tmp_path / "a", SilentHolders(patience=0.05)
    empty(path)
    for _ in range(3):
        assert watch.stale(path) is None
        time.sleep(0.06)
        os.utime(path)
    assert watch.stale(path) is None
    time.sleep(0.06)
    token = watch.stale(path)
    os.utime(path)  # a sign of life in the last moment
    with hold_lease(path, stale=token) as mine:
        assert not mine
    with hold_lease(path, stale=read_lease(path).holder.token) as mine:
        assert mine


@pytest.mark.parametrize("shift", [-(10**7), 10**7])
def test_a_clock_that_is_set_makes_nobody_wait_for_ever(tmp_path, shift):
    """Whoever was killed while taking over left a marker; whatever the disk's clock said then, it is cleared."""
    path = tmp_path / "a"
    foreign(path)
    marker = tmp_path / ".a.t.taken"
    foreign(marker)
    os.utime(marker, (time.time() + shift,) * 2)
    with hold_lease(path, stale="t") as mine:
        assert not mine
    assert not marker.exists()
    with hold_lease(path, stale="t") as mine:
        assert mine


def test_who_was_killed_while_taking_over_is_not_waited_for(tmp_path):
    path = tmp_path / "a"
    foreign(path)
    imports = "import os; from pathlib import Path; from bitplan.store import lease"
    dies = "lease.os.replace = lambda *_: os.kill(os.getpid(), 9)"
    code = f"{imports}\n{dies}\nwith lease.hold_lease(Path({str(path)!r}), stale='t'): pass"
    subprocess.run([sys.executable, "-c", code], check=False)
    assert (tmp_path / ".a.t.taken").exists()
    assert [taken(path, "t") for _ in range(2)] == [False, True]


def taken(path, stale):
    with hold_lease(path, stale=stale) as mine:
        return mine


def test_a_lease_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    flushed, link = [], os.link
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(os.readlink(f"/proc/self/fd/{number}")))
    monkeypatch.setattr(os, "link", lambda *names: (flushed.append("its name"), link(*names)))
    with hold_lease(tmp_path / "a") as mine:
        assert mine
    first, *rest = flushed
    assert Path(first).name.startswith(".a.")
    assert rest == ["its name", str(tmp_path)]
