"""Memory that one step frees and the next one takes again: kept by the process in between.

The usual allocator of Linux gives large blocks back to the system at once, and the system hands them out again page by
page, each filled with zeros: 3 to 17 % of a training step of a CNN on a CPU.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, as in malloc.h
_KEPT = 1 << 30  # bytes at the end of the heap
_LARGEST = 32 << 20  # what is larger the allocator takes from the system all the same


def keep_freed_memory() -> bool:
    """Have this process keep up to 1 GB of what it frees, in blocks of up to 32 MB; whether its allocator can.

    It holds for all of the process, so that only processes of bitplan's own ask for it unasked. In a script of yours
    that trains or runs quantized networks on a CPU, call it first: a step of a CNN takes 3 to 17 % less. It is of use
    with glibc alone, and changes no result.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another allocator's C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, _KEPT))
