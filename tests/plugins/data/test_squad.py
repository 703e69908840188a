"""SQuAD v1.1 in both of its formats: windows, spans, the best answers, and what is refused."""

import json
import math

import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from squads import DEV, OPTIONS, TRAIN, VOCABULARY, asked, official, small_bert, write_json, write_squad_parquet
from squads import write_tokenizer as tokenizer
from torch import nn

from bitplan.adapters.tokenizers import load_word_pieces
from bitplan.core.errors import FileError, InputError
from bitplan.plugins.data.squad import Best, Question, Shape, best_spans, cut, gather, read_questions, windows_of
from bitplan.tasks.base import load_task


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    return load_word_pieces(tokenizer(tmp_path_factory.mktemp("bert")))


@pytest.fixture
def make(tmp_path):
    def make(write=write_json, **options):
        data = write(tmp_path / "squad")
        return load_task("squad", data=str(data), tokenizer=str(tokenizer(tmp_path / "bert")), **OPTIONS | options)

    return make


def words_of(batch, row):
    return [VOCABULARY[number] for number in batch.ids[row].tolist()]


@pytest.mark.parametrize("write", [write_json, write_squad_parquet])
def test_both_formats_give_the_same_questions(tmp_path, write):
    for split, rows, word in (("train", TRAIN, "train"), ("test", DEV, "dev")):
        read = read_questions(write(tmp_path), split)
        assert [one.id for one in read] == [f"{word}{number}" for number in range(3)]
        for one, (context, *texts) in zip(read, rows, strict=True):
            assert (one.context, [text for text, _ in one.answers]) == (context, texts)


def test_a_window_is_the_question_and_a_part_of_the_context(make):
    batch = next(iter(make().batches("test", 50)))
    assert batch.ids.shape == batch.mask.shape == batch.types.shape == (len(batch.starts), 24)
    rows = [" ".join(words_of(batch, row)) for row in range(len(batch.ids))]
    asked = "[CLS] what is it in d ##e ##v"
    assert rows[0] == f"{asked} 0 [SEP] a new tower , in the old city of rome , is by [SEP]"
    assert rows[1] == f"{asked} 0 [SEP] old city of rome , is by the river ; the king built [SEP]"
    assert rows[3] == f"{asked} 1 [SEP] the cafe is in paris . [SEP]" + 7 * " [PAD]"
    assert [batch.starts[0], batch.ends[0]] == [0, 0]  # the answer comes later
    assert words_of(batch, 1)[batch.starts[1] : batch.ends[1] + 1] == ["the", "river"]
    assert words_of(batch, 3)[batch.starts[3] : batch.ends[3] + 1] == ["cafe"]
    assert batch.mask[3].tolist() == [1] * 17 + [0] * 7
    assert batch.types[3].tolist() == [0] * 10 + [1] * 7 + [0] * 7


@given(length=st.integers(0, 200), room=st.integers(1, 60), data=st.data())
def test_windows_cover_every_token(length, room, data):
    stride = data.draw(st.integers(1, room))
    windows = windows_of(length, room, stride)
    assert {token for begin, part in windows for token in range(begin, begin + part)} == set(range(length))
    assert [begin for begin, _ in windows] == [number * stride for number in range(len(windows))]
    assert all(part == room for _, part in windows[:-1])
    assert windows[-1][0] + windows[-1][1] == length
    assert len(windows) == 1 or windows[-2][0] + room < length  # none is needless


CONTEXTS = st.lists(
    st.sampled_from(["tower", "Café", "1889", "xyz", "naïve", "東京", "it's", "e\u0301t", "🙂", "\u200b", "of", "a,b"]),
    min_size=1,
    max_size=40,
)


@given(words=CONTEXTS, gap=st.sampled_from([" ", "  ", "\n", "\u00a0"]), data=st.data())
def test_spans_map_back_to_the_exact_answer(pieces, words, gap, data):
    context = gap.join(words)
    first = data.draw(st.integers(0, len(words) - 1))
    last = data.draw(st.integers(first, min(first + 3, len(words) - 1)))
    text = gap.join(words[first : last + 1])
    start = len(gap.join([*words[:first], ""]))
    stride = data.draw(st.integers(1, 12))
    windows = cut([Question("q", context, "who built the tower", ((text, start),))], pieces, Shape(24, stride, 4))
    batch = windows.batch(torch.arange(len(windows)))
    whole = pieces([context])[0]
    begins, ends = windows.parts(batch.rows)
    seen = set()
    for row, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        part = range(row * stride, row * stride + end - begin)
        seen.update(part)
        assert batch.ids[row, begin:end].tolist() == [whole.ids[token] for token in part]
        inside = [windows.places(row, [(token, token)])[1][0] for token in range(begin, end)]
        assert inside == [whole.offsets[token] for token in part]
        if batch.ends[row]:
            question, places = windows.places(row, [(int(batch.starts[row]), int(batch.ends[row]))])
            found = context[slice(*places[0])]
            assert question == 0
            assert found == text.strip("\u200b") or "\u200b" in text  # it has no token of its own
            assert found in text
    assert seen == set(range(len(whole.ids)))
    tokens = [t for t, (begin, end) in enumerate(whole.offsets) if begin < start + len(text) and end > start]
    if tokens and len(tokens) <= 17 - stride + 1:
        assert bool(batch.ends.any()), "an answer shorter than the overlap is whole in some window"


@given(seed=st.integers(0, 10**6), longest=st.integers(1, 6), n_best=st.integers(1, 8))
def test_the_best_spans_are_those_of_brute_force(pieces, seed, longest, n_best):
    questions = [Question(str(n), context, "who", ((text, 0),)) for n, (context, text, *_) in enumerate(TRAIN)]
    windows = cut(questions, pieces, Shape(16, 5, 4))
    rows = torch.arange(len(windows))
    generator = torch.Generator().manual_seed(seed)
    logits = tuple(torch.randn(len(windows), 16, generator=generator) for _ in range(2))
    begins, ends = windows.parts(rows)
    wanted: dict[int, dict] = {}
    for row in rows.tolist():
        inside = range(int(begins[row]), int(ends[row]))
        for start in inside:
            for end in [end for end in inside if 0 <= end - start < longest]:
                question, [place] = windows.places(row, [(start, end)])
                scores = wanted.setdefault(question, {})
                scores[place] = max(scores.get(place, -math.inf), float(logits[0][row, start] + logits[1][row, end]))
    halves = [rows[:2], rows[2:]]
    parts = [
        (half, best_spans((logits[0][half], logits[1][half]), windows.parts(half), longest, n_best)) for half in halves
    ]
    found = gather(windows, parts, n_best)
    for question, scores in wanted.items():
        best = sorted(scores.values(), reverse=True)[:n_best]
        assert [scores[place] for place in found[question]] == pytest.approx(best, rel=1e-5, abs=1e-5)


def test_scores_that_are_no_numbers_are_no_answers(pieces):
    windows = cut([Question("q", "the king", "who", (("king", 4),))], pieces, Shape(16, 5, 4))
    nothing = torch.full((1, 16), math.nan)
    best = best_spans((nothing, nothing), windows.parts(torch.tensor([0])), 3, 2)
    assert isinstance(best, Best)
    assert gather(windows, [(torch.tensor([0]), best)], 2) == {0: []}


class Oracle(nn.Module):
    """Knows the answers of some windows, and is sure of nothing in the others."""

    def __init__(self, batch):
        super().__init__()
        self.known = {
            tuple(ids): (start, end)
            for ids, start, end in zip(*(v.tolist() for v in batch[:1] + batch[3:5]), strict=True)
        }

    def forward(self, input_ids, attention_mask, token_type_ids):
        start, end = torch.zeros(2, *input_ids.shape)
        for row, ids in enumerate(input_ids.tolist()):
            first, last = self.known[tuple(ids)]
            start[row, first] = end[row, last] = 9
        return start, end


def test_an_oracle_scores_100_and_its_answers_are_the_given_ones(make):
    task = make()
    oracle = Oracle(next(iter(task.batches("test", 50))))
    assert task.scores(oracle) == {"F1": 100, "exact match": 100}
    answers = task.answers(oracle)
    assert [answers[f"dev{number}"][0] for number in range(3)] == ["the river", "café", "Rome"]
    assert all(len(found) == 3 for found in answers.values())
    batch = next(iter(task.batches("test", 50)))
    assert task.batch_score(task.forward(oracle, batch), batch) == 100


def test_the_score_is_the_mean_f1_of_the_best_answers(make):
    task = make()
    batch = next(iter(task.batches("test", 50)))
    shifted = batch._replace(ends=torch.where(batch.ends > 0, batch.ends + 1, 0))
    scores = task.scores(Oracle(shifted))
    # "the river;" is right all the same; "café is" against "café"; "Rome," is right
    assert scores == {"F1": pytest.approx(100 * (1 + 2 / 3 + 1) / 3), "exact match": pytest.approx(200 / 3)}
    assert task.score(Oracle(shifted)) == scores["F1"]
    hit = batch.ends == 0
    assert task.batch_score(task.forward(Oracle(shifted), batch), batch) == 100 * float(hit.double().mean())


def test_loss_and_logits_are_of_start_and_end(make):
    task, model = make(), small_bert().eval()
    batch = next(iter(task.batches("train", 4, seed=0)))
    outputs = task.forward(model, batch)
    start, end = task.logits(outputs)
    assert start.shape == end.shape == (4, 24)
    row = torch.arange(4)
    picked = start.log_softmax(1)[row, batch.starts] + end.log_softmax(1)[row, batch.ends]
    torch.testing.assert_close(task.loss(outputs, batch), -picked.mean() / 2)
    wanted = model(batch.ids, attention_mask=batch.mask, token_type_ids=batch.types).start_logits
    assert torch.equal(start, wanted)


def test_fewer_questions_are_a_draw_that_grows(make):
    drawn = [set(make(test_questions=count).answers(small_bert())) for count in (1, 2, 3, 9)]
    assert [len(ids) for ids in drawn] == [1, 2, 3, 3]
    assert drawn[0] < drawn[1] < drawn[2] == {"dev0", "dev1", "dev2"}
    assert make(questions=1).size("train") < make().size("train")


def test_missing_data_and_tokenizer_say_what_to_download_and_where_to_put_it(tmp_path):
    task = load_task("squad", data=tmp_path / "none", tokenizer=tokenizer(tmp_path / "bert"))
    for split, name in (("train", "train-v1.1.json"), ("test", "dev-v1.1.json")):
        with pytest.raises(FileError, match=r"^[^\n]+$") as refused:
            task.size(split)
        assert f"download https://rajpurkar.github.io/SQuAD-explorer/dataset/{name}" in str(refused.value)
        assert str(tmp_path / "none") in str(refused.value)
    task = load_task("squad", data=write_json(tmp_path / "squad"), tokenizer=tmp_path / "nowhere")
    with pytest.raises(
        FileError, match=r"^there is no tokenizer in [^\n]*nowhere: download tokenizer.json, or vocab.txt"
    ):
        task.size("train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cut off .*fetch it again"),
        ("[]", "is not SQuAD v1.1"),
        ('{"data": [], "version": "1.1"}', "has no questions"),
        ('{"data": [{"paragraphs": [{"context": 3, "qas": []}]}]}', "data.0.paragraphs.0.context"),
        (json.dumps(official(asked(DEV, "dev"), version="v2.0")), "is SQuAD v2.0, where questions may have no answer"),
        (json.dumps(official(asked(DEV, "dev"))).replace('"id"', '"is_impossible": false, "id"'), "is SQuAD v2.0"),
    ],
)
def test_a_wrong_json_is_one_line(tmp_path, content, message):
    (write_json(tmp_path) / "dev-v1.1.json").write_text(content)
    with pytest.raises(FileError, match=rf"^[^\n]*dev-v1.1.json[^\n]*{message}[^\n]*$"):
        read_questions(tmp_path, "test")


@pytest.mark.parametrize("form", ["json", "parquet"])
@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"text": ["Rome"], "answer_start": [3]}, "an answer of question dev1 is not in its context: at 3 there is"),
        ({"text": ["The"], "answer_start": [-22]}, "an answer of question dev1 is not in its context"),
        ({"text": [""], "answer_start": [3]}, "an answer of question dev1 is not in its context"),
        ({"text": [], "answer_start": []}, "question dev1 has no answer, as in SQuAD v2.0"),
    ],
)
def test_an_answer_that_is_not_there_is_named(tmp_path, form, answers, message):
    rows = asked(DEV, "dev")
    rows[1]["answers"] = answers
    if form == "json":
        (tmp_path / "dev-v1.1.json").write_text(json.dumps(official(rows)))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "dev.parquet")
    with pytest.raises(FileError, match=rf"^[^\n]*{message}[^\n]*$"):
        read_questions(tmp_path, "test")


def test_parquet_of_another_kind_is_named(tmp_path):
    rows = [{"id": "a", "context": "The king.", "question": None, "answers": {"text": ["king"], "answer_start": [4]}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "dev.parquet")
    with pytest.raises(FileError, match=r"dev.parquet is not SQuAD v1.1 \(row 0, question: "):
        read_questions(tmp_path, "test")
    rows[0] |= {"question": "who", "answers": {"text": ["king"], "answer_start": [4, 5]}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "dev.parquet")
    with pytest.raises(FileError, match="question a has 1 answers at 2 places"):
        read_questions(tmp_path, "test")


def test_a_context_longer_than_the_model_takes_is_refused(make):
    task = make(tokens=40)
    message = "a context longer than the model takes: windows have 40 tokens, the model has positions for 32"
    with pytest.raises(InputError, match=message):
        task.score(small_bert())
    with pytest.raises(InputError, match=message):
        task.forward(nn.ModuleList([small_bert()]), next(iter(task.batches("train", 2))))


def test_a_tokenizer_of_another_model_is_refused(make):
    with pytest.raises(InputError, match=f"has {len(VOCABULARY)} words, the model 50: take the tokenizer of the model"):
        make().score(small_bert(vocab_size=50))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens is 0: it must be a whole number of at least 1"),
        ({"questions": 0}, "questions is 0"),
        ({"n_best": 2.5}, "n_best is 2.5"),
        ({"tokens": 67}, "which a question of 64 tokens .* raise tokens to at least 68"),
        ({"tokens": 128}, "stride is 128, .* room for only 61 .* lower stride to 61 or less"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(InputError, match=message):
        load_task("squad", **options)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json is cut off or not a tokenizer"),
        ("vocab.txt", "[UNK]\n[CLS]\nthe\n", "sep_token not found"),
        ("vocab.txt", "[UNK]\n[CLS]\n[SEP]\n", r"vocab.txt has no \[PAD\]: it is not BERT's"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is cut off or not a tokenizer's JSON"),
        ("vocab.txt", b"\xff\xfe", "vocab.txt is not a text file"),
    ],
)
def test_a_broken_tokenizer_is_one_line(tmp_path, name, content, message):
    (tokenizer(tmp_path) / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FileError, match=rf"^[^\n]*{message}[^\n]*$"):
        load_word_pieces(tmp_path)


def test_a_tokenizer_knows_whether_letters_are_lowered(tmp_path):
    (tokenizer(tmp_path) / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    unknown = VOCABULARY.index("[UNK]")
    assert load_word_pieces(tmp_path)(["The the"])[0].ids == [unknown, VOCABULARY.index("the")]


def test_a_whole_tokenizer_file_is_taken_without_its_limits(tmp_path, pieces):
    library = pieces.library
    library.enable_truncation(4)
    library.enable_padding(length=4)
    library.save(str(tmp_path / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    text = "The old tower of Paris, built in 1889."
    assert load_word_pieces(tmp_path)([text, "a"]) == pieces([text, "a"])
