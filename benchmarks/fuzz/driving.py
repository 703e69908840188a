"""The process that reads damaged files, and the one that watches it: a crash or a hang is a finding like any other."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.fuzz.readers import READERS, Reader

CORPUS = Path(__file__).parents[2] / "tests" / "fuzz" / "corpus"
_SLOW = 10  # seconds that one file may take
_STUCK = 40  # seconds without a word from the process
_MEMORY = 3 << 30  # bytes of addresses that it may take beyond what it has when it begins
_GROWTH = 600 << 10  # kB of memory that one small file may take
_LARGEST = 20_000  # bytes of a finding that is kept
_ALIKE = 40  # characters of what is wrong by which two findings are taken for one
_ROUND = 20  # damaged files of one reader before the next has its turn


@dataclass(frozen=True)
class Finding:
    """A file that broke a reader, and how."""

    reader: str
    what: str
    file: str = ""


@dataclass
class Done:
    """How many files each reader has read, how many it refused, and what was found."""

    read: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    found: list[Finding] = field(default_factory=list)


def drive(readers: list[str], corpus: Path, *, seed: int, seconds: float = math.inf, rounds: float = math.inf) -> Done:
    """Damage and read files for so long, or so many rounds; the corpus itself is read first, every file of it once."""
    done, until, start = Done(), time.monotonic() + seconds, 0
    with TemporaryDirectory() as scratch:
        first = True
        while first or time.monotonic() < until:
            left = max(0.0, until - time.monotonic())
            told = map(str, (corpus, seed, start, left, rounds, scratch, ",".join(readers)))
            command = [sys.executable, "-m", "benchmarks.fuzz.driving", *told]
            ended, start = _watch(command, done, corpus, Path(scratch), start)
            first = False
            if ended:
                break
    return done


def _watch(command: list[str], done: Done, corpus: Path, scratch: Path, start: int) -> tuple[bool, int]:
    """Listen to one process until it ends; whether it ended by itself, and where the next one goes on."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    at: dict[str, Any] = {"reader": "?", "round": start}
    ended = False
    while True:
        ready, _, _ = select.select([process.stdout], [], [], _STUCK)
        line = process.stdout.readline() if ready else ""
        if not line:
            break
        said = json.loads(line)
        at |= said
        if "what" in said:
            known = any(
                one.reader == said["reader"] and one.what[:_ALIKE] == said["what"][:_ALIKE] for one in done.found
            )
            kept = "" if known else _keep(corpus, said["reader"], Path(said["file"]))
            done.found.append(Finding(said["reader"], said["what"], kept))
        done.read.update(said.get("read", {}))
        done.refused.update(said.get("refused", {}))
        ended = ended or "end" in said
    stuck = process.poll() is None and not ended and bool(not ready)
    process.kill()
    _, errors = process.communicate()
    if not ended:
        what = "hang" if stuck else f"crash ({process.returncode}) {errors[-300:]}"
        name = READERS[at["reader"]].name if at["reader"] in READERS else ""
        kept = _keep(corpus, at["reader"], scratch / at["reader"] / name)
        done.found.append(Finding(at["reader"], what, kept))
    return ended, at["round"] + 1


def _keep(corpus: Path, reader: str, path: Path) -> str:
    """Put a file that broke something into the corpus, unless it is large or of the corpus already."""
    if not path.is_file() or path.stat().st_size > _LARGEST:
        return ""
    content = path.read_bytes()
    folder = corpus / reader
    if any(other.read_bytes() == content for other in folder.glob("*")):
        return ""
    kept = folder / f"found-{hashlib.sha256(content).hexdigest()[:8]}{path.suffix}"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(content)
    return str(kept)


class _Slow(BaseException):
    """One file took too long; no reader catches this."""


def _work(corpus: Path, seed: int, start: int, seconds: float, rounds: float, scratch: Path, names: list[str]) -> None:
    """In the process: read every file of the corpus, then damaged ones in rounds until time is up or all are done."""
    logging.disable()  # nobody reads what would be told about each file, and a full pipe would wait for ever
    readers = {name: READERS[name] for name in names}
    files = {name: sorted(path for path in (corpus / name).glob("*") if path.is_file()) for name in names}
    for name, reader in readers.items():
        (scratch / name).mkdir(exist_ok=True)
        reader.beside(scratch / name)
    _limit_memory()
    until = time.monotonic() + seconds
    if start == 0:
        for name, reader in readers.items():
            _say(reader=name, round=0)
            _round(name, reader, [path.read_bytes() for path in files[name]], scratch)
    turn = start
    while time.monotonic() < until and turn < rounds:
        turn += 1
        name = names[turn % len(names)]
        _say(reader=name, round=turn)
        random_ = random.Random(f"{seed} {turn}")
        contents = [path.read_bytes() for path in files[name]]
        damaged = [random_.choice(readers[name].mutate)(random_, random_.choice(contents)) for _ in range(_ROUND)]
        _round(name, readers[name], damaged, scratch)
    _say(end=True)


def _round(name: str, reader: Reader, contents: list[bytes], scratch: Path) -> None:
    refused = 0
    for content in contents:
        path = scratch / name / reader.name
        path.write_bytes(content)
        what, was_refused = _tried(reader, path)
        refused += was_refused
        if what:
            path.write_bytes(content)  # a lease is taken over
            _say(reader=name, what=what, file=str(path))
    _say(read={name: len(contents)}, refused={name: refused})


def _tried(reader: Reader, path: Path) -> tuple[str, bool]:
    """What is wrong with how a file was read, if anything is; and whether it was refused."""
    import traceback

    from bitplan.core.errors import BitplanError

    before, begun = _peak(), time.monotonic()
    refused, what = False, ""
    signal.setitimer(signal.ITIMER_REAL, _SLOW)
    try:
        reader.read(path)
    except BitplanError as error:
        refused, said = True, str(error)
        if path.name not in said and path.parent.name not in said:
            what = f"names no file: {said[:200]}"
    except _Slow:
        what = "hang"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if "/bitplan/" in frame.filename]
        where = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else place.name
        what = f"{type(error).__name__} at {where}: {str(error)[:100]!r}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    grown = _peak() - before
    if grown > _GROWTH:
        what = what or f"took {grown >> 10} MB"
    if time.monotonic() - begun > _SLOW / 2:
        what = what or "slow"
    return what, refused


def _peak() -> int:
    """The most memory that this process has held, in kB; getrusage would count what its parent held before it."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def _limit_memory() -> None:
    import resource

    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + _MEMORY, -1))

    def ring(*_: Any) -> None:
        raise _Slow

    signal.signal(signal.SIGALRM, ring)


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    corpus_, seed_, start_, seconds_, rounds_, scratch_, names_ = sys.argv[1:]
    limits = float(seconds_), float(rounds_)
    _work(Path(corpus_), int(seed_), int(start_), *limits, Path(scratch_), names_.split(","))
