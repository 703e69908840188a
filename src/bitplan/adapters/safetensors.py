"""safetensors: tensors in a file that others may read, as any other file of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def write_tensors(tensors: Mapping[str, Tensor], path: Path, header: Mapping[str, str] | None = None) -> None:
    """Write a file; what prevents it is an OSError. safetensors alone gives it to its owner only (mode 0600)."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata=None if header is None else dict(header))
    except SafetensorError as error:
        raise OSError(str(error)) from None
    path.chmod(mode)
