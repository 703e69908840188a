"""A small language model with real weights for `studies/ceiling_stories.toml`, and stories of its own to train on.

python studies/stories.py FOLDER [--out stories]

FOLDER holds what llama2.c (MIT) offers as tinyllamas/stories260K: `stories260K.bin` and `tok512.bin`; and
`tinystories-valid-30k.txt`, stories that it was not trained on. Written is a folder as Hugging Face's library has them,
and beside it `stories.txt`: 1,024 stories that the network tells itself (seed 0, temperature 1), then the others. So
nothing is needed to train on but the network, and what it is tested on was written by somebody else.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from torch import Tensor, nn

from bitplan.core.errors import FileError
from bitplan.models.pretrained import build_pretrained

STORIES, TOKENS, BEGIN = 1024, 256, 1
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def network() -> nn.Module:
    """The network that the folder `$BITPLAN_STORIES` describes, with random weights: the model of the study."""
    place = Path(os.environ.get("BITPLAN_STORIES", Path(__file__).parent / "stories"))
    if not (place / "config.json").is_file():
        raise FileError(f"there is no network in {place}: make it with python studies/stories.py FOLDER --out {place}")
    return build_pretrained(place)[0]


def main() -> None:
    """Write the folder and the text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "stories")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model = read_network(options.folder / "stories260K.bin", options.out)
    words = read_words(options.folder / "tok512.bin", model.config.vocab_size)
    tokenizer = tokenizer_of(words)
    model.save_pretrained(options.out)
    tokenizer.save(str(options.out / "tokenizer.json"))
    others = (options.folder / "tinystories-valid-30k.txt").read_text()
    told = [tokenizer.decode(row) for row in stories_of(model)]
    (options.out / "stories.txt").write_text("".join(told) + others)
    own, theirs = (len(tokenizer.encode(text).ids) for text in ("".join(told), others))
    print(f"{options.out}: {model.num_parameters():,} parameters; {own:,} tokens of its own and {theirs:,} of others")


def read_network(path: Path, out: Path) -> Any:
    """llama2.c's file: seven integers, then all weights as floats, one kind after the other for all blocks."""
    content = path.read_bytes()
    *sizes, words, longest = struct.unpack("<7i", content[:28])
    told = dict(zip(SIZES, sizes, strict=True))
    more = {"vocab_size": words, "max_position_embeddings": longest, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bos_token_id": BEGIN, "eos_token_id": 2}
    (out / "config.json").write_text(json.dumps(kind | told | more))
    model: Any = build_pretrained(out)[0].eval()
    left = torch.from_numpy(np.frombuffer(content, dtype="<f4", offset=28).copy())
    blocks = model.model.layers
    kinds = [
        [model.model.embed_tokens],
        [block.input_layernorm for block in blocks],
        *([getattr(block.self_attn, name) for block in blocks] for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        [block.post_attention_layernorm for block in blocks],
        *([getattr(block.mlp, name) for block in blocks] for name in ("gate_proj", "down_proj", "up_proj")),
        [model.model.norm],
    ]
    with torch.no_grad():
        for weight in (module.weight for kind in kinds for module in kind):
            own, left = left[: weight.numel()], left[weight.numel() :]
            weight.copy_(own.view_as(weight))
        for block in blocks:
            for rotated in (block.self_attn.q_proj, block.self_attn.k_proj):
                rotated.weight.copy_(halves(rotated.weight, model.config.head_dim))
    return model


def halves(weight: Tensor, size: int) -> Tensor:
    """Rows of a head for positions as transformers turns them, one half with the other; llama2.c turns neighbours."""
    return weight.view(-1, size // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def read_words(path: Path, count: int) -> list[tuple[str, float]]:
    """Tokens with the scores by which they are joined; single bytes are called <0x..>."""
    content, place, found = path.read_bytes(), 4, []
    for number in range(count):
        score, length = struct.unpack_from("<fi", content, place)
        place += 8 + length
        text = content[place - length : place]
        found.append((f"<0x{number - 3:02X}>" if 3 <= number < 259 else text.decode(), score))
    return found


def tokenizer_of(words: list[tuple[str, float]]) -> Tokenizer:
    """The same joins by rank: every pair of tokens that make a token, the best scores first."""
    numbers = {word: number for number, (word, _) in enumerate(words)}
    scores = dict(words)
    cuts = [(word[:cut], word[cut:]) for word in list(numbers)[259:] for cut in range(1, len(word))]
    joins = [pair for pair in cuts if pair[0] in numbers and pair[1] in numbers]
    joins.sort(key=lambda pair: -scores[pair[0] + pair[1]])
    made = Tokenizer(BPE(numbers, joins, unk_token=words[0][0], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(words[BEGIN][0], normalized=False)])
    return made


def stories_of(model: Any) -> list[list[int]]:
    """So many rows of tokens, drawn from what the network foretells; a story that ends is followed by another."""
    torch.manual_seed(0)
    rows = torch.full((STORIES, 1), BEGIN)
    with torch.no_grad():
        seen = model(rows, use_cache=True)
        for _ in range(TOKENS):
            drawn = torch.multinomial(seen.logits[:, -1].softmax(-1), 1)
            rows = torch.cat([rows, drawn], dim=1)
            seen = model(drawn, past_key_values=seen.past_key_values, use_cache=True)
    return rows[:, 1:].tolist()


if __name__ == "__main__":
    main()
