"""Atomic directories with a manifest: they appear whole or not at all, and damage is seen before anything is loaded.

Owns drafts, renames, what must reach the disk before what, and the manifest: every file with its size and digest. Knows
nothing of what files mean.
Invariant: at any moment, a name without a leading dot is a directory that was written to its end.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from treadle.errors import RunError

DRAFT = ".draft-"
TRASH = ".trash-"
_DIRECTORY_MODE = 0o700
_FILE_MODE = 0o600


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """A draft to write into, which becomes `target` when the block ends well. `target` must not exist."""
    target.parent.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
    draft = target.with_name(DRAFT + target.name)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=_DIRECTORY_MODE)
    try:
        yield draft
        restrict_permissions(draft)
        flush_tree(draft)
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    flush(target.parent)


def move_to_trash(target: Path) -> Path:
    """Rename a directory that is to be deleted, so that it never looks whole meanwhile; returns its new name."""
    trash = target.with_name(TRASH + target.name)
    shutil.rmtree(trash, ignore_errors=True)
    target.rename(trash)
    flush(target.parent)
    return trash


def delete(trash: Path) -> None:
    """Delete what `move_to_trash` renamed."""
    shutil.rmtree(trash)


def remove_leftovers(parent: Path) -> None:
    """Delete what a crash left of drafts and deletions."""
    for left in [*parent.glob(f"{DRAFT}*"), *parent.glob(f"{TRASH}*")]:
        shutil.rmtree(left)


def restrict_permissions(directory: Path) -> None:
    """Make what is below readable by the user alone: weights may be worth as much as what they were trained on."""
    for folder, _, files in os.walk(directory):
        os.chmod(folder, _DIRECTORY_MODE)
        for name in files:
            os.chmod(Path(folder, name), _FILE_MODE)


def flush_tree(directory: Path) -> None:
    """Make every file below reach the disk, then the directories that name them."""
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            flush(Path(folder, name))
        flush(Path(folder))


def flush(path: Path) -> None:
    """Make a file, or the names in a directory, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MANIFEST = "training/manifest.json"


class Damaged(RunError):
    """A checkpoint that is not as it was written; the message names the file."""


def write_manifest(directory: Path) -> None:
    """List every file in `directory`. The last thing to be written there."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(_digest, paths))
    listed = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "blake2b": digest}
        for path, digest in zip(paths, digests, strict=True)
    }
    (directory / MANIFEST).write_text(json.dumps({"files": listed}, indent=1), encoding="utf-8")


def verify(directory: Path) -> None:
    """Read every file and compare; Damaged where one is missing or differs."""
    listed = read_manifest(directory)
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(_digest, [directory / name for name in listed]))
    for name, digest in zip(listed, digests, strict=True):
        if digest != listed[name]:
            raise Damaged(f"{directory / name} is not as it was written")


def read_manifest(directory: Path) -> dict[str, str]:
    """The digest of each file by name; Damaged where the list cannot be read or a file has another size."""
    path = directory / MANIFEST
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        digests = {str(name): str(entry["blake2b"]) for name, entry in files.items()}
        sizes = {name: int(entry["bytes"]) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    for name, size in sizes.items():
        file = directory / name
        if not file.is_file():
            raise Damaged(f"{file} is missing")
        if file.stat().st_size != size:
            raise Damaged(f"{file} has {file.stat().st_size} bytes, not {size}")
    return digests


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]
