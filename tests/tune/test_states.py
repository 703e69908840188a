"""Hidden states and attention scores of a teacher: found by structure, and what they add to the loss."""

import copy
from dataclasses import dataclass

import pytest
import torch
from halves import Halves, network
from torch import nn

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.rules import Rules
from bitplan.core.trials import Recipe
from bitplan.models.bert import minilm_l6
from bitplan.models.zoo import load_model
from bitplan.tune.distillation import blocks_of, difference, objective, watch_states
from bitplan.tune.loop import finetune_

BOTH = Recipe(steps=6, batch_size=8, lr=0.01, distill=1.0, distill_hidden=1.0, distill_attention=1.0)
RULES = Rules(first=None, last=None, narrow=0)


@dataclass(frozen=True)
class Rows(Halves):
    """The same images as six tokens of six pixels."""

    def batches(self, split, batch_size, seed=None):
        return ((images[:, 0], labels) for images, labels in super().batches(split, batch_size, seed))

    def example(self):
        return torch.zeros(1, 6, 6)


class Tokens(nn.Module):
    """(B, 6, 6) → (B, 2): two of torch's encoder layers."""

    def __init__(self, layers=2, dropout=0.0):
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


def tokens(**options):
    torch.manual_seed(3)
    return Tokens(**options)


def quantized(model):
    graph = bitplan.trace(model, torch.zeros(1, 6, 6), rules=RULES)
    return bitplan.quantize(model, bitplan.Plan.uniform(graph, "w8a8"))


def seen_in(model, *inputs, recipe=BOTH, **named):
    with watch_states(model, recipe) as states:
        model(*inputs, **named)
    return states


def test_the_blocks_of_networks_are_found_by_structure():
    resnet = load_model("resnet20", weightless=True)[0]
    assert {path: len(row) for path, row in blocks_of(resnet).items()} == {"layer1": 3, "layer2": 3, "layer3": 3}
    assert [len(row) for row in blocks_of(load_model("digits_resnet", weightless=True)[0]).values()] == [5]
    assert list(blocks_of(tokens()).values()) == [["encoder.layers.0", "encoder.layers.1"]]
    assert blocks_of(quantized(tokens())) == blocks_of(tokens())
    assert blocks_of(network()) == {}


@pytest.mark.parametrize("training", [True, False])
def test_a_quantized_network_shows_the_states_that_its_teacher_shows(training):
    teacher, x = tokens(), torch.randn(4, 6, 6)
    student = quantized(teacher).train()
    student(x)
    own, taught = seen_in(student.train(training), x), seen_in(teacher.eval(), x)
    assert [state.shape for state in own.hidden] == [(4, 6, 6)] * 3 == [state.shape for state in taught.hidden]
    assert [state.shape for state in own.scores] == [(4, 2, 6, 6)] * 2 == [state.shape for state in taught.scores]
    for one, other in zip((*own.hidden, *own.scores), (*taught.hidden, *taught.scores), strict=True):
        assert (one - other).square().mean() < 0.05 * other.square().mean(), "quantized, not another"
    assert torch.equal(own.hidden[0], x), "what the first block reads"
    assert own.scores[0].requires_grad


def test_scores_of_fused_attention_are_those_of_the_plain_one():
    model, example = load_model("digits_transformer")
    x = torch.randn(2, *example.shape[1:])
    states = seen_in(model.eval(), x)
    encoder = model.get_submodule(next(iter(blocks_of(model).values()))[0])
    attention, read = encoder.attention, encoder.norm1(states.hidden[0])
    split = (attention.heads, read.shape[2] // attention.heads)
    query, key = (part(read).unflatten(2, split).transpose(1, 2) for part in (attention.query, attention.key))
    torch.testing.assert_close(states.scores[0], query @ key.transpose(-2, -1) / split[1] ** 0.5)
    assert len(states.scores) == len(states.hidden) - 1


def test_models_of_hugging_face_show_theirs_with_masks():
    torch.manual_seed(0)
    model, _ = minilm_l6()
    ids = torch.randint(5, 900, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    model.eval()
    with torch.no_grad():
        states = seen_in(model, input_ids=ids, attention_mask=mask)
        expected = model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
    assert len(states.hidden) == len(expected) == 7
    assert all(torch.equal(one, other) for one, other in zip(states.hidden, expected, strict=True))
    assert [score.shape[-2:] for score in states.scores] == [(7, 7)] * 6
    assert difference(states.scores, states.scores, "attention scores", "distill_attention") == 0


def test_it_is_zero_for_equal_states_and_one_for_each_that_is_off_by_one():
    states = [torch.randn(4, 3, 5), torch.randn(4, 7)]
    told = ("hidden states", "distill_hidden")
    assert difference(states, states, *told) == 0
    assert difference([states[0] + 1, states[1]], states, *told).item() == pytest.approx(1)
    assert difference([state - 1 for state in states], states, *told).item() == pytest.approx(2)
    one_sample = [states[0].clone(), states[1]]
    one_sample[0][2] += 1
    assert difference(one_sample, states, *told).item() == pytest.approx(1 / 4)


@pytest.mark.parametrize("mask", [-1e4, float("-inf"), torch.finfo(torch.float32).min])
def test_masked_scores_count_as_equal_and_have_no_gradient(mask):
    own = torch.tensor([[1.0, mask]], requires_grad=True)
    apart = difference([own], [torch.tensor([[0.0, mask]])], "attention scores", "distill_attention")
    apart.backward()
    assert apart.item() == pytest.approx(1 / 2)
    assert own.grad.tolist() == [[1.0, 0.0]]


def test_the_objective_adds_what_the_recipe_says():
    task, student, teacher = Rows(), tokens(), tokens()
    with torch.no_grad():
        teacher.encoder.layers[0].linear1.weight.mul_(-1)
        teacher.encoder.layers[0].self_attn.in_proj_weight.mul_(2)
    batch = next(iter(task.batches("train", 8)))
    recipe = Recipe(steps=1, distill=0.25, distill_hidden=2.0, distill_attention=3.0)
    with watch_states(student, recipe) as own:
        outputs = student(batch[0])
    taught = seen_in(teacher.eval(), batch[0])
    plain = objective(
        task, outputs, batch, teacher, recipe.model_copy(update={"distill_hidden": 0, "distill_attention": 0})
    )
    hidden = sum((one - other).square().mean() for one, other in zip(own.hidden, taught.hidden, strict=True))
    scores = sum((one - other).square().mean() for one, other in zip(own.scores, taught.scores, strict=True))
    assert hidden > 0
    assert scores > 0
    torch.testing.assert_close(objective(task, outputs, batch, teacher, recipe, own), plain + 2 * hidden + 3 * scores)
    alone = Recipe(steps=1, distill_hidden=2.0)
    torch.testing.assert_close(
        objective(task, outputs, batch, teacher, alone, own), task.loss(outputs, batch) + 2 * hidden
    )


def test_training_brings_the_states_nearer_and_a_stopped_one_goes_on_as_if_not(tmp_path):
    task, teacher = Rows(), tokens()
    recipe = BOTH.model_copy(update={"steps": 16, "lr": 0.05, "distill_attention": 0.5})
    other = tokens()
    with torch.no_grad():
        other.encoder.layers[1].linear2.weight.mul_(-1)
    start = quantized(other)
    batch = next(iter(task.batches("test", 16)))[0]

    def apart(model):
        model.train()(batch)
        with torch.no_grad():
            own, taught = seen_in(model.eval(), batch), seen_in(teacher.eval(), batch)
            return difference(own.hidden, taught.hidden, "hidden states", "distill_hidden").item()

    whole, stopped = copy.deepcopy(start), copy.deepcopy(start)
    before = apart(copy.deepcopy(start))
    finetune_(whole, task, recipe, teacher=teacher, seed=2)
    assert apart(copy.deepcopy(whole)) < 0.8 * before
    calls = iter(range(1000))
    finetune_(stopped, task, recipe, teacher=teacher, seed=2, folder=tmp_path / "run", stop=lambda: next(calls) > 7)
    again = copy.deepcopy(start)
    finetune_(again, task, recipe, teacher=teacher, seed=2, folder=tmp_path / "run")
    assert all(torch.equal(again.state_dict()[name], value) for name, value in whole.state_dict().items())


BAD = [
    (network, {"distill_hidden": 1.0}, network, "no hidden states were found in the model: set distill_hidden to 0"),
    (
        network,
        {"distill_attention": 1.0},
        network,
        "no attention scores were found in the model: set distill_attention",
    ),
    (tokens, {"distill_hidden": 1.0}, lambda: tokens(layers=3), "other hidden states: 4 of (8, 6, 6), the model 3 of"),
    (
        tokens,
        {"distill_hidden": 0.5},
        lambda: None,
        "the recipe distills (distill_hidden = 0.5) but there is no teacher",
    ),
]


@pytest.mark.parametrize(("student", "told", "teacher", "said"), BAD, ids=[row[-1][:40] for row in BAD])
def test_a_network_that_has_none_is_one_line(student, told, teacher, said):
    task = Halves() if student is network else Rows()
    with pytest.raises(InputError, match=r"^[^\n]+$") as caught:
        finetune_(student(), task, Recipe(steps=1, batch_size=8, **told), teacher=teacher())
    assert said in str(caught.value)


def test_they_are_part_of_a_recipes_id():
    assert Recipe(steps=1, distill_hidden=1.0).id != Recipe(steps=1).id
