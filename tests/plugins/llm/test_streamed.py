"""Moments from a folder of weights, block after block: the values of the network, which is never there whole."""

import pytest
import torch
from torch import nn

import bitplan
from bitplan.adapters.torch import parameters_without_data
from bitplan.core.errors import FileError, InputError
from bitplan.gains.base import Context
from bitplan.graph.names import trace_checkpoint
from bitplan.models.streamed import skeleton_of, streaming
from bitplan.weights.opened import open_checkpoint
from texts import with_config, write_folder, write_text

CHOICES = "w2a16,w4a16"
RULES = bitplan.Rules(first="w16a16", last="w16a16", embeddings="w16a16", narrow=0).for_choices(CHOICES)


@pytest.fixture
def folder(tmp_path):
    torch.set_num_threads(1)
    return write_folder(tmp_path / "model", num_hidden_layers=3, shards=True)


@pytest.fixture
def task(folder, tmp_path):
    return bitplan.load_task("text", data=write_text(tmp_path / "t.txt"), tokenizer=folder, tokens=16)


def estimated(model, graph, task, **more):
    context = Context(task=task, quantizer="groups:size=16,zeros=true", **more)
    return bitplan.estimate("moments", model, graph, choices=CHOICES, context=context, samples=6, batch_size=6)


def test_the_file_gives_what_the_network_gives(folder, task):
    """On all windows, so that the order in which they are drawn does not matter."""
    every = {"samples": task.size("train"), "batch_size": task.size("train")}
    network = bitplan.load_pretrained(folder)
    graph = bitplan.trace(network, task.example(), rules=RULES)
    context = Context(task=task, quantizer="groups:size=16,zeros=true")
    found = [
        bitplan.estimate("moments", model, graph, choices=CHOICES, context=context, **every).rows
        for model in (network, folder)
    ]
    for name, row in found[0].items():
        assert found[1][name] == pytest.approx(row, rel=1e-3)


def test_a_graph_of_names_alone_will_do(folder, task):
    graph = trace_checkpoint(folder, RULES)
    gains = estimated(folder, graph, task)
    assert gains.rows.keys() == {group.name for group in graph.selectable}
    assert all(row[1] > 0 for row in gains.rows.values())


def test_only_the_block_that_runs_has_data(folder):
    opened = open_checkpoint(folder)
    network, there = skeleton_of(opened), []
    assert all(parameter.is_meta for parameter in network.parameters())
    blocks = network.model.layers

    def look(module, *_):
        there.append([not next(block.parameters()).is_meta for block in blocks])

    for block in blocks:
        block.register_forward_hook(look)
    with torch.no_grad(), streaming(network, opened):
        tokens = torch.arange(16)[None]
        made = network(tokens).logits
    assert there == [[place == number for place in range(3)] for number in range(3)]
    assert all(parameter.is_meta for parameter in network.parameters())
    assert torch.allclose(made, bitplan.load_pretrained(folder)(tokens).logits, atol=1e-6)


def test_a_killed_one_goes_on(folder, task, tmp_path):
    graph = trace_checkpoint(folder, RULES)
    expected = estimated(folder, graph, task)

    def kill(done, total, layer):
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        estimated(folder, graph, task, store=tmp_path / "store", progress=kill)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*.json")}
    assert len(kept) == 9
    again = estimated(folder, graph, task, store=tmp_path / "store")
    assert again.rows == expected.rows
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_what_cannot_be_streamed_is_said_in_one_line(folder, task, tmp_path):
    graph = trace_checkpoint(folder, RULES)
    shard = sorted(folder.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileError, match=f"{shard.name} is cut off"):
        estimated(folder, graph, task)
    shard.write_bytes(whole)
    deeper = with_config(folder, num_hidden_layers=4)
    with pytest.raises(FileError, match=r"lacks tensor 'model.layers.3\..*', which the network of its config.json has"):
        estimated(deeper, graph, task)
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match="no config.json beside it"):
        estimated(folder, graph, task)


def test_parameters_without_data_leave_tables_and_others_alone():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("table", torch.arange(3.0), persistent=False)

    with parameters_without_data():
        made = Table()
    assert made.weight.is_meta
    assert torch.equal(made.table, torch.arange(3.0))
    assert not Table().weight.is_meta
