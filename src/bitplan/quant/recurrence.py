"""torch's recurrent functions as loops over time in which every product by a weight can be seen.

torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu and their cells are single functions that hide their products.
These compute the same from products that the caller makes: plain ones for `trace`, quantizing ones for a quantized
network (`quant/call_interception.py`). A product is made once for a sequence, so its weight is quantized once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor], Tensor]
State = tuple[Tensor, ...]
"""What goes from step to step: the hidden state (B, H) and, of an LSTM, its cell (B, C)."""
Rule = Callable[[Tensor, Tensor, State], State]
"""One step: what the input and the hidden state give (B, gates · C), and the state before → the state."""


class Products(Protocol):
    """Makes the product by a weight (out, in) and bias; it will be used so many `times` for each sample."""

    def __call__(self, weight: Tensor, bias: Tensor | None, times: int = 1) -> Product:
        """x (…, in) → (…, out)."""


def plain_product(weight: Tensor, bias: Tensor | None, times: int = 1) -> Product:
    """Return the product itself."""
    return lambda x: F.linear(x, weight, bias)


@dataclass(frozen=True)
class FewSteps:
    """Plain products for shapes alone: all steps are alike, so three are run, and the last counts for the others.

    `counting(times)` is the context in which a multiplication counts so many times.
    """

    counting: Callable[[int], AbstractContextManager[None]]
    steps: ClassVar[int] = 3  # the first, one that follows one, and one for all others

    def __call__(self, weight: Tensor, bias: Tensor | None, times: int = 1) -> Product:
        """Return a product that is run for a few steps only."""
        product, numbers = plain_product(weight, bias), itertools.count(1)

        def counted(x: Tensor) -> Tensor:
            with self.counting(times - self.steps + 1 if next(numbers) == self.steps else 1):
                return product(x)

        return counted


def _lstm(given: Tensor, hidden: Tensor, state: State) -> State:
    into, forget, new, out = (given + hidden).chunk(4, -1)
    cell = forget.sigmoid() * state[1] + into.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell


def _gru(given: Tensor, hidden: Tensor, state: State) -> State:
    (reset, update, new), (reset_h, update_h, new_h) = given.chunk(3, -1), hidden.chunk(3, -1)
    new = (new + (reset + reset_h).sigmoid() * new_h).tanh()
    return (new + (update + update_h).sigmoid() * (state[0] - new),)


def _rnn_tanh(given: Tensor, hidden: Tensor, _: State) -> State:
    return ((given + hidden).tanh(),)


def _rnn_relu(given: Tensor, hidden: Tensor, _: State) -> State:
    return ((given + hidden).relu(),)


class _Settings(NamedTuple):
    """The arguments of torch's functions after the weights, in their order."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False


@dataclass(frozen=True)
class _Sequences:
    """The layout of sequences: (T, B, …); or packed, the rows of one step after those of the other, so many each."""

    packed: list[int] | None

    def steps(self, product: Product, x: Tensor) -> Sequence[Tensor]:
        """Return the rows of each step, multiplied for all steps at once; a quantizer sees samples first, (B, T, …)."""
        if self.packed is not None:
            return product(x).split(self.packed)
        if isinstance(x.shape[0], torch.SymInt):
            raise ValueError("it runs over a free dimension, the first one: give it sequences that are batch_first")
        return product(x.transpose(0, 1)).unbind(1)

    def joined(self, steps: Sequence[Tensor]) -> Tensor:
        """Return steps as one tensor again."""
        return torch.stack(tuple(steps)) if self.packed is None else torch.cat(tuple(steps))


@dataclass(frozen=True)
class _Direction:
    """One layer in one direction of time: its rule, the products that it is made of, and its weights."""

    rule: Rule
    products: Products
    weights: Sequence[Tensor]
    has_biases: bool
    backwards: bool

    def run(self, x: Tensor, state: State, sequences: _Sequences) -> tuple[Tensor, State]:
        """Return the hidden states of all steps, and the state after the last.

        If sequences end at different steps, the rows of those that have ended, or not yet begun, stay as they are.
        """
        of_input, of_hidden, *rest = self.weights
        bias_input, bias_hidden = rest[:2] if self.has_biases else (None, None)
        projection = rest[2:] if self.has_biases else rest
        few = isinstance(self.products, FewSteps) and sequences.packed is None  # packed steps are not alike
        products = plain_product if isinstance(self.products, FewSteps) and not few else self.products
        steps = sequences.steps(products(of_input, bias_input), x)
        remember = products(of_hidden, bias_hidden, times=len(steps))
        project = products(projection[0], None, times=len(steps)) if projection else None
        outputs: list[Tensor] = []
        ahead = self._order_in_time(steps)
        for given in ahead[: FewSteps.steps] if few else ahead:
            running = tuple(_leading_rows(part, given) for part in state)
            hidden, *cell = self.rule(given, remember(running[0]), running)
            new = (project(hidden) if project else hidden, *cell)
            outputs.append(new[0])
            state = tuple(_append_rest(part, before) for part, before in zip(new, state, strict=True))
        outputs += outputs[-1:] * (len(ahead) - len(outputs))
        return sequences.joined(self._order_in_time(outputs)), state

    def _order_in_time(self, steps: Sequence[Tensor]) -> list[Tensor]:
        """Return the steps in the order in which they run, or outputs of that order in the order of steps."""
        return list(reversed(steps)) if self.backwards else list(steps)


def _run_sequence(rule: Rule, products: Products, *arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    """Run torch.lstm(input, hx, params, …), or for packed sequences torch.lstm(data, batch_sizes, hx, params, …)."""
    is_packed = isinstance(arguments[3], list | tuple)  # the weights
    x, *sizes, hx, weights = arguments[: 4 if is_packed else 3]
    about = _Settings(*arguments[4 if is_packed else 3 :], **named)
    sequences = _Sequences(sizes[0].tolist() if is_packed else None)
    outputs, final = _run_layers(
        partial(_Direction, rule, products),
        x.transpose(0, 1) if about.batch_first else x,
        hx if isinstance(hx, list | tuple) else (hx,),
        weights,
        about,
        sequences,
    )
    return outputs.transpose(0, 1) if about.batch_first else outputs, *final


def _run_layers(
    direction: Callable[..., _Direction],
    x: Tensor,
    hx: Sequence[Tensor],  # (layers · directions, B, …) each
    weights: Sequence[Tensor],
    about: _Settings,
    sequences: _Sequences,
) -> tuple[Tensor, State]:
    """Run all layers, each on the outputs of the one before, in both directions if there are two."""
    projects = len(hx) > 1 and hx[0].shape[-1] != hx[1].shape[-1]
    each = 2 + 2 * about.has_biases + projects
    states = list(zip(*(part.unbind(0) for part in hx), strict=True))
    finals: list[State] = []
    for layer in range(about.num_layers):
        outputs = []
        for backwards in (False, True)[: 1 + about.bidirectional]:
            place = len(finals)
            own = weights[each * place : each * (place + 1)]
            output, final = direction(own, about.has_biases, backwards).run(x, states[place], sequences)
            outputs.append(output)
            finals.append(final)
        x = torch.cat(outputs, -1) if about.bidirectional else outputs[0]
        if about.train and about.dropout and layer < about.num_layers - 1:
            x = F.dropout(x, about.dropout)
    return x, tuple(torch.stack(parts) for parts in zip(*finals, strict=True))


def _run_cell(  # the signature is torch's
    rule: Rule,
    products: Products,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor | State:
    """Run torch.lstm_cell and its like: one step."""
    state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    new = rule(products(w_ih, b_ih)(input), products(w_hh, b_hh)(state[0]), state)
    return new if len(new) > 1 else new[0]


def _leading_rows(part: Tensor, given: Tensor) -> Tensor:
    """Return the rows of a state that a step goes on with."""
    return part if part.shape[0] == given.shape[0] else part[: given.shape[0]]


def _append_rest(new: Tensor, before: Tensor) -> Tensor:
    """Return a state after a step that went on with its first rows."""
    return new if new.shape[0] == before.shape[0] else torch.cat((new, before[new.shape[0] :]))


_RULES: dict[str, Rule] = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _rnn_tanh, "rnn_relu": _rnn_relu}
OPENED: dict[Callable[..., Any], Callable[..., Any]] = {
    **{getattr(torch, name): partial(_run_sequence, rule) for name, rule in _RULES.items()},
    **{getattr(torch, f"{name}_cell"): partial(_run_cell, rule) for name, rule in _RULES.items()},
}
"""torch's function → the same, given first what makes its products, then what torch's is given."""
