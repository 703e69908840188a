"""Models on disk: a folder of `model.safetensors` and `checkpoint.json`, whole or not there."""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bitplan
from bitplan.adapters.networks import find_network
from bitplan.adapters.pretrained import CONFIG
from bitplan.adapters.tokenizers import TOKENIZER, tokenizer_text
from bitplan.adapters.transformers import network_of
from bitplan.core.checkpoints import ABOUT, TENSORS, Checkpoint
from bitplan.core.errors import FileError, InputError, UnknownName
from bitplan.core.naming import STEP
from bitplan.core.parsing import named, parsing
from bitplan.core.registry import MODELS
from bitplan.core.store import load, sha256_of, whole_folder
from bitplan.core.swap import restore
from bitplan.core.trust import check_code, import_factory, names_code
from bitplan.quant.convert import is_quantized, options_of, plan_of, quantize
from bitplan.quant.factory import told_by
from bitplan.quant.loading import fill_, read_for
from bitplan.quant.lsq import positive
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.weights.opened import check_weights
from bitplan.weights.safetensors import map_with_texts
from bitplan.weights.torch_tensors import read_safetensors, write_tensors

_FILES = (ABOUT, TENSORS, CONFIG, TOKENIZER)


def check_replaceable(target: Path, *, more: bool = False) -> None:
    """Refuse a place where something else is than a checkpoint, or `more`; long work asks before it begins."""
    restore(target)
    if target.exists() and not (target / ABOUT).is_file() and not _is_empty_folder(target):
        raise FileError(f"{target} exists and is not a checkpoint: choose another name or delete it")
    if not more:
        _refuse_more_than_a_checkpoint(target)


def save_checkpoint(
    model: nn.Module,
    path: str | Path,
    *,
    spec: str | None = None,
    graph_id: str | None = None,
    of: str | None = None,
    pretrained: str | Path | None = None,
) -> Path:
    """Write a model, quantized or not, as a folder; `spec` is its name in the zoo, if it has one.

    `pretrained` is what `load_pretrained` read the network from: its configuration and its tokenizer are then kept
    beside the tensors, and the folder needs no model to be loaded.

    A folder of that name is replaced only if it is a checkpoint and no more, and once the new one is complete. `of`
    says what it belongs to, for those who ask when they load it.
    """
    target = Path(path)
    check_replaceable(target, more=of is not None)  # in a run the folder is the run's
    tensors, tied = tensors_of(model)
    beside = {} if pretrained is None else _beside(model, Path(pretrained))
    quantized = is_quantized(model)
    about = Checkpoint(
        plan=plan_of(model) if quantized else None,
        options=asdict(options_of(model)) if quantized else {},
        spec=CONFIG if beside else spec,
        graph=graph_id,
        tied=tied,
        versions={"bitplan": bitplan.__version__, "torch": torch.__version__},
    )
    with whole_folder(target) as temporary:
        write_tensors(tensors, temporary / TENSORS)
        for name, text in beside.items():
            (temporary / name).write_text(text, encoding="utf-8")
        sealed = about.model_copy(update={"sha256": sha256_of(temporary / TENSORS)})
        (temporary / ABOUT).write_text(sealed.to_json(of=of), encoding="utf-8")
    return target


def load_checkpoint(
    path: str | Path, model: nn.Module | None = None, *, of: str | None = None, trust: bool = False
) -> nn.Module:
    """Read a checkpoint folder; a foreign file or folder of weights needs `model` and fills a copy.

    Without `model`, the checkpoint must name a model of the zoo, or with `trust` code to import. Pickles are read by
    torch's weights-only loader. `of` is what a checkpoint of ours must belong to; it must then be as it was written in
    every respect.
    """
    source = Path(path)
    restore(source)
    if not source.exists():
        raise FileError(f"cannot read {source}: there is no such file or folder")
    if source.is_file() and model is None:
        raise InputError(
            f"{source} says nothing about its model: give the one it belongs to, --model (in Python: model=…)"
        )
    if model is not None and not (source / ABOUT).exists():
        filled = copy.deepcopy(model)
        fill_(filled, read_for(filled, source), source)
        return filled
    about = load(source / ABOUT, Checkpoint, of=of, sealed=of is not None)
    if of is not None:  # in a run: that it is damaged is said, not what the damage made of it
        check_weights(source, about, sealed=True)
    base = from_zoo(about.spec, source / ABOUT, trust=trust) if model is None else model
    if about.plan is None:
        filled = copy.deepcopy(base)
    else:
        with parsing(source / ABOUT, "a checkpoint as bitplan writes it", "write it again"):
            options = told_by(about.options)
        with named(source):
            filled = quantize(base, about.plan, **options)
    tensors, _ = read_safetensors(source / TENSORS)
    for name, stored in about.tied.items():
        if stored not in tensors:
            raise FileError(f"{source}: {name} should be tied to {stored}, which is not in {TENSORS}")
        tensors[name] = tensors[stored]
    fill_(filled, tensors, source)  # says what is missing or misshapen
    if of is None:
        check_weights(source, about)
    return filled


def from_zoo(spec: str | None, source: Path, *, trust: bool = False) -> nn.Module:
    """The model of the zoo that a file names; where it is trusted, also what code that it names builds."""
    if spec is None:
        raise InputError(
            f"{source} names no model of the zoo: give the one it belongs to, --model (in Python: model=…)"
        )
    if spec == CONFIG:
        return _described(source)
    check_code(spec, source, trust=trust, otherwise="give the model itself, or ")
    factory = import_factory(spec) if names_code(spec) else MODELS.get(spec) if spec in MODELS else find_network(spec)
    if factory is None:
        raise UnknownName(
            "model of the zoo",
            spec,
            MODELS,
            hint=f"Give the one that {source} belongs to, --model (in Python: model=…)",
        )
    built = factory()
    model: nn.Module = built[0] if isinstance(built, tuple) else built
    return model


def _described(source: Path) -> nn.Module:
    """The network that the configuration beside a file describes."""
    if not (source.parent / CONFIG).is_file():
        raise InputError(
            f"{source} is of a network that a {CONFIG} describes, which is not beside it: put it there, or give the "
            "network, --model (in Python: model=…)"
        )
    tensors, _ = map_with_texts(source.parent / TENSORS if source.name == ABOUT else source)
    return network_of(source.parent, [tensor.data.nbytes for tensor in tensors.values()])


def _beside(model: nn.Module, pretrained: Path) -> dict[str, str]:
    """The configuration of a network of transformers', and its tokenizer where there is one, as texts."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        raise InputError(f"the model has no configuration of transformers', so it is not the one in {pretrained}")
    has_one = pretrained.is_file() or (pretrained / TOKENIZER).is_file()
    return {CONFIG: config.to_json_string()} | ({TOKENIZER: tokenizer_text(pretrained)} if has_one else {})


def tensors_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What is stored: each tensor once, steps as they are in use (positive), and who is tied to whom."""
    steps = {
        id(module._parameters.get(STEP))
        for module in model.modules()
        if isinstance(module, InputQuantizer) or (isinstance(module, WeightQuantizer) and not module.follows)
    }
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise InputError(f"{name} in the model's state is a {type(value).__name__}, which a checkpoint cannot hold")
        tensor = value.detach()
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and place in first:
            tied[name] = first[place]
            continue
        first[place] = name
        plain = positive(tensor) if id(value) in steps else tensor
        stored[name] = plain.to("cpu", copy=True).contiguous()
    return stored, tied


def _refuse_more_than_a_checkpoint(path: Path) -> None:
    others = sorted(one.name for one in path.glob("[!.]*") if one.name not in _FILES)
    if others:
        raise FileError(f"{path} holds {others[0]} beside its checkpoint, which would be lost: choose another name")


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
