"""Provenance: digests of what trajectories and scores are made from, and which recorded ones may be reused.

Owns which settings, files and source code decide a trajectory's tokens, and which its score; reads them once, before
anything starts. Owns the rule of reuse and the refusal that names what changed; reads the journal before a run writes
to it, so a refused start leaves no trace.

    sampling   weights, tokenizer, chat template, sampling parameters, tools, agent loops, engine; the code behind them
    prompt     what the task adds: its messages, tools and arguments; the whole row where the user's own code sees it
    scoring    reward functions, classifiers and judges: settings, weights and the code behind them
    row        the whole task

    kept       all four digests match
    unscored   the tokens match; the reward functions, their settings or the row do not, or with rewards of scope
               group a sample of the task is missing
    refused    anything else: the directory holds results of something else

Invariant: what is not known to leave tokens and scores alone counts. Weights behind an endpoint cannot be read: its
address and the model's name stand for them.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from importlib.util import resolve_name
from logging import getLogger
from pathlib import Path

from treadle.config import Config, ModelConfig, RewardConfig, RolloutConfig
from treadle.config.plugin import find_in_working_directory, is_own_module, parse_source, source_file
from treadle.config.section import Section
from treadle.config.show import as_yaml, flatten, hide_secret
from treadle.errors import ConfigError, Mistake
from treadle.journal import Headline, Journal, JournalReader
from treadle.journal.codec import task_values
from treadle.journal.schema import FILE_NAME
from treadle.model.tokenizer import find_model_path
from treadle.types import Provenance, StopReason, Task

InputItems = Mapping[str, str]
"""Everything a digest stands for, by name; secrets as digests of their own."""

PLACEMENT_KEYS = (
    *("rollout.nnodes", "rollout.n_gpus_per_node", "rollout.replicas_per_node", "rollout.tensor_model_parallel_size"),
    *("rollout.n", "rollout.val_kwargs.n", "rollout.agent.num_workers", "rollout.agent.max_concurrent_sessions"),
    *("rollout.gpu_memory_utilization", "rollout.max_num_seqs", "rollout.max_num_batched_tokens"),
    *("rollout.enforce_eager", "rollout.enable_prefix_caching", "rollout.enable_chunked_prefill"),
    *("rollout.free_cache_engine", "rollout.overlap_weight_updates", "rollout.failures.", "rollout.openai.api_key_env"),
    *("rollout.limits.session_timeout_s", "rollout.limits.request_timeout_s", "rollout.limits.launch_timeout_s"),
    *("rollout.limits.close_timeout_s", "rollout.limits.stall_report_s", "rollout.multi_turn.max_parallel_calls"),
    *("rollout.scripted.latency_s", "rollout.scripted.latency_tail", "rollout.scripted.failure_rate"),
    *("rollout.scripted.hang_rate", "model.enable_gradient_checkpointing", "rollout.gateway.host"),
    *("rollout.gateway.port", "rollout.gateway.url", "rollout.gateway.max_body_mb"),
    *("rollout.sandbox.warm", "model.shared_prefix"),
)
"""Keys, or the beginnings of keys, that decide where, how many, how fast or how long, and not which tokens."""

SCORE_NEUTRAL_KEYS = (
    *("reward.success_threshold", "reward.num_workers", "reward.timeout_s", "reward.cpu_time_s", "reward.memory_mb"),
    *("reward.retries", "reward.rate_limit_per_s", "reward.sandbox.warm", "reward.max_gradings"),
)
"""Keys of `reward` that leave scores alone."""

_ENGINES = ("openai", "scripted")
"""Engines with a section of their own, which counts for that engine alone."""

_OWN_LOOPS = ("single_turn_agent", "tool_agent")
"""Loops that see no more of a row than its messages and tools."""

_IMPORT_PATH = re.compile(
    r"(?:(?P<file>[^\s\"',\[\]:]+\.(?:py|pkl))|(?P<module>[A-Za-z_]\w*(?:\.\w+)*)):[A-Za-z_]\w*(?:\.\w+)*"
)
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
_READ_WHOLE = 256 << 20
_READ_ENDS = 1 << 20
_MAX_MODULES = 200


@dataclass(frozen=True)
class RunInputs:
    """What all trajectories of a run are made from. Built by `of`; `stamp` adds what a task is."""

    training: InputItems
    """For sampling as `rollout` says."""
    validation: InputItems
    """For sampling as `rollout.val_kwargs` says."""
    scoring: InputItems
    sees_rows: bool
    """Whether the agent loop, an environment or a script is the user's own: it may look at any field of a row."""

    @classmethod
    def of(cls, rollout: RolloutConfig, model: ModelConfig, reward: RewardConfig | None) -> "RunInputs":
        """Read every file and source that counts; a file that is not there is reported where it is needed."""
        leaves = {**_leaves("rollout", rollout), **_leaves("model", model)}
        shared = dict(_relevant(leaves, rollout))
        shared |= _models(model, weights=rollout.uses_gpus()) | source_digests(shared)
        shared |= {
            f"contents of rollout.multi_turn.opponents: {path}": contents_digest(path, weights=rollout.uses_gpus())
            for path in rollout.multi_turn.opponents
        }
        sampled = {name.removeprefix("rollout.val_kwargs.") for name in shared if "rollout.val_kwargs." in name}
        training = {name: value for name, value in shared.items() if "rollout.val_kwargs." not in name}
        validation = {name: value for name, value in shared.items() if name.removeprefix("rollout.") not in sampled}
        scoring = {} if reward is None else _scoring(reward)
        if reward is not None and reward.scores_groups():
            scoring |= {"rollout.n": str(rollout.n), "rollout.val_kwargs.n": str(rollout.val_kwargs.n)}
        loop = rollout.agent.default_agent_loop
        sees_rows = loop not in _OWN_LOOPS or bool(rollout.agent.loops) or rollout.multi_turn.environment is not None
        return cls(training, validation, scoring, sees_rows)

    def sampling(self, *, validation: bool) -> InputItems:
        return self.validation if validation else self.training

    def stamp(self, task: Task, *, validation: bool) -> Provenance:
        """What a trajectory of this task is made from."""
        row = digest_of({"row": "\n".join(str(value) for value in task_values(task)[1:3])})
        prompt = row
        if not self.sees_rows and task.agent in (None, *_OWN_LOOPS):
            seen = (task.messages, task.agent, task.tools, task.tool_kwargs)
            prompt = digest_of({"prompt": repr(seen)})
        return Provenance(self._digests[validation], prompt, self._digests[2], row)

    @cached_property
    def _digests(self) -> tuple[str, str, str]:
        return digest_of(self.training), digest_of(self.validation), digest_of(self.scoring)


def digest_of(items: InputItems) -> str:
    """Stands for all of `items`."""
    return _hex("\n".join(f"{name}={value}" for name, value in sorted(items.items())).encode())


def changed_items(before: InputItems, now: InputItems) -> Iterator[tuple[str, str, str]]:
    """The names whose values differ, with both values; an absent one is empty."""
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            yield name, before.get(name, ""), now.get(name, "")


def _leaves(section: str, config: RolloutConfig | ModelConfig | RewardConfig) -> dict[str, str]:
    leaves = flatten(config, f"{section}.")
    return {name: as_yaml(hide_secret(name, value, digest=True)) for name, value in leaves.items()}


def _relevant(leaves: InputItems, rollout: RolloutConfig) -> Iterator[tuple[str, str]]:
    """What counts: no placement, no section of an engine that is not used; contents stand for paths of models."""
    unused = tuple(f"rollout.{name}." for name in _ENGINES if name != rollout.name)
    for name, value in leaves.items():
        if (
            name in ("model.path", "model.adapter", "model.tokenizer_path")
            or name.startswith(unused)
            or is_placement(name)
        ):
            continue
        yield name, value


def is_placement(name: str) -> bool:
    """Whether a key decides where, how many, how fast or how long, and not which tokens."""
    return name in PLACEMENT_KEYS or name.startswith(tuple(key for key in PLACEMENT_KEYS if key.endswith(".")))


def _scoring(reward: RewardConfig) -> dict[str, str]:
    leaves = {name: value for name, value in _leaves("reward", reward).items() if name not in SCORE_NEUTRAL_KEYS}
    for name, function in reward.functions.items():
        if ":" not in function.path:
            leaves[f"source of reward.functions.{name}.path"] = source_digest(f"treadle.reward.builtin.{function.path}")
    for kind, models in (("classifiers", reward.classifiers), ("judges", reward.judges)):
        for name, item in models.items():
            if item.path is not None:
                leaves[f"contents of reward.{kind}.{name}.path"] = contents_digest(item.path, weights=True)
    return leaves | source_digests(leaves)


def _models(model: ModelConfig, *, weights: bool) -> dict[str, str]:
    found = {"contents of model.path": contents_digest(model.path, weights=weights)}
    if model.adapter is not None:
        found["contents of model.adapter"] = contents_digest(model.adapter, weights=weights)
    if model.tokenizer_path is not None:
        found["contents of model.tokenizer_path"] = contents_digest(model.tokenizer_path, weights=False)
    return found


def source_digests(leaves: InputItems) -> dict[str, str]:
    """Digests of the code behind every value that is an import path."""
    return {
        f"source of {found[0]} in {name}": source_digest(found["file"] or found["module"])
        for name, value in leaves.items()
        for found in _IMPORT_PATH.finditer(value)
        if "://" not in value
    }


def contents_digest(path: str, *, weights: bool) -> str:
    """Digest of a model directory: its small files whole, large ones by size, time and both ends."""
    directory = find_model_path(path)
    if directory is None:
        return "not found"
    files = [file for file in directory.iterdir() if file.is_file() and not file.name.startswith(".")]
    files += list((directory / "additional_chat_templates").glob("*"))
    wanted = [file for file in files if weights or file.suffix not in _WEIGHTS]
    return _hex(b"\n".join(file.name.encode() + b"=" + _file_digest(file) for file in sorted(wanted)))


def _file_digest(file: Path) -> bytes:
    found, digest = file.stat(), blake2b(digest_size=16)
    with file.open("rb") as content:
        if found.st_size <= _READ_WHOLE:
            while block := content.read(_READ_ENDS):
                digest.update(block)
        else:
            digest.update(f"{found.st_size} {found.st_mtime_ns}".encode() + content.read(_READ_ENDS))
            content.seek(-_READ_ENDS, 2)
            digest.update(content.read())
    return digest.digest()


def source_digest(module: str) -> str:
    """Digest of a module or file, and of the modules it imports that are not of installed packages."""
    find_in_working_directory()
    seen: dict[str, bytes] = {}
    waiting = [module]
    while waiting and len(seen) < _MAX_MODULES:
        name = waiting.pop()
        if name in seen:
            continue
        file = source_file(name)
        seen[name] = b"" if file is None else file.read_bytes()
        waiting += [] if file is None else _imports(name, file, seen[name])
    return _hex(b"\n".join(name.encode() + b"=" + content for name, content in sorted(seen.items())))


def _imports(module: str, file: Path, source: bytes) -> list[str]:
    """The modules that a file imports and that are the user's own."""
    try:
        tree = parse_source(source)
    except (SyntaxError, ValueError):  # a serialized function is no source either
        return []
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = resolve_name("." * node.level + base, package) if package else base
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return [name for name in sorted(names) if name and _counts(name)]


def _counts(module: str) -> bool:
    return is_own_module(module) or module.startswith("treadle.reward.builtin.")


def _hex(content: bytes) -> str:
    return blake2b(content, digest_size=8).hexdigest()


log = getLogger(__name__)

INPUTS_EVENT = "inputs"
"""The event that records what a digest stands for: `part`, `digest` and `items`."""

RESUME_EVENT = "resume"
"""The event that every start of a training run writes."""


@dataclass(frozen=True, slots=True)
class ReusableSamples:
    """What a run directory holds of what is asked for."""

    finished: Sequence[Headline] = ()
    unscored: frozenset[tuple[str, int]] = frozenset()


def record_inputs(journal: Journal, inputs: RunInputs, *, validation: bool) -> None:
    """Record what the digests of this start stand for."""
    for part, items in (("sampling", inputs.sampling(validation=validation)), ("scoring", inputs.scoring)):
        journal.add_event(INPUTS_EVENT, part=part, digest=digest_of(items), items=dict(items))


def find_reusable(
    run_dir: Path, config: Config, inputs: RunInputs, tasks: Sequence[Task], *, validation: bool
) -> ReusableSamples:
    """What of a run directory is part of the result; a ConfigError where it is a result of something else."""
    if not (run_dir / FILE_NAME).exists():
        return ReusableSamples()
    n = config.rollout.val_kwargs.n if validation else config.rollout.n
    wanted = {task.uid: (task.n or n, inputs.stamp(task, validation=validation)) for task in tasks}
    with JournalReader.open(run_dir) as reader:
        if reader.events(kind=RESUME_EVENT, limit=1):
            problem = f"{run_dir} holds a training run: its samples are no evaluation"
            raise ConfigError([Mistake("logging.run_dir", problem, str(run_dir), fix="give another directory")])
        lines = [line for line in reader.headlines() if _is_wanted(line, wanted)]
        changed = [line for line in lines if not _same_tokens(line.provenance, wanted[line.uid][1])]
        if changed:
            raise ConfigError(_what_changed(reader, run_dir, config, inputs, changed, wanted, validation))
    finished = [line for line in lines if line.provenance == wanted[line.uid][1]]
    if config.reward.scores_groups():  # a score in a group is of that very group
        counts = Counter(line.uid for line in finished)
        finished = [line for line in finished if counts[line.uid] == wanted[line.uid][0]]
    done = {(line.uid, line.sample) for line in finished}
    unscored = frozenset((line.uid, line.sample) for line in lines) - done
    if unscored:
        why = "have another reward now, or were not scored" + (
            " as a whole group" if config.reward.scores_groups() else ""
        )
        log.warning("%d trajectories of %s %s: they are scored again", len(unscored), run_dir, why)
    return ReusableSamples(finished, unscored)


WantedSamples = Mapping[str, tuple[int, Provenance]]
"""By uid: how many samples, and what they would be made from."""


def _is_wanted(line: Headline, wanted: WantedSamples) -> bool:
    if line.uid not in wanted or line.sample >= wanted[line.uid][0]:
        return False
    if not line.is_intact:
        log.warning("%s/%d is not as it was written, and is sampled again", line.uid, line.sample)
        return False
    return line.outcome.ok and line.outcome.reason is not StopReason.ABORT


def _same_tokens(before: Provenance, now: Provenance) -> bool:
    return (before.sampling, before.prompt) == (now.sampling, now.prompt)


def _what_changed(
    reader: JournalReader,
    run_dir: Path,
    config: Config,
    inputs: RunInputs,
    changed: Sequence[Headline],
    wanted: WantedSamples,
    validation: bool,
) -> Iterator[Mistake]:
    """Every setting, file or source that differs, and then how to go on."""
    fix = f"--fresh sets {run_dir} aside and begins anew; logging.run_dir=DIRECTORY keeps both"
    asked, known = inputs.sampling(validation=validation), _known_inputs(reader)
    found = False
    for digest, count in Counter(line.provenance.sampling for line in changed).items():
        if digest == digest_of(asked):
            continue
        found = True
        if digest not in known:
            problem = f"{count} trajectories of {run_dir} say nothing about what they were made from"
            yield Mistake("logging.run_dir", problem, fix=fix)
            continue
        for name, before, now in changed_items(known[digest], asked):
            problem = (
                f"{now or 'absent'} now, but {count} trajectories of {run_dir} were sampled with {before or 'none'}"
            )
            yield Mistake(name, problem, origin=origin_of(config, name), fix=fix)
    prompts = [line.uid for line in changed if line.provenance.prompt != wanted[line.uid][1].prompt]
    if prompts and not found:
        files = "data.val_files" if validation else "data.train_files"
        uids = list(dict.fromkeys(prompts))
        problem = f"{len(uids)} tasks have another prompt than when {run_dir} was written, such as {uids[0]}"
        yield Mistake(files, problem, fix=fix)


def _known_inputs(reader: JournalReader) -> dict[str, InputItems]:
    events = reader.events(kind=INPUTS_EVENT, limit=1 << 30)
    return {event.fields["digest"]: event.fields["items"] for event in events if event.is_intact}


def origin_of(config: Config, name: str) -> object:
    """Where the value of a dotted key came from, where it is a key."""
    section: object = config
    *path, last = name.split(".")
    for part in path:
        section = getattr(section, part, None) if isinstance(section, Section) else None
    return section.origin(last) if isinstance(section, Section) and last in section.values() else None
