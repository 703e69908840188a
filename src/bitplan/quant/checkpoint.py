"""Models on disk: a folder of `model.safetensors` and `checkpoint.json`, whole or not there."""

from __future__ import annotations

import copy
import fnmatch
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bitplan
from bitplan.adapters.tokenizers import TOKENIZER, tokenizer_text
from bitplan.adapters.transformers import network_of
from bitplan.core.errors import FileError, InputError, UnknownName, suggestion
from bitplan.core.naming import STEP, layer_of_quantizer, strip_compiled
from bitplan.core.parsing import explain_failures, name_file_in_errors, parse_json
from bitplan.core.records import ABOUT, TENSORS, Checkpoint
from bitplan.core.registry import MODELS
from bitplan.core.trust import check_code, import_factory, names_code
from bitplan.models.zoo import find_network
from bitplan.quant.convert import is_quantized, options_of, plan_of, quantize, quantizers_of
from bitplan.quant.lsq import positive_scale
from bitplan.quant.methods import check_options
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer, find_shared_names, full_state
from bitplan.store.files import atomic_folder, load, read_text, restore_folder, sha256_of
from bitplan.weights.opened import check_weights
from bitplan.weights.pretrained_folders import CONFIG
from bitplan.weights.safetensors import map_with_texts
from bitplan.weights.torch_tensors import TorchTensors, hash_of_tensors, read_safetensors, read_weights, write_tensors

_FILES = (ABOUT, TENSORS, CONFIG, TOKENIZER)


def check_replaceable(target: Path, *, more: bool = False) -> None:
    """Raise an error if a target is something else than a checkpoint, or `more`; long work asks before it begins."""
    restore_folder(target)
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
    beside = {} if pretrained is None else _texts_beside(model, Path(pretrained))
    quantized = is_quantized(model)
    about = Checkpoint(
        plan=plan_of(model) if quantized else None,
        options=asdict(options_of(model)) if quantized else {},
        spec=CONFIG if beside else spec,
        graph=graph_id,
        tied=tied,
        versions={"bitplan": bitplan.__version__, "torch": torch.__version__},
    )
    with atomic_folder(target) as temporary:
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
    restore_folder(source)
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
        check_weights(source, about)
    base = build_from_zoo(about.spec, source / ABOUT, trust=trust) if model is None else model
    if about.plan is None:
        filled = copy.deepcopy(base)
    else:
        with explain_failures(source / ABOUT, "a checkpoint as bitplan writes it", "write it again"):
            options = check_options(about.options)
        with name_file_in_errors(source):
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


def build_from_zoo(spec: str | None, source: Path, *, trust: bool = False) -> nn.Module:
    """Return the model of the zoo that a file names, or with `trust` the model that its code builds."""
    if spec is None:
        raise InputError(
            f"{source} names no model of the zoo: give the one it belongs to, --model (in Python: model=…)"
        )
    if spec == CONFIG:
        return _build_from_config(source)
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


def _build_from_config(source: Path) -> nn.Module:
    """Return the network that the configuration beside a file describes."""
    if not (source.parent / CONFIG).is_file():
        raise InputError(
            f"{source} is of a network that a {CONFIG} describes, which is not beside it: put it there, or give the "
            "network, --model (in Python: model=…)"
        )
    tensors, _ = map_with_texts(source.parent / TENSORS if source.name == ABOUT else source)
    return network_of(source.parent, [tensor.data.nbytes for tensor in tensors.values()])


def _texts_beside(model: nn.Module, pretrained: Path) -> dict[str, str]:
    """Return the configuration of a transformers network, and its tokenizer if there is one, as texts."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        raise InputError(f"the model has no configuration of transformers', so it is not the one in {pretrained}")
    has_one = pretrained.is_file() or (pretrained / TOKENIZER).is_file()
    return {CONFIG: config.to_json_string()} | ({TOKENIZER: tokenizer_text(pretrained)} if has_one else {})


def tensors_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor once, scales positive as in use, and the names of tied tensors."""
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
        plain = positive_scale(tensor) if id(value) in steps else tensor
        stored[name] = plain.to("cpu", copy=True).contiguous()
    return stored, tied


def _refuse_more_than_a_checkpoint(path: Path) -> None:
    others = sorted(one.name for one in path.glob("[!.]*") if one.name not in _FILES)
    if others:
        raise FileError(f"{path} holds {others[0]} beside its checkpoint, which would be lost: choose another name")


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


# Weights that others published into a float model: which tensor is which, and a check that all of them fit.

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
    kept = _match_fresh(expected, fresh)
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
    further = find_shared_names(model)
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
    """Return the tensors of a file or folder under the model's names; tied tensors may be there once."""
    tensors = _align_names(read_weights(source), model.state_dict())
    _, tied = unique_state(model)
    return tensors | {name: tensors[first] for name, first in tied.items() if name not in tensors and first in tensors}


def _align_names(tensors: TorchTensors, expected: Mapping[str, Tensor]) -> TorchTensors:
    """Return the tensors under the model's names: old names of norms, and a bare network inside one with a head.

    This also brings back a part that the model calls `module`, or that is compiled, which the reader takes for
    wrappers.
    """
    plain = {strip_compiled(name): name for name in expected}
    parts = dict.fromkeys(name.partition(".")[0] for name in plain if "." in name)  # the model's outermost ones

    def inside(prefix: str) -> TorchTensors:
        known = {_modern_name(prefix + name, plain): tensor for name, tensor in tensors.items()}
        return {plain.get(name, name): tensor for name, tensor in known.items()}

    candidates = [inside(""), *(inside(f"{part}.") for part in parts)]
    return max(candidates, key=lambda named: len(named.keys() & expected.keys()))


def _refuse_quantized(tensors: TorchTensors, expected: Mapping[str, Tensor], source: Path) -> None:
    """Raise an error for the file of a quantized network: a float model has no use for its scales."""
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


def _match_fresh(expected: Mapping[str, Tensor], fresh: Sequence[str]) -> set[str]:
    if isinstance(fresh, str):
        raise InputError(f"fresh is the text {fresh!r}: give a list of patterns, such as [{fresh!r}]")
    kept: set[str] = set()
    for pattern in fresh:
        found = fnmatch.filter(expected, pattern)
        if not found:
            raise InputError(f"fresh {pattern!r} matches no tensor of the model{suggestion(pattern, expected)}")
        kept.update(found)
    return kept


def _modern_name(name: str, expected: Mapping[str, object]) -> str:
    """Return the name by which the model knows a tensor; the file may have a norm's old one (gamma, beta)."""
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
    with explain_failures(path, "a model's JSON configuration", "fetch it again"):
        theirs = dict(parse_json(read_text(path)))
    for setting in _SETTINGS:
        own = getattr(config, setting, None)
        if own is not None and theirs.get(setting, own) != own:
            raise FileError(f"{path} says {setting} {theirs[setting]!r}, the model has {own!r}: build the model so")


# A model's fingerprint: short hashes of what it is and of its weights, for files that belong to one model alone.


@dataclass(frozen=True)
class Fingerprint:
    """`network` is of names, shapes, plan and options; `weights` of the values themselves."""

    network: str
    weights: str


def fingerprint(model: nn.Module) -> Fingerprint:
    """Return both hashes; two models that have the same compute the same."""
    shapes = [(name, tuple(value.shape), str(value.dtype)) for name, value in full_state(model).items()]
    plan = _plan_and_options(model) if is_quantized(model) else None
    return Fingerprint(hashlib.sha256(repr((shapes, plan)).encode()).hexdigest()[:12], hash_of_weights(model))


def _plan_and_options(model: nn.Module) -> tuple[object, ...]:
    options = options_of(model)
    both = (plan_of(model).id, options)
    off = [
        name for name, found in quantizers_of(model).items() if found.weight is not None and not found.weight.enabled
    ]
    return (*both, *["integer"][: options.integer], *off)  # these are not shown: others are what they were


def hash_of_weights(model: nn.Module) -> str:
    """Return a hash of every tensor's name and bytes, tied ones once."""
    return hash_of_tensors(unique_state(model)[0], length=6)


def unique_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor of the model once, and the names of tied tensors."""
    own: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise InputError(f"{name} in the model's state is a {type(value).__name__}, which a checkpoint cannot hold")
        if id(value) in first:
            tied[name] = first[id(value)]
        else:
            first[id(value)], own[name] = name, value
    return own, tied


def put_state_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a model all of its tensors.

    A state dict says which version of each module's code wrote it, and files do not. Some networks, such as
    torchvision's MNASNet, refuse a state without it. They get the version of the code that is here.
    """
    state = OrderedDict(tensors)
    versions = getattr(model.state_dict(), "_metadata", None)
    if versions is not None:
        state._metadata = versions  # type: ignore[attr-defined]
    model.load_state_dict(state)
