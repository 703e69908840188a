"""Gains of language models from a mapped file: how much memory they take, against the file's size.

python -m benchmarks.streaming [--weights]

A synthetic checkpoint of Llama-7B's shapes (4,096 features, 11,008 between, 32,000 words, bfloat16) with two of its 32
blocks, random numbers in each. `--weights` makes a sparse file of all 32 that takes no disk, and runs only the
methods that read weights (eagl, weight_error on 64 rows of each matrix). Each method runs in a process of its own; its
peak beyond that of an empty one is printed, and its CPU time. Others run 4 windows of 128 tokens.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
CHOICES, QUANTIZER = "w2a16,w4a16", "groups:size=64,zeros=true"
WINDOWS, TOKENS = 4, 128
FOLDER = Path(os.environ.get("TMPDIR", "/tmp")) / "streaming"
ALONE, RUN = ("eagl", "weight_error"), ("moments", "drift", "fisher")


def main(is_sparse: bool) -> None:
    """Make the file and print a line for each method."""
    blocks, folder = (32, FOLDER / "sparse") if is_sparse else (2, FOLDER / "random")
    size = write_llama(folder, blocks, sparse=is_sparse)
    print(f"{folder}: {blocks} blocks, {size / 1e9:.2f} GB", flush=True)
    empty = alone("nothing", folder)[0]
    for method in ALONE if is_sparse else ALONE + RUN:
        peak, seconds = alone(method, folder)
        more = f"{(peak - empty) / 1e9:.2f} GB beyond {empty / 1e9:.2f} GB"
        print(f"{method}: peak {more}, {(peak - empty) / size:.2f} of the file; {seconds:.0f} CPU s", flush=True)


def shapes(blocks: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor."""
    import torch

    from bitplan.adapters.transformers import transformers

    library = transformers("Llama's shapes")
    with torch.device("meta"):
        network = library.LlamaForCausalLM(library.LlamaConfig(**CONFIG, num_hidden_layers=blocks))
    return {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}


def write_llama(folder: Path, blocks: int, *, sparse: bool) -> int:
    """Write the file unless it is there: its header, then random numbers or a hole; return its size."""
    import numpy as np

    path = folder / "model.safetensors"
    header, place = {}, 0
    for name, shape in shapes(blocks).items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    whole = 8 + len(text) + place
    if path.exists() and path.stat().st_size == whole:
        return whole
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": blocks}))
    drawn = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in () if sparse else shapes(blocks).values():
            for _ in range(shape[0]):
                row = drawn.standard_normal(int(np.prod(shape[1:])), np.float32) * 0.02
                file.write((row.view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes())
        file.truncate(whole)
    return whole


def alone(method: str, folder: Path) -> tuple[int, float]:
    """Return the peak of a process that estimates by this method, in bytes, and its CPU seconds."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(measured, method, folder).result()


def measured(method: str, folder: Path) -> tuple[int, float]:
    """Estimate; imports and the graph count as part of an empty process."""
    import torch

    import bitplan
    from bitplan.gains.base import Context
    from bitplan.models.streamed import skeleton_of
    from bitplan.weights.opened import open_checkpoint

    torch.set_num_threads(1)
    rules = bitplan.Rules(first="w16a16", last="w16a16", embeddings="w16a16", narrow=0).for_choices(CHOICES)
    example = {"input_ids": torch.zeros(1, TOKENS, dtype=torch.long)}
    graph, begun = bitplan.trace(skeleton_of(open_checkpoint(folder)), example, rules=rules), time.process_time()
    options: dict[str, object] = {
        "eagl": {"steps": "mse"}, "weight_error": {"rows": 64}, "moments": {"samples": WINDOWS},
        "drift": {"samples": WINDOWS, "batch_size": 1}, "fisher": {"samples": WINDOWS, "part": WINDOWS},
    }.get(method, {})  # fmt: skip
    if method != "nothing":
        context = Context(task=windows() if method in RUN else None, quantizer=QUANTIZER)
        bitplan.estimate(method, folder, graph, choices=CHOICES, context=context, **options)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, time.process_time() - begun


def windows() -> object:
    """Return a task of random tokens."""
    import torch

    import bitplan

    torch.manual_seed(0)
    rows = [{"input_ids": torch.randint(CONFIG["vocab_size"], (WINDOWS, TOKENS))}]
    return bitplan.task(train=rows, answers=words_first, name="tokens")


def words_first(outputs: Any) -> object:
    """Return the logits with the words in dimension 1."""
    return outputs.logits.transpose(1, 2)


if __name__ == "__main__":
    main("--weights" in sys.argv[1:])
