"""Where architectures come from: the names of timm, torchvision and transformers, each with a network and an example.

Weights are random. Images are as small as a network takes them; transformers' networks have small sizes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.adapters import timm
from bitplan.adapters.torchvision import torchvision
from bitplan.adapters.transformers import transformers

SIDES = (64, 96, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512, 640)  # of square images, tried in this order
BATCH = 2  # batch normalization wants more than one value
TOKENS = 16


@dataclass(frozen=True)
class Candidate:
    """One way to build an architecture, and the input it is tried with; the first that can be traced is taken.

    `values` is for a network that decides by the values of tensors.
    """

    build: Callable[[], nn.Module]
    example: Any
    size: str
    values: bool = False


def names() -> dict[str, list[str]]:
    """Every architecture by where it comes from."""
    models = torchvision().models
    parts = (models, models.segmentation, models.detection, models.video, models.optical_flow)
    return {
        "timm": timm.model_names(),
        "torchvision": [name for part in parts for name in models.list_models(module=part)],
        "transformers": list(_SMALL),
    }


def candidates(source: str, name: str) -> Iterator[Candidate]:
    """The ways to build an architecture, smallest input first."""
    return {"timm": _of_timm, "torchvision": _of_torchvision, "transformers": _of_transformers}[source](name)


def _of_timm(name: str) -> Iterator[Candidate]:
    library = timm.timm()
    settings = library.models.get_pretrained_cfg(name, allow_unregistered=True) or library.models.PretrainedCfg()
    channels, *_, usual = settings.input_size
    sides = [side for side in SIDES if side < usual]
    least = settings.min_input_size[-1] if settings.min_input_size else 0
    for side in () if settings.fixed_input_size else [side for side in sides if side >= least]:
        yield Candidate(lambda: library.create_model(name), _images(channels, side), f"{side}²")
    for side in sides if settings.fixed_input_size else ():  # where it can be built for other images, timm says how
        build = lambda side=side: library.create_model(name, img_size=side)  # noqa: E731
        yield Candidate(build, _images(channels, side), f"{side}², built for it")
    yield Candidate(lambda: library.create_model(name), _images(channels, usual), f"{usual}²")
    for side in (*sides[:1], usual):  # it may decide by values
        yield Candidate(lambda: library.create_model(name), _images(channels, side), f"{side}², by values", values=True)


def _of_torchvision(name: str) -> Iterator[Candidate]:
    models = torchvision().models

    def build() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # on how GoogLeNet and Inception are initialized
            options = {} if name in models.list_models(module=models) else _UNTRAINED.get(kind, {})
            model: nn.Module = models.get_model(name, weights=None, **options)
        return model.backbone if kind == "detection" else model  # what comes behind it decides by what it sees

    kind = next(
        kind
        for kind in ("detection", "segmentation", "video", "optical_flow", "models")
        if name in models.list_models(module=models if kind == "models" else getattr(models, kind))
    )
    for side in SIDES:
        if kind == "video":
            for frames in (8, 16):
                yield Candidate(build, torch.rand(BATCH, 3, frames, side, side), f"{frames} × {side}²")
        elif kind == "optical_flow":
            yield Candidate(build, (torch.rand(1, 3, side, side), torch.rand(1, 3, side, side)), f"{side}²")
        else:
            yield Candidate(build, _images(3, side), f"{side}²")


_UNTRAINED: dict[str, dict[str, Any]] = {
    "segmentation": {"weights_backbone": None},
    "detection": {"weights_backbone": None},
}


def _images(channels: int, side: int) -> Tensor:
    return torch.rand(BATCH, channels, side, side)


def _of_transformers(name: str) -> Iterator[Candidate]:
    library = transformers("the architectures of transformers")
    class_name, sizes, inputs = _SMALL[name]

    def build() -> nn.Module:
        config = library.AutoConfig.for_model(name.partition(" ")[0], **sizes)
        config.use_cache = False
        network = getattr(library, class_name)
        model: nn.Module = network.from_config(config) if class_name.startswith("Auto") else network(config)
        return model

    yield Candidate(build, inputs(), "small")
    yield Candidate(build, inputs(), "small, followed by values", values=True)


def _text() -> dict[str, Tensor]:
    return {"input_ids": torch.arange(BATCH * TOKENS).reshape(BATCH, TOKENS) % 50 + 5}


def _two_texts() -> dict[str, Tensor]:
    return _text() | {"decoder_input_ids": _text()["input_ids"][:, :6]}


def _picture(side: int = 32) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": torch.rand(BATCH, 3, side, side)}


def _picture_and_text() -> dict[str, Tensor]:
    return _text() | _picture()()


def _sound() -> dict[str, Tensor]:
    return {"input_values": torch.rand(BATCH, 4000)}


def _spectrum() -> dict[str, Tensor]:
    return {"input_features": torch.rand(BATCH, 16, 40), "decoder_input_ids": _text()["input_ids"][:, :6]}


_ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 99,
}
_DECODER = _ENCODER | {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
_BOTH = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 99,
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
_VIT = {k: v for k, v in _ENCODER.items() if k != "vocab_size"} | {"image_size": 32, "patch_size": 8}
_SWIN = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "image_size": 32, "patch_size": 4}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 99}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_STAGES = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}
_TOWERS = {
    "text_config": _ENCODER | {"max_position_embeddings": 64, "projection_dim": 16},
    "vision_config": _VIT | {"projection_dim": 16},
    "projection_dim": 16,
}
_WAVES = {
    "conv_dim": (16, 16),
    "conv_kernel": (8, 4),
    "conv_stride": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}

# transformers' name for it, the class, its sizes, and what it reads
_SMALL: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Tensor]]]] = {
    "albert": ("AutoModel", _ENCODER | {"embedding_size": 16}, _text),
    "bart": ("AutoModel", _BOTH, _two_texts),
    "beit": ("AutoModel", _VIT, _picture()),
    "bert": ("AutoModel", _ENCODER, _text),
    "bloom": ("AutoModel", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99}, _text),
    "clip": ("CLIPModel", _TOWERS, _picture_and_text),
    "codegen": ("AutoModel", _GPT | {"rotary_dim": 4}, _text),
    "convbert": ("AutoModel", _ENCODER | {"embedding_size": 32}, _text),
    "convnext": ("AutoModel", _STAGES, _picture()),
    "convnextv2": ("AutoModel", _STAGES, _picture()),
    "cvt": (
        "AutoModel",
        {"embed_dim": [16, 32, 32], "depth": [2, 2, 4], "num_heads": [1, 2, 2]},
        _picture(64),
    ),
    "data2vec-text": ("AutoModel", _ENCODER, _text),
    "deberta": ("AutoModel", _ENCODER, _text),
    "deberta-v2": ("AutoModel", _ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, _text),
    "deit": ("AutoModel", _VIT, _picture()),
    "dinov2": ("AutoModel", _VIT, _picture()),
    "distilbert": ("AutoModel", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 99}, _text),
    "dpt": (
        "DPTForDepthEstimation",
        _VIT
        | {
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 16,
        },
        _picture(),
    ),
    "electra": ("AutoModel", _ENCODER | {"embedding_size": 16}, _text),
    "falcon": ("AutoModel", {k: v for k, v in _ENCODER.items() if k != "intermediate_size"}, _text),
    "fnet": ("AutoModel", {k: v for k, v in _ENCODER.items() if k != "num_attention_heads"}, _text),
    "funnel": (
        "FunnelModel",
        {"block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "vocab_size": 99},
        _text,
    ),
    "gemma": ("AutoModelForCausalLM", _DECODER, _text),
    "gemma2": ("AutoModelForCausalLM", _DECODER | {"query_pre_attn_scalar": 8}, _text),
    "gemma3_text": ("AutoModelForCausalLM", _DECODER | {"query_pre_attn_scalar": 8}, _text),
    "gpt2": ("AutoModel", _GPT, _text),
    "gpt_bigcode": ("AutoModel", _GPT, _text),
    "gpt_neo": (
        "AutoModel",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "vocab_size": 99,
        },
        _text,
    ),
    "gpt_neox": ("AutoModel", _ENCODER, _text),
    "gptj": ("AutoModel", _GPT | {"rotary_dim": 4}, _text),
    "granite": ("AutoModelForCausalLM", _DECODER, _text),
    "hubert": ("AutoModel", _ENCODER | _WAVES, _sound),
    "layoutlm": ("AutoModel", _ENCODER, _text),
    "led": ("AutoModel", _BOTH | {"attention_window": [4, 4]}, _two_texts),
    "levit": (
        "AutoModel",
        {
            "hidden_sizes": [16, 32, 32],
            "num_attention_heads": [2, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
            "image_size": 64,
        },
        _picture(64),
    ),
    "llama": ("AutoModelForCausalLM", _DECODER, _text),
    "longformer": ("AutoModel", _ENCODER | {"attention_window": [4, 4]}, _text),
    "m2m_100": ("AutoModel", _BOTH, _two_texts),
    "mamba": ("AutoModel", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99}, _text),
    "marian": ("AutoModel", _BOTH | {"pad_token_id": 1}, _two_texts),
    "mistral": ("AutoModelForCausalLM", _DECODER, _text),
    "mixtral": ("AutoModelForCausalLM", _DECODER | {"num_local_experts": 4}, _text),
    "mobilebert": (
        "AutoModel",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "embedding_size": 16,
            "true_hidden_size": 32,
            "intra_bottleneck_size": 32,
            "vocab_size": 99,
        },
        _text,
    ),
    "mobilenet_v2": ("AutoModel", {"depth_multiplier": 0.35}, _picture()),
    "mobilevit": ("AutoModel", {"hidden_sizes": [16, 24, 32], "image_size": 64}, _picture(64)),
    "modernbert": ("AutoModel", _ENCODER | {"pad_token_id": 0}, _text),
    "mpnet": ("AutoModel", _ENCODER, _text),
    "mpt": ("AutoModel", {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 99, "max_seq_len": 64}, _text),
    "mt5": ("AutoModel", _T5, _two_texts),
    "olmo2": ("AutoModelForCausalLM", _DECODER, _text),
    "opt": (
        "AutoModelForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "vocab_size": 99,
            "word_embed_proj_dim": 32,
        },
        _text,
    ),
    "pegasus": ("AutoModel", _BOTH, _two_texts),
    "phi": ("AutoModelForCausalLM", _DECODER, _text),
    "phi3": ("AutoModelForCausalLM", _DECODER | {"pad_token_id": 0}, _text),
    "poolformer": (
        "AutoModel",
        {
            "hidden_sizes": [8, 16, 16, 32],
            "depths": [1, 1, 1, 1],
            "patch_sizes": [7, 3, 3, 3],
            "strides": [4, 2, 2, 2],
            "padding": [2, 1, 1, 1],
        },
        _picture(64),
    ),
    "qwen2": ("AutoModelForCausalLM", _DECODER, _text),
    "qwen2_moe": ("AutoModelForCausalLM", _DECODER | _EXPERTS | {"shared_expert_intermediate_size": 24}, _text),
    "qwen3": ("AutoModelForCausalLM", _DECODER, _text),
    "regnet": ("AutoModel", {"hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8}, _picture()),
    "rembert": ("AutoModel", _ENCODER | {"input_embedding_size": 16}, _text),
    "resnet": ("AutoModel", _STAGES | {"embedding_size": 16}, _picture()),
    "roberta": ("AutoModel", _ENCODER, _text),
    "roformer": ("AutoModel", _ENCODER, _text),
    "rwkv": ("AutoModel", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99}, _text),
    "segformer": (
        "AutoModelForSemanticSegmentation",
        {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]},
        _picture(64),
    ),
    "siglip": ("AutoModel", _TOWERS, _picture_and_text),
    "smollm3": ("AutoModelForCausalLM", _DECODER | {"pad_token_id": 0}, _text),
    "squeezebert": ("AutoModel", _ENCODER | {"embedding_size": 32}, _text),
    "stablelm": ("AutoModelForCausalLM", _DECODER, _text),
    "starcoder2": ("AutoModelForCausalLM", _DECODER, _text),
    "swin": ("AutoModel", _SWIN, _picture()),
    "swinv2": ("AutoModel", _SWIN, _picture()),
    "t5": ("AutoModel", _T5, _two_texts),
    "vit": ("AutoModel", _VIT, _picture()),
    "vit_mae": (
        "AutoModel",
        _VIT | {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2},
        _picture(),
    ),
    "wav2vec2": ("AutoModel", _ENCODER | _WAVES, _sound),
    "whisper": (
        "AutoModel",
        _BOTH | {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 20, "pad_token_id": 0},
        _spectrum,
    ),
    "xglm": (
        "AutoModel",
        {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "vocab_size": 99},
        _text,
    ),
    "xlm-roberta": ("AutoModel", _ENCODER, _text),
    "yolos": ("AutoModel", _VIT | {"image_size": [32, 32], "num_detection_tokens": 5}, _picture()),
}
