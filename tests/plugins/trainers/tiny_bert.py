"""A tiny BERT that classifies, its data, and how Trainer trains it."""

import torch

import bitplan
from bitplan.adapters.torch import inference
from bitplan.adapters.transformers import transformers as library

transformers = library("these tests")
WORDS, TOKENS, SAMPLES, STEPS = 40, 8, 32, 6


def network(dropout=0.1):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=TOKENS,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return transformers.BertForSequenceClassification(config)


def inputs():
    ids = torch.randint(WORDS, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": (ids[:, 0] > WORDS // 2).long()}


def dataset():
    columns = inputs()
    return [{name: column[row] for name, column in columns.items()} for row in range(SAMPLES)]


def quantized(dropout=0.1):
    model, batch = network(dropout), {"input_ids": inputs()["input_ids"]}
    graph = bitplan.trace(model, batch, rules=bitplan.Rules(narrow=0))
    assert len(graph.links) == 2  # query, key and value of both layers
    made = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(made, [batch])
    return made


def loader():
    return torch.utils.data.DataLoader(dataset(), batch_size=8)


def optimizer(model):
    return torch.optim.AdamW(bitplan.parameter_groups(model, lr=1e-3, step_lr=1e-4))


def logits(model):
    with inference(model), torch.no_grad():
        return model(input_ids=inputs()["input_ids"]).logits


def trainer(model, folder, **options):
    given = {
        "max_steps": STEPS,
        "save_steps": 1,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 8,
        "use_cpu": True,
    }
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_steps": 1, "dataloader_pin_memory": False}
    arguments = transformers.TrainingArguments(str(folder), seed=3, **given | quiet | options)
    return transformers.Trainer(model, arguments, train_dataset=dataset())
