"""A driver is frozen while it trains and another takes over; when it wakes up, it takes what the other did."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tiny import begin_again, diary_of

from bitplan.reports.tables import frontier
from bitplan.store import jobs
from bitplan.store.lease import SilentHolders
from bitplan.store.run_folder import RunFolder
from bitplan.study.sweep import sweep


def test_who_wakes_up_late_says_what_happened_and_ends_well(swept, tmp_path, write, monkeypatch):
    run = begin_again(swept, tmp_path / "run")
    script = Path(__file__).with_name("frozen.py")
    command = [sys.executable, str(script), str(write()), "--run", str(run), "--trust"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as late:
        _, status = os.waitpid(late.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        (frozen,) = diary_of(run).read_text().split()
        monkeypatch.setattr(jobs, "SilentHolders", lambda: SilentHolders(0.5))
        summary = sweep(RunFolder(run).study, run, trust=True)
        assert (summary.done, summary.failed) == (18, ())
        assert not (run / "running" / frozen).exists()
        os.kill(late.pid, signal.SIGCONT)
        out, err = late.communicate(timeout=120)
    assert late.returncode == 0, err
    assert f"another process took over {frozen}" in err
    assert "make room" not in err
    assert "18 of 18 trials done" in out
    assert diary_of(run).read_text().split().count(frozen) == 2
    assert frontier(RunFolder(run)).texts() == frontier(RunFolder(swept)).texts()
