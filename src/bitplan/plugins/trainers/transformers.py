"""bitplan as a quantization method of Hugging Face transformers; importing this file registers it.

    import bitplan.plugins.trainers.transformers

    from_pretrained(folder)                                                  a quantized network, as it was saved
    from_pretrained(folder, quantization_config=BitplanConfig("plan.json"))  a float network, quantized
    carry_plan_(bitplan.quantize(model, plan))                               a network that is here already

All three train in `Trainer`, and `save_pretrained` writes them: weights and learned steps as tensors, the plan and the
options of `quantize` as `quantization_config` in `config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from bitplan.adapters.transformers import quantization_door
from bitplan.core.errors import FileError, InputError, suggestion
from bitplan.core.naming import (
    ATTENTION,
    CALL_QUANTIZERS,
    INPUT_QUANTIZER,
    WEIGHT_QUANTIZER,
    function_of,
    is_product,
    layer_of_quantizer,
)
from bitplan.core.parsing import name_file_in_errors
from bitplan.core.records import Plan
from bitplan.quant.convert import options_of, plan_of, quantize_
from bitplan.quant.methods import OptionChanges, check_options
from bitplan.quant.quantizers import find_shared_names
from bitplan.quant.sites import PLAN, quantized_layers
from bitplan.store.files import load
from bitplan.weights.opened import open_checkpoint
from bitplan.weights.torch_tensors import as_torch

METHOD = "bitplan"
"""What `quant_method` says in a `config.json`."""
_WHERE = "quantization_config"
_KEYS = ("quant_method", "plan", "layers", "options")
_AGAIN = "write it again with save_pretrained"
_QUANTIZERS = tuple(rf"(^|\.){name}\." for name in (WEIGHT_QUANTIZER, INPUT_QUANTIZER, CALL_QUANTIZERS))
_ONE_DEVICE = 'load it onto one device, device_map="cuda:0" or none, and let accelerate or Trainer share the work'
_door = quantization_door()
_Config: Any = _door.config
_Quantizer: Any = _door.quantizer


@_door.register_config(METHOD)
class BitplanConfig(_Config):
    """What `quantization_config` says: a plan, here or in a file, and options as `quantize` takes them."""

    def __init__(self, plan: Plan | str | Path, **options: Unpack[OptionChanges]) -> None:
        self.quant_method = METHOD
        if not isinstance(plan, Plan | str | Path):
            raise InputError(f"BitplanConfig takes a Plan or the path of one, not a {type(plan).__name__}")
        self.plan: Plan = plan if isinstance(plan, Plan) else load(plan, Plan)
        self.options: OptionChanges = check_options(options)

    @property
    def attention(self) -> str | None:
        """The implementation of attention in which the plan's products were seen; None where it quantizes none."""
        products = [layer for layer in quantized_layers(self.plan) if is_product(layer)]
        if any(function_of(layer) == ATTENTION for layer in products):
            return "sdpa"
        return "eager" if products else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, which `from_dict` reads back equal.

        transformers sorts what it writes by name, but steps of one module are in the order of the plan's layers, and
        optimizers number them so: the order is kept beside the plan.
        """
        layers = list(self.plan.precisions)
        plan = json.loads(self.plan.to_json())
        del plan["checksum"]  # of bytes, which transformers writes in another order; the id covers the content
        return {"quant_method": METHOD, "plan": plan, "layers": layers, "options": dict(self.options)}

    def __repr__(self) -> str:
        told = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"BitplanConfig(plan {self.plan.id} of {len(self.plan.precisions)} layers{told})"

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.to_dict().items()

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Read what `to_dict` gave, strictly; nothing in it names code."""
        with name_file_in_errors(_WHERE, _AGAIN):
            config = cls(_plan_in(config_dict), **_options_in(config_dict))
        return (config, kwargs) if return_unused_kwargs else config


@_door.register_quantizer(METHOD)
class BitplanQuantizer(_Quantizer):
    """What `from_pretrained` and `save_pretrained` ask: the float network is loaded first, then quantized in place."""

    quantization_config: BitplanConfig
    is_trainable = True
    is_qat_trainable = True
    is_compileable = True

    def is_serializable(self) -> bool:
        """A quantized network is saved like any other."""
        return True

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Refuse a network that is spread over devices, whose linked layers may be apart; asked again once it is."""
        devices = set(map(str, device_map.values())) if isinstance(device_map, dict) else set()
        if len(devices) > 1 or "disk" in devices:
            raise InputError(f"device_map spreads the network over {', '.join(sorted(devices))}: {_ONE_DEVICE}")

    def update_attn_implementation(self, config: Any) -> Any:
        """Have attention computed as it was where the plan was made, since its products are named after that."""
        wanted, asked = self.quantization_config.attention, config._attn_implementation
        if wanted is not None and asked not in (None, wanted):
            raise InputError(
                f"attn_implementation={asked!r} was asked for, but the plan quantizes the products of {wanted!r}: "
                "leave it out, or make a plan from a trace of that network"
            )
        if wanted == "eager":  # sdpa is the default of all networks that have it
            config._attn_implementation = wanted
        return config

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> None:
        if self.pre_quantized and not checkpoint_files:
            raise InputError(
                "the learned steps of a quantized network are read from its files: give from_pretrained a folder"
            )
        self._files = [Path(file) for file in checkpoint_files or ()]
        self._shapes = {name: value.shape for name, value in model.state_dict().items()}
        # Steps are not left over: they are read below, when what they belong to is there.
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *_QUANTIZERS}

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        del model._keys_to_ignore_on_load_unexpected  # the instance's, not the class's
        self.validate_environment(device_map=getattr(model, "hf_device_map", None))
        self._check_shapes(model)
        try:
            quantize_(model, self.quantization_config.plan, **self.quantization_config.options)
        except InputError as error:
            said = (self.pre_quantized and _of_another(model)) or error
            raise InputError(f"the plan does not fit {type(model).__name__}: {said}") from None
        stored = _stored_steps(self._files, everywhere=self.pre_quantized)
        if self.pre_quantized or stored:
            _load_steps_(model, stored, self._files[0].parent)
        _keep_names_(model)

    def _check_shapes(self, model: nn.Module) -> None:
        """Refuse weights of another shape, which transformers takes as they are where it has a quantizer."""
        for name, value in model.state_dict().items():
            wanted = self._shapes.get(name, value.shape)
            if value.shape != wanted:
                raise InputError(
                    f"{name} is {tuple(value.shape)} in the files, {tuple(wanted)} by the configuration: load the "
                    "float network (from_pretrained with ignore_mismatched_sizes=True), then quantize(model, plan)"
                )

    def get_state_dict_and_metadata(self, model: Any) -> tuple[None, dict[str, str]]:
        """Called when a model is saved: its configuration then says the plan that it follows now."""
        self.quantization_config = model.config.quantization_config = _config_of(model)
        return None, {}


def carry_plan_(model: Any) -> None:
    """Let a model of transformers that `quantize` returned be saved with its plan, in its own `config`."""
    if not hasattr(model, PLAN) or not hasattr(model, "save_pretrained"):
        raise InputError(
            f"carry_plan_ takes a model of transformers that quantize returned, not a {type(model).__name__}: "
            "other models are saved by save_checkpoint(model, folder)"
        )
    model.config.quantization_config = _config_of(model)
    model.hf_quantizer = BitplanQuantizer(model.config.quantization_config)
    model.is_quantized, model.quantization_method = True, METHOD
    _keep_names_(model)


def _keep_names_(model: Any) -> None:
    """Have files written with the names that the model has, and not with older ones that transformers converts."""
    model._weight_conversions = []


def _config_of(model: nn.Module) -> BitplanConfig:
    """What a quantized model is to say of itself."""
    return BitplanConfig(plan_of(model), **check_options(asdict(options_of(model))))


def _plan_in(content: Mapping[str, Any]) -> Plan:
    """The plan of a `quantization_config`, its layers in the order that stands beside it."""
    unknown = content.keys() - set(_KEYS)
    if unknown:
        raise FileError(f"it has the unknown key {min(unknown)!r}{suggestion(min(unknown), _KEYS)}")
    plan = Plan.from_json(json.dumps(content.get("plan")))
    layers = content.get("layers")
    if not isinstance(layers, list) or not all(isinstance(name, str) for name in layers):
        raise FileError("it does not list its layers")
    if sorted(layers) != sorted(plan.precisions):
        raise FileError("it lists other layers than its plan has")
    return plan.model_copy(update={"precisions": {name: plan.precisions[name] for name in layers}})


def _options_in(content: Mapping[str, Any]) -> OptionChanges:
    options = content.get("options", {})
    if not isinstance(options, dict):
        raise FileError(f"its options are a {type(options).__name__}, not an object")
    return check_options(options)


def _stored_steps(files: list[Path], *, everywhere: bool) -> dict[str, torch.Tensor]:
    """What files say of quantizers; of a network that says it is float, only those are opened that cost nothing."""
    opened = [file for file in files if everywhere or file.suffix == ".safetensors"]
    tensors = {name: tensor for file in opened for name, tensor in open_checkpoint(file).tensors.items()}
    return {name: as_torch(tensor) for name, tensor in tensors.items() if layer_of_quantizer(name) is not None}


def _load_steps_(model: nn.Module, stored: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Give the quantizers of a model all that belongs to them; too little, too much or another shape is refused."""
    further = find_shared_names(model)
    wanted = {name: value for name, value in model.state_dict().items() if layer_of_quantizer(name) is not None}
    given = {name: value for name, value in stored.items() if name not in further}
    if wanted.keys() - given.keys():
        raise FileError(
            f"{folder} lacks {min(wanted.keys() - given.keys())}, which the plan in its {_WHERE} needs: {_AGAIN}"
        )
    if given.keys() - wanted.keys():
        raise FileError(f"{folder} has {min(given.keys() - wanted.keys())}, which its plan does not quantize: {_AGAIN}")
    for name, value in wanted.items():
        if given[name].shape != value.shape or not given[name].isfinite().all():
            raise FileError(f"{folder}: {name} is not {tuple(value.shape)} finite numbers: {_AGAIN}")
    model.load_state_dict(given, strict=False)


def _of_another(model: Any) -> str:
    """That a folder is of another class, where it says so."""
    written = [name for name in model.config.architectures or () if name != type(model).__name__]
    return f"the folder holds a {written[0]}; load it as that, transformers.{written[0]}" if written else ""
