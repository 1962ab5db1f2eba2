"""Directories that appear all at once, or not at all.

Owns drafts, renames and what must reach the disk before what. Knows nothing of what is inside.
Invariant: at any moment, a name without a leading dot is a directory that was written to its end.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DRAFT = ".draft-"
TRASH = ".trash-"
_DIRECTORY_MODE = 0o700
_FILE_MODE = 0o600


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A draft to write into, which becomes `target` when the block ends well. `target` must not exist."""
    target.parent.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
    draft = target.with_name(DRAFT + target.name)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=_DIRECTORY_MODE)
    try:
        yield draft
        close_to_others(draft)
        flush_tree(draft)
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    flush(target.parent)


def remove(target: Path) -> None:
    """Delete a directory that never looks whole meanwhile."""
    trash = target.with_name(TRASH + target.name)
    shutil.rmtree(trash, ignore_errors=True)
    target.rename(trash)
    flush(target.parent)
    shutil.rmtree(trash)


def sweep(parent: Path) -> None:
    """Delete what a crash left of drafts and deletions."""
    for left in [*parent.glob(f"{DRAFT}*"), *parent.glob(f"{TRASH}*")]:
        shutil.rmtree(left)


def close_to_others(directory: Path) -> None:
    """Let nobody but the user read what is below: weights may be worth as much as what they were trained on."""
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
