"""A full disk and a read-only one end a sweep with one clear line; nothing is broken, and it can go on."""

import json
import subprocess
import sys
from pathlib import Path

from tiny import STUDY

from bitplan.reports.tables import frontier
from bitplan.store.run_folder import RunFolder

HERE = Path(__file__).parent
SIZES = {"mount": [12, 60, 170, 4000], "limits": [1, 10, 4000]}


def may_mount(folder):
    """What to put before a command so that it may mount; None where nothing helps."""
    for prefix in (("unshare", "-m"), ("unshare", "-rm")):
        tried = subprocess.run([*prefix, "mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False)
        if not tried.returncode:
            return prefix
    return None


def test_a_sweep_goes_on_when_the_disk_is_sound_again(swept, tmp_path):
    (tmp_path / "study.toml").write_text(STUDY)
    prefix = may_mount(tmp_path)
    disks = [f"{how}:{','.join(map(str, sizes))}" for how, sizes in SIZES.items() if prefix or how != "mount"]
    command = [sys.executable, HERE / "small_disk.py", tmp_path, tmp_path / "study.toml", *disks]
    done = subprocess.run([*(prefix or ()), *command], stdout=subprocess.PIPE, text=True, check=True)
    for how, found in json.loads(done.stdout).items():
        *stopped, last, finished = found["told"]
        check_stops(how, stopped)
        for _, (code, *_), there in (last, finished):
            assert code == 0
            assert not there["hidden"]
        assert last[2] == finished[2], "a finished run is only read"
        assert found["table"] == frontier(RunFolder(swept)).texts()


def check_stops(how, stopped):
    """Every time one line and exit code 1, and what was there before is there still."""
    assert [one[0] for one in stopped][1:2] == ["read-only"]
    before = {}
    for size, (code, out, errors), there in stopped:
        assert (code, out) == (1, ""), (size, errors)
        *_, line = lines = errors.splitlines()
        assert line.startswith("error: cannot write ")
        assert any(reason in line for reason in REASONS[how, size == "read-only"]), line
        assert sum(one.startswith("error") for one in lines) == 1
        assert "Traceback" not in errors
        assert results(before).items() <= results(there["records"]).items(), "what was finished stays as it was"
        assert not [name for name in there["records"] if name.startswith("failures")], "no trial is to blame"
        before = there["records"]
    assert len({len(there["records"]) for *_, there in stopped}) > 1, "it was stopped at different places"


FULL, TOO_LARGE, FORBIDDEN = ("No space left",), ("File too large",), ("Permission denied", "File too large")
REASONS = {
    ("mount", False): FULL,
    ("mount", True): ("Read-only file system",),
    ("limits", False): TOO_LARGE,
    ("limits", True): FORBIDDEN,
}


def results(records):
    """The records that are written once and for all."""
    return {name: about for name, about in records.items() if name.split("/")[0] in ("trained", "trials", "estimates")}
