"""Where architectures come from: the names of timm, torchvision and transformers, each with a network and an example.

Weights are random. Images are as small as a network takes them; transformers' networks have small sizes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

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
        "transformers": sorted(_SMALL),
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
            options = {"weights_backbone": None} if kind in ("segmentation", "detection") else {}
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


def _images(channels: int, side: int) -> Tensor:
    return torch.rand(BATCH, channels, side, side)


def _of_transformers(name: str) -> Iterator[Candidate]:
    library = transformers("the architectures of transformers")
    class_name, own_sizes, inputs = _SMALL[name]

    def build() -> nn.Module:
        defaults = library.AutoConfig.for_model(name).to_dict()
        sizes = {key: size for key, size in _SIZES.items() if type(defaults.get(key)) is int} | dict(own_sizes)
        config = library.AutoConfig.for_model(name, **sizes)
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


def _each(names: str, size: int) -> dict[str, int]:
    return dict.fromkeys(names.split(), size)


# Given to every configuration that has a whole number by this name
_SIZES = {
    **_each("hidden_size d_model n_embd dim image_size",32),
    **_each("num_hidden_layers n_layers n_layer num_layers encoder_layers decoder_layers",2),
    **_each("num_attention_heads n_heads n_head num_heads attention_heads",4),
    **_each("encoder_attention_heads decoder_attention_heads",4),
    **_each("intermediate_size ffn_dim d_ff hidden_dim encoder_ffn_dim decoder_ffn_dim",48),
    **_each("query_pre_attn_scalar d_kv",8),
    "vocab_size": 99, "n_positions": 64, "rotary_dim": 4, "projection_dim": 16,
}  # fmt: skip

_DECODER = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
_VIT = {"patch_size": 8}
_SWIN = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_STAGES = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}
_TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_TOWERS = {
    "text_config": _TOWER | {"vocab_size": 99, "max_position_embeddings": 64, "projection_dim": 16},
    "vision_config": _TOWER | {"image_size": 32, "patch_size": 8, "projection_dim": 16},
    "projection_dim": 16,
}
_WAVES = {
    "conv_dim": (16, 16), "conv_kernel": (8, 4), "conv_stride": (8, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
_CAUSAL = "AutoModelForCausalLM"


class Small(NamedTuple):
    """A small network of transformers: its class, the sizes that are its own, and what it reads."""

    network: str = "AutoModel"
    sizes: Mapping[str, Any] = MappingProxyType({})
    inputs: Callable[[], dict[str, Tensor]] = _text


_DECODERS = "gemma gemma2 gemma3_text granite llama mistral olmo2 phi qwen2 qwen3 stablelm starcoder2"
_PLAIN = """bart bert bloom codegen data2vec-text deberta distilbert falcon fnet gpt2 gpt_bigcode gpt_neox gptj layoutlm
m2m_100 mpnet mt5 pegasus roberta roformer t5 xglm xlm-roberta"""
_TWO_TEXTS = {"bart", "m2m_100", "mt5", "pegasus", "t5"}

_SMALL: dict[str, Small] = {
    **{name: Small(_CAUSAL, _DECODER) for name in _DECODERS.split()},
    **{name: Small(inputs=_two_texts if name in _TWO_TEXTS else _text) for name in _PLAIN.split()},
    **{name: Small(sizes=_VIT, inputs=_picture()) for name in ("beit", "deit", "vit")},
    **{name: Small(sizes=_STAGES, inputs=_picture()) for name in ("convnext", "convnextv2")},
    **{name: Small(sizes=_SWIN, inputs=_picture()) for name in ("swin", "swinv2")},
    **{name: Small(sizes=_WAVES, inputs=_sound) for name in ("hubert", "wav2vec2")},
    **{name: Small(sizes={"embedding_size": 16}) for name in ("albert", "electra")},
    **{name: Small(sizes={"embedding_size": 32}) for name in ("convbert", "squeezebert")},
    "clip": Small("CLIPModel", _TOWERS, _picture_and_text),
    "cvt": Small(
        sizes={"embed_dim": [16, 32, 32], "depth": [2, 2, 4], "num_heads": [1, 2, 2]}, inputs=_picture(64)
    ),
    "deberta-v2": Small(sizes={"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "dinov2": Small(sizes=_VIT | {"intermediate_size": 48}, inputs=_picture()),
    "dpt": Small(
        "DPTForDepthEstimation",
        _VIT
        | {
            "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 16,
        },
        _picture(),
    ),
    "funnel": Small("FunnelModel", {"block_sizes": [1, 1], "d_head": 8, "d_inner": 48}),
    "gpt_neo": Small(sizes={"attention_types": [[["global", "local"], 1]]}),
    "led": Small(sizes={"attention_window": [4, 4]}, inputs=_two_texts),
    "levit": Small(
        sizes={
            "hidden_sizes": [16, 32, 32], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [8, 8, 8],
            "image_size": 64,
        },
        inputs=_picture(64),
    ),
    "longformer": Small(sizes={"attention_window": [4, 4]}),
    "mamba": Small(sizes={"intermediate_size": 64}),
    "marian": Small(sizes={"pad_token_id": 1}, inputs=_two_texts),
    "mixtral": Small(_CAUSAL, _DECODER | {"num_local_experts": 4}),
    "mobilebert": Small(sizes={"embedding_size": 16, "true_hidden_size": 32, "intra_bottleneck_size": 32}),
    "mobilenet_v2": Small(sizes={"depth_multiplier": 0.35}, inputs=_picture()),
    "mobilevit": Small(sizes={"hidden_sizes": [16, 24, 32], "image_size": 64}, inputs=_picture(64)),
    "modernbert": Small(sizes={"pad_token_id": 0}),
    "mpt": Small(sizes={"max_seq_len": 64}),
    "opt": Small(_CAUSAL, {"word_embed_proj_dim": 32}),
    "phi3": Small(_CAUSAL, _DECODER | {"pad_token_id": 0}),
    "poolformer": Small(
        sizes={
            "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "patch_sizes": [7, 3, 3, 3],
            "strides": [4, 2, 2, 2], "padding": [2, 1, 1, 1],
        },
        inputs=_picture(64),
    ),
    "qwen2_moe": Small(_CAUSAL, _DECODER | _EXPERTS | {"shared_expert_intermediate_size": 24}),
    "regnet": Small(sizes={"hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8}, inputs=_picture()),
    "rembert": Small(sizes={"input_embedding_size": 16}),
    "resnet": Small(sizes=_STAGES | {"embedding_size": 16}, inputs=_picture()),
    "rwkv": Small(sizes={"intermediate_size": 128}),
    "segformer": Small(
        "AutoModelForSemanticSegmentation",
        {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]},
        _picture(64),
    ),
    "siglip": Small(sizes=_TOWERS, inputs=_picture_and_text),
    "smollm3": Small(_CAUSAL, _DECODER | {"pad_token_id": 0}),
    "vit_mae": Small(
        sizes=_VIT | {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2},
        inputs=_picture(),
    ),
    "whisper": Small(
        sizes={"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 20, "pad_token_id": 0},
        inputs=_spectrum,
    ),
    "yolos": Small(sizes=_VIT | {"image_size": [32, 32], "num_detection_tokens": 5}, inputs=_picture()),
}  # fmt: skip
