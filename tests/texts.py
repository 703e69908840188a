"""A text, a tokenizer for it, and a small language model in a Hugging Face folder and in a GGUF file."""

from __future__ import annotations

import json
import random

import gguf
import numpy as np
import torch

import bitplan
from bitplan.adapters.transformers import transformers

WORDS = [
    "the",
    "old",
    "king",
    "of",
    "rome",
    "built",
    "a",
    "new",
    "bridge",
    "by",
    "river",
    "and",
    "saw",
    "city",
    "tower",
    "in",
    "paris",
]
SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def write_text(path, words=600):
    """Words that mostly follow one another in a circle, so that there is something to foretell."""
    drawn, place, chosen = random.Random(0), 0, []
    for _ in range(words):
        place = (place + 1) % len(WORDS) if drawn.random() < 0.6 else drawn.randrange(len(WORDS))
        chosen.append(WORDS[place])
    path.write_text(" ".join(chosen))
    return path


def write_tokenizer(folder, known=()):
    """One token a word, as Hugging Face writes it; `known` are further words."""
    import tokenizers

    vocabulary = {word: number for number, word in enumerate(["<unk>", *WORDS, *known])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder


def llama(**sizes):
    library, state = transformers("a test"), torch.get_rng_state()
    torch.manual_seed(0)
    model = library.LlamaForCausalLM(library.LlamaConfig(**SIZES | sizes)).eval()
    torch.set_rng_state(state)
    return model


def write_folder(folder, shards=False, **sizes):
    """The model, its configuration and its tokenizer."""
    llama(**sizes).save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
    return write_tokenizer(folder)


def trained(folder, text, steps=60):
    """The folder with a model that has learned the text a little, so that rounding can spoil it."""
    import bitplan

    model = bitplan.load_pretrained(folder)
    task = bitplan.load_task("text", data=text, tokenizer=folder, tokens=16)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(steps):
        batch = next(iter(task.batches("train", 8, seed=step)))
        loss = task.loss(task.forward(model, batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


def write_gguf(path, kinds=None):
    """The same model as llama.cpp has it; `kinds` are types of tensors by the ends of their names, elsewhere floats."""
    model = llama()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(SIZES["vocab_size"])
    write_gguf_tokenizer(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SIZES["num_hidden_layers"])
    for name, value in model.state_dict().items():
        own = names.get_name(name, try_suffixes=(".weight",))
        tensor = turned(name, value).numpy()
        kind = next((kind for end, kind in (kinds or {}).items() if own.endswith(end)), None)
        if kind is None:
            writer.add_tensor(own, tensor)
        elif kind == gguf.GGMLQuantizationType.I8:
            writer.add_tensor(own, tensor.astype(np.int8))
        else:
            writer.add_tensor(own, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def turned(name, value):
    """llama.cpp turns pairs of features of queries and keys that Hugging Face keeps in halves."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return value.contiguous()
    return value.unflatten(0, (SIZES[heads], 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def write_gguf_tokenizer(writer):
    """Byte pairs, as GPT-2's: single letters, and the pairs that make some words."""
    letters = [*"abcdefghijklmnoprstuvwy", "Ġ"]
    merges = ["t h", "th e", "o f", "i n"]
    tokens = ["<s>", *letters, *(pair.replace(" ", "") for pair in merges)]
    tokens += [f"<unused{number}>" for number in range(SIZES["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def with_config(folder, **changes):
    """A folder whose configuration says something else."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def language_task(place):
    """A small trained model, its folder, and windows of 16 tokens of a text."""
    torch.set_num_threads(1)
    text = write_text(place / "text.txt", words=2000)
    folder = trained(write_folder(place / "model"), text)
    task = bitplan.load_task("text", data=text, tokenizer=folder, tokens=16)
    return bitplan.load_pretrained(folder), folder, task
