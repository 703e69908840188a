"""The nouns of measuring: a network with some groups lowered, and what came of running or training it."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, JsonValue

from bitplan.core.precision import Precision
from bitplan.core.record import Record
from bitplan.core.records import Name
from bitplan.core.spend import Spend
from bitplan.core.trials import Count, NotNegative, Run


def _lowered(groups: tuple[str, ...], layers: dict[str, Precision]) -> str:
    if not groups:
        return "the network as it is"
    shown = ", ".join(groups[:3]) + (f" and {len(groups) - 3} more" if len(groups) > 3 else "")
    return f"{shown} at {', '.join(sorted({str(precision) for precision in layers.values()}))}"


class _Outcome(Record):
    """What came of a job, and what that took: seconds, and passes."""

    outside_id: ClassVar[frozenset[str]] = Record.outside_id | {"spend"}

    seconds: NotNegative = 0.0
    spend: Spend | None = None


class Lowered(Record):
    """A job: lower some groups of a network, then train it; everything that the outcome depends on.

    `groups` are named for people, `layers` says what is lowered to what. `run` is the training from the network as
    it was, before it was lowered. `scored` asks for the score on the test split too.
    """

    groups: tuple[Name, ...]
    layers: dict[Name, Precision]
    run: Run
    task_options: dict[str, str] = {}
    scored: bool = False

    @property
    def words(self) -> str:
        """What it lowers, for people."""
        return _lowered(self.groups, self.layers)

    @property
    def seed(self) -> int:
        """That of the training."""
        return self.run.seed


class Tuned(_Outcome):
    """What training said: means over all its steps, and over the last tenth of them; the score on the test split.

    Where samples were held out of choosing's training, all of these are measured on them once it is over. Scores of
    training are None where the task has none for a batch,
    `score` where it was not asked for.
    """

    mean_loss: float
    mean_score: float | None = None
    last_loss: float
    last_score: float | None = None
    score: float | None = None
    steps: Count
    samples: Count


class Dropped(Record):
    """A job: lower some groups of a network (or none), then only run it on training batches drawn by a seed."""

    groups: tuple[Name, ...]
    layers: dict[Name, Precision]
    network: str
    weights: str
    task: str
    task_options: dict[str, str] = {}
    seed: int
    batches: Count
    batch_size: Count

    @property
    def words(self) -> str:
        """What it lowers, for people."""
        return _lowered(self.groups, self.layers)


class Drifted(Dropped):
    """A job: the same, but compared with the network as it is, by what both answer at a temperature."""

    temperature: Annotated[float, Field(gt=0)]


class Shown(Dropped):
    """A job: the same, in a network that was trained for all plans at once, by the job of the id `trained`."""

    trained: str


class Drifts(_Outcome):
    """How far the answers to each batch are from those of the network as it is."""

    divergences: Annotated[tuple[float, ...], Field(min_length=1)]


class Sloped(Dropped):
    """A job: how the losses of samples number `first` and following lean towards each choice below the highest.

    Nothing is lowered; `members` are the layers of the groups that could be. Batches are of one sample.
    """

    members: dict[Name, tuple[Name, ...]]
    choices: tuple[Precision, ...]
    labels: str
    first: Annotated[int, Field(ge=0)]
    count: Count

    @property
    def words(self) -> str:
        """Which samples, for people."""
        return f"samples {self.first + 1} to {self.first + self.count}"


class Slopes(_Outcome):
    """For each group, each choice below the highest: the mean over the samples of the squared slope towards it."""

    squares: dict[Name, tuple[NotNegative, ...]]


class Misread(Dropped):
    """A job: what the weights of each layer at each choice would spoil of its outputs on batch number `first`."""

    members: dict[Name, tuple[Name, ...]]
    choices: tuple[Precision, ...]
    first: Annotated[int, Field(ge=0)]

    @property
    def words(self) -> str:
        """Which batch, for people."""
        return f"batch {self.first + 1} of {self.batches}"


class OutputErrors(_Outcome):
    """For each layer, the squares of its outputs, and of their error at each choice, both sums over a batch."""

    powers: dict[Name, NotNegative]
    errors: dict[Name, tuple[NotNegative, ...]]


class Noised(Dropped):
    """A job: the noise that a group's quantized weights make of the answers, and how much of it costs the score `fall`.

    Nothing is lowered: `layers` names the group's at the precision that they have.
    """

    levels: Count
    fall: Annotated[float, Field(gt=0)]


class Noise(_Outcome):
    """Mean squared distances of answers: what a group's own quantization makes, and what the score bears."""

    own: NotNegative
    borne: NotNegative


class Losses(_Outcome):
    """The loss and the score of each batch; `scores` is None where the task has none for a batch."""

    losses: Annotated[tuple[float, ...], Field(min_length=1)]
    scores: tuple[float, ...] | None = None


class Relaxed(Record):
    """A job: train a network in which every group has all choices at once, together with their shares.

    `run` is the training from the network as it was. `costs` are those of each budget, group and choice, and
    `capacities` what they may come to: the shares are learned for these.
    """

    method: Name
    options: dict[str, JsonValue] = {}
    members: dict[Name, tuple[Name, ...]]
    choices: tuple[Precision, ...]
    costs: tuple[tuple[tuple[int, ...], ...], ...]
    capacities: tuple[int, ...]
    run: Run
    task_options: dict[str, str] = {}

    @property
    def words(self) -> str:
        """What it chooses from, for people."""
        return f"all of {', '.join(map(str, self.choices))} at once"

    @property
    def seed(self) -> int:
        """That of the training."""
        return self.run.seed


class Learned(_Outcome):
    """What a relaxation learned: for each group the numbers that its shares follow from."""

    theta: Annotated[tuple[tuple[float, ...], ...], Field(min_length=1)]
    steps: Count


# --- The nouns of curvature: some probes of a network's Hessian, and what they gave.


class Probes(Record):
    """A job: probes number `first` and following of the loss of some samples; everything that they depend on."""

    network: str
    weights: str
    task: str
    layers: tuple[Name, ...]
    sizes: tuple[Count, ...]
    seed: int
    first: Annotated[int, Field(ge=0)]
    count: Count

    @property
    def words(self) -> str:
        """Which probes, for people."""
        return f"Hessian probes {self.first + 1} to {self.first + self.count}"


class Powers(Probes):
    """A job: power iterations of the layers number `first` and following."""

    iterations: Count
    tolerance: NotNegative

    @property
    def words(self) -> str:
        """Which layers, for people."""
        return f"power iteration of layers {self.first + 1} to {self.first + self.count}"


class Probed(_Outcome):
    """vᵀHv of each probe, for each layer."""

    products: Annotated[tuple[tuple[float, ...], ...], Field(min_length=1)]


class Eigenvalues(_Outcome):
    """The eigenvalue of largest magnitude of each layer's block."""

    values: Annotated[tuple[float, ...], Field(min_length=1)]
