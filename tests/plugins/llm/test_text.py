"""Text for language models: windows, perplexity, and networks compared window by window."""

import math
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from bitplan.core.errors import InputError
from bitplan.plugins.llm.text import perplexity
from bitplan.tasks.base import load_task
from bitplan.testing import check_task
from bitplan.tune.loop import evaluate_each
from texts import WORDS, llama, write_folder, write_text, write_tokenizer


@pytest.fixture
def options(tmp_path):
    return {"data": str(write_text(tmp_path / "text.txt")), "tokenizer": str(write_tokenizer(tmp_path)), "tokens": 16}


def test_it_keeps_the_contract_of_tasks(options):
    check_task(load_task("text", **options), model=llama())


def test_windows_lie_side_by_side_and_the_first_part_is_to_tune_by(options):
    task = load_task("text", **options)
    train, test = (torch.cat(list(task.batches(split, 5))) for split in ("train", "test"))
    assert train.shape == (600 * 6 // 10 // 16, 16)
    assert test.shape == (600 * 4 // 10 // 16, 16)
    text = Path(options["data"]).read_text().split()
    assert train.flatten().tolist() == [WORDS.index(word) + 1 for word in text[: train.numel()]]
    assert test.flatten().tolist() == [WORDS.index(word) + 1 for word in text[360 : 360 + test.numel()]]
    short = load_task("text", **options, share=0.25, windows=3, test_windows=2)
    assert short.size("train") == 3
    assert short.size("test") == 2
    assert torch.cat(list(short.batches("test", 1))).flatten()[0] == WORDS.index(text[150]) + 1


def test_perplexity_is_that_of_the_mean_loss_of_the_tokens_but_the_first(options):
    task, model = load_task("text", **options), llama()
    windows = torch.cat(list(task.batches("test", 4)))
    with torch.no_grad():
        chances = model(input_ids=windows).logits.double().log_softmax(-1)
    each = [
        -sum(float(chances[row, place, windows[row, place + 1]]) for place in range(15)) / 15
        for row in range(len(windows))
    ]
    assert task.each(model) == pytest.approx(each, rel=1e-5)
    assert task.score(model) == pytest.approx(math.exp(sum(each) / len(each)), rel=1e-5)
    assert task.scores(model)["loss"] == pytest.approx(sum(each) / len(each), rel=1e-5)
    assert not task.higher_is_better


def test_a_column_of_parquet_is_the_same_text(options, tmp_path):
    words = Path(options["data"]).read_text()
    rows = [words[: len(words) // 2], None, "", words[len(words) // 2 :]]
    pyarrow.parquet.write_table(pyarrow.table({"page": rows, "number": [1, 2, 3, 4]}), tmp_path / "text.parquet")
    table = load_task("text", **options | {"data": str(tmp_path / "text.parquet")}, column="page")
    assert table.size("train") == load_task("text", **options).size("train")
    assert torch.equal(next(table.batches("train", 9)), next(load_task("text", **options).batches("train", 9)))
    with pytest.raises(InputError, match="has no column text; it has page, number"):
        load_task("text", **options | {"data": str(tmp_path / "text.parquet")}).size("train")
    with pytest.raises(InputError, match="row 0 of the column number is no text"):
        load_task("text", **options | {"data": str(tmp_path / "text.parquet")}, column="number").size("train")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": 400}, "the train split of .* has 360 tokens, fewer than a window of 400: give a longer text"),
        ({"tokens": 1}, "there is nothing to foretell"),
        ({"share": 1.0}, "share is 1.0"),
        ({"data": "nowhere.txt"}, "there is no text nowhere.txt"),
        ({"tokenizer": None}, "needs a tokenizer"),
        ({"tokenizer": "nowhere.json"}, "nowhere.json"),
        ({"windows": 0}, "windows is 0"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(options, change, said):
    with pytest.raises(InputError, match=said) as caught:
        load_task("text", **options | change).size("train")
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_says_so(options, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"there is no tokenizer\.json in .*empty"):
        load_task("text", **options | {"tokenizer": str(tmp_path / "empty")}).size("train")


def test_a_tokenizer_or_a_window_that_does_not_fit_the_model_is_refused(options, tmp_path):
    task = load_task("text", **options)
    with pytest.raises(InputError, match="gave the token 17, and the model knows 8: take the tokenizer of the model"):
        task.score(llama(vocab_size=8))
    with pytest.raises(InputError, match="windows have 16 tokens, the model has positions for 8"):
        task.score(llama(max_position_embeddings=8))
    with pytest.raises(InputError, match="for causal language models"):
        task.loss(torch.zeros(2, 5), torch.zeros(2, 16, dtype=torch.long))


def test_a_folder_of_a_model_brings_its_tokenizer(options, tmp_path):
    folder = write_folder(tmp_path / "model")
    assert load_task("text", **options | {"tokenizer": str(folder)}).size("test") == 15


def test_a_study_keeps_the_loss_of_each_window(options):
    model, task = llama(), load_task("text", **options)
    score, losses = evaluate_each(model, task)
    assert losses == tuple(task.each(model))
    assert score == pytest.approx(task.score(model))


def test_losses_that_are_no_numbers_are_not_called_infinite():
    assert math.isnan(perplexity(math.nan))
    assert perplexity(1e6) == math.inf
    assert perplexity(math.log(7)) == pytest.approx(7)


def test_the_losses_of_a_network_of_16_bits_have_all_their_digits(options):
    task, model = load_task("text", **options), llama().bfloat16()
    batch = next(iter(task.batches("train", 2)))
    with torch.no_grad():
        outputs = task.forward(model, batch)
    exact = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].double().flatten(0, 1), batch[:, 1:].flatten())
    assert float(task.loss(outputs, batch)) == pytest.approx(float(exact), rel=1e-5)
