"""Where a verb writes, looked at before it begins: through links, and never over what is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitplan.core.errors import InputError
from bitplan.core.records import ABOUT, ENDINGS
from bitplan.store.files import clear_left, is_below, is_same, refuse_no_file, through_links
from bitplan.store.run_folder import RunFolder


def checked(output: Path, others: list[Any], *, to_folder: bool) -> Path:
    """The file or folder that an output names, if it may be written beside the others that were typed."""
    _refuse_own_source(output, others)
    written = through_links(output)
    if not to_folder:
        refuse_no_file(written)
    clear_left(written.parent, written.name)
    return written


def _refuse_own_source(output: Path, others: list[Any]) -> None:
    """Refuse an output that is, holds, or is a part of what was typed beside it, by whatever name; or a run's own."""
    run = RunFolder.owning(output)
    if run is not None:
        raise InputError(f"{output} is among the files that the run {run.path} keeps itself: write to another name")
    typed = [one for value in others for one in (value if isinstance(value, list | tuple) else (value,))]
    for one in typed:
        if isinstance(one, str | Path) and str(one):
            source = Path(one)
            said = f"{output} is also what is read ({one}), and would be replaced: write to another name"
            if is_same(source, output) or _is_part(output, source):
                raise InputError(said)
            if (output / ABOUT).is_file() and is_below(source, output):
                raise InputError(f"{output} holds what is read ({one}), and would be replaced: write to another name")


def _is_part(output: Path, source: Path) -> bool:
    """Whether a file is among those that a folder of weights is read from."""
    read = output.name in (ABOUT, "config.json") or output.name.endswith((*ENDINGS, ".index.json"))
    return read and output.is_file() and source.is_dir() and is_below(output, source)
