"""Searches beside what is known: the best of all plans, and random plans at equal evaluations."""

import statistics

import numpy as np
import pytest
import torch
from additive import PRICE, best_of_all, found, problem

from bitplan.core.errors import InputError
from bitplan.core.registry import CHOOSERS, GAINS, RELAXATIONS, SEARCHES
from bitplan.core.spend import PassMeter
from bitplan.plugins.methods.searches.base import search
from bitplan.plugins.methods.searches.generator import Emitter, Generator
from bitplan.plugins.methods.searches.haq import Agent, Haq, Walk, choice_of, states_of

QUICK = {"haq": {"hidden": 64}, "generator": {"hidden": 16}}
METHODS = {name: SEARCHES.make(name, QUICK.get(name, {})) for name in SEARCHES}
OTHERS = sorted(METHODS.keys() - {"random_search"})


@pytest.mark.parametrize("name", METHODS)
def test_it_finds_the_best_of_all_plans(name):
    """Of 2⁸, each of which there is enough to spend for."""
    for number in range(3):
        _, aim, bench = problem(8, seed=number)
        assert found(METHODS[name], 8, 256, seed=0, problem_seed=number).score == pytest.approx(best_of_all(aim, bench))


@pytest.mark.parametrize("name", OTHERS)
def test_it_beats_random_plans_at_equal_evaluations(name):
    """On 2¹⁶ plans, in the median of ten seeds."""
    mine, control = (
        statistics.median(found(METHODS[one], 16, 80, seed).score for seed in range(10))
        for one in (name, "random_search")
    )
    assert mine > control


@pytest.mark.parametrize("name", METHODS)
def test_nothing_exceeds_the_budget_and_no_plan_is_judged_twice(name):
    graph, aim, bench = problem(10, "w2a2,w3a3,w4a4", 0.6)
    meter = PassMeter(45 * PRICE.passes + 7)
    result = search(METHODS[name], aim, graph, bench, meter, seed=3)
    assert all(map(aim.fits, bench.seen))
    assert len(bench.seen) == len(set(bench.seen)) == meter.spent.evaluations == 45
    assert meter.spent.passes == 450 <= meter.limit
    assert result.score == max(result.scores)
    assert bench.total(result.best) == pytest.approx(result.score)


@pytest.mark.parametrize("name", METHODS)
def test_it_repeats_for_a_seed(name):
    first, again, other = (found(METHODS[name], 12, 40, seed) for seed in (1, 1, 2))
    assert (first.best, first.scores) == (again.best, again.scores)
    assert first.scores != other.scores


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("choices", "share"), [("w4a4", 1.0), ("w2a2,w4a4", 0.5), ("w2a2,w4a4", 1.0)])
def test_one_plan_to_choose_is_the_uniform_one(name, choices, share):
    """One choice, a budget that leaves only the lowest, or one that allows the highest everywhere."""
    graph, aim, bench = problem(5, "w2a2,w4a4", share)
    if "," not in choices:
        aim = type(aim)(aim.groups, aim.choices[1:], aim.costs[:, :, 1:], aim.capacities)
        bench = type(bench)(aim, bench.worth[:, 1:])
    result = search(METHODS[name], aim, graph, bench, PassMeter(40 * PRICE.passes), seed=0)
    assert result.best == ((0,) * 5 if share == 0.5 else aim.top)


def test_the_table_of_a_plan_has_it_as_the_only_best():
    _, aim, _ = problem(4, "w2a2,w3a3,w4a4")
    rows = np.array([row for row in aim.rows((0, 1, 2, 0)).values()])
    assert (rows[:, 0] == 0).all()
    assert rows.argmax(axis=1).tolist() == [0, 1, 2, 0]
    assert ((rows == rows.max(axis=1, keepdims=True)).sum(axis=1) == 1).all()


def test_no_search_is_called_like_a_gain_nor_a_relaxation_like_either():
    assert not set(SEARCHES) & set(GAINS)
    assert not set(RELAXATIONS) & {*SEARCHES, *GAINS}
    assert set(CHOOSERS) == {*SEARCHES, *GAINS, *RELAXATIONS}


# HAQ


def test_actions_from_0_to_1_are_choices_from_the_lowest_to_the_highest():
    for choices in (1, 2, 3, 7):
        picks = [choice_of(action, choices) for action in np.linspace(0, 1, 1001)]
        assert (picks[0], picks[-1]) == (0, choices - 1)
        assert sorted(picks) == picks
        counts = np.bincount(picks, minlength=choices)
        assert counts.max() - counts.min() <= 2  # each has the same share


def test_a_state_tells_groups_apart_in_columns_from_0_to_1():
    graph, aim, _ = problem(6)
    states = states_of(graph, aim)
    assert float(states.min()) == 0
    assert float(states.max()) == 1
    assert len({tuple(row) for row in states.tolist()}) == 6


def test_an_actor_learns_which_action_is_rewarded():
    """With two groups, of which the first is best at 1 and the second at 0."""
    draw = torch.Generator().manual_seed(0)
    agent = Agent.of(Haq(hidden=32), 2, 2, draw)
    features = torch.eye(2)
    for _ in range(100):
        actions = torch.rand(2, generator=draw)
        states = torch.cat([features, torch.tensor([[0.0], [float(actions[0])]])], dim=1)
        agent.remember_(Walk(states, torch.roll(states, -1, 0), actions), float(actions[0] - actions[1]))
    for _ in range(150):
        agent.learn_(draw)
    with torch.no_grad():
        first, second = (float(agent.actor(torch.cat([row, torch.tensor([0.5])]))) for row in features)
    assert first > 0.8
    assert second < 0.2


@pytest.mark.parametrize("options", [{"warmup": 1}, {"hidden": 0}, {"updates": 0}, {"rate": 0.0}, {"discount": 2.0}])
def test_an_agent_that_cannot_learn_is_refused(options):
    with pytest.raises(InputError, match="haq"):
        Haq(**options)


# SAQ's generator


@pytest.mark.parametrize("share", [0.6, 0.7, 0.9])
def test_with_a_constant_score_what_a_generator_draws_comes_to_cost_the_budget(share):
    graph, aim, _ = problem(12, "w2a2,w3a3,w4a4", share)
    generator = Generator().start(aim, graph, seed=0)

    def costs():
        draws = generator.emitter.drawn(256, torch.Generator().manual_seed(9)).tolist()
        return np.mean([aim.cost(draw)[0] for draw in draws]) / aim.capacities[0]

    before, later = costs(), []
    for number in range(50):
        generator.learn_([(picks, 0.5) for picks in generator.propose()])
        later += [costs()] if number >= 10 and number % 5 == 0 else []
    assert abs(np.mean(later) - 1) < 0.03 < abs(before - 1)


def test_first_all_choices_are_as_likely_and_draws_are_told_alike():
    draw = torch.Generator().manual_seed(0)
    emitter = Emitter.of(8, torch.eye(5), 3, draw)
    drawn = emitter.drawn(200, draw)
    told = emitter.told(drawn)
    assert torch.equal(told.choices, drawn)
    assert torch.allclose(told.logp, torch.tensor(-5 * np.log(3), dtype=torch.float32))
    assert torch.allclose(told.entropy, -told.logp)
    assert drawn.unique().tolist() == [0, 1, 2]


def test_a_generator_learns_which_choices_are_worth_more_by_scores_of_one_sign():
    """All negative: without a baseline whatever is drawn would become less likely."""
    graph, aim, bench = problem(6, share=1.0)
    generator = Generator(weight=0.0).start(aim, graph, seed=0)
    first = bench.worth.argmin(axis=1)
    for _ in range(40):
        draws = generator._rows()
        generator.drawn = [(row, row) for row in draws]
        generator.learn_([(row, -100.0 + sum(np.array(row) == first)) for row in draws])
    drawn = generator.emitter.drawn(100, torch.Generator().manual_seed(1))
    assert (drawn == torch.tensor(first)).float().mean() > 0.8


@pytest.mark.parametrize("options", [{"together": 1}, {"hidden": 0}, {"rate": 0.0}, {"weight": -1.0}, {"entropy": -1}])
def test_a_generator_that_cannot_learn_is_refused(options):
    with pytest.raises(InputError, match="generator"):
        Generator(**options)
