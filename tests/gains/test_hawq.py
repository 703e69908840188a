"""HAWQ-v3, v2 and v1 as gains: their formulas, that they repeat, and what they refuse."""

import copy
import logging

import pytest
import torch
from curves import Assisted, Auxiliary, Ends, Net, Points, Reader, Summed, made
from test_hessian import exact_blocks

import bitplan
from bitplan.core.errors import InputError
from bitplan.gains.base import Context
from bitplan.gains.curvature import Data
from bitplan.gains.hawq import Hawq, HawqV1, HawqV2, quantize_absmax
from bitplan.store.engines import Local

THREE = "w2a2,w4a4,w8a8"
MANY = {"probes": 1200, "min_probes": 1200, "samples": 24}


@pytest.fixture(scope="module")
def start():
    return made(quantized=True)


def exact_and_weights(model, layers=("middle", "more")):
    blocks = exact_blocks(model, Points(), Data.draw(Points(), 24, 24, 0), layers)
    parameters = dict(model.named_parameters())
    return {name: (block, parameters[f"{name}.weight"].detach()) for name, block in blocks.items()}


def test_v3_is_the_average_trace_times_the_distance_between_the_grids(start):
    model, graph = start
    gains = bitplan.estimate(Hawq(**MANY), model, graph, choices=THREE, context=Context(task=Points()))
    for name, (block, weight) in exact_and_weights(model).items():
        average = float(block.trace()) / weight.numel()
        for place, bits in enumerate((2, 4, 8)):
            distance = float((quantize_absmax(weight, bits) - quantize_absmax(weight, 2)).square().sum())
            assert abs(gains.rows[name][place] - average * distance) <= 2 * gains.errors[name][place]
    assert gains.counts == {"samples": 24, "probes": 1200, "clipped": 0}


def test_v2_is_what_is_saved_of_the_quantization_error(start):
    model, graph = start
    gains = bitplan.estimate(HawqV2(**MANY), model, graph, choices=THREE, context=Context(task=Points()))
    for name, (block, weight) in exact_and_weights(model).items():
        average = float(block.trace()) / weight.numel()
        errors = [float((quantize_absmax(weight, bits) - weight).square().sum()) for bits in (2, 4, 8)]
        for place, error in enumerate(errors):
            assert abs(gains.rows[name][place] - average * (errors[0] - error)) <= 2 * gains.errors[name][place]


def test_v1_is_the_largest_eigenvalue_over_the_weights(start):
    model, graph = start
    gain = HawqV1(iterations=200, tolerance=1e-6, samples=24)
    gains = bitplan.estimate(gain, model, graph, choices=THREE, context=Context(task=Points()))
    for name, (block, weight) in exact_and_weights(model).items():
        largest = float(torch.linalg.eigvalsh(block)[-1])
        assert gains.rows[name][1] == pytest.approx(largest / weight.numel(), rel=1e-3)
        assert gains.rows[name][2] == pytest.approx(2 * gains.rows[name][1])
    assert gains.errors is None


def test_the_grid_stays_within_the_largest_weight():
    weight = torch.tensor([-1.0, -0.6, -0.2, 0.0, 0.3, 0.8, 1.0])
    assert quantize_absmax(weight, 2).tolist() == [-1.0, -0.5, 0.0, 0.0, 0.5, 0.5, 0.5]
    assert torch.equal(quantize_absmax(weight, 16), weight)
    assert torch.equal(quantize_absmax(torch.zeros(3), 2), torch.zeros(3))
    for bits in (2, 3, 4, 8):
        assert quantize_absmax(weight, bits).abs().max() <= 1
        assert len(quantize_absmax(torch.linspace(-1, 1, 5000), bits).unique()) == 2**bits


@pytest.mark.parametrize(
    ("kind", "task"), [(Net, Points()), (Reader, Ends()), (Assisted, Auxiliary())], ids=["classes", "answers", "tuple"]
)
@pytest.mark.parametrize("gain", [Hawq(4, 2), HawqV2(4, 2), HawqV1(4)], ids=["v3", "v2", "v1"])
@pytest.mark.parametrize("quantized", [False, True], ids=["float", "quantized"])
def test_any_task_and_model_repeatably_leaving_the_model_bit_identical(kind, task, gain, quantized):
    model, graph = made(kind, task, quantized)
    model.train()
    before = copy.deepcopy(model.state_dict())
    first, second = (bitplan.estimate(gain, model, graph, context=Context(task=task, seed=2)) for _ in range(2))
    other = bitplan.estimate(gain, model, graph, context=Context(task=task, seed=3))
    assert first.id == second.id != other.id
    assert set(first.rows) == {"middle", "more"}
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["digits_resnet", "digits_transformer"])
@pytest.mark.parametrize("method", ["hawq", "hawq_v2", "hawq_v1"])
def test_the_digits_networks(name, method):
    task = bitplan.load_task("digits")
    torch.manual_seed(0)  # two probes of other weights may all be below 0
    model, example = bitplan.load_model(name)
    graph = bitplan.trace(model, example)
    model = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(model, [next(iter(task.batches("train", 8)))[0]])
    options = {"iterations": 1} if method == "hawq_v1" else {"probes": 2, "min_probes": 2}
    gains = bitplan.estimate(method, model, graph, context=Context(task=task), samples=8, batch_size=4, **options)
    assert list(gains.rows) == [group.name for group in graph.selectable]
    assert any(row[-1] > 0 for row in gains.rows.values())
    assert gains.counts["samples"] == 8


def test_negative_estimates_count_as_zero_and_are_said(caplog):
    class Upside(Points):
        def loss(self, outputs, batch):
            return -super().loss(outputs, batch)

    model, graph = made()
    with caplog.at_level(logging.WARNING):
        gains = bitplan.estimate(Hawq(40, 40), model, graph, context=Context(task=Upside()))
    negative = [name for name, row in gains.rows.items() if row[-1] == 0]
    assert gains.counts["clipped"] == len(negative) > 0
    assert all(gains.errors[name][-1] > 0 for name in negative)
    assert f"below 0 after 40 rounds for {len(negative)} of 2 layers" in caplog.text
    assert negative[0] in caplog.text


def test_what_was_done_before_a_kill_is_not_done_again(tmp_path):
    model, graph = made()
    gain, seen = Hawq(probes=25, min_probes=25), []
    whole = bitplan.estimate(gain, model, graph, context=Context(task=Points(), seed=4))

    def killed(done, total, what):
        if done == 14:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bitplan.estimate(gain, model, graph, context=Context(Points(), seed=4, store=tmp_path, progress=killed))
    context = Context(Points(), seed=4, store=tmp_path, progress=lambda done, total, what: seen.append(done))
    assert bitplan.estimate(gain, model, graph, context=context).id == whole.id
    assert seen == list(range(11, 26))
    changed = copy.deepcopy(model)
    changed.more.weight.data.mul_(1.1)
    bitplan.estimate(gain, changed, graph, context=context)
    bitplan.estimate(gain, model, graph, context=Context(Points(23), seed=4, store=tmp_path, progress=context.progress))
    assert len(seen) == 15 + 25 + 25


def test_eigenvalues_found_before_a_kill_are_not_looked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr("bitplan.gains.curvature.ROUND", 1)
    model, graph = made()
    gain, seen = HawqV1(iterations=40, tolerance=0.0), []
    whole = bitplan.estimate(gain, model, graph, context=Context(task=Points(), seed=4))

    def killed(done, total, what):
        if done == 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bitplan.estimate(gain, model, graph, context=Context(Points(), seed=4, store=tmp_path, progress=killed))
    context = Context(Points(), seed=4, store=tmp_path, progress=lambda done, total, what: seen.append(done))
    assert bitplan.estimate(gain, model, graph, context=context).id == whole.id
    assert seen == list(range(41, 81))
    assert bitplan.estimate(gain, model, graph, context=context).id == whole.id
    assert len(seen) == 40


@pytest.mark.parametrize("gain", [Hawq(probes=25, min_probes=25), HawqV1(iterations=3)], ids=["traces", "eigenvalues"])
def test_rounds_run_on_any_engine_and_are_kept_once(gain, tmp_path, monkeypatch):
    monkeypatch.setattr("bitplan.gains.curvature.ROUND", 10 if isinstance(gain, Hawq) else 1)
    model, graph = made(quantized=True)
    here = bitplan.estimate(gain, model, graph, context=Context(task=Points(), seed=4))
    told = []
    context = Context(
        Points(), seed=4, store=tmp_path, engine=Local(workers=2), progress=lambda *what: told.append(what)
    )
    there = bitplan.estimate(gain, model, graph, context=context)
    assert there.id == here.id
    jobs = 3 if isinstance(gain, Hawq) else len(graph.selectable)
    assert len(list(tmp_path.glob("*.json"))) == jobs == len(told)
    assert told[-1][:2] == (jobs, jobs), "whole jobs are told of, since products happen elsewhere"
    monkeypatch.setattr(Local, "run", None)
    assert bitplan.estimate(gain, model, graph, context=Context(Points(), seed=4, store=tmp_path, engine=Never())).id


class Never:
    """An engine that has nothing to do, since all is kept."""

    def run(self, work, items):
        assert not list(items)
        return iter(())


def test_progress_ends_at_the_end_or_stops_early():
    seen = []
    model, graph = made()
    context = Context(task=Points(), progress=lambda done, total, what: seen.append((done, total)))
    bitplan.estimate(Hawq(probes=5, min_probes=3, tolerance=0, batch_size=12), model, graph, context=context)
    assert seen[-1] == (10, 10)
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Hawq(probes=0), "at least 2 probes"),
        (lambda: HawqV2(min_probes=1), "at least 2 probes"),
        (lambda: Hawq(samples=0), "at least one sample"),
        (lambda: HawqV1(batch_size=0), "batch_size of at least 1"),
        (lambda: HawqV1(iterations=0), "at least one iteration"),
        (lambda: Hawq(tolerance=-1.0), "at least 0"),
        (lambda: Hawq(tolerance=float("nan")), "at least 0"),
    ],
)
def test_impossible_options_are_refused_in_one_line(make, said):
    with pytest.raises(InputError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("gain", [Hawq(2, 2), HawqV2(2, 2), HawqV1(1)], ids=["v3", "v2", "v1"])
def test_bad_input_is_refused_in_one_line(gain):
    model, graph = made()
    broken = copy.deepcopy(model)
    broken.more.weight.data.fill_(float("nan"))
    uncalibrated = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    cases = [
        (model, None, "w2a2,w4a4", "a task, and none was given"),
        (None, Points(), "w2a2,w4a4", "got only its graph"),
        ("runs/start", Points(), "w2a2,w4a4", r"got a file \(runs/start\)"),
        (model, Points(samples=0), "w2a2,w4a4", "training split of task points is empty"),
        (model, Points(), "w4a4", "at least two precisions"),
        (broken, Points(), "w2a2,w4a4", "loss of task points is nan"),
        (uncalibrated, Points(), "w2a2,w4a4", "input scale of layer 'stem' is not set"),
    ]
    for given, task, choices, said in cases:
        with pytest.raises(InputError, match=said) as caught:
            bitplan.estimate(gain, given, graph, choices=choices, context=Context(task=task))
        assert "\n" not in str(caught.value)


def test_a_loss_without_curvature_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    graph = bitplan.trace(model, torch.zeros(2, 4), rules=bitplan.Rules(narrow=0))
    with pytest.raises(InputError, match="not twice differentiable"):
        bitplan.estimate(Hawq(2, 2), model, graph, context=Context(task=Summed()))
