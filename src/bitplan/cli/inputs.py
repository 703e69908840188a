"""Tell what a user typed by its name and by what lies there; each kind of input says what it has.

typed                                           kind              it has
resnet50 · timm/NAME · package.module:factory   BuiltModel        graph, model, example, its name in the zoo
a folder with a checkpoint.json                 CheckpointFolder  the same, with weights, and a plan
FILE.gguf · a folder with transformers' config  PretrainedModel   graph, model, example, tokenizer
FILE.safetensors, .pth … · a folder of them     WeightsFile       graph, by names and shapes; the opened file
FILE.json                                       RecordFile        a graph or a plan
a folder with a study.json                      RunNetwork        all of them, and a task

Nothing is loaded before it is asked for, and nothing twice. An input that lacks something says what it is instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

from bitplan.cli.options import fill_example, limit_threads, read_shape, refuse_rules, split_input
from bitplan.cli.terminal import showing_progress, tell
from bitplan.core.errors import FileError, InputError
from bitplan.core.records import ABOUT, ENDINGS, Graph
from bitplan.core.studies import Study
from bitplan.core.trust import check_code, names_code
from bitplan.store.files import open_file
from bitplan.store.run_folder import RunFolder
from bitplan.weights.pretrained_folders import CONFIG, is_pretrained

if TYPE_CHECKING:
    from bitplan.core.records import Checkpoint, Plan
    from bitplan.core.rules import Rules
    from bitplan.core.trials import Result
    from bitplan.study.context import RunContext

_COPIES = 3  # of the network: the float one, one to be lowered, and its lowered weights

_PICKLE = b"\x80"  # what a pickle begins with
_WEIGHTS = (*ENDINGS, ".index.json")


def read_input(typed: str | Path, options: InputOptions | None = None, choice: RunChoice | None = None) -> Input:
    """Return the input of the kind that its name, or its file or folder, says; `choice` is for the folder of a run."""
    name, path, options = str(typed), Path(typed), options or InputOptions()
    is_checkpoint = (path / ABOUT).is_file()
    if options.model is not None and not is_checkpoint:
        raise InputError(f"--model names the network of a checkpoint folder, and {name} is none")
    if RunFolder.is_one(path):
        return RunNetwork(name, options, choice or RunChoice())
    _refuse_choice(name, choice or RunChoice())
    if is_checkpoint:
        return CheckpointFolder(name, options)
    if is_pretrained(path):
        return PretrainedModel(name, options)
    if path.is_dir() or name.endswith(_WEIGHTS):
        return WeightsFile(name, options)
    if path.suffix == ".json" and not _is_binary(path):
        return RecordFile(name, options)
    if path.is_file():  # of any name: PyTorch's files have many
        return WeightsFile(name, options)
    return BuiltModel(name, options)


def load_teacher(
    teacher: str | None, teacher_weights: str | None, model: str | None = None, *, trust: bool = False
) -> Any:
    """Return the float network that a recipe names as its teacher, with its weights; None if it names none."""
    if teacher is None:
        if teacher_weights is not None:
            raise InputError("teacher_weights are those of teacher=NAME: name it too, or leave them out")
        return None
    is_checkpoint = (Path(teacher) / ABOUT).is_file()  # --model is about the network of such a folder
    network = read_input(
        teacher, InputOptions(weights=teacher_weights, model=model if is_checkpoint else None, trust=trust)
    )
    if network.has_random_weights:
        raise InputError(f"{teacher} from the zoo has random weights, which teach nothing: add teacher_weights=FILE")
    return network.model


def _is_binary(path: Path) -> bool:
    """Return True if a file is no text: archives and safetensors have zeros in their first bytes."""
    try:
        with open_file(path) as file:
            start = file.read(16)
    except OSError:  # who reads it says why
        return False
    return b"\0" in start or start[:1] == _PICKLE


def _refuse_choice(name: str, choice: RunChoice) -> None:
    for option in ("method", "budget", "seed"):
        if getattr(choice, option) is not None:
            raise InputError(f"--{option} is for the folder of a run (with a study.json), which {name} is not")


MustRun = Literal["no", "small", "yes"]
"""Whether a network is run on data: no, if memory holds it, or in any case."""


@dataclass(frozen=True)
class InputOptions:
    """The options typed beside an input.

    `input` is an example's shapes, or the word values; `weights` and `fresh` are weights and the tensors that they may
    lack; `model` names the network of a checkpoint folder; `trust` lets a file name code to import.
    """

    input: str | None = None
    weights: str | None = None
    fresh: Sequence[str] = ()
    model: str | None = None
    seed: int = 0
    trust: bool = False
    must_run: MustRun = "no"

    def __post_init__(self) -> None:
        if self.fresh and self.weights is None:
            raise InputError("--fresh says which tensors --weights may lack: give --weights, or leave --fresh out")

    @property
    def shape(self) -> str | None:
        """The shapes of an example's inputs, if they were typed."""
        return split_input(self.input)[0]

    @property
    def values(self) -> bool:
        """True if the model is to be traced with values, since it decides by them."""
        return split_input(self.input)[1]


@dataclass(frozen=True)
class Input:
    """Something that a user typed. The class of each kind says which parts it has; the rest is refused here."""

    is_a: ClassVar[str] = "nothing that bitplan knows"

    name: str
    options: InputOptions = InputOptions()

    def graph(self, rules: Rules, link: Sequence[str] = ()) -> Graph:
        """Return its layers under these rules; the patterns `link` say how names tell links if there is no model."""
        raise self._without("graph")

    def refuse_inputs(self) -> None:
        """Refuse an example of the input if no network is run."""
        if self.options.input is not None:
            raise InputError(f"--input would have no effect: {self.name} is {self.is_a}, which is not run")

    def check_plannable(self) -> None:
        """Refuse an input without a graph to plan on, before anything is loaded."""

    @property
    def model(self) -> Any:
        """The network with its weights."""
        raise self._without("network")

    @property
    def weights(self) -> Any:
        """The network, or an opened file of weights, which methods look at."""
        return self.model

    @property
    def has_random_weights(self) -> bool:
        """True if its weights are random, so that methods learn nothing from them."""
        return False

    @property
    def plan(self) -> Plan:
        """A precision for every layer."""
        raise self._without("plan")

    @property
    def recorded_graph(self) -> Graph | None:
        """The graph that it was made with, if that is kept beside it."""
        return None

    @property
    def task(self) -> Any:
        """The task that it comes with, if it does."""
        return None

    @property
    def example(self) -> Any:
        """An example of its input, as `--input` says or its own; None if it has none."""
        shape = self.options.shape
        return None if shape is None else read_shape(shape)

    @property
    def spec(self) -> str | None:
        """Its name in the zoo, if it has one."""
        return None

    @property
    def pretrained(self) -> Path | None:
        """Where its configuration and its tokenizer are, if it is a network of transformers'."""
        return None

    @property
    def quantized_model(self) -> Any:
        """The network that files for others are made of."""
        raise FileError(
            f"{self.name} is neither a plan (.json), nor a checkpoint folder (with a checkpoint.json), nor that of "
            "a run (with a study.json)"
        )

    def get_content(self, *, plan_only: bool) -> Any:
        """The quantized network that a file is made of, or its plan if that is enough and at hand."""
        return self.quantized_model

    def _without(self, what: str) -> InputError:
        return InputError(f"{self.name} is {self.is_a}, which has no {what}")


@dataclass(frozen=True)
class BuiltModel(Input):
    """A model that code builds: the zoo's, or a factory of the user's own."""

    is_a: ClassVar[str] = "a model"

    def graph(self, rules: Rules, link: Sequence[str] = ()) -> Graph:
        """Trace the network itself if it is loaded, else one without weights, which is faster."""
        model, _ = self._with_weights if self.options.values else self._at_hand
        return trace_model(model, self.example, self.name, rules, link, values=self.options.values)

    @property
    def model(self) -> Any:
        """The network with its weights."""
        return self._with_weights[0]

    @property
    def has_random_weights(self) -> bool:
        """True for a model of the zoo without --weights. A factory may load any weights."""
        from bitplan.models.zoo import find_factory

        return self.spec is not None and self.options.weights is None and bool(find_factory(self.spec))

    @property
    def example(self) -> Any:
        """The one that its code gives, unless a shape was typed."""
        return self._at_hand[1] if self.options.shape is None else super().example

    @property
    def spec(self) -> str | None:
        """Its name, unless that names code."""
        return None if names_code(self.name) else self.name

    @property
    def _at_hand(self) -> tuple[Any, Any]:
        """Model and example: with weights where they were asked for, or else without."""
        return self._with_weights if "_with_weights" in vars(self) else self._without_weights

    @cached_property
    def _without_weights(self) -> tuple[Any, Any]:
        from bitplan.models.zoo import load_model

        return load_model(self.name, weightless=True)

    @cached_property
    def _with_weights(self) -> tuple[Any, Any]:
        """Model and example; random weights repeat for a seed."""
        import torch

        from bitplan.models.zoo import load_model

        with torch.random.fork_rng([]):
            torch.manual_seed(self.options.seed)
            model, example = load_model(self.name)
        if self.options.weights is not None:
            from bitplan.quant.checkpoint import load_weights_

            load_weights_(model, self.options.weights, fresh=self.options.fresh)
        return model, example


@dataclass(frozen=True)
class RecordFile(Input):
    """A file of bitplan's own: a graph or a plan."""

    is_a: ClassVar[str] = "a record"

    def graph(self, rules: Rules, link: Sequence[str] = ()) -> Graph:
        """Return it as it was traced, with the patterns `fix` and `free` if they were typed."""
        from bitplan.core.records import Graph
        from bitplan.graph.rules import amend
        from bitplan.store.files import load

        refuse_links(link)
        self.refuse_inputs()
        graph = load(self.name, Graph)
        why = f"{self.name} was traced under its own; trace again, or name layers by --rules fix=… and free=…"
        refuse_rules(rules, why, but=("fix", "free"))
        return amend(graph, rules)

    @property
    def model(self) -> Any:
        """Refuse: a record has no network."""
        raise InputError(f"{self.name} is no network: give the model, a checkpoint folder, or the folder of a run")

    @cached_property
    def plan(self) -> Plan:
        """The plan in the file."""
        from bitplan.core.records import Plan
        from bitplan.store.files import load

        return load(self.name, Plan)

    @property
    def quantized_model(self) -> Any:
        """Refuse: a record has no network."""
        return self.model

    def get_content(self, *, plan_only: bool) -> Any:
        """A plan is enough for recipes; a format that holds the network itself refuses it."""
        return self.plan


def trace_model(
    model: Any, example: Any, name: str, rules: Rules, link: Sequence[str], *, values: bool = False
) -> Graph:
    """Trace a model on an example; `values` fills an example that has only shapes."""
    from bitplan.graph.trace import trace

    refuse_links(link)
    if example is None:
        raise InputError(f"{name} gives no example input: add --input, such as --input 1x3x224x224")
    return trace(model, fill_example(example) if values else example, rules=rules, name=name, values=values)


def refuse_links(link: Sequence[str]) -> None:
    """Refuse patterns that link layers by their names if links follow from a forward pass or a file."""
    if link:
        raise InputError(
            "--rules link=… is for checkpoints, which have no forward pass; links of a model follow from its tensors"
        )


@dataclass(frozen=True)
class WeightsFile(Input):
    """A file or folder of weights without code: layers follow from names and shapes."""

    is_a: ClassVar[str] = "a file of weights"

    def graph(self, rules: Rules, link: Sequence[str] = ()) -> Graph:
        """Return the graph that the names of its tensors tell."""
        from bitplan.graph.names import LinkRule, Names, trace_checkpoint

        self.refuse_inputs()
        asked = tuple(LinkRule(pattern, pattern) for pattern in link if pattern != "none")
        return trace_checkpoint(self.weights, rules, names=Names(links=asked) if link else Names())

    @property
    def model(self) -> Any:
        """Refuse: a file of weights does not say which network it belongs to."""
        raise InputError(
            f"{self.name} is not a checkpoint that bitplan wrote: name the model and give this as --weights"
        )

    @cached_property
    def weights(self) -> Any:
        """The opened file of weights."""
        from bitplan.weights.opened import open_checkpoint

        return open_checkpoint(self.name)


@dataclass(frozen=True)
class PretrainedModel(WeightsFile):
    """A network of transformers': a folder with its configuration, or a GGUF file.

    Without data to run it on, a folder is planned by the names of its tensors, which are mapped and not loaded, as any
    file of weights; GGUF has names of its own, so its network is loaded and traced. Where a method can run a folder
    block by block, and memory does not hold the network, it is traced without its weights.
    """

    is_a: ClassVar[str] = "a network of transformers'"

    def graph(self, rules: Rules, link: Sequence[str] = ()) -> Graph:
        """Return the graph by names, or traced from the network."""
        if self._is_file:
            return super().graph(rules, link)
        return trace_model(self._network_to_trace, self.example, self.name, rules, link, values=self.options.values)

    @cached_property
    def model(self) -> Any:
        """Built as its configuration says, with its weights."""
        from bitplan.models.pretrained import load_pretrained

        if self.options.weights is not None:
            raise InputError(f"{self.name} has its own weights: leave --weights out")
        return load_pretrained(self.name)

    @cached_property
    def weights(self) -> Any:
        """The opened file, or the network."""
        return super().weights if self._is_file or self._is_large else self.model

    @property
    def example(self) -> Any:
        """A row of tokens, unless a shape was typed."""
        from bitplan.models.pretrained import example_for

        return example_for(self._network_to_trace) if self.options.shape is None else super().example

    @property
    def spec(self) -> str | None:
        """The name of the configuration file, which builds the network."""
        return CONFIG

    @property
    def pretrained(self) -> Path:
        """The folder or file."""
        return Path(self.name)

    @property
    def _is_file(self) -> bool:
        """True if it is treated as a file of weights."""
        return self.pretrained.is_dir() and self.options.must_run == "no"

    @cached_property
    def _is_large(self) -> bool:
        """True if it is run block by block, since memory does not hold the copies that lowering needs."""
        from bitplan.core.parsing import available_memory
        from bitplan.weights.opened import open_checkpoint

        if not self.pretrained.is_dir() or self.options.must_run != "small":
            return False
        tensors = open_checkpoint(self.name).tensors.values()
        need = _COPIES * sum(4 * tensor.size for tensor in tensors)  # as floats of 32 bits
        return need > (available_memory() or need)

    @cached_property
    def _network_to_trace(self) -> Any:
        """The network, without its weights where they are not loaded."""
        from bitplan.models.streamed import skeleton_of

        return skeleton_of(self.weights) if self._is_large else self.model


@dataclass(frozen=True)
class CheckpointFolder(Input):
    """A folder that bitplan wrote. It names a model of the zoo, or `--model` names its code, or it has only weights."""

    is_a: ClassVar[str] = "a checkpoint"

    def graph(self, rules: Rules, link: Sequence[str] = ()) -> Graph:
        """Trace its network if that is known, else use the names of its tensors."""
        if self._network is None:
            return self._file.graph(rules, link)
        return trace_model(self.model, self.example, self._network, rules, link, values=self.options.values)

    @cached_property
    def model(self) -> Any:
        """Built by name, then filled from the folder."""
        from bitplan.quant.checkpoint import load_checkpoint

        if self.options.weights is not None:
            raise InputError(f"{self.name} has its own weights: leave --weights out")
        return load_checkpoint(self.name, self._model_and_example[0])

    @property
    def weights(self) -> Any:
        """The network where it is known, else the opened file."""
        return self._file.weights if self._network is None else self.model

    @property
    def plan(self) -> Plan:
        """The plan that it was quantized by."""
        if self._about.plan is None:
            raise InputError(f"{self.name} holds a float network, which has no plan")
        return self._about.plan

    @property
    def example(self) -> Any:
        """The one that its network's code gives, unless a shape was typed."""
        return (
            super().example if self.options.shape is not None or self._network is None else self._model_and_example[1]
        )

    @property
    def spec(self) -> str | None:
        """The name of its network in the zoo, or None if code builds it."""
        return None if self._network is None or names_code(self._network) else self._network

    @property
    def pretrained(self) -> Path | None:
        """The folder itself, where a configuration of transformers' lies in it."""
        return Path(self.name) if self._about.spec == CONFIG else None

    @property
    def quantized_model(self) -> Any:
        """The network, plan and all."""
        return self.model

    @property
    def _network(self) -> str | None:
        """The name of its network. Code is imported only if the user names or trusts it."""
        own = self._about.spec
        if self.options.model is None and own is not None:
            check_code(own, Path(self.name) / ABOUT, trust=self.options.trust, otherwise="name it by --model, or ")
        return self.options.model or own

    @cached_property
    def _model_and_example(self) -> tuple[Any, Any]:
        from bitplan.models.pretrained import build_pretrained
        from bitplan.models.zoo import load_model

        if self._network == CONFIG:
            return build_pretrained(self.name)
        if self._network is None:
            raise InputError(
                f"{self.name} names no model of the zoo: say which it is with --model package.module:factory"
            )
        return load_model(self._network)

    @cached_property
    def _file(self) -> WeightsFile:
        return WeightsFile(self.name, self.options)

    @cached_property
    def _about(self) -> Checkpoint:
        from bitplan.core.records import Checkpoint
        from bitplan.store.files import load

        return load(Path(self.name) / ABOUT, Checkpoint)


@dataclass(frozen=True)
class RunChoice:
    """Which network of a run, as typed; by default the one that the run's page recommends."""

    method: str | None = None
    budget: str | None = None
    seed: int | None = None
    threads: int | None = None


@dataclass(frozen=True)
class RunNetwork(Input):
    """A trained network of a run, with the run's task. Training it again is said, and where it ends up otherwise."""

    is_a: ClassVar[str] = "the folder of a run"

    choice: RunChoice = RunChoice()

    def graph(self, rules: Rules, link: Sequence[str] = ()) -> NoReturn:
        """Refuse: it has a graph already, under the rules of its study."""
        self.check_plannable()
        raise AssertionError

    def check_plannable(self) -> NoReturn:
        """Refuse: a run has plans already."""
        raise InputError(
            f"{self.name} is the folder of a run: its graph is in {self._run.file_of(Graph)}, and "
            "`bitplan steps select` chooses from its gains"
        )

    @cached_property
    def model(self) -> Any:
        """The network of the chosen trial, trained again if it was not kept."""
        return _load_or_train(self._setting, self._result, self._words, self.choice.threads)

    @cached_property
    def plan(self) -> Plan:
        """The plan that the network was trained with."""
        tell(f"the plan of {self._run.study.words_over_seeds(self._result.trial)}")
        plans, name = self._run.plans, self._result.plan
        if name not in plans:
            raise FileError(f"{self.name} no longer has the plan of {self._words} ({name}): go on with `bitplan sweep`")
        return plans[name]

    @property
    def recorded_graph(self) -> Graph | None:
        """The graph of the run."""
        return self._run.graph

    @property
    def task(self) -> Any:
        """The task of the study."""
        return self._setting.task

    @property
    def example(self) -> Any:
        """The task's, unless a shape was typed."""
        return self.task.example() if self.options.shape is None else super().example

    @property
    def spec(self) -> str | None:
        """The study's model, if it is one of the zoo."""
        return self._setting.spec

    @property
    def quantized_model(self) -> Any:
        """The trained network."""
        return self.model

    def get_content(self, *, plan_only: bool) -> Any:
        """For a recipe only the plan, without training."""
        return self.plan if plan_only else self.model

    @cached_property
    def _run(self) -> RunFolder:
        return RunFolder(Path(self.name))

    @cached_property
    def _setting(self) -> RunContext:
        from bitplan.study.context import RunContext

        study, trust = self._run.study, self.options.trust
        check_code(study.model, self._run.file_of(Study), trust=trust)
        return RunContext(study, self._run, trust)

    @cached_property
    def _result(self) -> Result:
        from bitplan.reports.scores import choose

        return choose(self._run, method=self.choice.method, budget=self.choice.budget, seed=self.choice.seed)

    @property
    def _words(self) -> str:
        return self._run.study.words(self._result.trial)


def _load_or_train(setting: RunContext, result: Result, words: str, threads: int | None) -> Any:
    """Return the network of a result, trained again if it is not kept; tell if it scores otherwise than recorded."""
    from bitplan.core.progress import clock
    from bitplan.study.networks import is_kept, trained_network

    run = setting.run
    if is_kept(run, result):
        tell(f"{words}, scored {result.score:.4g}")
    else:
        tell(f"{words}, scored {result.score:.4g}: not kept, so it is trained again; about {clock(result.seconds)}")
        limit_threads(threads or _threads_of(run))
    with showing_progress("training again") as progress:
        found = trained_network(run, result, progress=progress, trust=setting.trust)
    if not found.as_recorded:
        tell(
            f"warning: this is not the network that the run had: it scores {found.score:.6g}, recorded is "
            f"{found.recorded:.6g}. Another machine, version or number of --threads (1 where the sweep had workers) "
            f"trains otherwise; remove {found.folder} to train it again"
        )
    tell(f"its checkpoint is {found.folder}")
    return found.model


def _threads_of(run: RunFolder) -> int | None:
    """Return the threads of each worker of the run, or None if its study has no workers."""
    options = run.study.engine_options
    return int(str(options.get("threads", 1))) if run.study.engine == "local" and options.get("workers") else None
