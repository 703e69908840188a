"""quantize, finetune and evaluate, as a user types them: digits, with very short training."""

import json

import pytest
import torch

import bitplan
from bitplan.quant.convert import options_of
from bitplan.quant.integer import additions_of

SHORT = ("--recipe", "steps=3", "--recipe", "batch_size=32", "--threads", "1")


@pytest.fixture(scope="module", autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_from_a_name_to_a_mixed_network(run):
    code, out, err = run("finetune", "digits_resnet", "--task", "digits", *SHORT, "-o", "float", "--json")
    assert (code, err) == (0, "wrote float\n")
    said = json.loads(out)
    assert said["task"] == "digits"
    assert said["steps"] == 3
    model = bitplan.load_checkpoint("float")
    assert bitplan.evaluate(model, bitplan.load_task("digits")) == said["scores"]["top-1"]

    assert (
        run(
            "quantize",
            "float",
            "--bits",
            "w4a4",
            "--rules",
            "narrow=0",
            "--task",
            "digits",
            "--samples",
            "64",
            "-o",
            "q",
        )[0]
        == 0
    )
    quantized = bitplan.load_checkpoint("q")
    assert {str(precision) for precision in bitplan.plan_of(quantized).precisions.values()} == {"w4a4", "w8a8"}

    told = (
        "finetune",
        "q",
        "--task",
        "digits",
        *SHORT,
        "--recipe",
        "distill=0.5",
        "--recipe",
        "teacher=float",
        "-o",
        "tuned",
    )
    assert run(*told)[0] == 0
    assert run("plan", "tuned", "--rules", "narrow=0", "--budget", "70%", "-o", "plan.json")[0] == 0
    code, _, err = run("quantize", "tuned", "--plan", "plan.json", "-o", "mixed")
    assert (code, err) == (0, "wrote mixed\n")  # its steps are known already
    assert bitplan.plan_of(bitplan.load_checkpoint("mixed")).method == "eagl"
    code, out, _ = run("evaluate", "mixed", "--task", "digits", "--threads", "1")
    assert code == 0
    assert out.startswith("top-1 ")
    assert out.endswith(" on the 360 test samples of digits\n")
    assert run("evaluate", "mixed", "--task", "digits", "--threads", "1", "--integer")[:2] == (0, out)


def test_quantizers_are_listed_and_typed_with_their_options(run):
    code, out, _ = run("list", "quantizers", "--json")
    listed = json.loads(out)
    assert (code, list(listed)[:2]) == (0, ["dorefa", "faq"])
    assert listed["ternary"]["weights"] == "2, 8 bits"
    assert listed["lq"]["uniform"] == "no"
    assert listed["pact"]["from"].startswith("Choi et al. 2018")
    typed = ("quantize", "digits_resnet", "--bits", "w2a4", "--task", "digits", "--samples", "64", "-o", "q")
    assert run(*typed, "--quantizer", "sawb:zero=true,decay=0.001")[0] == 0
    assert options_of(bitplan.load_checkpoint("q")).method == "sawb:zero=true,decay=0.001"
    assert run("finetune", "q", "--task", "digits", *SHORT, "-o", "tuned")[0] == 0
    code, _, err = run("plan", "tuned", "--bits", "w2a2,w2a4", "--cost", "bops", "--budget", "80%", "-o", "plan.json")
    assert code == 0, err
    assert run("quantize", "tuned", "--plan", "plan.json", "-o", "mixed")[0] == 0
    assert options_of(bitplan.load_checkpoint("mixed")).method == "sawb:zero=true,decay=0.001"


def test_the_same_seed_gives_the_same_weights_and_a_finished_run_is_not_repeated(run):
    for name in ("one", "two"):
        assert run("finetune", "digits_resnet", "--task", "digits", *SHORT, "--seed", "3", "-o", name)[0] == 0
    one, two = (bitplan.load_checkpoint(name).state_dict() for name in ("one", "two"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    _, out, _ = run("finetune", "digits_resnet", "--task", "digits", *SHORT, "--seed", "3", "-o", "one", "--json")
    again = bitplan.load_checkpoint("one").state_dict()
    assert all(torch.equal(one[key], again[key]) for key in one)
    assert json.loads(out)["steps"] == 3


def test_a_recipe_file_and_single_values_over_it(run, tmp_path):
    (tmp_path / "recipe.toml").write_text("[recipe]\nepochs = 5\nlr = 0.1\nbatch_size = 32\n")
    told = ("--recipe", "recipe.toml", "--recipe", "steps=2", "--threads", "1")
    assert run("finetune", "digits_resnet", "--task", "digits", *told, "-o", "x")[0] == 0
    lines = [json.loads(line) for line in (tmp_path / "x.training" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["lr"] == pytest.approx(0.1)


def test_public_weights_from_a_local_file(run, tmp_path):
    torch.save({"state_dict": bitplan.load_model("resnet20")[0].state_dict()}, tmp_path / "w.th")
    assert run("quantize", "resnet20", "--weights", "w.th", "--bits", "w8a8", "-o", "q")[0] == 0
    assert str(bitplan.plan_of(bitplan.load_checkpoint("q")).precisions["linear"]) == "w8a8"


def test_a_model_of_ones_own(run, own_model):
    source = f"{own_model}:with_example"
    code, _, err = run("quantize", source, "--bits", "w4a4", "-o", "q")
    assert code == 0
    assert "first training batch" in err
    code, _, err = run("plan", "q", "--budget", "70%")
    assert code == 0  # without its code: by names and shapes
    code, _, err = run("evaluate", "q", "--task", "digits")
    assert (code, "--model package.module:factory" in err) == (2, True)
    code, _, err = run("quantize", "q", "--model", source, "--bits", "w2a2", "-o", "q2")
    assert code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("quantize", "digits_resnet", "-o", "q"), "give either --plan FILE or --bits PRECISION"),
        (("finetune", "digits_resnet", "--task", "digits", "-o", "x"), "give the length of training once"),
        (("finetune", "digits_resnet", "--task", "digits", "--recipe", "epoch=1", "-o", "x"), "did you mean epochs?"),
        (("finetune", "digits_resnet", "--task", "digits", "--recipe", "epochs", "-o", "x"), "'epochs' is neither"),
        (("finetune", "digits_resnet", "--task", "digits", "--recipe", "no.toml", "-o", "x"), "cannot read no.toml"),
        (("finetune", "digits_resnet", "--task", "digits", "--recipe", "bad.toml", "-o", "x"), "bad.toml: not TOML"),
        (("evaluate", "digits_resnet", "--task", "digit"), "did you mean digits?"),
        (("evaluate", "digits_resnet", "--task", "digits:data=x"), "unknown option of digits"),
        (("evaluate", "resnet20", "--task", "cifar10:data=nowhere"), "nowhere"),
        (("evaluate", "digits_resnet", "--model", "x", "--task", "digits"), "--model names the network"),
        (("finetune", "resnet20", "--task", "digits", *SHORT, "--recipe", "teacher=resnet20", "-o", "x"),
         "teach nothing"),
        (("evaluate", "digits_resnet", "--task", "digits", "--fresh", "fc.*"), "which tensors --weights may lack"),
        (("finetune", "digits_resnet", "--task", "digits", *SHORT, "--recipe", "teacher_weights=x.pth", "-o", "x"),
         "teacher_weights are those of teacher=NAME"),
        (("export", "bad.toml", "--model", "x", "--format", "mlx", "-o", "x"), "--model names the network"),
        (("evaluate", "resnet20", "--task", "digits"), "does not fit the task digits: the example input does not fit "
                                                       "the model: in conv1 (Conv2d): "),
        (("finetune", "resnet20", "--task", "digits", *SHORT, "-o", "x"), "does not fit the task digits"),
        (("finetune", "users_model:three", "--task", "digits", *SHORT, "-o", "x"), "by its classes: Target "),
        (("quantize", "users_model:three", "--bits", "w4a4", "-o", "q"), "gives no example input: add --input"),
        (("evaluate", "digits_resnet", "--task", "digits", "--integer"), "this model is not quantized"),
        (("evaluate", "empty", "--task", "digits"), "not a checkpoint that bitplan wrote"),
        (("steps", "estimate", "eagl", "x.json", "--engine", "loca"), "cannot read x.json"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(run, own_model, tmp_path, words, said):
    (tmp_path / "bad.toml").write_text("epochs = = 3")
    (tmp_path / "empty").mkdir()
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("given", ["q", "q/model.safetensors"])
def test_a_quantized_networks_weights_are_told_as_what_they_are(run, given):
    assert run("quantize", "digits_resnet", "--bits", "w8a8", "-o", "q")[0] == 0
    code, _, err = run("quantize", "digits_resnet", "--weights", given, "--bits", "w4a4", "-o", "other")
    assert code == 2
    assert f"error: {given} holds a network that bitplan quantized (it has " in err
    assert "give the folder q instead of a model with --weights" in err
    assert run("quantize", "q", "--bits", "w4a4", "-o", "other")[0] == 0


def test_a_network_for_integers_stays_one_from_verb_to_verb(run):
    words = ("--bits", "w4a4", "--rules", "narrow=0", "--task", "digits", "--samples", "64", "--integer")
    assert run("quantize", "digits_resnet", *words, "-o", "q")[0] == 0
    assert run("finetune", "q", "--task", "digits", *SHORT, "-o", "tuned")[0] == 0
    assert run("plan", "tuned", "--rules", "narrow=0", "--budget", "70%", "-o", "plan.json")[0] == 0
    assert run("quantize", "tuned", "--plan", "plan.json", "-o", "mixed")[0] == 0
    mixed = bitplan.load_checkpoint("mixed")
    assert options_of(mixed).integer
    assert additions_of(mixed).keys() == additions_of(bitplan.load_checkpoint("q")).keys() != set()


def test_a_plan_of_before_is_completed_by_the_model(run):
    plan = bitplan.Plan.uniform(bitplan.trace(*bitplan.load_model("digits_resnet")), "w4a4")
    bitplan.save(plan.model_copy(update={"integers": None}), "older.json")
    assert run("quantize", "digits_resnet", "--plan", "older.json", "--integer", "-o", "q")[0] == 0
    assert additions_of(bitplan.load_checkpoint("q"))
