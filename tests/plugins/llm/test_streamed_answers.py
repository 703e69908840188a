"""Drift and fisher from a folder of weights, block after block: values of the network, which is never there whole."""

import pytest
import torch
from torch import nn

import bitplan
from bitplan.adapters.transformers import transformers
from bitplan.core.errors import InputError
from bitplan.gains.base import Context
from bitplan.graph.names import LinkRule, Names, trace_checkpoint
from bitplan.models.block_sequence import BlockChain
from bitplan.models.streamed import skeleton_of
from bitplan.weights.opened import open_checkpoint
from texts import write_folder, write_text, write_tokenizer

CHOICES = "w2a16,w3a16,w4a16"
OPTIONS = {"drift": {"samples": 6, "batch_size": 2}, "fisher": {"samples": 6, "part": 3}}
LIKE_LLAMA = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LIKE_GPT = {"vocab_size": 32, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
NETWORKS = {
    "llama": LIKE_LLAMA, "qwen3": LIKE_LLAMA | {"head_dim": 8}, "gemma2": LIKE_LLAMA | {"head_dim": 8},
    "gpt2": LIKE_GPT, "gptj": LIKE_GPT | {"rotary_dim": 8},  # a block of which gives out its attention too
    "opt": {"vocab_size": 32, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
            "max_position_embeddings": 64, "word_embed_proj_dim": 32},
}  # fmt: skip


def rules(last="w16a16"):
    return bitplan.Rules(first="w16a16", last=last, embeddings="w16a16", narrow=0).for_choices(CHOICES)


@pytest.fixture
def folder(tmp_path):
    torch.set_num_threads(1)
    return write_folder(tmp_path / "model", num_hidden_layers=3, shards=True)


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "t.txt")


@pytest.fixture
def task(folder, text):
    return bitplan.load_task("text", data=text, tokenizer=folder, tokens=16)


def estimated(method, model, graph, task, choices=CHOICES, seed=0, store=None, progress=None, **options):
    context = Context(task=task, quantizer="groups:size=16,zeros=true", seed=seed, store=store, progress=progress)
    return bitplan.estimate(method, model, graph, choices=choices, context=context, **OPTIONS[method] | options)


def assert_alike(one, other):
    assert one.rows.keys() == other.rows.keys()
    for name in one.rows:
        assert other.rows[name] == pytest.approx(one.rows[name], rel=1e-6, abs=1e-9)
        assert other.errors[name] == pytest.approx(one.errors[name], rel=1e-6, abs=1e-9)
    assert (one.counts, one.spend) == (other.counts, other.spend)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_file_gives_what_the_network_gives(name, text, tmp_path):
    library = transformers("a test")
    torch.manual_seed(0)
    network = library.AutoModelForCausalLM.from_config(library.AutoConfig.for_model(name, **NETWORKS[name]))
    network.save_pretrained(tmp_path / "model")
    folder = write_tokenizer(tmp_path / "model")
    task, network = bitplan.load_task("text", data=text, tokenizer=folder, tokens=16), bitplan.load_pretrained(folder)
    graph = bitplan.trace(network, task.example(), rules=rules())
    for method in OPTIONS:
        assert_alike(*(estimated(method, model, graph, task, seed=3) for model in (network, folder)))


def test_labels_of_the_text_and_a_last_layer_that_is_chosen(folder, task):
    """The last layer runs after all blocks."""
    network = bitplan.load_pretrained(folder)
    graph = bitplan.trace(network, task.example(), rules=rules(last=None))
    assert "lm_head" in {group.name for group in graph.selectable}
    assert_alike(*(estimated("fisher", model, graph, task, labels="task") for model in (network, folder)))
    assert_alike(*(estimated("drift", model, graph, task) for model in (network, folder)))


def test_groups_that_reach_over_blocks(folder, task):
    every = Names(links=(LinkRule("all o", r"(?<=layers\.)\d+(?=\.self_attn\.o_proj)"),))
    linked = trace_checkpoint(folder, rules(), names=every)
    assert [len(group.layers) for group in linked.selectable].count(3) == 1
    for method in OPTIONS:
        assert_alike(*(estimated(method, model, linked, task) for model in (bitplan.load_pretrained(folder), folder)))


@pytest.mark.parametrize(("method", "after"), [("drift", 20), ("fisher", 1)])
def test_a_killed_one_goes_on(folder, task, tmp_path, method, after):
    graph = trace_checkpoint(folder, rules())
    expected = estimated(method, folder, graph, task)

    def kill(done, total, words):
        if done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        estimated(method, folder, graph, task, store=tmp_path / "store", progress=kill)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*.json")}
    assert len(kept) == after
    again = estimated(method, folder, graph, task, store=tmp_path / "store")
    assert (again.rows, again.spend) == (expected.rows, expected.spend)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_only_the_block_that_runs_has_data(folder, task):
    """When a block runs, whoever runs it, no other has its weights."""
    opened = open_checkpoint(folder)
    network, there = skeleton_of(opened), []
    blocks = network.model.layers
    for block in blocks:
        block.register_forward_hook(lambda *_: there.append([not next(one.parameters()).is_meta for one in blocks]))
    chain, batch = BlockChain(network, opened), next(iter(task.batches("train", 1)))
    chain.first(lambda: task.forward(network, batch))
    calls = chain.calls(lambda: task.forward(network, batch))
    assert calls.first.shape == (1, 16, 32)
    there.clear()
    state = calls.first
    for number, block in enumerate(chain.blocks):
        with block.reading(), torch.no_grad():
            state = chain.run(number, calls, state)
    assert there == [[place == number for place in range(3)] for number in range(3)]
    assert all(parameter.is_meta for parameter in network.parameters())


def test_choices_that_quantize_inputs_need_the_network(folder, task):
    with pytest.raises(InputError, match="drift from a file lowers weights alone, and w2a8 is another choice"):
        estimated("drift", folder, trace_checkpoint(folder, rules()), task, choices="w2a8,w4a8")


def test_blocks_that_hand_on_something_else_are_refused(folder, task):
    """A network that adds the first block's state to all others is no chain."""
    opened = open_checkpoint(folder)
    network = skeleton_of(opened)

    class Twice(nn.Module):
        def __init__(self, own):
            super().__init__()
            self.own = own

        def forward(self, input_ids):
            state = self.own.model.embed_tokens(input_ids)
            place = self.own.model.rotary_emb(state, torch.arange(16)[None])
            for block in self.own.model.layers:
                state = state + block(state, position_embeddings=place)
            return self.own.lm_head(self.own.model.norm(state))

    strange = Twice(network)
    names = {f"own.{name}": tensor for name, tensor in opened.tensors.items()}
    with pytest.raises(InputError, match="is not blocks that hand one tensor on.*load it"):
        BlockChain(strange, type(opened)(opened.path, names)).first(lambda: strange(torch.arange(16)[None]))
