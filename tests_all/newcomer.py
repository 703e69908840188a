"""Somebody with an environment of her own, away from the repository."""

import os
import subprocess
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Newcomer:
    """Somebody with an environment of her own and a folder."""

    def __init__(self, folder: Path) -> None:
        self.home, self.folder = folder / "venv", folder / "work"
        self.folder.mkdir()
        venv.create(self.home, with_pip=True)

    def run(self, *words):
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_NUM_THREADS")
        kept = {name: value for name, value in os.environ.items() if name not in hidden and "BITPLAN" not in name}
        path = f"{self.home / 'bin'}{os.pathsep}{kept['PATH']}"
        return subprocess.run(words, cwd=self.folder, env=kept | {"PATH": path}, capture_output=True, text=True)

    def type(self, line: str):
        return self.run("sh", "-c", line)

    def install(self, what: str) -> None:
        done = self.run("python", "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), what)
        assert done.returncode == 0, done.stderr
