"""Call arguments: what a call of `treadle.train` or `treadle.rollout` says, as a config and the files it names.

Owns which key each argument sets, what a call fills in where nothing is said, and the inputs of a call that are not in
files yet: tasks become a JSONL file, functions that no other process can import are serialized, both in `inputs/` of
the run directory. So a call is a config like any other, and `treadle train` repeats it from its YAML.
Invariant: `prepare` writes nothing. The name of an input file says what is in it, so that the same call has the same
config, and one with another function or other tasks is another config.
"""

import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

from treadle.api.hints import (
    explain_trl_argument,
    name_left_out,
    refuse_model_object,
    refuse_trl_reward,
    suggest_key,
)
from treadle.api.prepared_run import INPUTS, PreparedRun
from treadle.api.tasks import Tasks, count_rows, read_tasks
from treadle.config import Config, SFTRunConfig, TrainConfig
from treadle.config.load import build, read_config
from treadle.config.parse import KeyPath, Layer, dotted, put_leaf
from treadle.config.section import Leaf, Origin, Source, fields_of
from treadle.config.serialized import import_path, name_of, script_directory, serialize
from treadle.config.stages import first_stage, has_stages, own_names, second_stage
from treadle.errors import ConfigError, Mistake, nearest
from treadle.reward.arguments import ARGUMENTS, GROUP_ARGUMENTS

_RUN_DIR = ("logging", "run_dir")
_PLAIN = bool | int | float | str | None
_BATCH_SIZE, _SAMPLES = 64, 8
"""Tasks of a step, fewer where there are fewer, and samples of each, where neither the call nor a config says."""

Configs = Sequence[str | os.PathLike[str]]
RewardLike = str | Callable[..., Any] | Mapping[str, Any]
Rewards = RewardLike | Sequence[str | Callable[..., Any]]
Tools = Callable[..., Any] | str | Sequence[Callable[..., Any] | str]


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The arguments of a call, as they were given."""

    call: str
    """`train`, `sft` or `rollout`."""
    configs: Configs
    _: KW_ONLY
    model: str | os.PathLike[str] | Mapping[str, Any] | None
    tasks: Tasks | None
    reward: Rewards | None
    tools: Tools | None
    agent: str | type | Callable[..., Any] | None
    environment: str | type | None
    run_dir: str | os.PathLike[str] | None
    keys: Mapping[str, Any]
    steps: int | None = None
    validation_tasks: Tasks | None = None

    def names(self) -> list[str]:
        """What the call takes beside dotted keys."""
        if self.call == "sft":
            return ["model", "tasks", "tools", "steps", "validation_tasks", "run_dir", "fresh", "allow_changes"]
        own = ["model", "tasks", "reward", "tools", "agent", "environment", "run_dir", "fresh"]
        return [*own, "steps", "validation_tasks", "allow_changes"] if self.call == "train" else own


def prepare(arguments: CallArguments) -> PreparedRun:
    """The config that a call amounts to; a ConfigError with every mistake in it."""
    return _ArgumentReader(arguments).prepare()


@dataclass(slots=True)
class _ArgumentReader:
    """Collects the leaves, the inputs and the mistakes of a call."""

    given: CallArguments
    layer: Layer = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    base: list[Layer] = field(default_factory=list)
    keys: dict[KeyPath, Any] = field(default_factory=dict)
    directory: Path = Path()
    num_tasks: int | None = None
    search_path: Path | None = None

    def prepare(self) -> PreparedRun:
        given = self.given
        self.base = self._stage([read_config(os.fspath(name), self.mistakes) for name in given.configs])
        self.keys = dict(self._read_keys())
        self.directory = self._choose_directory()
        self._read_arguments()
        for path, value in self.keys.items():
            self._put(path, value, dotted(path), dotted(path))
        self._fill_in()
        self._put(_RUN_DIR, str(self.directory), "run_dir")
        if self.mistakes:
            raise ConfigError(self.mistakes)
        try:
            config = build([*self._without_replaced(), self.layer], self.mistakes)
        except ConfigError as error:
            arguments = {"model": given.model, "tasks": given.tasks, "reward": given.reward}
            raise name_left_out(error, {**arguments, "validation_tasks": given.validation_tasks}) from None
        self._refuse_distant_functions(config)
        return PreparedRun(config, given.call, self.directory, self.files, self.places, self.search_path)

    def _stage(self, layers: list[Layer]) -> list[Layer]:
        """The stage of two-stage files that the call is: `sft`, or everything after it."""
        if not has_stages(layers):
            return layers
        if self.given.call == "sft":
            return [*first_stage(layers), own_names(layers)]
        return second_stage(layers, self.mistakes)

    def _read_keys(self) -> Iterator[tuple[KeyPath, Any]]:
        """Dotted keys and whole sections; anything else is no argument."""
        kinds = {"train": TrainConfig, "sft": SFTRunConfig}
        root: type[Config] = kinds.get(self.given.call, Config)
        sections = {*fields_of(root)}
        for name, value in self.given.keys.items():
            path = tuple(name.split("."))
            if len(path) == 1 and name not in sections:
                known = self.given.names()
                fix = (
                    explain_trl_argument(name, value)
                    or nearest(name, known)
                    or suggest_key(name, value, root)
                    or f"it takes {', '.join(known)}, and sections of the config: rollout={{'n': 8}}"
                )
                problem = f"treadle.{self.given.call} has no argument of this name"
                self.mistakes.append(Mistake(name, problem, value, fix=fix))
            elif len(path) == 1 and not isinstance(value, Mapping):
                fix = f"write {name}={{'key': value}}"
                self.mistakes.append(Mistake(name, f"is a section, got {type(value).__name__}", value, fix=fix))
            else:
                yield from _leaves(path, value)

    def _read_arguments(self) -> None:
        given = self.given
        if isinstance(given.model, Mapping):
            for path, value in _leaves(("model",), given.model):
                self._put(path, value, "model")
        elif (mistake := refuse_model_object(given.model)) is not None:
            self.mistakes.append(mistake)
        elif given.model is not None:
            self._put(("model", "path"), given.model, "model")
        self._read_tasks(given.tasks, "tasks", "train_files")
        self._read_tasks(given.validation_tasks, "validation_tasks", "val_files")
        if given.reward is not None:
            self._read_reward(given.reward)
        if given.tools is not None:
            many = isinstance(given.tools, Sequence) and not isinstance(given.tools, str)
            tools: Sequence[Any] = given.tools if many else [given.tools]  # type: ignore[assignment]
            paths = [self._code(item, f"tools[{at}]", "tool") for at, item in enumerate(tools)]
            self._put(("rollout", "multi_turn", "tools"), paths, "tools")
            self.places["rollout.multi_turn.tools"] = "tools"
        self._read_agent()
        if given.steps is not None:
            self._put(("trainer", "total_training_steps"), given.steps, "steps")
        if given.call != "rollout":
            self.layer.setdefault(("trainer",), Leaf({}, self._origin(given.call)))
        if given.call == "sft":
            self.layer.setdefault(("sft",), Leaf({}, self._origin(given.call)))

    def _read_agent(self) -> None:
        """The agent loop: as given; one that uses the tools or the environment, where these are given."""
        given, path = self.given, ("rollout", "agent", "default_agent_loop")
        if inspect.isroutine(given.agent):
            self._read_agent_function(given.agent)
        elif given.agent is not None:
            self._put(path, self._code(given.agent, "agent", "agent"), "agent")
        if given.environment is not None:
            found = self._code(given.environment, "environment", "environment")
            self._put(("rollout", "multi_turn", "environment"), found, "environment")
        if given.agent is None and not self._is_said(path):
            if given.environment is not None:
                self._put(path, "environment_agent", "environment")
            elif given.tools is not None:
                self._put(path, "tool_agent", "tools")

    def _read_agent_function(self, function: Callable[..., Any]) -> None:
        """A function that is an agent: it talks to the gateway."""
        try:
            inspect.signature(function).bind(base_url="", api_key="", task=None)
        except (TypeError, ValueError):
            problem = f"the function {function.__name__!r} cannot be called with base_url, api_key and task"
            fix = "write `async def agent(base_url, api_key, task)`; an agent loop is a subclass of AgentLoopBase"
            self.mistakes.append(Mistake("agent", problem, fix=fix))
            return
        path = self._code(function, "agent", "agent")
        self._put(("rollout", "agent", "default_agent_loop"), "function_agent", "agent")
        self._put(("rollout", "agent", "loops", "function_agent", "kwargs", "function"), path, "agent")

    def _read_tasks(self, tasks: Tasks | None, argument: str, key: str) -> None:
        if tasks is None:
            return
        try:
            read = read_tasks(tasks, argument)
        except ConfigError as error:
            self.mistakes += error.mistakes
            return
        if read.content is not None:
            name = f"{argument}-{read.digest}.jsonl"
            self.files[name] = read.content
            self.places[str(self.directory / INPUTS / name)] = argument
            files = [str(self.directory / INPUTS / name)]
        else:
            files = list(read.files)
        if key == "train_files":
            self.num_tasks = read.num_rows if read.num_rows is not None else count_rows(files, most=_BATCH_SIZE)
        self._put(("data", key), files, argument)

    def _read_reward(self, reward: Rewards) -> None:
        """Functions by name: those of a dict, else what each is called."""
        if isinstance(reward, Mapping):
            named = dict(reward)
        else:
            many = isinstance(reward, Sequence) and not isinstance(reward, str)
            items: Sequence[Any] = reward if many else [reward]  # type: ignore[assignment]
            named = {}
            for item in items:
                name = item.rpartition(":")[2] if isinstance(item, str) else name_of(item, "reward")
                number = sum(other == name or other.startswith(f"{name}_") for other in named)
                named[f"{name}_{number + 1}" if number else name] = item
        if not named:
            fix = "leave it out, or give a function"
            self.mistakes.append(Mistake("reward", "names no function", fix=fix))
        for name, item in named.items():
            place = "reward" if len(named) == 1 else f"reward[{name!r}]"
            options = dict(item) if isinstance(item, Mapping) else {"path": item}
            function = options.get("path")
            if callable(function) and (mistake := refuse_trl_reward(function, place)) is not None:
                self.mistakes.append(mistake)
                continue
            options["path"] = self._code(function, place, str(name))
            if callable(function) and "scope" not in options and _sees_groups(function):
                options["scope"] = "group"
            for key, value in options.items():
                self._put(("reward", "functions", str(name), str(key)), value, place)

    def _code(self, value: object, argument: str, otherwise: str) -> str:
        """The path of a function or class: an import path, or that of a file that is still to be written."""
        if isinstance(value, str):
            return value
        if not callable(value):
            problem = f"must be a function, a class or the name of one, got {type(value).__name__}"
            self.mistakes.append(Mistake(argument, problem, value, fix="give a function, or 'package.module:name'"))
            return ""
        if (path := import_path(value)) is not None:
            self.search_path = self.search_path or script_directory(value)
            return path
        try:
            found = serialize(value, name_of(value, otherwise), argument)
        except ConfigError as error:
            self.mistakes += error.mistakes
            return ""
        folder = self.directory / INPUTS
        self.files[found.file_name] = found.content
        if found.source is not None:
            head = f"# For people to read: {found.file_name} is what runs.\n"
            self.files[f"{Path(found.file_name).stem}.py"] = f"{head}{found.source}\n".encode()
        self.places[str(folder / found.file_name)] = argument
        return found.path(folder)

    def _put(self, path: KeyPath, value: object, argument: str, name: str | None = None) -> None:
        """Set a key. A function or class as its value is kept as those of other arguments are."""
        if callable(value):
            value = self._code(value, argument, path[-1])
        plain = _as_plain(value)
        if plain is _UNFIT:
            problem = f"must be a number, a text, a list or a map, got {type(value).__name__}"
            self.mistakes.append(Mistake(name or argument, problem, value))
            return
        put_leaf(self.layer, path, Leaf(plain, self._origin(argument)))

    def _origin(self, argument: str) -> Origin:
        return Origin(Source.CODE, f"treadle.{self.given.call}, {argument}")

    def _is_said(self, path: KeyPath) -> bool:
        """Whether a config or the call sets a key."""
        return any(path in layer for layer in (*self.base, self.layer, self.keys))

    def _without_replaced(self) -> list[Layer]:
        """The configs without the reward functions that an argument stands for."""
        if self.given.reward is None:
            return self.base
        kept = ("reward", "functions")
        return [{path: leaf for path, leaf in layer.items() if path[:2] != kept} for layer in self.base]

    def _fill_in(self) -> None:
        """What a call says by saying nothing; its YAML has it all."""
        trains = self.given.call != "rollout"
        self._put_default(("logging", "experiment_name"), self.directory.name, "run_dir")
        if trains:
            batch = ("data", "train_batch_size")
            if self.given.call == "train":
                self._put_default(("rollout", "n"), _SAMPLES, "a task needs several samples")
            if self.num_tasks:
                self._put_default(batch, min(_BATCH_SIZE, self.num_tasks), f"{self.num_tasks} tasks")
            if batch in self.layer:
                self._put_default(("actor", "ppo_mini_batch_size"), self.layer[batch].value, dotted(batch))
        gpus = ("trainer" if trains else "rollout", "n_gpus_per_node")
        if self.given.configs or self._is_said(gpus) or self._is_said(("cluster", "backend")):
            return
        from treadle.engine.gpus import this_machine

        if this_machine().num_gpus:
            self._put(gpus, 1, "this machine has a GPU")
        elif trains:
            self._put_default(("actor", "dtype"), "fp32", "this machine has no GPU")

    def _put_default(self, path: KeyPath, value: object, why: str) -> None:
        if not self._is_said(path):
            self._put(path, value, why)

    def _choose_directory(self) -> Path:
        """The run directory that is named somewhere, or a new one; relative to the working directory if below it."""
        said = [layer[_RUN_DIR].value for layer in self.base if _RUN_DIR in layer]
        named = self.given.run_dir or self.keys.get(_RUN_DIR) or (said[-1] if said else None)
        if named is not None:
            path = Path(os.fspath(named)).expanduser()
            here = Path.cwd()
            return path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        stem = "+".join(Path(name).stem for name in self.given.configs) or (Path(script).stem if script else "python")
        own = token_hex(3)  # scripts that start in the same second, on any machine of a shared disk, stay apart
        return Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{own}"

    def _refuse_distant_functions(self, config: Config) -> None:
        """Nodes of a cluster that is elsewhere do not see this machine's run directory."""
        cluster = config.cluster
        if cluster.backend == "local" or cluster.address is None:
            return
        fix = "put it into a module that every node can import, and give 'package.module:name' or the imported function"
        mistakes = [
            Mistake(
                argument, f"is a function that only this process knows; {cluster.address} cannot be sent it", fix=fix
            )
            for file, argument in self.places.items()
            if file.endswith(".pkl")
        ]
        if mistakes:
            raise ConfigError(mistakes)


_UNFIT = object()


def _leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """The leaves of a map, as a file's are: an empty map is one."""
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from _leaves((*path, *str(name).split(".")), below)
    else:
        yield path, value


def _as_plain(value: object) -> Any:
    """A value as a file could say it; `_UNFIT` where none could."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        inner = {str(name): _as_plain(item) for name, item in value.items()}
        return _UNFIT if any(item is _UNFIT for item in inner.values()) else inner
    if isinstance(value, Sequence):
        items = [_as_plain(item) for item in value]
        return _UNFIT if any(item is _UNFIT for item in items) else items
    return _UNFIT


def _sees_groups(function: Callable[..., Any]) -> bool:
    """Whether a reward function takes what only all samples of a task together have."""
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return any(name in GROUP_ARGUMENTS and name not in ARGUMENTS for name in names)
