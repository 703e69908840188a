"""Do trained networks answer the same as files and in integers, and how do they score? Float, quantized, exported.

python studies/exported_scores.py DATA [resnet20 …] [--minilm FOLDER] [--work FOLDER] [--steps 1.0] [--threads 1]

The CIFAR-10 ResNet-20 and -44 (public weights), a small PSPNet on CamVid and MiniLM-L6 on a part of SQuAD (trained
here, shortly), each quantized to a mix of w4a4 and w2a4, as usual and with `integer=True`, fine-tuned, exported for
ONNX Runtime and OpenVINO, run by `plugins/integer`, and compared on the whole test split. What the folder WORK has
already is not done again. `--steps` multiplies the length of every training. DATA is the folder of `studies/README.md`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bitplan
from bitplan.plugins.integer import integer

TARGETS = ("onnx", "openvino")
KINDS = {"usual": False, "integer": True}
CHOICES, BUDGET = ("w2a4", "w4a4"), "85%"


@dataclass(frozen=True)
class Subject:
    """A network, its task, where its weights come from, and how long it trains, in float and quantized."""

    model: str
    task: Callable[[argparse.Namespace], bitplan.Task]
    weights: Callable[[argparse.Namespace], Path] | None
    float_recipe: bitplan.Recipe | None
    recipe: bitplan.Recipe
    rules: bitplan.Rules
    fresh: tuple[str, ...] = ()


def cifar(model: str, file: str) -> Subject:
    """A CIFAR ResNet, which has no layer with 128 input features."""
    return Subject(
        model,
        lambda options: bitplan.load_task("cifar10", data=str(options.data / "cifar10")),
        lambda options: options.data / "weights" / file,
        None,
        bitplan.Recipe(steps=150, lr=0.01, distill=1.0, temperature=4.0),
        bitplan.Rules(narrow=0),
    )


def questions(options: argparse.Namespace) -> bitplan.Task:
    """A part of SQuAD that a small network answers some of after minutes."""
    limits = {"tokens": 128, "stride": 48, "questions": 2000, "test_questions": 150}
    return bitplan.load_task("squad", data=str(options.data / "squad"), tokenizer=str(options.minilm), **limits)


ADAM: dict[str, Any] = {"optimizer": "adamw", "lr": 1e-4, "weight_decay": 0.01, "decay_vectors": False}
SUBJECTS = {
    "resnet20": cifar("resnet20", "resnet20-12fca82f.th"),
    "resnet44": cifar("resnet44", "resnet44-014dd654.th"),
    "pspnet": Subject(
        "pspnet_small",
        lambda options: bitplan.load_task("camvid", data=str(options.data / "camvid")),
        None,
        bitplan.Recipe(steps=300, batch_size=4, lr=0.02, weight_decay=5e-5, schedule="poly"),
        bitplan.Recipe(steps=100, batch_size=4, lr=0.01, weight_decay=5e-5, schedule="poly"),
        bitplan.Rules(narrow=33),
    ),
    "minilm": Subject(
        "minilm-l6",
        questions,
        lambda options: options.minilm,
        bitplan.Recipe(steps=150, batch_size=16, schedule="linear", warmup=0.1, **ADAM),
        bitplan.Recipe(steps=60, batch_size=16, schedule="linear", warmup=0.1, distill=1.0, **ADAM),
        bitplan.Rules(),
        ("qa_outputs.*",),
    ),
}


def main() -> None:
    """Train and compare what is missing, and print the table."""
    options = arguments()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    print(
        "| network | kind | | score | equal predictions | begins at a tie | unexplained | passes |\n" + "|---" * 8 + "|"
    )
    for name in options.networks or SUBJECTS:
        floating, task = trained_float(name, options), SUBJECTS[name].task(options)
        record = cached(options.work / f"{name}.json", lambda: timed(floating, task))  # noqa: B023 (called at once)
        print(f"| {name} | float | PyTorch | {record['score']:.2f} | | | | |", flush=True)
        for kind in KINDS:
            path = options.work / f"{name}-{kind}.json"
            rows = cached(path, lambda: compared(name, kind, floating, task, options))  # noqa: B023
            print(f"| {name} | {kind} | PyTorch | {rows['quantized']['score']:.2f} | | | | |")
            for where in ("integer", *TARGETS):
                show(name, kind, where, rows[where])
            faster = record["seconds"] / rows["integer"]["seconds"]
            print(f"{name}, {kind}: evaluate in integers {faster:.2f} × float's speed", flush=True)


def cached(path: Path, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a file holds, computed first where there is none."""
    if not path.exists():
        path.write_text(json.dumps(compute(), indent=1))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def trained_float(name: str, options: argparse.Namespace) -> nn.Module:
    """The float network, with its public weights, or trained here."""
    subject, folder = SUBJECTS[name], options.work / f"{name}-float"
    if folder.exists():
        return bitplan.load_checkpoint(folder)
    torch.manual_seed(0)
    network = bitplan.load_model(subject.model)[0]
    if subject.weights is not None:
        bitplan.load_weights_(network, subject.weights(options), fresh=subject.fresh)
    if subject.float_recipe is not None:
        bitplan.finetune_(network, subject.task(options), scaled(subject.float_recipe, options), seed=0)
    bitplan.save_checkpoint(network.eval(), folder, spec=subject.model)
    return network


def scaled(recipe: bitplan.Recipe, options: argparse.Namespace) -> bitplan.Recipe:
    """A recipe as much longer or shorter as was asked."""
    return recipe.model_copy(update={"steps": max(1, round((recipe.steps or 0) * options.steps))})


def compared(
    name: str, kind: str, floating: nn.Module, task: bitplan.Task, options: argparse.Namespace
) -> dict[str, Any]:
    """The scores of one quantized network in every form, and how many of its answers are equal."""
    model, example = trained(name, kind, floating, task, options), task.example()
    rows: dict[str, Any] = {"quantized": timed(model, task)}
    made = integer(model, example)
    rows["integer"] = timed(made, task) | equal_answers(model, made, task)
    for target in TARGETS:
        path = options.work / f"{name}-{kind}-{target}.onnx"
        bitplan.export(model, path, target, example=example, force=True)
        rows[target] = json.loads(bitplan.verify(path, model, task).to_json())
    return rows


def trained(name: str, kind: str, floating: nn.Module, task: bitplan.Task, options: argparse.Namespace) -> nn.Module:
    """The network of a kind: a mix of 4 and 2 bits that depends on nothing that was trained, calibrated, fine-tuned."""
    subject, folder = SUBJECTS[name], options.work / f"{name}-{kind}"
    if folder.exists():
        return bitplan.load_checkpoint(folder).eval()
    graph = bitplan.trace(floating, task.example(), rules=subject.rules, name=name)
    gains, costs = bitplan.estimate("uniform", None, graph, choices=CHOICES), bitplan.price("memory", graph, CHOICES)
    plan = bitplan.select(graph, gains, costs, budget=BUDGET)
    model = bitplan.quantize(floating, plan, integer=KINDS[kind])
    batches = itertools.islice(task.batches("train", subject.recipe.batch_size, seed=0), 8)
    bitplan.calibrate_(model, batches, forward=task.forward)
    teacher = floating if subject.recipe.distill else None
    bitplan.finetune_(model, task, scaled(subject.recipe, options), teacher=teacher, seed=0)
    bitplan.save_checkpoint(model.eval(), folder, spec=subject.model)
    return model


def timed(model: nn.Module, task: bitplan.Task) -> dict[str, Any]:
    """A score, and the processor's seconds that it took."""
    task.size("test")  # is read now
    start = time.process_time()
    score = bitplan.evaluate(model, task)
    return {"score": score, "seconds": time.process_time() - start}


@torch.no_grad()
def equal_answers(model: nn.Module, other: nn.Module, task: bitplan.Task) -> dict[str, Any]:
    """How many predictions of two networks are equal on the test split."""
    equal = total = 0
    for batch in task.batches("test", 32):
        mine, theirs = (task.logits(task.forward(one, batch)) for one in (model, other))
        for own, found in zip(mine, theirs, strict=True):
            equal += int((own.argmax(1) == found.argmax(1)).sum())
            total += own.argmax(1).numel()
    return {"predictions": total, "predictions_equal": equal}


def show(name: str, kind: str, where: str, row: dict[str, Any]) -> None:
    """A row of the table; only `verify` looks for ties."""
    equal = f"{row['predictions_equal']:,} of {row['predictions']:,}"
    share = 100 * row["predictions_equal"] / row["predictions"]
    title = {"integer": "bitplan.plugins.integer", "onnx": "ONNX Runtime", "openvino": "OpenVINO"}[where]
    ties = f"{row['ties']} | {row['unexplained']} | {passes(row)}" if "ties" in row else " | | "
    print(f"| {name} | {kind} | {title} | {row['score']:.2f} | {equal} ({share:.2f} %) | {ties} |", flush=True)


def passes(row: dict[str, Any]) -> str:
    """What `verify` says of a file."""
    verdict = bitplan.Verdict.from_json(json.dumps(row))
    if verdict.enough and verdict.passed:
        return "yes"
    return f"yes, control {100 * (verdict.control or 0):.2f} %" if verdict.passed else "no"


def arguments() -> argparse.Namespace:
    """What to run, and where the data lies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(SUBJECTS)}; all without")
    parser.add_argument("--minilm", type=Path, default=Path("studies/minilm"))
    parser.add_argument("--work", type=Path, default=Path("exported_scores"))
    parser.add_argument("--steps", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
