"""Work as it is sent to another process, with what that process must do before it can unpickle it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

BEFORE_WORK: list[Callable[[], object]] = []
"""What this process had to do itself before a library could be imported; functions that have a name to import."""


def pack_payload(work: Any, dumps: Callable[[Any], bytes] = pickle.dumps) -> bytes:
    """Work for another process of ours."""
    return dumps((tuple(BEFORE_WORK), dumps(work)))


def unpack_payload(sent: bytes) -> Any:
    """The work, in the process that it was sent to."""
    before, work = pickle.loads(sent)  # from our own driver
    for prepare in before:
        prepare()
    return pickle.loads(work)
