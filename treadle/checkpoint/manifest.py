"""What a whole checkpoint consists of: every file with its size and digest, so that damage is seen before it is loaded.

Knows nothing of what files mean.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from treadle.errors import RunError

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
