"""Relaxations on a network: what is learned beside what is known, kills, spends, and what is refused."""

import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from relaxing import CHOICES, RECIPE, Flat, Rows, Stripes, aimed, estimated, members, started
from torch import nn

import bitplan
import bitplan.tune.resume as resume
from bitplan.core.errors import InputError
from bitplan.core.registry import RELAXATIONS
from bitplan.gains.base import Context
from bitplan.plugins.methods.relaxations.base import InTurn, LearnedShares
from bitplan.plugins.methods.relaxations.fracbits import FracBits
from bitplan.plugins.methods.relaxations.mixture import ChoiceMixture
from bitplan.quant.blend import blended
from bitplan.store.run_folder import RunFolder
from bitplan.tasks.base import choosing_task

WAYS = [("fracbits", {}), ("fracbits", {"penalty": "linear"})]
WAYS += [("mixture", {"style": style}) for style in ("ssps", "dnas", "bpnas")]
STEP = 3 * RECIPE.batch_size


@pytest.fixture(scope="module")
def start():
    return started()


def trained(start, method, task, recipe=RECIPE, folder=None, progress=None):
    """A blended copy after a training, and its shares."""
    model, graph = start
    aim = aimed(graph)
    shares = LearnedShares(method, aim, method.start(aim, 0))
    made = blended(model, members(graph), CHOICES, shares)
    bitplan.finetune_(made, task, recipe, folder=folder, progress=progress)
    return made, shares


def test_every_relaxation_is_tried_here():
    assert {name for name, _ in WAYS} == set(RELAXATIONS)


@pytest.mark.parametrize(("method", "options"), WAYS)
def test_plans_are_within_the_budget_and_say_what_was_spent(start, method, options):
    model, graph = start
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gains = estimated(start, method, spend=5 * STEP + 7, budget=["80%", "memory=85%"], **options)
    assert gains.counts["spend"] == 5 * STEP
    assert (gains.counts["steps"], gains.counts["trainings"], gains.budgets) == (5, 1, ("80%", "memory=85%"))
    costs = [bitplan.price(name, graph, CHOICES) for name in ("bmac", "memory")]
    plan = bitplan.select(graph, gains, costs, budget=["80%", "memory=85%"])
    assert all(limit.cost <= limit.capacity for limit in plan.limits)
    assert "for 80%, memory=85% alone" in gains.notes[-1]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    other = estimated(start, method, spend=5 * STEP + 7, budget=["80%", "memory=85%"], seed=2, **options)
    assert other.rows != gains.rows


def test_without_a_limit_it_takes_what_the_recipe_takes_and_epochs_count_otherwise(start):
    assert estimated(start, "fracbits").counts["steps"] == RECIPE.steps
    assert estimated(start, "fracbits", epochs=0.5).counts["steps"] == int(0.5 * 128 / 16)
    trainings = RELAXATIONS.make("fracbits", {}).trainings(*start, CHOICES, Context(task=Rows(), recipe=RECIPE))
    told = trainings.estimate_time()
    assert (told.jobs, told.steps, told.samples) == (1, 6, 96)


@pytest.mark.parametrize("method", ["fracbits", "mixture"])
def test_of_a_recipe_of_several_stages_it_trains_one_within_what_may_be_spent(start, method):
    staged = RECIPE.model_copy(update={"then": RECIPE.model_copy(update={"steps": 4, "distill": 0.5})})
    gains = estimated(start, method, recipe=staged, spend=6 * STEP)
    assert (gains.counts["steps"], gains.counts["spend"]) == (6, 6 * STEP)
    assert gains.rows == estimated(start, method, spend=6 * STEP).rows


@pytest.mark.parametrize(("method", "options"), [("fracbits", {}), ("alps", {"steps": 1, "budget": None})])
def test_an_epoch_is_that_of_the_whole_task_where_samples_are_held_out(start, method, options):
    gains = estimated(start, method, choosing_task(Rows(), 0.5), **options)
    assert gains.counts["samples_per_epoch"] == Rows().size("train") == 128


def test_a_teacher_counts(start):
    recipe = RECIPE.model_copy(update={"distill": 0.5})
    gains = estimated(start, "fracbits", recipe=recipe, teacher=started()[0], spend=4 * 64 * 2)
    assert (gains.counts["steps"], gains.counts["spend"]) == (8, 8 * 4 * 16)


def test_a_float_network_and_batches_without_a_recipe_are_enough():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    graph = bitplan.trace(model, torch.zeros(1, 1, 6, 6), rules=bitplan.Rules(narrow=0))
    batches = list(Stripes().batches("train", 16))
    for method in ("fracbits", "mixture"):
        gains = bitplan.estimate(method, model, graph, choices=CHOICES, budget="80%", batches=batches, spend=2000,
                                 loss=nn.functional.cross_entropy)  # fmt: skip
        assert gains.counts["steps"] == 2000 // (3 * 64)
    assert type(model[1]) is nn.Linear


def test_at_constant_loss_bitpruning_falls_by_rate_times_gamma_times_cost(start):
    method = FracBits(penalty="linear", rate=0.25, weight=0.5)
    _, shares = trained(start, method, Flat(), RECIPE.model_copy(update={"steps": 3}))
    aim = shares.aim
    each = torch.tensor((aim.costs[0, :, 2] - aim.costs[0, :, 1]) / aim.capacities[0])
    fallen = 2 - 3 * 0.25 * 0.5 * each
    assert bool((fallen > 1).all())
    assert shares.theta.flatten().tolist() == pytest.approx(fallen.tolist(), abs=1e-5)


def test_groups_that_are_alike_keep_lambdas_that_are_alike():
    """Bit for bit; and another group goes its own way."""

    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.left, self.other = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
            self.two, self.right = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
            self.two.load_state_dict(self.one.state_dict())
            self.right.load_state_dict(self.left.state_dict())
            self.head = nn.Linear(24, 3)

        def forward(self, x):
            x = (self.left(self.one(x).relu()) + self.right(self.two(x).relu())).relu()
            return self.head(self.other(x).relu().mean(3).flatten(1))

    torch.manual_seed(0)
    net = Twins()
    graph = bitplan.trace(net, torch.zeros(1, 1, 6, 6), rules=bitplan.Rules(narrow=0))
    model = bitplan.quantize(net, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(model, [next(iter(Rows().batches("train", 32)))[0]])
    _, shares = trained((model, graph), FracBits(rate=3.0), Rows())
    level = dict(zip(shares.aim.groups, shares.theta.flatten().tolist(), strict=True))
    assert level["left"] == level["right"] != level["other"]
    assert level["left"] != float(FracBits().start(shares.aim, 0)[0])


def test_weights_and_chances_learn_in_turn_from_halves_that_share_no_sample(start):
    task = InTurn.of(Rows(), 16)
    pieces = list(task.batches("train", 8, seed=3))
    assert task.size("train") == 128 == sum(len(labels) for _, labels in pieces)
    halves = [{tuple(image.flatten().tolist()) for piece in pieces[at::4] + pieces[at + 1 :: 4] for image in piece[0]}
              for at in (0, 2)]  # fmt: skip
    assert [len(half) for half in halves] == [64, 64]
    assert not halves[0] & halves[1]
    recipe, looks = RECIPE.model_copy(update={"steps": 4}), []
    model, graph = start
    aim, method = aimed(graph), ChoiceMixture()
    shares = LearnedShares(method, aim, method.start(aim, 0))
    made = blended(model, members(graph), CHOICES, shares)

    class Looking(InTurn):
        def forward(self, model, batch):
            looks.append((shares.theta.detach().clone(), made.wide.weight.detach().clone()))
            return super().forward(model, batch)

    bitplan.finetune_(made, Looking(Rows(), *Rows().hold_out(0.5), 16), recipe)
    looks.append((shares.theta.detach().clone(), made.wide.weight.detach().clone()))
    moved = [[not torch.equal(a, b) for a, b in zip(*pair, strict=True)] for pair in pairwise(looks)]
    assert moved == [[False, True], [True, False], [False, True], [True, False]]


def test_a_training_by_adamw_leaves_fixed_groups_where_they_are(start):
    recipe = bitplan.Recipe(steps=6, batch_size=16, optimizer="adamw", lr=0.001, grad_clip=0.1)
    _, shares = trained(start, ChoiceMixture(halves=False, certain=0.6, rate=100.0), Rows(), recipe)
    assert bool((shares.fixed >= 0).any())
    assert bool(shares.theta.isfinite().all())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb"])
def test_theta_takes_plain_steps_whatever_the_optimizer(start, optimizer, monkeypatch):
    seen = []
    end_ = LearnedShares.end_

    def noting(shares, *told):
        before, slope = shares.theta.detach().clone(), shares.theta.grad.clone()
        end_(shares, *told)
        seen.append((shares.theta.detach() - before, slope))
        assert shares.theta.grad is None

    monkeypatch.setattr(LearnedShares, "end_", noting)
    recipe = bitplan.Recipe(steps=4, batch_size=16, lr=0.001, optimizer=optimizer, schedule="linear")
    trained(start, ChoiceMixture(halves=False, rate=0.2, certain=1.0), Rows(), recipe)
    for step, (moved, slope) in enumerate(seen):
        assert slope.abs().max() > 0
        assert torch.allclose(moved, -0.2 * (1 - step / 4) * slope, atol=1e-7)
    assert len(seen) == 4


@pytest.mark.parametrize(("method", "options"), WAYS)
def test_stopped_in_the_middle_it_goes_on_as_if_it_had_not_been(start, method, options, tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(resume, "SAVE_SHARE", 1e9)
    whole = estimated(start, method, **options)

    def stop(done, total, text):
        if done >= 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("bitplan.tune.loop._PAUSE", 0.0)
    with pytest.raises(KeyboardInterrupt):
        estimated(start, method, store=tmp_path, progress=stop, **options)
    (left,) = (tmp_path / "running").iterdir()
    assert (left / "resume.safetensors").is_file()
    steps = []
    resumed = estimated(start, method, store=tmp_path, progress=lambda done, *_: steps.append(done), **options)
    assert resumed.id == whole.id
    assert resumed.spend == whole.spend
    assert steps == list(range(3, 7))
    assert not list((tmp_path / "running").iterdir())
    again = estimated(start, method, store=tmp_path, progress=lambda *_: pytest.fail("trained again"), **options)
    assert again.id == whole.id
    assert again.spend == whole.spend


def test_killed_it_goes_on(start, tmp_path):
    script = str(Path(__file__).parent / "relaxing.py")
    with subprocess.Popen([sys.executable, script, str(tmp_path)], stdout=subprocess.PIPE) as process:
        for line in process.stdout:
            if int(line) >= 3:
                os.kill(process.pid, signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.glob("running/*/resume.safetensors"))
    steps = []
    resumed = estimated(start, "fracbits", Rows(slow=0.1), store=tmp_path, progress=lambda done, *_: steps.append(done))
    assert steps[0] > 1
    assert resumed.id == estimated(start, "fracbits").id


def test_what_a_killed_training_left_damaged_is_set_aside(start, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(resume, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr("bitplan.tune.loop._PAUSE", 0.0)

    def stop(done, total, text):
        if done >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        estimated(start, "fracbits", store=tmp_path, progress=stop)
    (state,) = tmp_path.glob("running/*/resume.safetensors")
    state.write_bytes(state.read_bytes()[:-3])
    assert estimated(start, "fracbits", store=tmp_path).id == estimated(start, "fracbits").id
    assert "the training begins anew" in caplog.text


def test_a_run_has_its_trainings_where_those_of_its_jobs_are(tmp_path):
    run = RunFolder(tmp_path)
    assert run.jobs.running.folder == run.running.folder


@pytest.mark.parametrize(
    ("method", "told", "said"),
    [
        ("fracbits", {"budget": None}, r"fracbits chooses within a budget: say which, --budget 70%"),
        ("fracbits", {"spend": 10}, r"spend=10 is too little for 1 steps of fracbits, which takes 48 passes: spend at"),
        ("mixture", {"spend": 60}, r"spend=60 is too little for 2 steps of mixture, which takes 96 passes"),
        ("fracbits", {"penalty": 3}, r"fracbits: penalty is target or linear, not 3"),
        ("fracbits", {"kappa": 3}, r"unknown option of fracbits 'kappa'"),
        ("mixture", {"task": Stripes()}, r"halves of the data \(task stripes cannot hold out .*\); or halves=false"),
        (
            "mixture",
            {"recipe": RECIPE.model_copy(update={"batch_size": 100})},
            r"batch_size 100 is more than half of the",
        ),
        (
            "mixture",
            {"style": "bpnas", "budget": "50%"},
            r"only the lowest choices are within it: raise the budget, or",
        ),
        ("fracbits", {"recipe": RECIPE.model_copy(update={"distill": 1.0})}, r"but there is no teacher"),
        ("fracbits", {"budget": "10%"}, r"budget 10% cannot be met"),
    ],
)
def test_what_cannot_work_is_one_line(start, method, told, said):
    with pytest.raises(InputError, match=said) as caught:
        estimated(start, method, **told)
    assert "\n" not in str(caught.value)


def test_without_data_it_says_so(start):
    with pytest.raises(
        InputError, match=r"mixture trains precisions with the weights: give a task, --task, or batches"
    ):
        bitplan.estimate("mixture", *start, choices=CHOICES, budget="80%")
