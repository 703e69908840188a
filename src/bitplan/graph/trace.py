"""Trace a model with an example input into a Graph, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from bitplan.core.errors import InputError, TraceError
from bitplan.core.naming import (
    ATTENTION,
    COMPLEX,
    LOOK_UPS,
    WEIGHTED,
    function_name,
    holder_of,
    is_recurrent,
    join_names,
    layer_of,
    layer_of_quantizer,
    product_name,
    split_name,
)
from bitplan.core.records import Graph, Layer, Link, Use, Uses
from bitplan.core.rules import Rules
from bitplan.forward.operations import (
    Key,
    ModuleCall,
    Observer,
    Product,
    Values,
    find_products,
    tensors_in,
    written_tensors,
)
from bitplan.forward.shadow import Shadow
from bitplan.graph.names import trace_checkpoint
from bitplan.graph.rules import Ends, apply_rules
from bitplan.quant.convert import without_quantizers
from bitplan.quant.functions import (
    LAYER_FUNCTIONS,
    MOVES,
    MULTIPLICATIONS,
    SOFTMAX,
    open_attention,
    operands_of_einsum,
    pairs_of_einsum,
    place_operands,
)
from bitplan.quant.integer_places import IntegerObserver
from bitplan.quant.layers import original_class
from bitplan.quant.recurrence import OPENED, FewSteps, Products, plain_product
from bitplan.quant.sites import WeightLocation, find_own_name, guess_use
from bitplan.weights.opened import CheckpointLike


def trace(
    model: nn.Module | CheckpointLike,
    example: Any = None,
    *,
    rules: Rules | None = None,
    name: str | None = None,
    values: bool = False,
) -> Graph:
    """Return the layers of a model, their costs and their links.

    The graph of a checkpoint file follows from its names and shapes alone (`graph/names.py`), without an example.
    `example` is a tensor, a tuple of positional arguments, or a dict of keyword arguments. Only its shapes matter (meta
    tensors do), and the model is neither run nor changed. MACs are those of the example, its batch included.

    Use `values` for models that decide by the values of tensors: a copy which shares the parameters is run, on the path
    that this example takes.
    """
    if not isinstance(model, nn.Module):
        if values:
            raise InputError("a file of weights is not run, so there are no values to follow: leave values out")
        return trace_checkpoint(model, rules)
    if example is None:
        raise InputError("an example input is needed to trace a model: trace(model, example)")
    shadow = Shadow(model, values=values)
    watch = TraceObserver(shadow.model, shadow.parameters, few_steps=not shadow.follows_values)
    integers = IntegerObserver(shadow.model)
    _run(shadow, watch, integers, example)
    if not watch.layers:
        raise TraceError(f"{type(model).__name__} has no layer that multiplies by weights; there is nothing to plan")
    keys = {key: watch.values.producer(key) for seen in watch.layers.values() for key in seen.inputs}
    graph = Graph(
        model=name or original_class(model).__name__,
        layers=tuple(
            Layer(
                name=seen.name,
                kind=seen.kind,
                macs=seen.macs,
                weights=seen.weights,
                in_features=seen.in_features,
            )
            for seen in watch.layers.values()
        ),
        links=find_links({seen.name: seen.inputs for seen in watch.layers.values() if seen.inputs}, keys),
        unreached=_unreached(shadow, watch),
        uses=find_uses(shadow.model, watch),
        integers=integers.found,
    )
    return apply_rules(graph, rules or Rules(), watch.ends)


def _run(shadow: Shadow, watch: TraceObserver, integers: IntegerObserver, example: Any) -> None:
    positional, keyword = shadow.example(example)
    integers.add_inputs((positional, keyword))
    labelled = [(f"model input {number}", value) for number, value in enumerate(positional)]
    labelled += [(f"model input {key!r}", value) for key, value in keyword.items()]
    for label, value in labelled:
        for tensor in tree_leaves(value):
            if hasattr(tensor, "untyped_storage"):
                watch.values.add_input(tensor, label)
    try:
        with (
            shadow.running(),
            without_quantizers(shadow.model),
            watch,
            integers,
        ):  # a quantized network is the float one it was
            integers.add_outputs(shadow.model(*positional, **keyword))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise TraceError(
            f"{_locate(watch)} decides by the values of a tensor ({error.func}), which shapes alone cannot follow: "
            "trace it with data, --input values (in Python: trace(model, example, values=True))"
        ) from error
    except Exception as error:
        message = str(error).strip().splitlines()
        # Some operations know the shapes of fewer types than they compute (torch's grouped products: bf16 only).
        hint = (
            "" if shadow.follows_values else " (if the model runs on it: --input values, or values=True, traces a run)"
        )
        misfit = isinstance(error, RuntimeError | TypeError | ValueError | IndexError)
        problem = "the example input does not fit the model" if misfit else "the model's own code fails"
        raise TraceError(
            f"{problem}: in {_locate(watch)}: {message[0] if message else repr(error)}{hint if misfit else ''}"
        ) from error


def _locate(watch: TraceObserver) -> str:
    """Name the module that runs; after an error, the one in which it happened."""
    call = watch.calls[-1]
    name = type(call.module).__name__
    return f"{call.path} ({name})" if call.path else name


def _unreached(shadow: Shadow, watch: TraceObserver) -> tuple[str, ...]:
    """Return layers whose weights no operation has read."""
    never = {
        name: parameter
        for name, parameter in shadow.parameters.items()
        if name not in watch.touched and parameter.dim() >= 2 and layer_of_quantizer(name) is None
    }
    return tuple(dict.fromkeys(layer_of(name) for name in never))


# Layers are found by the tensors that are multiplied, not by the classes of modules.

aten = torch.ops.aten

_UNSEEN = "operation"  # what runs where no function of torch was called from Python: in scripted code, say
_FILLS = {getattr(aten, f"{kind}_like") for kind in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")} | {
    getattr(aten, f"new_{kind}") for kind in ("zeros", "ones", "empty", "full")
}
_COPIES = {aten.clone, aten._to_copy, aten.lift_fresh_copy}


@dataclass
class TracedLayer:
    """A layer as seen so far."""

    name: str
    kind: str
    weights: int
    in_features: int
    parameter: str = ""
    macs: int = 0
    inputs: list[Key] = field(default_factory=list)
    uses: dict[Use, None] = field(default_factory=dict)


@dataclass(frozen=True)
class _Origin:
    """The way a tensor came from parameters, computed or only moved, and the module calls that it happened in."""

    computed: bool
    within: tuple[ModuleCall, ...]


class _Flow:
    """Find the first layers and the heads: follow the results of layers with weights through all other operations.

    A first layer reads something that comes from the network's input and from no layer. The result of a head is read by
    no layer. A table is neither, unless it is the layer that is called first.
    """

    def __init__(self, values: Values) -> None:
        self._values = values
        self._called: list[str] = []  # in the order of calls
        self._unread: set[int] = set()  # the calls whose result no layer has read yet
        self._results: dict[
            int, frozenset[int]
        ] = {}  # storage → the calls whose results are in it, until they are read
        self._no_input: set[int] = set()  # storages that come from a layer, or were filled with a constant
        self._first: dict[str, None] = {}
        self._running: list[int] = []  # the calls that the operation which runs now belongs to

    def read(self, layers: list[TracedLayer], given: torch.Tensor, kind: str) -> None:
        """Note that layers are called on a tensor."""
        storage, is_table = self._values.storage(given), kind == "embedding"
        if self._values.is_activation(given) and storage not in self._no_input and not (is_table and self._called):
            self._first |= {layer.name: None for layer in layers}
        self._unread -= self._results.get(storage, frozenset())
        calls = range(len(self._called), len(self._called) + len(layers))
        self._called += [layer.name for layer in layers]
        self._running += calls
        self._unread.update(() if is_table else calls)

    def ran(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], *, fills: bool) -> None:
        """Note the results of an operation; one that `fills` uses only the shape of its input."""
        read = {self._values.storage(tensor) for tensor in inputs}
        before = set[int]().union(*(self._results.get(storage, ()) for storage in read))
        results = frozenset() if fills else frozenset(self._unread.intersection(before.union(self._running)))
        no_input = fills or bool(self._running) or not self._no_input.isdisjoint(read)
        self._running.clear()
        for storage in {self._values.storage(tensor) for tensor in outputs}:
            self._results[storage] = results
            if no_input:
                self._no_input.add(storage)

    @property
    def ends(self) -> Ends:
        """The first layers and the heads, or the layers called first and last where there are none."""
        heads = frozenset(self._called[call] for call in self._unread)
        return Ends(frozenset(self._first or self._called[:1]), heads or frozenset(self._called[-1:]))


class TraceObserver(Observer):
    """The layers of one forward pass, in the order of their first call."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], *, few_steps: bool = False) -> None:
        """With `few_steps` a few of a recurrent layer stand for all: right where tensors have shapes and no values."""
        self.products: Products = FewSteps(self.counting) if few_steps else plain_product
        self._times = 1
        self.values = Values()
        self.layers: dict[str, TracedLayer] = {}
        self._flow = _Flow(self.values)
        self.touched: set[str] = set()
        self._sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            self.values.add_parameter(parameter, name)
        self._function = _UNSEEN
        self._moves = False
        self._product_name = ""
        self._softmaxes: set[str] = set()
        super().__init__(model)

    @property
    def ends(self) -> Ends:
        """The layers that read the network's input, and its heads."""
        return self._flow.ends

    def call_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function; one that hides its products is opened, as a quantized network opens it."""
        if func is F.multi_head_attention_forward:
            with self.functions:
                return open_attention(*args, **kwargs)
        if func in OPENED:
            with self.functions:
                return OPENED[func](self.products, *args, **kwargs)
        if func is torch.einsum and len(operands_of_einsum(args)[1]) > 2:
            equation, (result, *operands) = operands_of_einsum(args)
            with self.functions:
                for pair, operand in zip(pairs_of_einsum(equation, len(operands) + 1), operands, strict=True):
                    result = torch.einsum(pair, result, operand)
            return result
        with self._calling(func, args, kwargs):
            return func(*args, **kwargs)

    @contextmanager
    def _calling(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Observe a function of torch that is called from Python; its operations follow.

        Calls are counted as `quant/call_interception.py` counts them when the network runs (`core/naming.py`).
        """
        name = function_name(getattr(func, "__name__", str(func)))
        call = self.calls[-1]
        self._function, self._moves = name, func in MOVES or func in MULTIPLICATIONS
        self._product_name = join_names(call.path, product_name(name, call.functions[name]))
        call.functions[name] += not self._reads_weight(func, args, kwargs)
        if func in SOFTMAX:
            self._note_softmax()
        try:
            yield
        finally:
            self._function, self._moves = _UNSEEN, False
            self._product_name = join_names(call.path, _UNSEEN)

    @contextmanager
    def counting(self, times: int) -> Iterator[None]:
        """Count products so many times until the block ends."""
        self._times, before = times, self._times
        try:
            yield
        finally:
            self._times = before

    def _reads_weight(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether an operand of a multiplication comes from parameters."""
        multiplication = MULTIPLICATIONS.get(func)
        if multiplication is None:
            return False
        args, _ = place_operands(multiplication, args, kwargs)
        operands = args[min(multiplication.first, multiplication.second) :][:2]
        return any(isinstance(operand, torch.Tensor) and self.values.sources(operand) for operand in operands)

    def _note_softmax(self) -> None:
        """Note a softmax for the module that calls it, or that lets a module of torch's call it."""
        for call in reversed(self.calls):
            if any(join_names(call.path, function) in self.layers for function in call.functions):
                self._softmaxes.add(call.path)
                return
            if not original_class(call.module).__module__.startswith("torch.nn."):
                return

    def run_operation(self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        """Note one tensor operation that has run."""
        inputs, outputs = tensors_in((arguments, options)), tensors_in(output)
        for tensor in inputs:
            self.touched |= self.values.sources(tensor)
        products = find_products(operation, arguments, output)
        is_layer = any([self._note(product) for product in products])
        path = self.calls[-1].path
        by = f"output of {path or 'the model'} ({operation.overloadpacket.__name__})"
        multiplies = any(product.kind != "embedding" for product in products)  # of parameters: a weight is computed so
        origin = self._origin(inputs, moves=self._moves and not multiplies)
        self.values.made(outputs, inputs, by, is_layer, origin)
        changed = written_tensors(operation, arguments)
        self.values.wrote(changed, inputs, by, origin)
        self._flow.ran(inputs, outputs + changed, fills=operation.overloadpacket in _FILLS)
        if operation.overloadpacket in _COPIES:
            self.values.copied(inputs[0], outputs[0])

    def _origin(self, inputs: list[torch.Tensor], *, moves: bool) -> _Origin:
        """Return how a new tensor comes from parameters, if it does."""
        before = [origin for origin in map(self.values.origin, inputs) if origin is not None]
        computed = not moves or any(origin.computed for origin in before)
        within = tuple(self.calls)
        for origin in before:
            shared = zip(within, origin.within, strict=False)
            within = tuple(mine for mine, _ in takewhile(lambda both: both[0] is both[1], shared))
        return _Origin(computed, within)

    def _note(self, product: Product) -> bool:
        """Add a product to its layers, if it belongs to any."""
        given, weight = self._roles(product)
        if weight is not None:
            layers = self._weighted_layers(product, weight)
            self._flow.read(layers, given, product.kind)
            if product.kind not in ("embedding", "bilinear"):  # what they read are indices, or is never quantized
                for seen in layers:
                    seen.inputs.append(self.values.key(given))
            return True
        if not self._is_product(product):
            return False
        kind = "attention" if self._function == ATTENTION else "product"
        seen = self._layer(self._product_name, product, 0, kind)
        seen.macs += product.macs * self._times
        seen.uses[Use(module=self.calls[-1].path, function=self._function_of(product))] = None
        return True

    def _function_of(self, product: Product) -> str:
        """Return the function that multiplies; complex numbers have one of their own, since they have no quantizers."""
        return f"{COMPLEX}{self._function}" if product.second.is_complex() else self._function

    def _is_product(self, product: Product) -> bool:
        """Tell whether activations are multiplied; attention counts as such in any case."""
        both = self.values.is_activation(product.first) and self.values.is_activation(product.second)
        return both or self._function == ATTENTION

    def _weighted_layers(self, product: Product, weight: torch.Tensor) -> list[TracedLayer]:
        """Return the layers of this weight: one layer, or several whose weights were put together."""
        sources = sorted(self.values.sources(weight))
        origin = self.values.origin(weight) or _Origin(False, tuple(self.calls))
        if origin.computed:  # of a matrix with a low-rank update: the matrix
            largest = max(sources, key=lambda name: self._sizes[name])
            size = self._sizes[largest] if len(sources) == 1 else weight.numel()
            parts = {largest: size}
        else:
            parts = {name: self._sizes[name] for name in sources}
        layers = [self._matrix(layer_of(name), product, size) for name, size in parts.items()]
        shared = [call for call, own in zip(origin.within, self.calls, strict=False) if call is own]
        use = Use(module=shared[-1].path, function=self._function_of(product), computed=origin.computed)
        for seen, (name, size) in zip(layers, parts.items(), strict=True):
            seen.parameter = name
            seen.macs += product.macs * self._times * size // sum(parts.values())
            seen.uses[use] = None
        return layers

    def _roles(self, product: Product) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the operand that is the input and the one that is the weight (None if neither is)."""
        first, second = product.first, product.second
        if self._function == ATTENTION or (product.by_data and not self.values.is_activation(first)):
            return first, None
        only_second = product.kind == "embedding" or product.kind.startswith("conv")
        takes_weights = only_second or self._function in LAYER_FUNCTIONS
        if self.values.sources(second) and (takes_weights or self.values.is_activation(first)):
            return first, second
        if self.values.sources(first) and self.values.is_activation(second) and not only_second:
            return second, first
        return first, None

    def complex_products(self) -> list[str]:
        """Return the products of activations that are complex numbers."""
        products = [seen for seen in self.layers.values() if not seen.parameter]
        return [seen.name for seen in products if any(use.function.startswith(COMPLEX) for use in seen.uses)]

    def products_without_softmax(self) -> list[str]:
        """Return the products of modules that have several and no softmax among them."""
        within: dict[str, list[str]] = {}
        for seen in self.layers.values():
            if seen.kind == "product":
                within.setdefault(split_name(seen.name)[0], []).append(seen.name)
        alone = [names for path, names in within.items() if len(names) > 1 and path not in self._softmaxes]
        return [name for names in alone for name in names]

    def _matrix(self, name: str, product: Product, weights: int) -> TracedLayer:
        return self._layer(name, product, weights, "recurrent" if is_recurrent(name) else None)

    def _layer(self, name: str, product: Product, weights: int, kind: str | None = None) -> TracedLayer:
        seen = self.layers.get(name)
        if seen is None:
            seen = self.layers[name] = TracedLayer(name, kind or product.kind, weights, product.in_features)
        elif seen.kind == "embedding" and product.kind == "linear":  # a table that is also the output layer
            seen.kind, seen.in_features = product.kind, product.in_features
        return seen


# Linked layers: those that read the same tensor.


def find_links(inputs: Mapping[str, Iterable[Key]], producers: Mapping[Key, str]) -> tuple[Link, ...]:
    """Return links of layers that share an input, also through a third layer; `inputs` in execution order."""
    readers: dict[Key, str] = {}
    leader = {name: name for name in inputs}
    through: dict[str, list[str]] = {}

    def root(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    for name, keys in inputs.items():
        for key in keys:
            first = root(readers.setdefault(key, name))
            other = root(name)
            if first != other:
                leader[other] = first
                through.setdefault(first, []).extend([*through.pop(other, []), producers[key]])
    members: dict[str, list[str]] = {}
    for name in inputs:
        members.setdefault(root(name), []).append(name)
    return tuple(
        Link(layers=tuple(names), through="; ".join(dict.fromkeys(through[first])))
        for first, names in members.items()
        if len(names) > 1
    )


# The uses of layers in a graph: those that `quantize` would not find by the names of layers alone.


def find_uses(model: nn.Module, watch: TraceObserver) -> Uses:
    """Return all uses of the layers whose uses do not follow from their name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    uses_of_layers: Uses = {}
    for seen in watch.layers.values():
        if seen.parameter:
            path, name = holder_of(seen.parameter)
            held = WeightLocation(path, modules[path], name)
            uses = tuple(dict.fromkeys(_without_function(use, held, modules) for use in seen.uses))
            usual = guess_use(held, modules)
            if not all(_is_usual(use, usual) for use in uses):
                uses_of_layers[seen.name] = uses
    uses_of_layers |= {name: tuple(watch.layers[name].uses) for name in watch.complex_products()}
    for name in watch.products_without_softmax():
        uses_of_layers[name] = tuple(use.model_copy(update={"softmax": False}) for use in watch.layers[name].uses)
    return uses_of_layers


def _without_function(use: Use, held: WeightLocation, modules: Mapping[str, nn.Module]) -> Use:
    """Drop the function of a use if the counterpart of the module runs the forward."""
    named = use.module and not use.function.startswith(COMPLEX)
    own = find_own_name(modules[use.module], getattr(held.module, held.name), held) if named else ""
    return Use(module=use.module, function="") if own else use


def _is_usual(use: Use, usual: Use) -> bool:
    """Tell whether a use is the one that a name suggests."""
    if use.module != usual.module or bool(use.function) != bool(usual.function):
        return False
    return not use.function or (use.function in WEIGHTED - LOOK_UPS and not use.computed)
