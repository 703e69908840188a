"""Small SQuAD in its two real formats, a vocabulary for it, and a small BERT."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import torch

from bitplan.adapters.transformers import bert_for_question_answering

WORDS = "who what where when built the tower river bridge city king in by of 1889 1990 paris rome café old new is a it"
PIECES = [*"abcdefghijklmnopqrstuvwxyz0123456789.,;?!'", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz0123456789")]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys([*WORDS.replace("é", "e").split(), *PIECES])]
OPTIONS = {"tokens": 24, "stride": 6, "question_tokens": 8, "answer_tokens": 5, "n_best": 3}

TRAIN = [
    ("The old tower of Paris, built in 1889 by the king, is new. It is the tower of the city.", "built in 1889"),
    ("The bridge in Rome.", "Rome"),
    ("Where the river is, the old bridge is. A king built it in 1990; who built the city? The new king.", "new king"),
]
DEV = [
    ("A new tower, in the old city of Rome, is by the river; the king built it in 1990.", "the river", "river"),
    ("The café is in Paris.", "café", "The café", "Paris"),
    ("The king is old, the city is new, and the bridge of the river is in Rome, in Paris, in the old city.", "Rome"),
]


def asked(rows, word):
    """Questions in parquet's form."""
    return [
        {
            "id": f"{word}{number}",
            "title": "Towers",
            "context": context,
            "question": f"What is it in {word} {number}?",
            "answers": {"text": list(texts), "answer_start": [context.index(text) for text in texts]},
        }
        for number, (context, *texts) in enumerate(rows)
    ]


def official(rows, version="1.1"):
    """Questions in the official form."""
    paragraphs = [
        {
            "context": row["context"],
            "qas": [
                {
                    "id": row["id"],
                    "question": row["question"],
                    "answers": [
                        {"text": text, "answer_start": start}
                        for text, start in zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
                    ],
                }
            ],
        }
        for row in rows
    ]
    return {"data": [{"title": "Towers", "paragraphs": paragraphs}], "version": version}


def write_tokenizer(folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return folder


def write_json(folder, train=TRAIN, dev=DEV):
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows, word in (("train", train, "train"), ("dev", dev, "dev")):
        (folder / f"{name}-v1.1.json").write_text(json.dumps(official(asked(rows, word))))
    return folder


def write_squad_parquet(folder, train=TRAIN, dev=DEV):
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows, word in (("squad11-train-part", train, "train"), ("squad11-dev-a", dev, "dev")):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(asked(rows, word)), folder / f"{name}.parquet")
    return folder


def small_bert(**sizes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "max_position_embeddings": 32, **sizes}
    return bert_for_question_answering(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, **sizes
    )
