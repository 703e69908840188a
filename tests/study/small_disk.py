"""A sweep on a disk that is too small, and once read-only: `python small_disk.py HOME STUDY mount:12,40 limits:1,3`.

Run it in a mount namespace of its own (`unshare -m`), so that its tmpfs ends with it. Where mounting is forbidden,
`limits` refuses writes by other means: files may only get so large, or folders are not writable.
"""

import contextlib
import hashlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

KIB = 1024


class Mounted:
    """A tmpfs of some size, which can be made read-only."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)], check=True)

    @contextlib.contextmanager
    def holding(self, kilobytes):
        self._remount(f"rw,size={kilobytes}k")
        yield

    @contextlib.contextmanager
    def read_only(self):
        self._remount("ro")
        yield
        self._remount("rw")

    def _remount(self, options):
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.folder)], check=True)


class Limited:
    """A folder in which no file may get larger than so much, or, but for root, nothing may be written."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()

    @contextlib.contextmanager
    def holding(self, kilobytes):
        with _file_size(kilobytes * KIB):
            yield

    @contextlib.contextmanager
    def read_only(self):
        if os.getuid() == 0:  # to whom no mode forbids anything
            with _file_size(0):
                yield
            return
        folders = [self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())]
        for folder in folders:
            folder.chmod(0o555)
        yield
        for folder in folders:
            folder.chmod(0o755)


@contextlib.contextmanager
def _file_size(most):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def sweep_once(study, run):
    """`bitplan sweep` in a process of its own: its exit code and what it wrote; libraries are imported already."""
    pipes = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        for number, (_, end) in enumerate(pipes, start=1):
            os.dup2(end, number)
        sys.argv = ["bitplan", "sweep", str(study), "--run", str(run), "--trust"]
        import bitplan.cli

        code = 0
        try:
            bitplan.cli.main()
        except SystemExit as end:
            code = end.code or 0
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # at once: to take down all that the parent imported takes a second of each child's time
    written = []
    for ours, theirs in pipes:  # little is written, so the pipes hold it
        os.close(theirs)
        with os.fdopen(ours) as file:
            written.append(file.read())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *written


def look(run):
    """Every record by its path, its hash and time (a broken one raises here); and hidden files that were left."""
    from bitplan.core.record import Record
    from bitplan.store.files import load

    records, hidden = {}, []
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.name.startswith("."):
            hidden.append(name)
        elif path.suffix == ".json":
            load(path, Record)
            records[name] = [hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns]
    return {"records": records, "hidden": hidden}


def swept_in_parts(disk, study, sizes):
    """Sweep with less room than it takes, then more, and so on; before the second time on a read-only disk."""
    run, told = disk.folder / "run", []
    for number, size in enumerate(sizes):
        if number == 1:
            with disk.read_only():
                told.append(["read-only", sweep_once(study, run), look(run)])
        with disk.holding(int(size)):
            told.append([size, sweep_once(study, run), look(run)])
    with disk.read_only():  # a finished run is only read
        told.append(["finished", sweep_once(study, run), look(run)])
    from bitplan.reports.tables import frontier
    from bitplan.store.run_folder import RunFolder

    return {"told": told, "table": frontier(RunFolder(run)).texts()}


def main():
    """Sweep on each kind of disk in parts, and print what was told and found."""
    home, study, *disks = sys.argv[1:]
    import bitplan.cli.app  # noqa: F401
    from bitplan.study.spec import read_study
    from bitplan.study.sweep import sweep

    sweep(read_study(study), Path(home) / "elsewhere", trust=True)  # all is imported once, and the children find it
    found = {}
    for how, sizes in (disk.split(":") for disk in disks):
        disk = (Mounted if how == "mount" else Limited)(Path(home) / how)
        found[how] = swept_in_parts(disk, study, sizes.split(","))
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
