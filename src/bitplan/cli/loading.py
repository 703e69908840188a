"""Python looks for unreachable objects seldom while libraries load.

Of the half a million objects that torch and its compiler make when they are imported none is unreachable; looking
through them again and again took a fifth of `bitplan plan resnet50`. Work that is long finds what is usual.
"""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()
_SELDOM = (1_000_000, 50, 100)  # new objects, and how many looks at the young come to one at the older


def begin_loading() -> None:
    """To be said when a command begins."""
    gc.set_threshold(*_SELDOM)


def end_loading() -> None:
    """To be said before networks run for long: copies of them may be unreachable. What was made until now is old.

    So nobody looks through it at once, and the first look at the old, which short work never gets to, frees what of it
    is unreachable.
    """
    if gc.get_threshold()[0] == _SELDOM[0]:  # Python 3.14 has no third
        gc.freeze()
        gc.unfreeze()  # into the oldest generation
        gc.set_threshold(*_USUAL)
