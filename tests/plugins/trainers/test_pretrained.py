"""bitplan as a quantization method of transformers: from_pretrained, save_pretrained, and Trainer in between."""

import json
import shutil
import warnings

import loops
import pytest
import tiny_bert as tiny
import torch
from safetensors.torch import load_file, save_file

import bitplan
from bitplan.adapters.torch import inference
from bitplan.plugins.trainers.transformers import BitplanConfig, BitplanQuantizer, carry_plan_

transformers = tiny.transformers
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def bert():
    return tiny.network(), {"input_ids": tiny.inputs()["input_ids"]}


def llama():
    """A causal language model whose head is its embedding, with attention written out."""
    config = transformers.LlamaConfig(
        vocab_size=40, num_key_value_heads=1, tie_word_embeddings=True, attn_implementation="eager", **SIZES
    )
    return transformers.LlamaForCausalLM(config), {"input_ids": tiny.inputs()["input_ids"][:4]}


def vit():
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=3, **SIZES)
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def planned(model, batch):
    """A mixed plan: the layers between the ends have two and four bits in turn, linked ones alike."""
    graph = bitplan.trace(model, batch, rules=bitplan.Rules(narrow=0))
    plan = bitplan.Plan.uniform(graph, "w4a4")
    low = {layer.name: bitplan.Precision.parse("w2a4") for group in graph.selectable[::2] for layer in group.layers}
    return plan.model_copy(update={"precisions": plan.precisions | low})


def logits(model, batch):
    with inference(model), torch.no_grad():
        return model(**batch).logits


def stretch_(model):
    """Give steps values that nothing but a file can bring back."""
    for module in model.modules():
        if "Quantizer" in type(module).__name__ and hasattr(module, "step"):
            module.step.data *= 1.25


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def float_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("float")
    tiny.network().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory, float_folder):
    model, batch = bert()
    made = type(model).from_pretrained(float_folder, quantization_config=BitplanConfig(planned(model, batch)))
    bitplan.calibrate_(made, [batch])
    folder = tmp_path_factory.mktemp("saved")
    made.save_pretrained(folder)
    return folder


@pytest.fixture
def saved(tmp_path, saved_once):
    """A folder with a quantized BERT, which a test may spoil."""
    return shutil.copytree(saved_once, tmp_path / "saved")


@pytest.mark.parametrize("options", [{}, {"per_channel": True, "method": "faq"}], ids=["lsq", "faq"])
@pytest.mark.parametrize("make", [bert, llama, vit])
def test_a_float_folder_comes_back_quantized_and_once_more_from_what_it_saved(make, options, tmp_path):
    model, batch = make()
    plan = planned(model, batch)
    model.save_pretrained(tmp_path / "float")
    bitplan.save(plan, tmp_path / "plan.json")
    config = BitplanConfig(tmp_path / "plan.json", **options)
    made = type(model).from_pretrained(tmp_path / "float", quantization_config=config)
    expected = bitplan.quantize(model, plan, **options)
    for one in (made, expected):
        bitplan.calibrate_(one, [batch])
    assert torch.equal(logits(made, batch), logits(expected, batch))

    stretch_(made)
    made.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    with warnings.catch_warnings(action="error"):
        again, told = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(told.values()), "nothing is missing, and nothing left over"
    assert torch.equal(logits(again, batch), logits(made, batch))
    assert bitplan.plan_of(again) == plan
    assert list(bitplan.plan_of(again).precisions) == list(plan.precisions), "an optimizer numbers steps in this order"
    trained = [[name for name, value in one.named_parameters() if value.requires_grad] for one in (again, made)]
    assert trained[0] == trained[1]


@pytest.mark.parametrize("by", ["hand", "config"])
def test_trainer_trains_it_and_its_checkpoints_are_loaded(by, float_folder, tmp_path):
    model, batch = bert()
    if by == "config":
        model = type(model).from_pretrained(float_folder, quantization_config=BitplanConfig(planned(model, batch)))
    else:
        model = bitplan.quantize(model, planned(model, batch))
        carry_plan_(model)
    tiny.trainer(model, tmp_path / "run", max_steps=2).train()  # the first batch sets the steps of inputs
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "checkpoint-2")
    assert torch.equal(tiny.logits(again), tiny.logits(model))


def test_trainer_killed_and_resumed_ends_as_an_unbroken_one_and_is_loaded_with_equal_logits(tmp_path):
    run = tmp_path / "run"
    loops.start_and_kill(loops.by_config, run, until=run / "checkpoint-2" / "trainer_state.json")  # written last
    steps, more = [], []
    unbroken = loops.by_config(tmp_path / "other", tick=lambda: steps.append(1))
    resumed = loops.by_config(run, tick=lambda: more.append(1))
    assert 0 < len(more) < len(steps) == tiny.STEPS, "it went on where it was"
    for name, value in unbroken.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(run / f"checkpoint-{tiny.STEPS}")
    assert torch.equal(tiny.logits(loaded), tiny.logits(resumed))
    assert not torch.equal(tiny.logits(loaded), tiny.logits(loops.configured(tmp_path))), "it learned"


def test_a_model_that_is_quantized_anew_is_saved_with_the_plan_that_it_follows_now(saved, tmp_path):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(saved)
    graph = bitplan.trace(tiny.network(), bert()[1], rules=bitplan.Rules(narrow=0))
    other = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w8a8"))
    other.save_pretrained(tmp_path / "other")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "other")
    assert bitplan.plan_of(again).method == "w8a8"
    assert torch.equal(tiny.logits(again), tiny.logits(other))


def test_a_saved_folder_is_read_by_bitplans_own_loaders_too(saved):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(saved)
    by_plan = bitplan.load_checkpoint(saved, bitplan.quantize(tiny.network(), bitplan.plan_of(model)))
    assert torch.equal(tiny.logits(by_plan), tiny.logits(model))
    assert repr(model.config.quantization_config).startswith(
        f"BitplanConfig(plan {bitplan.plan_of(model).id} of 19 layers"
    )


def test_half_precision_keeps_the_steps(saved):
    whole = transformers.AutoModelForSequenceClassification.from_pretrained(saved)
    half = transformers.AutoModelForSequenceClassification.from_pretrained(saved, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    for name, value in whole.state_dict().items():
        if "quantizer" in name:
            assert torch.equal(half.state_dict()[name], value), name
    assert torch.equal(tiny.logits(half), tiny.logits(whole.to(torch.bfloat16)))


def test_steps_that_a_folder_has_without_a_config_are_not_thrown_away(float_folder, tmp_path):
    """Such as those of a model that was saved before it carried its plan."""
    model, batch = bert()
    made = bitplan.quantize(model, planned(model, batch))
    bitplan.calibrate_(made, [batch])
    stretch_(made)
    made.save_pretrained(tmp_path / "bare")
    config = BitplanConfig(bitplan.plan_of(made))
    again = type(model).from_pretrained(tmp_path / "bare", quantization_config=config)
    assert torch.equal(tiny.logits(again), tiny.logits(made))


def test_one_device_is_taken_and_several_are_refused(saved):
    there = transformers.AutoModelForSequenceClassification.from_pretrained(saved, device_map="cpu")
    assert there.device.type == "cpu"
    with pytest.raises(bitplan.InputError, match="spreads the network over cpu, disk: load it onto one device"):
        transformers.AutoModelForSequenceClassification.from_pretrained(saved, device_map={"bert": "cpu", "": "disk"})
    with pytest.raises(bitplan.InputError, match="one device"):
        BitplanQuantizer(there.config.quantization_config).validate_environment(device_map={"a": 0, "b": 1})


def written(change):
    """A change of what a folder's config.json says of quantization."""

    def change_(folder):
        path = folder / "config.json"
        content = json.loads(path.read_text())
        change(content["quantization_config"])
        path.write_text(json.dumps(content))

    return change_


def stored(change):
    """A change of a folder's tensors."""

    def change_(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return change_


STEP = "bert.encoder.layer.0.intermediate.dense.weight_quantizer.step"
SPOILT = {
    "bits": (written(lambda q: q["plan"]["precisions"].update(classifier="w2a2")), "id .* does not fit its content"),
    "no plan": (written(lambda q: q.pop("plan")), "not a bitplan record"),
    "another record": (written(lambda q: q["plan"].update(bitplan="graph")), "this is a graph, where a plan is needed"),
    "newer": (written(lambda q: q["plan"].update(format=99)), "upgrade bitplan"),
    "order": (written(lambda q: q["layers"].pop()), "lists other layers than its plan has"),
    "no order": (written(lambda q: q.update(layers=3)), "does not list its layers"),
    "a key": (written(lambda q: q.update(plam=1)), "unknown key 'plam'; did you mean plan"),
    "an option": (written(lambda q: q["options"].update(per_chanel=True)), "did you mean per_channel"),
    "an option's value": (written(lambda q: q["options"].update(method="gptq")), "unknown quantizer 'gptq'"),
    "options": (written(lambda q: q.update(options=[1])), "its options are a list"),
    "a step is gone": (stored(lambda t: t.pop(STEP)), f"lacks {STEP}, which the plan .* needs: write it again"),
    "a step too many": (
        stored(lambda t: t.update({"x." + STEP: t[STEP] + 0})),
        f"has x.{STEP}, which its plan does not",
    ),
    "a step's shape": (stored(lambda t: t.update({STEP: torch.ones(3)})), f"{STEP} is not .* finite numbers"),
    "a step's value": (stored(lambda t: t.update({STEP: torch.tensor(torch.nan)})), f"{STEP} is not .* finite"),
}


@pytest.mark.parametrize(("spoil_", "said"), SPOILT.values(), ids=SPOILT)
def test_a_folder_that_is_not_as_it_was_written_is_refused_in_one_line(spoil_, said, saved):
    spoil_(saved)
    with pytest.raises(bitplan.InputError, match=said) as caught:
        transformers.AutoModelForSequenceClassification.from_pretrained(saved)
    assert "\n" not in str(caught.value)


LOADED_AS = {
    "another class": (transformers.AutoModel, {}, "the folder holds a BertForSequenceClassification; load it as that"),
    "other labels": (transformers.BertForSequenceClassification, {"num_labels": 5}, "in the files, .* quantize"),
    "other attention": (transformers.BertForSequenceClassification, {"attn_implementation": "eager"}, "leave it out"),
}


@pytest.mark.parametrize(("kind", "options", "said"), LOADED_AS.values(), ids=LOADED_AS)
def test_what_does_not_fit_a_folder_is_refused_in_one_line(kind, options, said, saved):
    with pytest.raises(bitplan.InputError, match=said) as caught:
        kind.from_pretrained(saved, **options)
    assert "\n" not in str(caught.value)


def test_a_plan_of_another_network_is_refused_in_one_line(float_folder):
    config = BitplanConfig(planned(*llama()))
    with pytest.raises(bitplan.InputError, match="the plan does not fit .*unknown layer 'model.embed_tokens'"):
        transformers.AutoModelForSequenceClassification.from_pretrained(float_folder, quantization_config=config)


def test_tensors_without_files_are_refused(saved):
    """Where weights are given as a dict, there is no file that steps could be read from."""
    whole = transformers.AutoModelForSequenceClassification.from_pretrained(saved)
    config = transformers.AutoConfig.from_pretrained(saved)
    with pytest.raises(bitplan.InputError, match="are read from its files: give from_pretrained a folder"):
        type(whole).from_pretrained(None, config=config, state_dict=whole.state_dict())


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (({"layer": 4},), {}, "a Plan or the path of one, not a dict"),
        (("nowhere.json",), {}, "cannot read nowhere.json"),
        ((bitplan.plan_of(tiny.quantized()),), {"per_chanel": True}, "unknown option .* did you mean per_channel"),
        ((bitplan.plan_of(tiny.quantized()),), {"percentile": 0}, "above 0"),
    ],
)
def test_a_config_that_cannot_be_is_refused_in_one_line(arguments, options, said):
    with pytest.raises(bitplan.InputError, match=said):
        BitplanConfig(*arguments, **options)


@pytest.mark.parametrize("model", [tiny.network(), torch.nn.Linear(2, 2)], ids=["float", "not of transformers"])
def test_only_a_quantized_model_of_transformers_can_carry_its_plan(model):
    with pytest.raises(bitplan.InputError, match="takes a model of transformers that quantize returned"):
        carry_plan_(model)
