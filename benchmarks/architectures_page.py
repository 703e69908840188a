"""What came of looking at architectures, as a page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from bitplan.core.record import Record
from bitplan.store.files import write_text


class Examined(Record):
    """What was found of one architecture; `problem` says at which step it failed, and is empty where it did not.

    `handed` counts layers that are not simply called by their own module, `left_alone` those that stay float.
    """

    source: str
    name: str
    problem: str = ""
    seconds: float = 0.0
    parameters: int = 0
    size: str = ""
    layers: int = 0
    products: int = 0
    handed: int = 0
    left_alone: int = 0
    proven: int | None = None


_TITLES = {
    "timm": "timm",
    "torchvision": "torchvision: classifiers, segmenters, video, optical flow, and the backbones of its detectors",
    "transformers": "transformers, in small sizes",
}


def write_page(path: Path, outcomes: list[Examined]) -> None:
    """Write what was found as Markdown: how many of each library, what failed and why, and every name."""
    parts = [_INTRODUCTION, _summary(outcomes), _failures(outcomes), _traced_only(outcomes)]
    parts += [_names(source, outcomes) for source in dict.fromkeys(one.source for one in outcomes)]
    write_text(path, "\n\n".join(part for part in parts if part) + "\n")


_INTRODUCTION = """# Architectures

Every name in this page was built with random weights and looked at by one command, which goes on where it was when it
is started again:

```
python -m benchmarks.architectures --page docs/architectures.md
```

Each network is **traced** from shapes; **quantized**, every layer at 4 bits (first, last and narrow ones, embeddings
and products of activations too); every layer of the plan is **proven** to be multiplied as planned, and none in float
(`bitplan.prove` counts the multiplications); and a **training step** gives a finite loss and finite gradients. Images
are the smallest of a list of sizes that the network takes (timm's networks of a fixed size are built for smaller images
where they can be). This says that networks work, and nothing about how accurate they are at 4 bits."""


def _summary(outcomes: list[Examined]) -> str:
    titles = ("", "names", "all four", "only traced", "fail", "layers", "products of activations", "not called plainly")
    rows = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for source in dict.fromkeys(one.source for one in outcomes):
        own = [one for one in outcomes if one.source == source]
        failed, only = sum(bool(one.problem) for one in own), sum(_is_only_traced(one) for one in own)
        good = len(own) - failed - only
        counts = (sum(one.layers for one in own), sum(one.products for one in own), sum(one.handed for one in own))
        shown = " | ".join(f"{count:,}" for count in counts)
        share = f"{good} ({100 * good / max(1, len(own) - only):.1f} %)"
        rows.append(f"| {_TITLES[source]} | {len(own)} | {share} | {only} | {failed} | {shown} |")
    return "\n".join(rows)


def _failures(outcomes: list[Examined]) -> str:
    failed = [one for one in outcomes if one.problem]
    if not failed:
        return "## What fails\n\nNothing."
    by_reason = Counter(one.problem for one in failed)
    rows = ["## What fails", "", "| architecture | why |", "|---|---|"]
    for reason, _ in by_reason.most_common():
        named = ", ".join(f"{one.source}/{one.name}" for one in failed if one.problem == reason)
        rows.append(f"| {named} | {reason.replace('|', '/')} |")
    return "\n".join(rows)


def _traced_only(outcomes: list[Examined]) -> str:
    only = [one for one in outcomes if _is_only_traced(one)]
    if not only:
        return ""
    listed = ", ".join(f"{one.name} ({one.parameters / 1e9:.1f} B)" for one in only)
    return f"## More than a billion parameters: traced only\n\n{listed}."


def _names(source: str, outcomes: list[Examined]) -> str:
    good = [one for one in outcomes if one.source == source and not one.problem and not _is_only_traced(one)]
    rows = [f"| {one.name} | {one.parameters / 1e6:.1f} | {one.size} | {one.layers} | {one.proven} |" for one in good]
    head = "| name | million parameters | input | layers | proven |\n|---|---|---|---|---|"
    title = f"<details><summary>{_TITLES[source]}: {len(good)} names</summary>"
    return "\n".join([title, "", head, *rows, "", "</details>"])


def _is_only_traced(one: Examined) -> bool:
    return not one.problem and one.proven is None
