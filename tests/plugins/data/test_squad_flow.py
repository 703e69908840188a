"""The whole flow on a small BERT with the task squad: trace, quantize, calibrate, train with a teacher, plan, save."""

import copy

import pytest
import torch
from squads import OPTIONS, small_bert, write_json, write_tokenizer

import bitplan
from bitplan.quant.convert import quantizers_of

RULES = bitplan.Rules(narrow=0)
RECIPE = bitplan.Recipe(steps=2, batch_size=4, optimizer="adamw", lr=1e-3, distill=0.5, temperature=2.0)
ATTENTION = "bert.encoder.layer.{}.attention.self.{}"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("squad")
    data, words = write_json(folder / "squad"), write_tokenizer(folder / "bert")
    return bitplan.load_task("squad", data=str(data), tokenizer=str(words), **OPTIONS)


@pytest.fixture(scope="module")
def four(task):
    """The float model, its graph, and the model at 4 bits, calibrated."""
    model = small_bert().eval()
    graph = bitplan.trace(model, task.example(), rules=RULES)
    quantized = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(quantized, task.batches("train", 4), forward=task.forward)
    return model, graph, quantized


def test_the_small_public_bert_is_traced_as_the_paper_says():
    model, example = bitplan.load_model("minilm-l6", weightless=True)
    graph = bitplan.trace(model, example, name="minilm-l6")
    encoder = [layer for layer in graph.layers if ".encoder." in layer.name and layer.weights]
    assert (len(encoder), len(graph.selectable), len(graph.links)) == (36, 24, 6)
    assert sum(layer.weights for layer in encoder) == 6 * (4 * 384 * 384 + 2 * 384 * 1536)
    assert sum(parameter.numel() for parameter in model.parameters()) == 22_566_146


def test_query_key_and_value_are_linked_and_products_stay_at_8_bits(four):
    _, graph, quantized = four
    assert {link.layers for link in graph.links} == {
        tuple(ATTENTION.format(number, part) for part in ("query", "key", "value")) for number in range(2)
    }
    fixed = {layer.name: str(layer.fixed) for layer in graph.layers if not layer.weights}
    assert fixed == {ATTENTION.format(n, product): "w8a8" for n in range(2) for product in ("matmul", "matmul_1")}
    quantizers = quantizers_of(quantized)
    inputs = {id(quantizers[ATTENTION.format(0, part)].inputs[0]) for part in ("query", "key", "value")}
    assert len(inputs) == 1


def test_training_with_a_teacher_moves_weights_and_steps_and_repeats(task, four):
    model, _, quantized = four
    trained = []
    for _ in range(2):
        student = copy.deepcopy(quantized)
        log = bitplan.finetune_(student, task, RECIPE, teacher=model, seed=1)
        assert log.complete
        trained.append(student.state_dict())
    before = quantized.state_dict()
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in before)
    moved = {name for name in before if not torch.equal(before[name], trained[0][name])}
    assert {"qa_outputs.weight", "bert.encoder.layer.0.attention.self.query.weight"} <= moved
    assert any(name.endswith("weight_quantizer.step") for name in moved)
    assert any(name.endswith("input_quantizer.step") for name in moved)


def test_a_mixed_plan_by_eagl_is_saved_and_loaded_with_the_same_answers(task, four, tmp_path):
    _, graph, quantized = four
    gains = bitplan.estimate("eagl", quantized, graph)
    plan = bitplan.select(graph, gains, bitplan.price("bmac", graph), budget="70%")
    chosen = {str(plan.precisions[layer.name]) for group in graph.selectable for layer in group.layers}
    assert chosen == {"w2a2", "w4a4"}
    mixed = bitplan.quantize(quantized, plan)
    bitplan.finetune_(mixed, task, bitplan.Recipe(steps=1, batch_size=4, optimizer="adamw", lr=1e-3), seed=1)
    path = bitplan.save_checkpoint(mixed, tmp_path / "mixed")
    loaded = bitplan.load_checkpoint(path, small_bert()).eval()
    batch = next(iter(task.batches("test", 4)))
    for own, other in zip(*(task.logits(task.forward(one, batch)) for one in (mixed.eval(), loaded)), strict=True):
        assert torch.equal(own, other)
    assert task.answers(loaded) == task.answers(mixed)
    assert 0 <= bitplan.evaluate(loaded, task) <= 100
