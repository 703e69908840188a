"""ALPS: what it measures, its jobs that resume, and every way in which it cannot start."""

import copy
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from killed_alps import estimate as estimate_again
from torch import nn
from toys import CHOICES, RECIPE, Pickled, Pixels, Refusing, Spans, Spawned, Stripes, quantized

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.jobs import Job, Outcome
from bitplan.core.precision import parse_choices
from bitplan.core.registry import GAINS
from bitplan.gains.alps import Alps
from bitplan.gains.base import Context
from bitplan.gains.finetuning import Finetune
from bitplan.store.files import load

TASK = Stripes()
STEPS = 6
TRAINING = ["alps", *({"alps_racing"} & {*GAINS}), "regression"]  # one is a plugin's
EVERY = [*TRAINING, "drop"]
BUDGET = {"alps_racing": {"budgets": "70%"}, "drop": {}}


@pytest.fixture(scope="module")
def start():
    torch.set_num_threads(1)
    return quantized(TASK)


def estimate(start, method="alps", *, choices=CHOICES, options=None, **context):
    """The gains, by few steps unless said."""
    setting = Context(**({"task": TASK, "recipe": RECIPE} | context))
    return bitplan.estimate(method, *start, choices=choices, context=setting, **({"steps": STEPS} | (options or {})))


def outcomes(start, folder, choices=CHOICES, **options):
    """What every job in the folder measured, by group and precision."""
    context = Context(task=TASK, recipe=RECIPE)
    jobs = Alps(steps=STEPS, **options).trainings(*start, parse_choices(choices), context).jobs
    return {
        (job.groups[0], str(next(iter(job.layers.values())))): load(folder / f"{job.id}.json", Outcome) for job in jobs
    }


SEEDS = []


@dataclass(frozen=True)
class Recorded(Stripes):
    """Remembers in which order training asked for its data; trying a task and looks at how it does take fewer."""

    def batches(self, split, batch_size, seed=None):
        if batch_size == RECIPE.batch_size:
            SEEDS.append(seed)
        return super().batches(split, batch_size, seed)


def trained_by_hand(model, graph, group, seed):
    """Mean loss of SGD with a cosine, in plain PyTorch, with one group lowered to two bits."""
    plan = bitplan.Plan.uniform(graph, "w4a4")
    lowered = {layer.name: bitplan.Precision.parse("w2a2") for layer in group.layers}
    network = bitplan.quantize(model, plan.model_copy(update={"precisions": plan.precisions | lowered})).train()
    groups = bitplan.parameter_groups(network, lr=RECIPE.lr, weight_decay=RECIPE.weight_decay)
    optimizer = torch.optim.SGD(groups, lr=RECIPE.lr, momentum=RECIPE.momentum)
    losses = []
    for step, (images, labels) in zip(range(STEPS), TASK.batches("train", RECIPE.batch_size, seed=seed), strict=False):
        for one in optimizer.param_groups:
            one["lr"] = RECIPE.lr * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        loss = nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def test_it_agrees_with_a_fine_tuning_of_each_group_written_by_hand(start):
    SEEDS.clear()
    gains = estimate(start, task=Recorded())
    assert len(set(SEEDS)) == 1, "every group sees the same batches"
    assert len(SEEDS) == len(gains.rows) == 4
    losses = {group.name: trained_by_hand(*start, group, SEEDS[0]) for group in start[1].selectable}
    least = min(losses.values())
    expected = {name: loss - least for name, loss in losses.items()}
    assert {name: row[1] for name, row in gains.rows.items()} == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert max(expected.values()) > 1e-3, "there is something to agree on"
    assert gains.counts == {"trainings": 4, "steps": 24, "samples": 384, "samples_per_epoch": 128}


def test_more_choices_add_up_what_each_step_gains(start, tmp_path):
    three = "w2a2,w3a3,w4a4"
    gains = estimate(start, choices=three, store=tmp_path)
    found = outcomes(start, tmp_path, three)
    least = min(outcome.value("mean_loss") for outcome in found.values())
    for name, row in gains.rows.items():
        low, middle = (found[name, precision].value("mean_loss") for precision in ("w2a2", "w3a3"))
        assert row == pytest.approx((0, low - middle, low - least))


@pytest.mark.parametrize("higher", [True, False])
def test_by_score_it_is_the_papers_and_follows_the_direction(start, tmp_path, higher):
    task = copy.copy(TASK)
    object.__setattr__(task, "higher_is_better", higher)
    gains = estimate(start, task=task, store=tmp_path, options={"by": "score"})
    scores = {name: outcome.value("mean_score") for (name, _), outcome in outcomes(start, tmp_path).items()}
    best = max(scores.values()) if higher else min(scores.values())
    expected = {name: (best - score) * (1 if higher else -1) for name, score in scores.items()}
    assert {name: row[1] for name, row in gains.rows.items()} == pytest.approx(expected)


@pytest.mark.parametrize("by", ["loss", "score"])
def test_the_final_value_is_that_of_the_last_tenth_of_the_steps(start, tmp_path, by):
    """The paper's algorithm says final, its text average: the same trainings, looked at otherwise."""
    average = estimate(start, store=tmp_path, options={"by": by})
    final = estimate(start, engine=Refusing(), store=tmp_path, options={"by": by, "final": True})
    found = {name: outcome.value(f"last_{by}") for (name, _), outcome in outcomes(start, tmp_path, by=by).items()}
    sign = 1 if by == "score" else -1
    best = max(sign * value for value in found.values())
    assert {name: row[1] for name, row in final.rows.items()} == pytest.approx(
        {name: best - sign * value for name, value in found.items()}
    )
    assert final.id != average.id
    assert (final.rows != average.rows) == (by == "loss"), "every score is 100 in so easy a task"


def test_a_group_that_recovers_late_ranks_otherwise_by_the_final_value(start, monkeypatch):
    """On average the first group suffers most, at the end the last one does: each option says its own."""
    names = [group.name for group in start[1].selectable]

    def told(work, job):
        place = names.index(job.groups[0])
        scores = {"mean_score": 50.0 + place, "last_score": 90.0 - place}
        return {name: (value,) for name, value in {"mean_loss": 1.0, "steps": 1, "samples": 1, **scores}.items()}

    monkeypatch.setattr(Finetune, "__call__", told)
    by_average = {name: row[1] for name, row in estimate(start, options={"by": "score"}).rows.items()}
    by_end = {name: row[1] for name, row in estimate(start, options={"by": "score", "final": True}).rows.items()}
    assert sorted(by_average, key=by_average.get) == names[::-1]
    assert sorted(by_end, key=by_end.get) == names


def test_two_epochs_are_twice_the_steps_and_other_gains(start):
    """Section 4.1 tried two epochs per layer."""
    one, two = (estimate(start, options={"steps": None, "epochs": epochs}) for epochs in (1, 2))
    assert two.counts["steps"] == 2 * one.counts["steps"]
    assert two.counts["samples"] / two.counts["samples_per_epoch"] == 2 * len(two.rows)
    assert two.rows != one.rows


def test_it_trains_one_stage_even_where_the_first_of_a_recipe_is_as_long(start):
    staged = bitplan.Recipe(epochs=1, batch_size=32, lr=0.02, then={"epochs": 3, "batch_size": 32, "lr": 0.01})
    once = staged.model_copy(update={"then": None})
    gains = [estimate(start, options={"epochs": None, "steps": None}, recipe=recipe) for recipe in (staged, once)]
    assert gains[0].counts == gains[1].counts
    assert gains[0].rows == gains[1].rows


def test_offset_is_the_loss_itself(start, tmp_path):
    gains = estimate(start, store=tmp_path, options={"offset": True})
    losses = {name: outcome.value("mean_loss") for (name, _), outcome in outcomes(start, tmp_path).items()}
    assert {name: row[1] for name, row in gains.rows.items()} == pytest.approx(losses)


def test_seeds_give_standard_errors_and_one_gives_none(start):
    one, three = estimate(start), estimate(start, options={"seeds": 3})
    assert one.errors is None
    assert three.counts["trainings"] == 3 * one.counts["trainings"]
    assert all(row[0] == 0 < row[1] for row in three.errors.values())
    singles = [estimate(start, seed=seed) for seed in range(3)]
    assert len({gains.id for gains in singles}) == 3
    raw = [estimate(start, seed=seed, options={"offset": True}).rows["middle"][1] for seed in range(3)]
    mean = estimate(start, options={"seeds": 3, "offset": True}).rows["middle"][1]
    assert mean == pytest.approx(sum(raw) / 3)


def test_a_fraction_of_an_epoch_anneals_over_its_own_length(start):
    assert estimate(start, options={"steps": None, "epochs": 0.5}).rows == estimate(start, options={"steps": 4}).rows
    assert estimate(start, options={"steps": None}).counts["steps"] == 4 * 8
    assert estimate(start, options={"lr_factor": 0.25}).rows != estimate(start).rows


def test_what_is_in_the_store_is_not_done_again(start, tmp_path, monkeypatch):
    calls = []
    plain = Finetune.__call__
    monkeypatch.setattr(Finetune, "__call__", lambda work, job: (calls.append(job.groups), plain(work, job))[1])
    whole = estimate(start, store=tmp_path)
    assert calls == [("left",), ("middle",), ("wide",), ("last",)]
    files = sorted(tmp_path.iterdir())
    for path in files[:2]:
        path.unlink()
    calls.clear()
    told = []
    again = estimate(start, store=tmp_path, progress=lambda *what: told.append(what))
    assert len(calls) == 2
    assert again.id == whole.id == estimate(start, store=tmp_path).id
    assert [what[:2] for what in told] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert len(calls) == 2
    estimate(start, store=tmp_path, options={"steps": STEPS + 1})
    estimate(start, store=tmp_path, task=Stripes(samples=127))
    estimate(start, store=tmp_path, seed=1)
    assert len(calls) == 2 + 3 * 4, "another recipe, task or seed is another job"


def test_killed_in_the_middle_it_goes_on(tmp_path):
    script = str(Path(__file__).parent / "killed_alps.py")
    with subprocess.Popen([sys.executable, script, str(tmp_path)], stdout=subprocess.PIPE) as process:
        for line in process.stdout:
            if int(line) == 2:
                os.kill(process.pid, signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("[!.]*.json")}
    assert len(before) in (2, 3)
    task = Stripes(slow=0.02)
    resumed = estimate_again(task, tmp_path)
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in before} == before
    assert resumed.id == estimate_again(task).id


def test_it_runs_in_other_processes(start, tmp_path):
    assert estimate(start, engine=Spawned(), store=tmp_path).id == estimate(start).id


@pytest.mark.parametrize("method", EVERY)
def test_its_work_can_be_sent_and_its_outcomes_kept(start, tmp_path, method):
    options = {"samples": 64} if method == "drop" else {"steps": 2} | BUDGET.get(method, {})
    if method == "alps_racing":
        options["rounds"] = 2
    sent, kept, plain, again = (
        bitplan.estimate(
            method, *start, context=Context(task=TASK, recipe=RECIPE, engine=engine, store=store), **options
        )
        for engine, store in ((Pickled(), None), (None, tmp_path), (None, None), (Refusing(), tmp_path))
    )
    assert sent.id == kept.id == plain.id == again.id


def test_it_tells_beforehand_what_it_will_take(start, tmp_path):
    setting = Context(task=TASK, recipe=RECIPE, store=tmp_path)
    method = Alps(steps=STEPS)
    expected = method.trainings(*start, parse_choices(CHOICES), setting).estimate_time()
    assert (expected.jobs, expected.done, expected.steps, expected.samples) == (4, 0, 24, 384)
    assert 0 < expected.seconds < 60
    bitplan.estimate(method, *start, context=setting)
    done = method.trainings(*start, parse_choices(CHOICES), setting).estimate_time()
    assert (done.jobs, done.done, done.steps, done.seconds) == (4, 4, 0, 0)


@dataclass(frozen=True)
class Faulty(Stripes):
    """Training fails where a layer has two bits."""

    layer: str = "middle"

    def forward(self, model, batch):
        low = bitplan.plan_of(model).precisions[self.layer].weight_bits == 2
        return super().forward(model, batch) * (math.nan if low else 1)


def test_a_failing_job_names_its_group_and_the_others_are_kept(start, tmp_path):
    with pytest.raises(InputError, match="alps failed with middle at w2a2 .seed 0.: Diverged: .*there is no store"):
        estimate(start, task=Faulty())
    with pytest.raises(InputError, match="alps failed with middle at w2a2.*only what failed is done again") as caught:
        estimate(start, task=Faulty(), store=tmp_path)
    assert "\n" not in str(caught.value)
    assert len(list(tmp_path.glob("*.json"))) == 3
    with pytest.raises(InputError, match="drop failed with last at w2a2 .*NaN or infinite once it is lowered"):
        bitplan.estimate("drop", *start, context=Context(task=Faulty(layer="last")))


@pytest.mark.parametrize("task", [Pixels(), Spans()], ids=["segmentation", "question answering"])
def test_every_method_works_on_other_tasks(task):
    model, graph = quantized(task)
    before = copy.deepcopy(model.state_dict())
    options = {
        "alps": {"steps": 2},
        "drop": {},
        "alps_racing": {"steps": 4, "rounds": 2, "budgets": ("70%",)},
        "regression": {"steps": 2, "by": "loss"},
    }
    for method, chosen in ((method, options[method]) for method in EVERY):
        gains = bitplan.estimate(method, model, graph, context=Context(task=task, recipe=RECIPE), **chosen)
        assert set(gains.rows) == {group.name for group in graph.selectable}
        assert any(row[1] != 0 for row in gains.rows.values())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@dataclass(frozen=True)
class Unlabelled(Stripes):
    def batches(self, split, batch_size, seed=None):
        for images, _ in super().batches(split, batch_size, seed):
            yield (images,)


class Lossless:
    name = "lossless"
    batches = forward = None


@dataclass(frozen=True)
class Short(Stripes):
    """Promises more than it gives."""

    def size(self, split):
        return 1000


CANNOT = {
    "nothing": ({"task": None, "recipe": None}, "{method} .*: give a task, --task"),
    "no task": ({"task": None}, "{method} .*: give a task, --task"),
    "no loss": ({"task": Lossless()}, "task lossless has no batches"),
    "empty": ({"task": Stripes(samples=0)}, "the training split of task stripes is empty"),
    "no labels": ({"task": Unlabelled()}, "loss of task stripes cannot be computed .*IndexError.*labelled"),
}


@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize("what", CANNOT)
def test_a_task_that_cannot_be_used_is_one_line(start, method, what):
    context, message = CANNOT[what]
    setting = Context(**({"task": TASK, "recipe": RECIPE} | context))
    with pytest.raises(InputError, match=message.format(method=method)) as caught:
        bitplan.estimate(method, *start, context=setting, **BUDGET.get(method, {}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", EVERY)
def test_a_model_that_cannot_be_lowered_is_one_line(start, method):
    model, graph = start
    low = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w2a2"))
    other = bitplan.quantize(nn.Sequential(nn.Linear(2, 2)), bitplan.Plan(
        model="other", precisions={"0": "w4a4"}, method="by hand", selector="none"
    ))  # fmt: skip
    cases = [
        (low, "highest choice, w4a4, but left is at w2a2: quantize and fine-tune the model at w4a4 first"),
        (other, "the model's plan has no layer 'left': the graph must come from this model"),
        (None, "{method} runs the network, so it needs the model itself, not only its graph"),
        ("weights.pth", "not a file .weights.pth.: read it with load_checkpoint"),
    ]
    if method not in ("drift", "drop"):  # which calibrate a float network themselves
        refusal = "{method} lowers groups of a network that is trained at w4a4, but this model is not quantized"
        cases.append((nn.Linear(2, 2), refusal))
    for given, message in cases:
        with pytest.raises(InputError, match=message.format(method=method)):
            bitplan.estimate(method, given, graph, context=Context(task=TASK, recipe=RECIPE), **BUDGET.get(method, {}))


@pytest.mark.parametrize("method", TRAINING)
def test_what_a_training_lacks_is_one_line(start, method):
    options = BUDGET.get(method, {})
    for context, message in [
        ({"recipe": None}, f"{method} fine-tunes by the recipe that the network was trained with: give it"),
        ({"recipe": RECIPE.model_copy(update={"batch_size": 500})}, "batch_size 500 is more than the 128 training"),
        ({"recipe": RECIPE.model_copy(update={"distill": 0.5})}, "there is no teacher"),
        ({"task": Short()}, "ran out of batches"),
    ]:
        with pytest.raises(InputError, match=message):
            bitplan.estimate(method, *start, context=Context(**({"task": TASK, "recipe": RECIPE} | context)), **options)


@pytest.mark.parametrize(
    "options",
    [{"by": "luck"}, {"epochs": 1.0}, {"steps": 0}, {"lr_factor": 0}, {"seeds": 0}, {"by": "score", "offset": True}],
)
def test_bad_options_are_one_line(start, options):
    with pytest.raises(InputError) as caught:
        estimate(start, options=options)
    assert "\n" not in str(caught.value)


def test_by_score_needs_a_score():
    with pytest.raises(InputError, match="task spans has no score for a batch: use by=loss"):
        bitplan.estimate("alps", *quantized(Spans()), context=Context(task=Spans(), recipe=RECIPE), by="score")


def test_a_job_depends_on_the_network_the_task_and_the_teacher(start):
    recipe = RECIPE.model_copy(update={"distill": 0.5})
    model, graph = start

    def job(**changes):
        setting = {"task": TASK, "recipe": recipe, "teacher": quantized(TASK, train=False)[0], "seed": 0} | changes
        return Alps(steps=1).trainings(changes.get("model", model), graph, parse_choices(CHOICES), Context(
            **{key: value for key, value in setting.items() if key != "model"}
        )).jobs[0]  # fmt: skip

    changes = [
        {},
        {"model": quantized(TASK, train=False)[0]},
        {"task": Stripes(slow=1e-9)},
        {"teacher": quantized(TASK)[0]},
    ]
    assert len({job(**change).id for change in changes}) == len(changes)
    assert job().id == job().id
    assert Job.from_json(job().to_json()) == job()
