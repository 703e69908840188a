"""Replace a folder in a process that is killed at its n-th line, for every n: `python killed_swap.py HOME`."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from bitplan.store import files

OURS = {files.__file__, shutil.__file__}
os.fsync = lambda _: None  # a kill takes nothing from the disk, and flushing it a thousand times takes long
TEXT = {"old": "a" * 100, "new": "b" * 100}


def fill(path, which):
    with files.atomic_folder(path) as temporary:
        for name in "xyz":
            (temporary / name).write_text(TEXT[which])


def replace_until(path, line):
    """In a child: replace the folder, and be killed before so many lines are run; whether it was."""
    child = os.fork()
    if not child:
        left = itertools.count(line, -1)

        def count(frame, event, _):
            if frame.f_code.co_filename not in OURS:
                return None
            if event == "line" and next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return count

        sys.settrace(count)
        with contextlib.suppress(BaseException):
            fill(path, "new")
            sys.settrace(None)
            os._exit(0)
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def look(path):
    """Which of the two is there, whole; None where nothing has the name."""
    if not path.exists():
        return None
    texts = {name: (path / name).read_text() for name in os.listdir(path)}
    return next((which for which, text in TEXT.items() if texts == dict.fromkeys("xyz", text)), "broken")


def kill_everywhere(home):
    """Kill at the first line, the second, and so on, until the work is done before."""
    home.mkdir()
    gone, seen, wrong, left = 0, set(), [], []
    for line in itertools.count():
        path = home / f"{line}" / "it"
        fill(path, "old")
        killed = replace_until(path, line)
        gone += look(path) is None
        files.restore_folder(path)
        seen.add(found := look(path))
        if found not in TEXT or not (killed or found == "new"):
            wrong.append([line, found])
        fill(path, "old")
        left += [name for name in os.listdir(path.parent) if name != path.name]
        if not killed:
            return {"kills": line, "gone": gone, "seen": sorted(map(str, seen)), "wrong": wrong, "left": left}


def main():
    """Write what was found as JSON."""
    sys.stdout.write(json.dumps(kill_everywhere(Path(sys.argv[1]) / "it")))


if __name__ == "__main__":
    main()
