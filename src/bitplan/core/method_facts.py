"""What a method looks at, what it costs and where it comes from: what `bitplan list gains` and docs/methods.md say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class About:
    """Of a method with its default options: whether it runs data, looks at labels and trains; its cost and its source.

    `passes` counts passes of one sample through the network, backwards 2: N samples that are looked at, T of an epoch
    of training, G groups, C choices, P plans.
    """

    data: bool = False
    labels: bool = False
    trains: bool = False
    passes: str = "0"
    source: str = ""


def describe_method(method: object) -> About | None:
    """What a method, or its class, says of itself; None where it says nothing."""
    told = getattr(method, "about", None)
    return told if isinstance(told, About) else None
