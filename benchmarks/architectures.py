"""Every architecture of timm and torchvision and many of transformers: traced, quantized, proven, one backward pass.

python -m benchmarks.architectures [timm | torchvision | transformers | PATTERN …] [--folder DIR] [--workers N]
                                   [--page docs/architectures.md]

Outcomes are files in the folder: started again, it goes on where it was. Of each network, built with random weights,
every layer is planned at w4a4, first, last and narrow ones too; `bitplan.prove` counts that each of them is multiplied
as planned, and a training step must give finite gradients.
"""

from __future__ import annotations

import argparse
import fnmatch
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bitplan
from benchmarks.catalogue import Candidate, candidates, names
from bitplan.core.record import Record
from bitplan.forward.operations import tensors_in
from bitplan.forward.shadow import arguments_of
from bitplan.quant.convert import quantizers_of
from bitplan.quant.proof import take_proof_off_
from bitplan.store.engines import Failure, Local
from bitplan.store.files import write_text
from bitplan.store.jobs import run_jobs
from bitplan.store.record_store import RecordStore

LIMIT = 1_000_000_000  # parameters: above, a network is only traced
INPUTS = 12  # sizes that are tried where training fails
ALL_LAYERS = bitplan.Rules(first=None, last=None, narrow=0, embeddings=None)


class Architecture(Record):
    """A job: one architecture by its name."""

    source: str
    name: str


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


def main() -> None:
    """Look at what was asked for, print each as it is done, and write the page."""
    options = _arguments()
    jobs = [Architecture(source=source, name=name) for source, name in _chosen(options.which)]
    shelf = RecordStore.at(options.folder).holding(Examined)
    done = len(shelf.ids() & {job.id for job in jobs})
    print(f"{len(jobs)} architectures, {done} of them done")
    found: list[Examined] = []
    for job, outcome in run_jobs(Work(), jobs, shelf=shelf, engine=Local(workers=options.workers, retries=0)):
        if isinstance(outcome, Failure):  # its worker died: not kept, so the next call tries again
            problem = f"{outcome.error}, most likely for want of memory"
            outcome = Examined(source=job.source, name=job.name, problem=problem)
        found.append(outcome)
        if outcome.problem:
            print(f"{len(found)}/{len(jobs)} {outcome.source}/{outcome.name}: {outcome.problem}", flush=True)
    good = sum(not outcome.problem for outcome in found)
    print(f"{good} of {len(found)} ({100 * good / len(found):.1f} %)")
    if options.page:
        write_page(options.page, sorted(found, key=lambda one: (one.source, one.name)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("which", nargs="*", default=[], help="a library, or patterns of names; all without")
    parser.add_argument("--folder", type=Path, default=Path("runs/architectures"), help="where outcomes are kept")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--page", type=Path, help="where to write the table")
    return parser.parse_args()


def _chosen(which: list[str]) -> Iterator[tuple[str, str]]:
    """Sources and names that were asked for, in the order of the libraries."""
    there = names()
    for source, known in there.items():
        for name in known:
            if not which or source in which or any(fnmatch.fnmatch(name, pattern) for pattern in which):
                yield source, name


class Work:
    """Looks at one architecture."""

    def __call__(self, job: Architecture) -> Examined:
        """Whatever goes wrong is the outcome, by the step at which it did."""
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        torch.manual_seed(0)
        self.facts: dict[str, Any] = {}
        self.step = "cannot be built or traced"
        start = time.perf_counter()
        try:
            self._examine(job)
            problem = ""
        except Exception as error:
            line = next(iter(str(error).splitlines()), "")
            problem = f"{self.step}: {type(error).__name__}: {line[:160]}"
        seconds = time.perf_counter() - start
        return Examined(source=job.source, name=job.name, problem=problem, seconds=seconds, **self.facts)

    def _examine(self, job: Architecture) -> None:
        """Take the smallest input; a larger one if training needs it, as the auxiliary head of an Inception does."""
        for tried, (candidate, graph) in enumerate(self._traced(job), start=1):
            if self.facts["parameters"] > LIMIT:
                return
            try:
                self._quantized(candidate, graph)
                return
            except RuntimeError:
                if self.step != "does not train" or tried == INPUTS:
                    raise

    def _traced(self, job: Architecture) -> Iterator[tuple[Candidate, bitplan.Graph]]:
        """Each candidate that can be traced, built without weights; the last one's error if none can."""
        error: Exception | None = LookupError("there is no way to build it")
        for candidate in candidates(job.source, job.name):
            try:
                model = candidate.build() if candidate.values else _weightless(candidate)
                graph = bitplan.trace(
                    model.eval(), candidate.example, rules=ALL_LAYERS, name=job.name, values=candidate.values
                )
            except Exception as what:
                error = error and what
                continue
            error = None
            self.facts |= {
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "size": candidate.size,
                "layers": len(graph.layers),
                "products": sum(not layer.weights for layer in graph.layers),
                "handed": len(graph.uses or {}),
            }
            yield candidate, graph
        if error is not None:
            raise error

    def _quantized(self, candidate: Candidate, graph: bitplan.Graph) -> None:
        self.step = "cannot be quantized"
        plan = bitplan.Plan.uniform(graph, "w4a4")
        alone = [layer.name for layer in graph.layers if plan.precisions[layer.name].left_alone]
        self.facts["left_alone"] = len(alone)
        model = bitplan.quantize(candidate.build().float(), plan)
        self.step = "not proven"
        proof = bitplan.prove(model, candidate.example)
        proof.check()
        self.facts["proven"] = sum(count > 0 for count in proof.quantized.values())
        if self.facts["proven"] + len(alone) != len(graph.layers):
            raise AssertionError(f"{len(graph.layers)} layers, {self.facts['proven']} of them proven")
        self.step = "does not train"
        take_proof_off_(model)  # it has one
        _train_once(model, candidate.example)


def _train_once(model: nn.Module, example: Any) -> None:
    """One forward and backward pass; all that is learned must have a gradient, and each must be finite."""
    args, kwargs = arguments_of(example)
    output = model.train()(*args, **kwargs)
    floats = [tensor for tensor in _tensors(output) if tensor.is_floating_point() and tensor.requires_grad]
    loss = torch.stack([tensor.float().square().mean() for tensor in floats]).sum()
    if not loss.isfinite():
        raise FloatingPointError("the loss is not finite")
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            raise FloatingPointError(f"the gradient of {name} is not finite")
    quantizers = [one for both in quantizers_of(model).values() for one in (both.weight, *both.inputs) if one]
    if not any(one.step.grad is not None for one in quantizers):
        raise AssertionError("no step has a gradient")


def _tensors(output: Any) -> list[Tensor]:
    """Every tensor of what a network gives, also of transformers' outputs, which are mappings."""
    return tensors_in(dict(output) if hasattr(output, "keys") else output)


def _weightless(candidate: Candidate) -> nn.Module:
    try:
        with torch.device("meta"):
            return candidate.build()
    except (NotImplementedError, RuntimeError):  # it reads numbers while it is built
        return candidate.build()


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
    rows = ["| | names | all four | only traced | fail | layers | products of activations | not called plainly |"]
    rows.append("|" + "---|" * 8)
    for source in dict.fromkeys(one.source for one in outcomes):
        own = [one for one in outcomes if one.source == source]
        failed, only = sum(bool(one.problem) for one in own), sum(_is_only_traced(one) for one in own)
        good = len(own) - failed - only
        share = f"{good} ({100 * good / max(1, len(own) - only):.1f} %)"
        counts = (sum(one.layers for one in own), sum(one.products for one in own), sum(one.handed for one in own))
        cells = " | ".join(f"{count:,}" for count in counts)
        rows.append(f"| {source} | {len(own)} | {share} | {only} | {failed} | {cells} |")
    return "\n".join(rows)


def _failures(outcomes: list[Examined]) -> str:
    failed = [f"| {one.source}/{one.name} | {one.problem.replace('|', '/')} |" for one in outcomes if one.problem]
    table = ["| architecture | why |", "|---|---|", *failed] if failed else ["Nothing."]
    return "\n".join(["## What fails", "", *table])


def _traced_only(outcomes: list[Examined]) -> str:
    only = ", ".join(f"{one.name} ({one.parameters / 1e9:.1f} B)" for one in outcomes if _is_only_traced(one))
    return only and f"## More than a billion parameters: traced only\n\n{only}."


def _names(source: str, outcomes: list[Examined]) -> str:
    good = [one for one in outcomes if one.source == source and one.proven is not None and not one.problem]
    rows = [f"| {one.name} | {one.parameters / 1e6:.1f} | {one.size} | {one.layers} | {one.proven} |" for one in good]
    head = "| name | million parameters | input | layers | proven |\n|---|---|---|---|---|"
    title = f"<details><summary>{source}: {len(good)} names</summary>"
    return "\n".join([title, "", head, *rows, "", "</details>"])


def _is_only_traced(one: Examined) -> bool:
    return not one.problem and one.proven is None


if __name__ == "__main__":
    sys.exit(main())
