"""A reader of runs that shares nothing with bitplan's: plain JSON and hashes, of every file, against a sound run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_PASSING = {"seconds", "device", "versions", "checksum"}  # what differs between two runs of the same
_BY_ID = {"trials", "failures", "plans", "estimates", "trained", "networks", "jobs"}
_ONCE = ("trials", "trained", "estimates", "jobs", "starts", "networks")
"""What is finished once it is there, and must stay."""


@dataclass(frozen=True)
class Look:
    """What was found in a run: every finished file with what it says, and what is wrong with files."""

    finished: dict[str, str]
    wrong: dict[str, str]


def table(run: Path) -> dict[str, tuple[float, str, str]]:
    """The results of a run by trial: score, plan, training."""
    found = {}
    for path in sorted((run / "trials").glob("[!.]*.json")):
        content = json.loads(path.read_text())
        found[path.stem] = (content["score"], content["plan"], content["training"])
    return found


def look(run: Path, sound: Path) -> Look:
    """Read every file that has its name; temporary ones, leases and what was set aside have none."""
    finished, wrong = {}, {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        part = name.split("/")[0]
        hidden = any(piece.startswith(".") for piece in name.split("/"))
        if hidden or ".damaged" in name or part in ("leases", "running") or not path.is_file():
            continue
        try:
            told = _json(path, part) if path.suffix == ".json" else _tensors(path)
        except (ValueError, OSError, KeyError, TypeError) as error:
            wrong[name] = f"{type(error).__name__}: {error}"
            continue
        if part in _ONCE:
            finished[name] = told
        lasting = part in _ONCE or part in ("plans", "gains")  # an agenda grows
        if lasting and (sound / name).is_file() and told != _told(sound / name, part):
            wrong[name] = "it says something else than in a run that nobody disturbed"
    return Look(finished, wrong)


@cache
def _told(path: Path, part: str) -> str:
    return _json(path, part) if path.suffix == ".json" else _tensors(path)


def _json(path: Path, part: str) -> str:
    """What a record says, without what differs between two runs of the same; its checksum and owner must be right."""
    text = path.read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    checked = "".join(text.partition(f'{content["checksum"]}"')[2].split())
    if content["checksum"] != hashlib.sha256(checked.encode()).hexdigest()[:32]:
        raise ValueError("its checksum is of something else")
    owner = path.parent.name if path.name == "checkpoint.json" else path.stem
    if (part in _BY_ID or path.name == "checkpoint.json") and content["of"] != owner:
        raise ValueError(f"it belongs to {content['of']}")
    return json.dumps({key: value for key, value in content.items() if key not in _PASSING}, sort_keys=True)


def _tensors(path: Path) -> str:
    """The hash of a checkpoint's tensors, which must be the one that the record beside them has."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if json.loads((path.parent / "checkpoint.json").read_text())["sha256"] != found:
        raise ValueError("its tensors are not those that were written")
    return found
