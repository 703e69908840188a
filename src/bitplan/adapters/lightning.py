"""Lightning: the base class of its callbacks."""

from __future__ import annotations

from typing import Any

from bitplan.adapters import torchvision
from bitplan.adapters.foreign import require


def callback_class() -> Any:
    """What callbacks of Lightning derive from; where it is not installed, what to install."""
    require("lightning", "lightning", "a callback of Lightning")
    if torchvision.installed():
        torchvision.torchvision()  # torchmetrics, which Lightning imports, imports it, and it may need help
    from lightning.pytorch import Callback

    return Callback
