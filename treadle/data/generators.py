"""Tasks that are made, not read: `reasoning_gym:NAME`.

Owns the call of the reasoning-gym package. Validation draws with a seed far from training's, so the same generator in
`data.train_files` and `data.val_files` gives different tasks.
Invariant: the same name, arguments and seed give the same tasks.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from treadle.config.data import DataConfig
from treadle.errors import ConfigError, Mistake, nearest
from treadle.types import Task

PREFIX = "reasoning_gym:"
VALIDATION_SEED_SHIFT = 1_000_003_000


def generate_tasks(source: str, data: DataConfig, key: str, *, validation: bool) -> Iterator[Task]:
    """The tasks of one generator; `source` is as it stands under the config key `key`."""
    name = source.removeprefix(PREFIX)
    options = _options(name, data)
    seed = options.pop("seed", data.seed) + (VALIDATION_SEED_SHIFT if validation else 0)
    made = _make_dataset(name, {**options, "seed": seed}, source, key)
    for index in range(len(made)):
        entry = made[index]
        messages = ({"role": "user", "content": entry["question"]},)
        uid = f"{source}@{seed}:{index}"
        yield Task(uid, messages, entry["answer"], data_source=source, extra={"entry": entry})


def _options(name: str, data: DataConfig) -> dict[str, Any]:
    options = data.source_kwargs.get(name, {})
    if not isinstance(options, Mapping) or not isinstance(options.get("seed", 0), int):
        raise ConfigError([Mistake(f"data.source_kwargs.{name}", f"must be a map with a whole seed, got {options!r}")])
    return dict(options)


def _make_dataset(name: str, options: Mapping[str, Any], source: str, key: str) -> Any:
    try:
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        fix = "pip install 'treadle[reasoning-gym]'"
        raise ConfigError([Mistake(key, f"{source} needs the package reasoning-gym", source, fix=fix)]) from error
    if name not in DATASETS:
        fix = nearest(name, DATASETS) or f"it has {len(DATASETS)}, such as {', '.join(sorted(DATASETS)[:5])}"
        raise ConfigError([Mistake(key, f"reasoning-gym has no dataset {name!r}", source, fix=fix)])
    try:
        return create_dataset(name, **options)
    except (TypeError, ValueError, AssertionError) as error:
        problem = f"reasoning-gym refuses these arguments: {error}"
        raise ConfigError([Mistake(f"data.source_kwargs.{name}", problem, value=dict(options))]) from error


def check_source_kwargs(data: DataConfig) -> None:
    """Arguments for a generator that no file list names would be ignored in silence: refuse them."""
    used = {file.removeprefix(PREFIX) for file in (*data.train_files, *data.val_files) if file.startswith(PREFIX)}
    stray = [name for name in data.source_kwargs if name not in used]
    if stray:
        problem = "no generator of this name in data.train_files or data.val_files"
        raise ConfigError(Mistake(f"data.source_kwargs.{name}", problem, fix=nearest(name, used)) for name in stray)
