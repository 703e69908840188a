"""Hugging Face transformers: models from a configuration or with weights, and its door for quantization methods."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from bitplan.adapters import torchvision
from bitplan.adapters.foreign import require
from bitplan.adapters.gguf import pre_tokenizer_name, quick_gguf
from bitplan.core.errors import FileError, InputError
from bitplan.core.parsing import check_available, explain_failures, first_line, limit_memory, memory_for
from bitplan.store.files import check_text_size
from bitplan.weights.pretrained_folders import CONFIG, refuse_link_out

_log = logging.getLogger(__name__)
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}  # no code of a file, no network
_FEW, _MORE = 1000, 100  # tensors that a network may have, and more of them for each that a file holds
_LARGER = 16  # times the bytes of a file is the size for which a network may take memory
_ATTENTION = ("eager", "sdpa")  # torch's own; other names are repositories of kernels
_BESIDE = ("torchao", "torch.utils._pytree")  # where torchao is there it is imported too, and warns of what it lacks
CUT = "gguf_tokenizer_pre"
"""What a configuration says of the GGUF file that it was read from: its `tokenizer.ggml.pre`, for files made of it."""
_UNKNOWN_NETWORK = re.compile(r"architecture (\S+) is not supported yet|Unknown gguf model_type: (\S+)")


def transformers(purpose: str) -> ModuleType:
    """Import transformers, or say what to install."""
    require("transformers", "text", purpose)
    if torchvision.is_installed():
        torchvision.torchvision()  # transformers imports it beside its models, and it may need help
    import transformers as module

    return module


class QuantizationDoor(NamedTuple):
    """What a quantization method derives from, and how it is registered under a name."""

    quantizer: Any
    config: Any
    register_quantizer: Any
    register_config: Any


def quantization_door() -> QuantizationDoor:
    """transformers' door for quantization methods; the one before version 5 asks for other things, and is refused."""
    library = transformers("a quantization method of transformers")
    major = library.__version__.partition(".")[0]
    if not major.isdecimal() or int(major) < 5:
        raise InputError(
            f"bitplan.plugins.trainers.transformers needs transformers 5, this is {library.__version__}: "
            "pip install -U transformers, "
            "or without it save_checkpoint and load_checkpoint(folder, model)"
        )
    from transformers.quantizers import auto
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    return QuantizationDoor(
        HfQuantizer, QuantizationConfigMixin, auto.register_quantizer, auto.register_quantization_config
    )


def bert_for_question_answering(**sizes: int) -> torch.nn.Module:
    """BERT with a span head; attention in its plain form, whose products and softmax can be quantized."""
    library = transformers("BERT")
    config = library.BertConfig(attn_implementation="eager", **sizes)
    model: torch.nn.Module = library.BertForQuestionAnswering(config)
    return model


def network_of(folder: Path, held: Sequence[int]) -> torch.nn.Module:
    """The network that a folder's configuration describes, with random weights; its class is one of transformers'.

    `held` are the bytes of each tensor that it is for: one that is far larger is refused while it is built.
    """
    path = folder / CONFIG
    with _reading(path):
        config = _config(folder)
        kind = _class(folder, config)
        with limit_memory(path, _LARGER * sum(held)), _no_larger_than(held, path):
            return _plain(kind(config))


def network_with_weights(path: Path, held: Sequence[int]) -> torch.nn.Module:
    """The network in a folder of safetensors, or in a GGUF file, with its weights as float32; `held` as above."""
    library = transformers(f"reading {path}")
    check_available(path, sum(held))
    with _reading(path):
        if path.is_file():
            where: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
            kind: Any = library.AutoModelForCausalLM
        else:
            for beside in filter(Path.is_file, path.glob("*.json")):  # transformers reads some of them whole
                check_text_size(beside)
            config = _config(path)
            where = {"pretrained_model_name_or_path": str(path), "use_safetensors": True, "config": config}
            kind = _class(path, config)
        with quick_gguf() if path.is_file() else nullcontext(), _no_larger_than(held, path):
            model, found = kind.from_pretrained(
                **where, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True, **_LOCAL
            )
        _check_filled(path, found)
        if path.is_file():
            setattr(model.config, CUT, pre_tokenizer_name(path))
        return _plain(model)


def tokenizer_in_gguf(path: Path) -> str:
    """The tokenizer in a GGUF file, as the text of a tokenizer.json."""
    library = transformers(f"reading {path}")
    with _reading(path), quick_gguf():
        found = library.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, **_LOCAL)
        text: str = found.backend_tokenizer.to_str()
    return text


def _config(folder: Path) -> Any:
    refuse_link_out(folder / CONFIG)
    library = transformers(f"reading {folder / CONFIG}")
    try:
        with limit_memory(folder / CONFIG):  # some numbers in it become lists
            config = library.AutoConfig.from_pretrained(str(folder), **_LOCAL)
    except ValueError as error:
        if "custom code" not in str(error):
            raise
        raise FileError(
            f"{folder} brings code of its own, which is not run: build the network yourself where you trust it, "
            "package.module:factory, and give this as --weights"
        ) from None
    for key in ("_attn_implementation", "_experts_implementation"):  # of networks inside it too; None is the default
        setattr(config, key, getattr(config, key, None) if getattr(config, key, None) in _ATTENTION else None)
    form = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if form is not None:
        raise FileError(
            f"{folder} holds a network that is quantized already ({form}): give the float one that it was made from"
        )
    return config


@contextmanager
def _no_larger_than(held: Sequence[int], path: Path) -> Iterator[None]:
    """Refuse a network that is built until the block ends, if it has far more than a file with such tensors holds.

    Files hold some tensors once that a network has several times, or as one, and values of 32 bits in 2.
    """
    config = path / CONFIG if path.is_dir() else path
    most, room = _FEW + _MORE * len(held), memory_for(_LARGER * sum(held))
    count = taken = 0

    def look(_: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        nonlocal count, taken
        count, taken = count + 1, taken + (0 if tensor is None else tensor.numel() * tensor.element_size())
        if count > most or taken > room:
            raise FileError(
                f"{config} describes a network of {count:,} tensors with {taken:,} bytes, and perhaps more, where its "
                f"file holds {len(held):,} tensors with {sum(held):,} bytes: they do not belong together, fetch both"
            )

    hooks = [register_module_parameter_registration_hook(look), register_module_buffer_registration_hook(look)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _class(folder: Path, config: Any) -> Any:
    """The class that a configuration names, where transformers has it: names of code elsewhere lead nowhere."""
    library = transformers(f"reading {folder / CONFIG}")
    for name in config.architectures or ():
        kind = getattr(library, name, None)
        if isinstance(kind, type) and issubclass(kind, library.PreTrainedModel):
            return kind
    said = ", ".join(config.architectures or ()) or "no architecture"
    raise FileError(
        f"{folder / CONFIG} names {said}, which this transformers ({library.__version__}) does not have: upgrade it, "
        "or name what builds the network, package.module:factory, and give this as --weights"
    )


def _check_filled(path: Path, found: Mapping[str, Any]) -> None:
    """Refuse weights that a file lacks or has in another shape, which would stay random; tied ones are not lacking."""
    advice = "fetch it again, or write it anew with save_pretrained from a network that has all its weights"
    for name, there, wanted in sorted(found["mismatched_keys"]):
        raise FileError(f"{path}: tensor {name!r} has shape {tuple(there)}, the network {tuple(wanted)}: {advice}")
    lacking, unused = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise FileError(f"{path} lacks tensor {lacking[0]!r}{more}, which the network has: {advice}")
    if unused:
        _log.warning("%s has %d tensors that its network has no place for, as %s", path, len(unused), unused[0])


def _plain(model: Any) -> torch.nn.Module:
    """A float network in inference, that does not remember what it was read from, nor keys and values of a run."""
    for name in ("hf_quantizer", "quantization_method"):
        vars(model).pop(name, None)
    if "quantization_config" in vars(model.config):
        del model.config.quantization_config
    model.is_quantized = False
    model.config.architectures = [type(model).__name__]
    model.config.use_cache = False
    network: torch.nn.Module = model.eval()
    return network


@contextmanager
def _offline() -> Iterator[None]:
    """The hub is not asked until the block ends: a file of a stranger's may name any place there."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _asked_of_hub(error: BaseException | None) -> str | None:
    """What the hub would have been asked, if that is why something failed."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    while error is not None and not isinstance(error, OfflineModeIsEnabled):
        error = error.__cause__ or error.__context__
    return None if error is None else first_line(error).partition(": offline")[0]


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """transformers at work on a file, without the hub: bars and warnings kept quiet, errors said in one line."""
    log = transformers(f"reading {path}").utils.logging
    barred, level = log.is_progress_bar_enabled(), log.get_verbosity()
    beside = [(logger, logger.level) for logger in map(logging.getLogger, _BESIDE)]
    log.disable_progress_bar()
    log.set_verbosity(logging.ERROR)
    for logger, _ in beside:
        logger.setLevel(logging.ERROR)
    try:
        with (
            _offline(),
            redirect_stderr(io.StringIO()),
            explain_failures(path, "what transformers reads", "fetch it again"),
        ):
            yield  # bars that no setting switches off are written there
    except FileError as error:
        asked = _asked_of_hub(error)
        if asked is not None:
            raise FileError(
                f"{path} names something on the hub, and what is on this machine is read alone ({asked}): build the "
                "network yourself where you trust it, package.module:factory, and give this as --weights"
            ) from None
        unknown = _UNKNOWN_NETWORK.search(str(error.__cause__))
        if unknown is None:
            raise
        raise FileError(
            f"{path} holds a network of architecture {unknown[1] or unknown[2]}, which transformers does not read: "
            "upgrade it (pip install -U transformers), or give the checkpoint that this one was made from"
        ) from None
    except ImportError as error:
        raise InputError(f"transformers cannot read {path}: {first_line(error)}") from None
    finally:
        log.set_verbosity(level)
        for logger, own in beside:
            logger.setLevel(own)
        if barred:
            log.enable_progress_bar()
