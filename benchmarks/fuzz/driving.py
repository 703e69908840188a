"""The process that reads damaged files, and the one that watches it: a crash or a hang is a finding like any other."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import random
import resource
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.fuzz.readers import READERS, Reader
from bitplan.core.errors import BitplanError

CORPUS = Path(__file__).parents[2] / "tests" / "fuzz" / "corpus"
_SLOW = 10  # CPU seconds that one file may take
_STUCK = 300  # seconds without an answer from the process, on a busy machine
_MEMORY = 3 << 30  # bytes of addresses that it may take beyond what it has when it begins
_GROWTH = 600 << 10  # kB of memory that one small file may take
_LARGEST = 20_000  # bytes of a finding that is kept
_ALIKE = 40  # equal characters at the beginning of two findings that are taken for one
_ROUND = 20  # damaged files of one reader before the next has its turn


@dataclass(frozen=True)
class Finding:
    """A file that broke a reader, and how."""

    reader: str
    what: str
    content: bytes = b""


@dataclass
class Done:
    """How many files each reader has read, how many it refused, and the findings."""

    read: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    found: list[Finding] = field(default_factory=list)


def drive(readers: list[str], corpus: Path, *, seed: int, seconds: float = math.inf, rounds: float = math.inf) -> Done:
    """Read every file of the corpus once, then damaged ones for so long, or so many rounds."""
    done, until = Done(), time.monotonic() + seconds
    process = None
    with TemporaryDirectory() as scratch:
        for turn, (name, contents) in enumerate(_turns(readers, corpus, seed), start=-len(readers)):
            if turn >= rounds or (turn >= 0 and time.monotonic() > until):
                break
            if process is None:
                here, there = get_context("spawn").Pipe()
                process = get_context("spawn").Process(target=_serve, args=(there, scratch), daemon=True)
                process.start()
                there.close()
            here.send((name, contents))
            is_stuck = not here.poll(_STUCK)
            try:
                refused, findings = (0, [Finding(name, "hang")]) if is_stuck else here.recv()
            except EOFError:
                process.join()
                refused, findings = 0, [Finding(name, f"crash ({process.exitcode})", _last_file(name, scratch))]
            if is_stuck or not process.is_alive():
                process.kill()
                process = None
            done.read[name] += len(contents)
            done.refused[name] += refused
            for finding in findings:
                if all((one.reader, one.what[:_ALIKE]) != (name, finding.what[:_ALIKE]) for one in done.found):
                    _keep(corpus, finding)
                done.found.append(finding)
        if process is not None:
            process.kill()
    return done


def _turns(readers: list[str], corpus: Path, seed: int) -> Iterator[tuple[str, list[bytes]]]:
    """Yield the files of the corpus by reader, then damaged ones without end: the same on every machine."""
    files = {
        name: [path.read_bytes() for path in sorted((corpus / name).glob("*")) if path.is_file()] for name in readers
    }
    yield from files.items()
    for turn in itertools.count(1):
        name = readers[turn % len(readers)]
        draw = random.Random(f"{seed} {turn}")
        yield name, [draw.choice(READERS[name].mutate)(draw, draw.choice(files[name])) for _ in range(_ROUND)]


def _keep(corpus: Path, finding: Finding) -> None:
    """Put a file that broke something into the corpus, unless it is large or of the corpus already."""
    folder, content = corpus / finding.reader, finding.content
    if not content or len(content) > _LARGEST or any(path.read_bytes() == content for path in folder.glob("*")):
        return
    ending = Path(READERS[finding.reader].name).suffix
    (folder / f"found-{hashlib.sha256(content).hexdigest()[:8]}{ending}").write_bytes(content)


def _last_file(name: str, scratch: str) -> bytes:
    path = Path(scratch) / name / READERS[name].name
    return path.read_bytes() if path.is_file() else b""


# --- in the process that reads ---


class _Slow(BaseException):
    """One file took too long; no reader catches this."""


def _serve(connection: Connection, scratch: str) -> None:
    """Read the files that are sent, with limited memory, and answer how many were refused and what broke."""
    logging.disable()
    warnings.simplefilter("ignore")
    for name, reader in READERS.items():
        folder = Path(scratch) / name
        folder.mkdir(exist_ok=True)
        reader.beside(folder)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + _MEMORY, -1))
    signal.signal(signal.SIGPROF, _ring)
    with suppress(EOFError):
        while True:
            name, contents = connection.recv()
            reader, refused, findings = READERS[name], 0, []
            for content in contents:
                path = Path(scratch) / name / reader.name
                path.write_bytes(content)
                what, was_refused = _tried(reader, path)
                refused += was_refused
                findings += [Finding(name, what, content)] if what else []
            connection.send((refused, findings))


def _ring(*_: Any) -> None:
    raise _Slow


def _tried(reader: Reader, path: Path) -> tuple[str, bool]:
    """Return what is wrong with how a file was read, if anything is, and whether it was refused."""
    before, begin = _peak(), time.process_time()
    is_refused, what = False, ""
    signal.setitimer(signal.ITIMER_PROF, _SLOW)
    try:
        reader.read(path)
    except BitplanError as error:
        is_refused, message = True, str(error)
        if path.name not in message and path.parent.name not in message:
            what = f"names no file: {message[:200]}"
    except _Slow:
        what = "hang"
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "/bitplan/" in frame.filename] or frames
        what = f"{type(error).__name__} at {Path(own[-1].filename).name}:{own[-1].lineno}: {str(error)[:100]!r}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    grown = _peak() - before
    if grown > _GROWTH:
        what = what or f"took {grown >> 10} MB"
    if time.process_time() - begin > _SLOW / 2:
        what = what or "slow"
    return what, is_refused


def _peak() -> int:
    """Return the most memory that this process has held, in kB; getrusage would count its parent's as well."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
