"""Networks of Hugging Face's: folders and GGUF files, with their weights; what cannot be read is one line."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext

import gguf
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import bitplan
from bitplan.adapters.gguf import read_header
from bitplan.adapters.tokenizers import load_tokenizer
from bitplan.core.errors import InputError
from bitplan.weights.pretrained_folders import is_pretrained
from texts import llama, turned, with_config, write_folder, write_gguf

TOKENS = torch.arange(20).view(2, 10)
Q8 = gguf.GGMLQuantizationType.Q8_0


def test_a_folder_gives_the_network_that_was_saved(tmp_path):
    folder = write_folder(tmp_path / "model")
    assert is_pretrained(folder)
    model = bitplan.load_pretrained(folder)
    assert torch.equal(model(TOKENS).logits, llama()(TOKENS).logits)
    assert not model.training


def test_reading_is_quiet(tmp_path):
    """What transformers imports beside its models may warn of what it lacks itself: nobody asked for that."""
    program = "import sys, logging, bitplan; logging.basicConfig(); bitplan.load_pretrained(sys.argv[1])"
    command = [sys.executable, "-c", program, str(write_folder(tmp_path / "model"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


def test_shards_are_put_together(tmp_path):
    folder = write_folder(tmp_path / "model", shards=True)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert torch.equal(bitplan.load_pretrained(folder)(TOKENS).logits, llama()(TOKENS).logits)


def test_gguf_gives_the_same_network_with_its_codes_as_floats(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"ffn_down.weight": Q8, "attn_q.weight": Q8})
    assert is_pretrained(path)
    model, expected = bitplan.load_pretrained(path), llama()
    for name, value in expected.state_dict().items():
        if "down_proj" in name:
            value.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(value.numpy(), Q8), Q8)))
        if "q_proj" in name:
            stored = torch.from_numpy(gguf.dequantize(gguf.quantize(turned(name, value).numpy(), Q8), Q8))
            value.copy_(stored.unflatten(0, (4, -1, 2)).transpose(1, 2).flatten(0, 2))
    assert {name: value.dtype for name, value in model.state_dict().items()} == {
        name: torch.float32 for name in expected.state_dict()
    }
    assert torch.allclose(model(TOKENS).logits, expected(TOKENS).logits, atol=1e-5)
    assert not torch.allclose(model(TOKENS).logits, llama()(TOKENS).logits, atol=1e-5)


def test_what_is_read_quickly_is_what_gguf_reads(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", {"ffn_down.weight": Q8})
    plain = gguf.GGUFReader, gguf.get_tensor_name_map
    quick = bitplan.load_pretrained(path), read_header(path)
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == plain
    monkeypatch.setattr("bitplan.adapters.transformers.quick_gguf", nullcontext)
    monkeypatch.setattr("bitplan.adapters.gguf._reader", lambda: gguf.GGUFReader)
    slow = bitplan.load_pretrained(path), read_header(path)
    assert quick[1] == slow[1]
    assert quick[0].state_dict().keys() == slow[0].state_dict().keys()
    for name, value in quick[0].state_dict().items():
        assert torch.equal(value, slow[0].state_dict()[name])


def test_gguf_brings_its_tokenizer(tmp_path):
    tokens = load_tokenizer(write_gguf(tmp_path / "m.gguf"))
    assert tokens.library.decode(tokens("the king of rome")) == "the king of rome"
    assert len(tokens("the")) == 1


def test_a_quantized_one_keeps_its_configuration_and_tokenizer(tmp_path):
    folder = write_folder(tmp_path / "model")
    model = bitplan.load_pretrained(folder)
    graph = bitplan.trace(model, {"input_ids": TOKENS}, rules=bitplan.Rules(narrow=0).for_choices("w4a16"))
    made = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a16"), method="groups:size=16")
    saved = bitplan.save_checkpoint(made, tmp_path / "q", pretrained=folder)
    assert (saved / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    assert torch.equal(bitplan.load_checkpoint(saved)(TOKENS).logits, made(TOKENS).logits)
    bitplan.save_checkpoint(made, saved, pretrained=saved)  # what lies there is a checkpoint and no more
    (saved / "config.json").unlink()
    with pytest.raises(InputError, match=r"a config\.json describes, which is not beside it"):
        bitplan.load_checkpoint(saved)


def cut_shard(folder):
    part = sorted(folder.glob("*.safetensors"))[0]
    part.write_bytes(part.read_bytes()[:-100])


def without_shard(folder):
    sorted(folder.glob("*.safetensors"))[0].unlink()


def pickled(folder):
    for part in folder.glob("*.safetensors*"):
        part.unlink()
    torch.save(llama().state_dict(), folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut_shard, "is cut off"),
        (without_shard, "the shard .* is missing; download it again"),
        (pickled, "has no .safetensors"),
        (lambda folder: with_config(folder, architectures=["Evil"]), "names Evil, which this transformers"),
        (lambda folder: with_config(folder, architectures=["AutoConfig"]), "names AutoConfig, which this"),
        (
            lambda folder: with_config(folder, model_type="evil", auto_map={"AutoConfig": "evil.Evil"}),
            "brings code of its own, which is not run",
        ),
        (lambda folder: with_config(folder, quantization_config={"quant_method": "gptq"}), "quantized already"),
        (lambda folder: (folder / "config.json").write_text("{"), r"has no config\.json that says"),
        (lambda folder: with_config(folder, hidden_size="wide"), r"config\.json|model"),
    ],
)
def test_damaged_folders_are_one_line(tmp_path, change, said):
    folder = write_folder(tmp_path / "model", shards=True)
    (folder / "evil.py").write_text("raise SystemExit('code of a stranger ran')")
    change(folder)
    with pytest.raises(InputError, match=said) as caught:
        bitplan.load_pretrained(folder)
    assert "\n" not in str(caught.value)


DOWN = "model.layers.1.mlp.down_proj.weight"


def with_tensors(folder, **changes):
    """A folder with other tensors; those that are None go."""
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, r"lacks tensor 'model\.layers\.1\.mlp\.down_proj\.weight', which the network has: fetch it again"),
        (torch.zeros(32, 60), r"down_proj\.weight' has shape \(32, 60\), the network \(32, 64\)"),
    ],
)
def test_weights_that_would_stay_random_are_refused(tmp_path, value, said):
    folder = with_tensors(write_folder(tmp_path / "model"), **{DOWN: value})
    with pytest.raises(InputError, match=said) as caught:
        bitplan.load_pretrained(folder)
    assert "\n" not in str(caught.value)


def test_a_gguf_file_that_lacks_a_tensor_is_refused(tmp_path, monkeypatch):
    whole = llama()
    lacking = {name: value for name, value in whole.state_dict().items() if name != DOWN}
    monkeypatch.setattr(whole, "state_dict", lambda: lacking)
    monkeypatch.setattr("texts.llama", lambda: whole)
    with pytest.raises(InputError, match=r"lacks tensor 'model\.layers\.1\.mlp\.down_proj\.weight'"):
        bitplan.load_pretrained(write_gguf(tmp_path / "m.gguf"))


def test_tied_weights_are_not_lacking_and_tensors_without_a_place_are_named(tmp_path, caplog):
    folder = write_folder(tmp_path / "model", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    expected = bitplan.load_pretrained(folder)(TOKENS).logits
    assert not caplog.records
    with_tensors(folder, **{"model.extra.weight": torch.ones(3)})
    assert torch.equal(bitplan.load_pretrained(folder)(TOKENS).logits, expected)
    assert "has 1 tensors that its network has no place for, as model.extra.weight" in caplog.text


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_configuration_names_no_repository_of_kernels(tmp_path, key):
    folder = with_config(write_folder(tmp_path / "model"), **{key: "evil/kernel"})
    assert bitplan.load_pretrained(folder).config._attn_implementation == "sdpa"
    with_config(folder, **{key: "eager"})
    assert bitplan.load_pretrained(folder).config._attn_implementation == "eager"


def test_a_type_that_cannot_be_read_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"blk.1.ffn_up.weight": gguf.GGMLQuantizationType.I8})
    with pytest.raises(InputError, match=r"tensor 'blk\.1\.ffn_up\.weight' is of type I8, which cannot be turned"):
        bitplan.load_pretrained(path)


def test_an_unknown_type_or_architecture_is_named_and_not_taken_for_damage(tmp_path):
    path, name = write_gguf(tmp_path / "m.gguf"), b"blk.0.ffn_down.weight"
    whole = path.read_bytes()
    place = whole.find(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions, and two of them
    path.write_bytes(whole[:place] + (250).to_bytes(4, "little") + whole[place + 4 :])
    with pytest.raises(InputError, match="with a tensor of type 250, which this gguf package does not know: upgrade"):
        bitplan.load_pretrained(path)
    path.write_bytes(whole.replace(b"llama", b"lxxma"))
    with pytest.raises(InputError, match="a network of architecture lxxma, which transformers does not read"):
        bitplan.load_pretrained(path)


def test_cut_off_gguf_is_one_line(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    whole = path.read_bytes()
    for size in (8, 40, len(whole) // 2, len(whole) - 200):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match="is a GGUF checkpoint that is cut off or damaged") as caught:
            bitplan.load_pretrained(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="there is no such file or folder"):
        bitplan.load_pretrained(tmp_path / "nowhere.gguf")


def saved(folder, target):
    """What a folder of a quantized network is written as."""
    model = bitplan.load_pretrained(folder)
    graph = bitplan.trace(model, {"input_ids": TOKENS}, rules=bitplan.Rules(narrow=0).for_choices("w4a16"))
    made = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a16"), method="groups:size=16")
    return bitplan.save_checkpoint(made, target, pretrained=folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_link_out_of_the_folder_is_not_copied(tmp_path, name):
    folder = write_folder(tmp_path / "model")
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=rf"{name} is a link to .*elsewhere, outside its folder"):
        saved(folder, tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_what_is_no_tokenizer_is_not_copied(tmp_path):
    folder = write_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text("password=1")
    with pytest.raises(InputError, match=r"tokenizer\.json is cut off or not a tokenizer"):
        saved(folder, tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_links_of_the_hubs_cache_lead_to_its_blobs_alone(tmp_path):
    (tmp_path / "snapshots").mkdir()
    blobs, folder = tmp_path / "blobs", write_folder(tmp_path / "snapshots" / "abc")
    blobs.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).rename(blobs / f"hash of {name}")
        (folder / name).symlink_to(f"../../blobs/hash of {name}")
    made = saved(folder, tmp_path / "q")
    assert (made / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    (blobs / "hash of tokenizer.json").rename(tmp_path / "elsewhere")
    (blobs / "hash of tokenizer.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="elsewhere, outside its folder"):
        saved(folder, tmp_path / "r")


@pytest.mark.parametrize(
    "content",
    [
        {
            "model_type": "dpt",
            "architectures": ["DPTForDepthEstimation"],
            "backbone": "microsoft/resnet-50",
            "use_pretrained_backbone": True,
        },
        {
            "model_type": "timm_wrapper",
            "architectures": ["TimmWrapperForImageClassification"],
            "architecture": "hf-hub:somebody/something",
            "num_classes": 2,
            "label_names": ["a", "b"],
        },
    ],
    ids=["backbone", "hf-hub"],
)
def test_the_hub_is_not_asked_while_a_folder_is_read(tmp_path, monkeypatch, content):
    folder, asked = write_folder(tmp_path / "model"), []
    (folder / "config.json").write_text(json.dumps(content))

    def resolve(host, *others, **more):
        asked.append(host)
        raise OSError("there is no network in tests")

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    with pytest.raises(InputError, match=r"names something on the hub, .*https://huggingface\.co"):
        bitplan.load_pretrained(folder)
    assert asked == []
    assert not constants.HF_HUB_OFFLINE or "HF_HUB_OFFLINE" in os.environ
