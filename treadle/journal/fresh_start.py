"""Fresh start: the run directory of an earlier run, set aside for a run that begins anew in its place.

Owns the names `RUN.1`, `RUN.2`, …, and what the new run still reads of the old directory: files that its config names
in `inputs/`, and config files that lie beside them, are copied over; a model or trajectories in there are refused.
Invariant: until the new run is listed in `run.json`, whatever ends it gives the old directory its name back.
"""

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treadle.config import Config
from treadle.config.section import Section, Source
from treadle.config.show import flatten
from treadle.errors import ConfigError, Mistake, RunError
from treadle.journal.run_directory import CONFIG_FILE, DIRECTORY_MODE, RUN_FILE, RunLock
from treadle.terminal import note

_INPUTS = "inputs"
_WRITTEN = ("logging.", "trainer.weights.directory")
"""Keys and sections that say where a run writes: what an earlier run left there is not read."""

_READ = ("path", "adapter", "files")
"""How keys end whose values are paths, even where such a value is a single word."""


@contextmanager
def fresh_start(config: Config, run_dir: Path) -> Iterator[None]:
    """Set a run directory that holds anything aside, for the run that begins in the block; refused while a run is in
    it, or where the new run would read more of it than its inputs."""
    kept = _find_what_is_read(config, run_dir)
    target = _set_aside(run_dir)
    if target is None:
        yield
        return
    note(f"note: the earlier run is in {target} now")
    try:
        for name in kept:
            _copy(target / name, run_dir / name)
        yield
    except BaseException:
        _put_back(target, run_dir)
        raise


def _find_what_is_read(config: Config, run_dir: Path) -> list[Path]:
    """What a config reads of a directory, relative to it; a ConfigError where that cannot be copied over."""
    found = dict[Path, None]()
    mistakes = []
    for key, value in flatten(config).items():
        for text in () if key.startswith(_WRITTEN) else _texts(value):
            path = _path_inside(text, run_dir)
            if path is None or not ("/" in text or key.endswith(_READ)):
                continue
            if path.parts[:1] == (_INPUTS,) and len(path.parts) > 1:
                found |= dict.fromkeys((path, path.with_suffix(".py")))
                continue
            problem = f"lies in the run directory {run_dir}, which --fresh renames before the new run reads it"
            fix = f"choose another logging.run_dir, or rename {run_dir} yourself and give its new name here"
            mistakes.append(Mistake(key, problem, text, config.origin(key), fix))
    if mistakes:
        raise ConfigError(mistakes)
    for file in _config_files(config):
        path = _path_inside(file, run_dir)
        if path is not None and path != Path(CONFIG_FILE):  # which every run writes
            found[path] = None
    return list(found)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _path_inside(text: str, run_dir: Path) -> Path | None:
    """The file or directory that a text names, relative to the directory that it lies in; `file:name` is a file."""
    for name in (text, text.rpartition(":")[0]):
        if not name or "\0" in name:
            continue
        given = os.path.expanduser(name)
        for resolved in (os.path.abspath, os.path.realpath):
            path, folder = Path(resolved(given)), Path(resolved(run_dir))
            if path.is_relative_to(folder) and os.path.exists(path):
                return path.relative_to(folder)
    return None


def _config_files(section: Section) -> Iterator[str]:
    """The files that gave values of a config."""
    for name, value in section.values().items():
        if isinstance(value, Section):
            yield from _config_files(value)
            continue
        if isinstance(value, Mapping):
            for item in value.values():
                if isinstance(item, Section):
                    yield from _config_files(item)
        origins = [section.origin(key) for key in section.traced(name) or [name]]
        yield from (origin.place.rpartition(":")[0] for origin in origins if origin.source is Source.FILE)


def _set_aside(run_dir: Path) -> Path | None:
    """Rename a run directory that holds anything to the first free `run_dir.N`."""
    if not run_dir.is_dir() or not any(run_dir.iterdir()):
        return None
    lock = RunLock.take(run_dir, time.time())
    try:
        number = 1
        while (target := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
            number += 1
        run_dir.rename(target)
    except OSError as error:
        raise RunError(f"cannot rename {run_dir}: {error.strerror or error}") from error
    finally:
        lock.release()
    return target


def _copy(source: Path, target: Path) -> None:
    if not source.exists():
        return
    for folder in (target.parent.parent, target.parent):
        folder.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)


def _put_back(target: Path, run_dir: Path) -> None:
    """Undo a set-aside, where no run has begun in the directory since."""
    if (run_dir / RUN_FILE).exists():
        return
    try:
        if run_dir.is_dir():
            lock = RunLock.take(run_dir, time.time())
            try:
                shutil.rmtree(run_dir)
            finally:
                lock.release()
        target.rename(run_dir)
    except (OSError, RunError) as error:
        note(f"note: the new run has not begun, and {target} could not be renamed back to {run_dir}: {error}")
    else:
        note(f"note: the new run has not begun: the earlier one is in {run_dir} again")
