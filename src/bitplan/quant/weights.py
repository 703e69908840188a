"""Weights that others published, read into a float model: PyTorch's files, safetensors, Hugging Face folders."""

from __future__ import annotations

import fnmatch
import json
import logging
import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from bitplan.core.errors import FileError, InputError, suggestion
from bitplan.core.shards import INDEX, lacking, read_index
from bitplan.core.store import read_text
from bitplan.quant.convert import is_quantized

Tensors = dict[str, Tensor]
_WRAPPINGS = ("state_dict", "model", "model_state_dict")  # where training scripts keep it
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}  # of norms, in BERT's first checkpoints
# Parts of BERT's checkpoints that no span depends on: what looks at [CLS], the heads of pretraining, a constant.
_SPARE = ("*pooler.dense.*", "cls.*", "*embeddings.position_ids")
# What a model computes with but no shape shows.
_SETTINGS = ("model_type", "num_attention_heads", "hidden_act", "layer_norm_eps", "position_embedding_type")
_log = logging.getLogger(__name__)


def load_weights_(model: nn.Module, path: str | Path, *, fresh: Sequence[str] = ()) -> None:
    """Fill a float model from a `.pth` or `.safetensors` file, or a Hugging Face folder; no code in them is run.

    `fresh` holds shell wildcards on the model's tensors that keep the values they have, such as ("qa_outputs.*",)
    for a new head; all others must be there. Weights of a bare network (`BertModel`) fit the one with a head around it.
    """
    source = Path(path)
    if is_quantized(model):
        raise InputError("weights are loaded into the float model: load them first, then quantize")
    expected = model.state_dict()
    kept = _kept(expected, fresh)
    _check_settings(model, source)
    tensors = _aligned(read_weights(source), expected)
    aside = {name for name in tensors if name in kept or (name not in expected and _is_spare(name))}
    if aside:
        _log.info("%s: left aside %s", source, ", ".join(sorted(aside)))
    given = {name: tensor for name, tensor in tensors.items() if name not in aside}
    if given.keys() & expected.keys():
        _check_complete(given, {name: value for name, value in expected.items() if name not in kept}, source)
    fill_(model, given | {name: expected[name] for name in kept}, source)


def _check_complete(given: Tensors, wanted: Mapping[str, Tensor], source: Path) -> None:
    """Refuse a file that lacks tensors; where it is one head, or two, say how it stays as it is."""
    lacks = [name for name in wanted if name not in given and not name.endswith("num_batches_tracked")]
    if lacks:
        heads = tuple(dict.fromkeys(f"{name.rpartition('.')[0]}.*" for name in lacks))
        shown = ", ".join(f"{name} {tuple(wanted[name].shape)}" for name in lacks[:4])
        rest = f" and {len(lacks) - 4} more" if len(lacks) > 4 else ""
        advice = f": if they are to be trained from their random values, pass fresh={heads}" if len(heads) <= 2 else ""
        raise FileError(f"{source} lacks {shown}{rest}, which the model has{advice}")


def read_weights(path: Path) -> Tensors:
    """The tensors of a file or folder by name; pickles are read by torch's weights-only loader."""
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise FileError(f"cannot read {path}: there is no such file or folder")
    if path.name.endswith(".index.json"):
        return _read_shards(path)
    return read_safetensors(path) if path.suffix == ".safetensors" else _read_pickled(path)


def read_safetensors(path: Path) -> Tensors:
    """The tensors of one safetensors file."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise FileError(f"cannot read {path}: there is no such file") from None
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise FileError(f"{path} is cut off or not a safetensors file ({_line(error)}): fetch it again") from None


def fill_(model: nn.Module, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Give a model all of its tensors; one too few, too many or of another shape is refused before any is copied."""
    expected = model.state_dict()
    counters = {n: v for n, v in expected.items() if n.endswith("num_batches_tracked")}
    complete = counters | dict(tensors)  # files older than torch 0.4.1 lack them
    for name in sorted(expected.keys() - complete.keys()):
        raise FileError(f"{source} lacks {name}, which the model has{suggestion(name, complete)}")
    for name in sorted(complete.keys() - expected.keys()):
        raise FileError(f"{source} has {name}, which the model lacks{suggestion(name, expected)}")
    for name, tensor in complete.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{tuple(tensor.shape)} in the file, {tuple(expected[name].shape)} in the model"
            raise FileError(f"{source}: {name} is {shapes}: the model is not the one that was saved")
        if tensor.is_floating_point() != expected[name].is_floating_point():
            kinds = f"{tensor.dtype} in the file, {expected[name].dtype} in the model"
            raise FileError(f"{source}: {name} is {kinds}: take a checkpoint that is not quantized")
    model.load_state_dict(complete)


def _kept(expected: Mapping[str, Tensor], fresh: Sequence[str]) -> set[str]:
    if isinstance(fresh, str):
        raise InputError(f"fresh is the text {fresh!r}: give a list of patterns, such as [{fresh!r}]")
    kept: set[str] = set()
    for pattern in fresh:
        found = fnmatch.filter(expected, pattern)
        if not found:
            raise InputError(f"fresh {pattern!r} matches no tensor of the model{suggestion(pattern, expected)}")
        kept.update(found)
    return kept


def _aligned(tensors: Tensors, expected: Mapping[str, Tensor]) -> Tensors:
    """The tensors under the model's names: old names of norms, and a bare network's inside one with a head."""
    prefixes = ["", *dict.fromkeys(f"{name.partition('.')[0]}." for name in expected if "." in name)]
    named = [{_known(prefix + name, expected): tensor for name, tensor in tensors.items()} for prefix in prefixes]
    return max(named, key=lambda one: len(one.keys() & expected.keys()))


def _known(name: str, expected: Mapping[str, Tensor]) -> str:
    stem, dot, last = name.rpartition(".")
    modern = f"{stem}{dot}{_OLD_NAMES.get(last, last)}"
    return modern if modern in expected and name not in expected else name


def _is_spare(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _SPARE)


def _check_settings(model: nn.Module, source: Path) -> None:
    """Compare a folder's config.json with the model's configuration, where both say something."""
    path, config = source / "config.json", getattr(model, "config", None)
    if config is None or not path.is_file():
        return
    try:
        theirs = dict(json.loads(read_text(path)))
    except (ValueError, TypeError):
        raise FileError(f"{path} is not a model's JSON configuration: fetch it again") from None
    for setting in _SETTINGS:
        own = getattr(config, setting, None)
        if own is not None and theirs.get(setting, own) != own:
            raise FileError(f"{path} says {setting} {theirs[setting]!r}, the model has {own!r}: build the model so")


def _read_folder(folder: Path) -> Tensors:
    if (folder / INDEX).is_file():
        return _read_shards(folder / INDEX)
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return read_weights(folder / name)
    raise FileError(f"{folder} holds none of model.safetensors, {INDEX} and pytorch_model.bin: name the file itself")


def _read_shards(index: Path) -> Tensors:
    listed = read_index(index)
    shards = {shard: read_safetensors(shard) for shard in sorted(set(listed.values()))}
    for name, shard in listed.items():
        if name not in shards[shard]:
            raise lacking(index, name, shard)
    return {name: shards[shard][name] for name, shard in listed.items()}


def _read_pickled(path: Path) -> Tensors:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # on pickle protocols: it loads, or is refused below
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise FileError(
            f"{path} wants to run code when it is read, so it is refused: save its state_dict() alone, "
            "best as safetensors"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise FileError(f"{path} is cut off or not a PyTorch file ({_line(error)}): fetch it again") from None
    for key in _WRAPPINGS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise FileError(f"{path} holds no state_dict of tensors")
    return {name.removeprefix("module."): tensor for name, tensor in content.items()}


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:120]
