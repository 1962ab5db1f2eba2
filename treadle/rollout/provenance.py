"""Provenance: digests of what trajectories and their scores are made from, so that only what matches is reused.

Owns which settings, files and source code decide a trajectory's tokens, and which its score. Reads them once, before
anything starts. Knows nothing of journals or of what becomes of a mismatch.

    sampling   weights, tokenizer, chat template, sampling parameters, tools, agent loops, engine; the code behind them
    prompt     what the task adds: its messages, tools and arguments; the whole row where the user's own code sees it
    scoring    reward functions, classifiers and judges: settings, weights and the code behind them
    row        the whole task

Invariant: what is not known to leave tokens and scores alone counts. Weights behind an endpoint cannot be seen: its
address and the model's name stand for them.
"""

import ast
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from importlib.util import find_spec, resolve_name
from pathlib import Path

from treadle.config import ModelConfig, RewardConfig, RolloutConfig
from treadle.config.secrets import hide_secret
from treadle.config.show import as_yaml, flatten
from treadle.journal.codec import task_values
from treadle.model.tokenizer import find_model_path
from treadle.types import Provenance, Task

Items = Mapping[str, str]
"""Everything a digest stands for, by name; secrets as digests of their own."""

PLACEMENT = (
    *("rollout.nnodes", "rollout.n_gpus_per_node", "rollout.replicas_per_node", "rollout.tensor_model_parallel_size"),
    *("rollout.n", "rollout.val_kwargs.n", "rollout.agent.num_workers", "rollout.agent.max_concurrent_sessions"),
    *("rollout.gpu_memory_utilization", "rollout.max_num_seqs", "rollout.max_num_batched_tokens"),
    *("rollout.enforce_eager", "rollout.enable_prefix_caching", "rollout.enable_chunked_prefill"),
    *("rollout.free_cache_engine", "rollout.failures.", "rollout.openai.api_key_env"),
    *("rollout.limits.session_timeout_s", "rollout.limits.request_timeout_s", "rollout.limits.launch_timeout_s"),
    *("rollout.limits.close_timeout_s", "rollout.limits.stall_report_s", "rollout.multi_turn.max_parallel_calls"),
    *("rollout.scripted.latency_s", "rollout.scripted.latency_tail", "rollout.scripted.failure_rate"),
    *("rollout.scripted.hang_rate", "model.enable_gradient_checkpointing"),
)
"""Keys, or the beginnings of keys, that say where, how many, how fast or how long, and not which tokens."""

SCORER = (
    *("reward.success_threshold", "reward.num_workers", "reward.timeout_s", "reward.cpu_time_s", "reward.memory_mb"),
    *("reward.retries", "reward.rate_limit_per_s"),
)
"""Keys of `reward` that leave scores alone."""

_ENGINES = ("openai", "scripted")
"""Engines with a section of their own, which counts for that engine alone."""

_OWN_LOOPS = ("single_turn_agent", "tool_agent")
"""Loops that see no more of a row than its messages and tools."""

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*:[A-Za-z_]\w*(?:\.\w+)*")
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
_READ_WHOLE = 256 << 20
_READ_ENDS = 1 << 20
_MAX_MODULES = 200


@dataclass(frozen=True)
class RunInputs:
    """What all trajectories of a run are made from. Built by `of`; `stamp` adds what a task is."""

    training: Items
    """For sampling as `rollout` says."""
    validation: Items
    """For sampling as `rollout.val_kwargs` says."""
    scoring: Items
    sees_rows: bool
    """Whether the agent loop, an environment or a script is the user's own: it may look at any field of a row."""

    @classmethod
    def of(cls, rollout: RolloutConfig, model: ModelConfig, reward: RewardConfig | None) -> "RunInputs":
        """Read every file and source that counts; a file that is not there is reported by whoever needs it."""
        leaves = {**_leaves("rollout", rollout), **_leaves("model", model)}
        shared = dict(_relevant(leaves, rollout))
        shared |= _models(model, weights=rollout.uses_gpus()) | _sources(shared)
        sampled = {name.removeprefix("rollout.val_kwargs.") for name in shared if "rollout.val_kwargs." in name}
        training = {name: value for name, value in shared.items() if "rollout.val_kwargs." not in name}
        validation = {name: value for name, value in shared.items() if name.removeprefix("rollout.") not in sampled}
        scoring = {} if reward is None else _scoring(reward)
        if reward is not None and reward.scores_groups():
            scoring |= {"rollout.n": str(rollout.n), "rollout.val_kwargs.n": str(rollout.val_kwargs.n)}
        loop = rollout.agent.default_agent_loop
        sees_rows = loop not in _OWN_LOOPS or bool(rollout.agent.loops) or rollout.multi_turn.environment is not None
        return cls(training, validation, scoring, sees_rows)

    def sampling(self, *, validation: bool) -> Items:
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


def digest_of(items: Items) -> str:
    """Stands for all of `items`."""
    return _hex("\n".join(f"{name}={value}" for name, value in sorted(items.items())).encode())


def changes(before: Items, now: Items) -> Iterator[tuple[str, str, str]]:
    """The names whose values differ, with both values; an absent one is empty."""
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            yield name, before.get(name, ""), now.get(name, "")


def _leaves(section: str, config: RolloutConfig | ModelConfig | RewardConfig) -> dict[str, str]:
    leaves = flatten(config, f"{section}.")
    return {name: as_yaml(hide_secret(name, value, digest=True)) for name, value in leaves.items()}


def _relevant(leaves: Items, rollout: RolloutConfig) -> Iterator[tuple[str, str]]:
    """What counts: no placement, no section of an engine that is not used; contents stand for paths of models."""
    unused = tuple(f"rollout.{name}." for name in _ENGINES if name != rollout.name)
    for name, value in leaves.items():
        if name in ("model.path", "model.tokenizer_path") or name.startswith(unused) or is_placement(name):
            continue
        yield name, value


def is_placement(name: str) -> bool:
    """Whether a key says where, how many, how fast or how long, and not which tokens."""
    return name in PLACEMENT or name.startswith(tuple(key for key in PLACEMENT if key.endswith(".")))


def _scoring(reward: RewardConfig) -> dict[str, str]:
    leaves = {name: value for name, value in _leaves("reward", reward).items() if name not in SCORER}
    for name, function in reward.functions.items():
        if ":" not in function.path:
            leaves[f"source of reward.functions.{name}.path"] = source_digest(f"treadle.reward.builtin.{function.path}")
    for kind, models in (("classifiers", reward.classifiers), ("judges", reward.judges)):
        for name, item in models.items():
            if item.path is not None:
                leaves[f"contents of reward.{kind}.{name}.path"] = contents_digest(item.path, weights=True)
    return leaves | _sources(leaves)


def _models(model: ModelConfig, *, weights: bool) -> dict[str, str]:
    found = {"contents of model.path": contents_digest(model.path, weights=weights)}
    if model.tokenizer_path is not None:
        found["contents of model.tokenizer_path"] = contents_digest(model.tokenizer_path, weights=False)
    return found


def _sources(leaves: Items) -> dict[str, str]:
    """Digests of the code behind every value that is an import path."""
    return {
        f"source of {path} in {name}": source_digest(path.partition(":")[0])
        for name, value in leaves.items()
        for path in _IMPORT_PATH.findall(value)
        if "://" not in value
    }


def contents_digest(path: str, *, weights: bool) -> str:
    """Of a model directory: its small files whole, large ones by size, time and both ends."""
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
    """Of a module's file and of those it imports, as far as they are not installed packages."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    seen: dict[str, bytes] = {}
    waiting = [module]
    while waiting and len(seen) < _MAX_MODULES:
        name = waiting.pop()
        if name in seen:
            continue
        file = _source_file(name)
        seen[name] = b"" if file is None else file.read_bytes()
        waiting += [] if file is None else _imports(name, file, seen[name])
    return _hex(b"\n".join(name.encode() + b"=" + content for name, content in sorted(seen.items())))


def _source_file(module: str) -> Path | None:
    try:
        spec = find_spec(module)
    except Exception:  # noqa: BLE001 - a parent package may do anything when it is imported; the real import tells
        return None
    origin = None if spec is None else spec.origin
    return Path(origin) if origin and origin.endswith(".py") and Path(origin).is_file() else None


def _imports(module: str, file: Path, source: bytes) -> list[str]:
    """The modules that a file imports and that are the user's own."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
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
    return [name for name in names if name and _is_own(name)]


def _is_own(module: str) -> bool:
    if module.split(".")[0] in sys.stdlib_module_names:
        return False
    if module.split(".")[0] == "treadle":
        return module.startswith("treadle.reward.builtin.")
    file = _source_file(module)
    return file is not None and not any(file.is_relative_to(place) for place in _INSTALLED)


_INSTALLED: Sequence[str] = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def _hex(content: bytes) -> str:
    return blake2b(content, digest_size=8).hexdigest()
