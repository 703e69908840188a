"""Weights that others published into a float model: which tensor is which, and a check that all of them fit."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from bitplan.core.checkpoints import ABOUT
from bitplan.core.errors import FileError, InputError, suggestion
from bitplan.core.naming import layer_of_quantizer, uncompiled
from bitplan.core.parsing import parse_json, parsing
from bitplan.core.store import read_text
from bitplan.quant.convert import is_quantized
from bitplan.quant.fingerprint import put_state_, state_once
from bitplan.quant.sharing import further_names
from bitplan.weights.torch_tensors import TorchTensors, read_weights

_OLD_NAMES = {"gamma": "weight", "beta": "bias"}  # of norms, in BERT's first checkpoints
# Parts of checkpoints that nothing depends on here: of BERT's what looks at [CLS], the heads of pretraining and a
# constant; of a backbone the classifier that it was trained with.
_SPARE = ("*pooler.dense.*", "cls.*", "*embeddings.position_ids", "backbone.fc.*")
# What a model computes with but no shape shows.
_SETTINGS = ("model_type", "num_attention_heads", "hidden_act", "layer_norm_eps", "position_embedding_type")
_COUNTER = "num_batches_tracked"  # of a batch norm
_SHOWN = 4
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
    tensors = read_for(model, source)
    _refuse_quantized(tensors, expected, source)
    aside = {name for name in tensors if name in kept or (name not in expected and _is_spare(name))}
    if aside:
        _log.info("%s: left aside %s", source, ", ".join(sorted(aside)))
    given = {name: tensor for name, tensor in tensors.items() if name not in aside}
    wanted = {name: value for name, value in expected.items() if name not in kept}
    _check_complete(given, wanted, source)
    fill_(model, given | {name: expected[name] for name in kept}, source)


def fill_(model: nn.Module, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Give a model all of its tensors; one too few, too many or of another shape is refused before any is copied."""
    expected = model.state_dict()
    # Files older than torch 0.4.1 lack counters.
    counters = {name: value for name, value in expected.items() if name.endswith(_COUNTER)}
    further = further_names(model)  # which files of before have too
    complete = counters | {name: tensor for name, tensor in tensors.items() if name not in further}
    missing, unknown = expected.keys() - complete.keys(), complete.keys() - expected.keys()
    if missing:
        name = min(missing)
        raise FileError(f"{source} lacks {name}, which the model has{suggestion(name, tensors)}")
    if unknown:
        name = min(unknown)
        raise FileError(f"{source} has {name}, which the model lacks{suggestion(name, expected)}")
    for name, tensor in complete.items():
        _check_fits(name, tensor, expected[name], source)
    put_state_(model, complete)


def read_for(model: nn.Module, source: Path) -> TorchTensors:
    """The tensors of a file or folder under the model's names; those that the model ties may stand there once."""
    tensors = _aligned(read_weights(source), model.state_dict())
    _, tied = state_once(model)
    return tensors | {name: tensors[first] for name, first in tied.items() if name not in tensors and first in tensors}


def _aligned(tensors: TorchTensors, expected: Mapping[str, Tensor]) -> TorchTensors:
    """The tensors under the model's names: old names of norms, and a bare network's inside one with a head.

    The same brings a name back inside a part that the model calls `module`, or that is compiled, which the reader takes
    for wrappers.
    """
    plain = {uncompiled(name): name for name in expected}
    parts = dict.fromkeys(name.partition(".")[0] for name in plain if "." in name)  # the model's outermost ones

    def inside(prefix: str) -> TorchTensors:
        known = {_known(prefix + name, plain): tensor for name, tensor in tensors.items()}
        return {plain.get(name, name): tensor for name, tensor in known.items()}

    candidates = [inside(""), *(inside(f"{part}.") for part in parts)]
    return max(candidates, key=lambda named: len(named.keys() & expected.keys()))


def _refuse_quantized(tensors: TorchTensors, expected: Mapping[str, Tensor], source: Path) -> None:
    """Say of a quantized network's file what it is; a float model has no use for its steps."""
    steps = [name for name in tensors if name not in expected and layer_of_quantizer(name) is not None]
    if not steps:
        return
    folder = source if source.is_dir() else source.parent
    advice = f"give the folder {folder} instead of a model with --weights (in Python: load_checkpoint({str(folder)!r}))"
    if not (folder / ABOUT).is_file():
        advice = "fill the model that was quantized by its plan: load_checkpoint(path, quantize(model, plan))"
    raise FileError(f"{source} holds a network that bitplan quantized (it has {min(steps)}): {advice}")


def _check_fits(name: str, given: Tensor, wanted: Tensor, source: Path) -> None:
    if given.shape != wanted.shape:
        shapes = f"{tuple(given.shape)} in the file, {tuple(wanted.shape)} in the model"
        raise FileError(f"{source}: {name} is {shapes}: the model is not the one that was saved")
    if given.is_floating_point() != wanted.is_floating_point():
        kinds = f"{given.dtype} in the file, {wanted.dtype} in the model"
        raise FileError(f"{source}: {name} is {kinds}: take a checkpoint that is not quantized")


def _check_complete(given: TorchTensors, wanted: Mapping[str, Tensor], source: Path) -> None:
    """Refuse a file that lacks tensors; where it is one head, or two, say how it stays as it is."""
    lacking = [name for name in wanted if name not in given and not name.endswith(_COUNTER)]
    if not lacking:
        return
    if not given.keys() & wanted.keys():
        theirs, ours = (", ".join([*names][:_SHOWN]) or "nothing" for names in (given, lacking))
        raise FileError(
            f"{source} has no tensor of this model: it has {theirs} …, the model has {ours} …; name the network that "
            "these weights are of"
        )
    shown = ", ".join(f"{name} {tuple(wanted[name].shape)}" for name in lacking[:_SHOWN])
    rest = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
    modules = [name.rpartition(".")[0] for name in lacking]
    heads = tuple(dict.fromkeys(f"{module}.*" for module in modules))
    advice = ""
    if len(heads) <= 2:
        typed = " ".join(f"--fresh '{head}'" for head in heads)
        advice = f": if they are to be trained from their random values, add {typed} (in Python: fresh={heads})"
    raise FileError(f"{source} lacks {shown}{rest}, which the model has{advice}")


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


def _known(name: str, expected: Mapping[str, object]) -> str:
    """The name by which the model knows a tensor: a norm's old one (gamma, beta) may be in the file."""
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
    with parsing(path, "a model's JSON configuration", "fetch it again"):
        theirs = dict(parse_json(read_text(path)))
    for setting in _SETTINGS:
        own = getattr(config, setting, None)
        if own is not None and theirs.get(setting, own) != own:
            raise FileError(f"{path} says {setting} {theirs[setting]!r}, the model has {own!r}: build the model so")
