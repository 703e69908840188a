"""What every method says that it spent, beside what was seen to run: passes forward, passes back, labels, trainings."""

from dataclasses import dataclass, replace

import pytest
import torch
from toys import RECIPE, Stripes, quantized

import bitplan
from bitplan.core.record import Record
from bitplan.core.records import Gains
from bitplan.core.registry import CHOOSERS, GAINS
from bitplan.core.spend import Spend, charge, meter_spend, pause_charging
from bitplan.core.trials import Recipe
from bitplan.gains.base import Context, Gain, LayerGains
from bitplan.gains.hawq import Hawq
from bitplan.gains.jobs import MeasuredWork
from bitplan.store.engines import Local
from bitplan.tune.loop import finetune_

SEEN = {"forwards": 0, "backwards": 0, "labels": 0}
TRIED = 4  # samples that are run before work starts, to see that the task fits: not charged
N, G, CHOICES = 64, 4, "w2a2,w3a3,w4a4"
SHORT = Recipe(steps=3, batch_size=16, lr=0.01)


@dataclass(frozen=True)
class Watched(Stripes):
    """Counts the samples that run forward, those whose gradient comes back, and who looks at labels."""

    name = "watched"

    def forward(self, model, batch):
        outputs = super().forward(model, batch)
        SEEN["forwards"] += len(batch[0])
        if outputs.requires_grad:
            outputs.register_hook(lambda _: SEEN.update(backwards=SEEN["backwards"] + len(batch[0])))
        return outputs

    def loss(self, outputs, batch):
        SEEN["labels"] += 1
        return super().loss(outputs, batch)


@pytest.fixture(scope="module")
def start():
    torch.set_num_threads(1)
    return quantized(Stripes(), train=False)


def spent(start, name, recipe=SHORT, store=None, engine=None, **options):
    SEEN.update(dict.fromkeys(SEEN, 0))
    context = Context(task=Watched(samples=128), recipe=recipe, store=store, engine=engine)
    return bitplan.estimate(name, *start, choices=CHOICES, context=context, **options)


BY_NAME = {
    "drift": ({"samples": N}, Spend(N * (1 + G * 2), 0, evaluations=G * 2)),
    "drop": ({"samples": N}, Spend(N * (1 + G * 2), 0, evaluations=1 + G * 2, labels=True)),
    "fisher": ({"samples": N, "part": 16}, Spend(N, N)),
    "ompq": ({"samples": 32}, Spend(32)),
    "imprint": ({"samples": N, "batch_size": 16}, Spend(N, labels=True)),
    "adaptive": ({"samples": N, "levels": 3}, Spend(N * G * 5, evaluations=G * 5, labels=True)),
    "alps": ({"steps": 3}, Spend(48 * 8, 48 * 8, trainings=8, evaluations=8, labels=True)),
    "regression": ({"steps": 3, "networks": 3, "per_level": 1, "by": "loss", "held_out": 0.0},
                   Spend(48 * 3, 48 * 3, trainings=3, evaluations=3, labels=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in BY_NAME if name in CHOOSERS])  # some are plugins'
def test_what_is_said_is_what_ran(start, name):
    options, expected = BY_NAME[name]
    said = spent(start, name, **options).spend
    assert said == expected
    looks = 16 * 8 * 2 * said.trainings  # how training does, at its beginning and end: at most, and nobody's choosing
    assert said.forwards <= SEEN["forwards"] <= said.forwards + TRIED + looks
    assert SEEN["backwards"] == said.backwards


def test_labels_count_where_they_were_looked_at(start):
    assert spent(start, "fisher", samples=16, part=16).spend.labels is False
    assert SEEN["labels"] == 0
    assert spent(start, "fisher", samples=16, part=16, labels="task").spend.labels is True
    assert SEEN["labels"] == 16


def test_hessian_products_are_two_passes_back(start):
    """A round of ten probes shares one gradient: three passes of each sample, and four for each probe."""
    said = spent(start, Hawq(probes=12, min_probes=12, samples=N, batch_size=32)).spend
    assert said == Spend(2 * N, 2 * N + 2 * N * 12, labels=True)
    assert said.forwards == SEEN["forwards"]
    ones = spent(start, "hawq_v1", iterations=1, tolerance=0.0, samples=N).spend
    assert ones == Spend(N, N + 2 * N * 5, labels=True), "five layers in four groups"


def test_the_oracle_sees_the_test_split_and_says_so(start):
    said = spent(start, "regression", steps=2, networks=3, per_level=1, held_out=0.0).spend
    assert said.tested
    assert said.forwards == 3 * (2 * 16 + Watched(samples=128).size("test"))
    assert not spent(start, "alps", steps=2).spend.tested


@pytest.mark.parametrize("name", ["uniform", "first_to_last", "random", "eagl"])
def test_who_runs_nothing_spends_nothing(start, name):
    assert spent(start, name).spend == Spend()
    assert spent(start, name).epochs == 0


def test_teachers_and_sharp_steps_are_passes_too(start):
    model, _ = quantized(Stripes(), train=False)
    teacher, _ = quantized(Stripes(), train=False)
    for recipe, passes in (
        (SHORT, (48, 48)),
        (replace_recipe(distill=0.5), (96, 48)),
        (replace_recipe(sharpness=0.1), (96, 96)),
    ):
        SEEN.update(dict.fromkeys(SEEN, 0))
        with meter_spend() as meter:
            finetune_(model, Watched(samples=128), recipe, teacher=teacher if recipe.distills else None)
        assert (meter.spent.forwards, meter.spent.backwards) == passes
        assert meter.spent.labels
    with meter_spend() as meter:
        finetune_(model, Watched(samples=128), replace_recipe(distill=1.0), teacher=teacher)
    assert meter.spent.labels is False


def replace_recipe(**changes):
    return SHORT.model_copy(update=changes)


def test_what_was_found_in_a_store_or_done_by_workers_is_charged_alike(start, tmp_path):
    plain = spent(start, "drop", samples=N)
    first = spent(start, "drop", samples=N, store=tmp_path)
    again = spent(start, "drop", samples=N, store=tmp_path)
    assert SEEN["forwards"] == TRIED, "all was in the store"
    assert plain.spend == first.spend == again.spend
    assert plain.id == again.id


def test_workers_tell_what_they_spent(start):
    engine = Local(workers=1)
    context = Context(task=Stripes(samples=128), engine=engine)
    gains = bitplan.estimate("drop", *start, context=context, choices="w2a2,w4a4", samples=N)
    assert gains.spend == Spend(N * (1 + G), evaluations=1 + G, labels=True)


def test_outcomes_without_it_leave_it_unsaid(start, tmp_path):
    spent(start, "drop", samples=N, store=tmp_path)
    for path in tmp_path.rglob("*.json"):
        record = Record.from_json(path.read_text())
        bare = record.model_copy(update={"spend": None})
        assert bare.id == record.id
        path.write_text(bare.to_json(of=path.stem))
    gains = spent(start, "drop", samples=N, store=tmp_path)
    assert gains.spend is None
    assert gains.epochs is None


def test_ids_do_not_tell_it(start):
    gains = spent(start, "drift", samples=16)
    bare = gains.model_copy(update={"spend": None, "samples_per_epoch": None})
    assert bare.id == gains.id
    assert Gains.from_json(bare.to_json()) == bare
    assert Gains.from_json(gains.to_json()).spend == gains.spend
    assert gains.epochs == gains.spend.passes / (3 * 128)


@dataclass(frozen=True)
class Silent(Gain):
    """Says nothing of itself, and runs nothing that charges."""

    def layer_gains(self, model, graph, choices, context):
        return LayerGains({layer.name: (0.0, 1.0, 2.0) for group in graph.selectable for layer in group.layers})


@dataclass(frozen=True)
class Telling(Silent):
    """Says what it spent."""

    def layer_gains(self, model, graph, choices, context):
        found = super().layer_gains(model, graph, choices, context)
        return replace(found, spend=Spend(7, labels=True))


@dataclass(frozen=True)
class Hiding(Silent):
    """Says that it runs data, and charges nothing."""

    about = GAINS.get("drift").about


def test_who_does_not_say_is_not_guessed_at(start, tmp_path):
    assert spent(start, Silent()).spend is None
    assert spent(start, Hiding()).spend is None
    assert spent(start, Telling()).spend == Spend(7, labels=True)
    table = tmp_path / "numbers.csv"
    rows = [f"{group.name},1,2,3" for group in start[1].selectable]
    table.write_text("\n".join(["layer,w2a2,w3a3,w4a4", *rows]))
    assert spent(start, str(table)).spend is None


def test_meters_do_not_mix():
    with meter_spend() as outer:
        charge(Spend(1))
        with meter_spend() as inner, pause_charging():
            charge(Spend(100))
        with meter_spend() as inner:
            charge(Spend(2, labels=None))
    charge(Spend(1000))
    assert (outer.spent, inner.spent) == (Spend(1), Spend(2, labels=None))
    assert (inner.spent + Spend(labels=True)).labels is True
    assert (inner.spent + Spend()).labels is None
    outcome = MeasuredWork(lambda job: charge(Spend(3)) or {"losses": [1.0]})(RECIPE)
    assert (outcome.numbers, outcome.spend) == ({"losses": (1.0,)}, Spend(3))


def test_the_record_shows_it(start):
    assert str(spent(start, "drop", samples=N)).endswith(f"{N * 9:,} passes (1.5 epochs), labels")
    assert "passes" not in str(spent(start, "uniform"))
