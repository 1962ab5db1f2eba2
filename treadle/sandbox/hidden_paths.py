"""Hidden paths: files that a fenced process must not read, and the rules by which Landlock keeps them closed.

Landlock allows and never forbids: so what lies beside the hidden paths is allowed, from the root down. Names in a
directory stay visible, as imports need them; contents of files under a hidden path are not. A file that is made beside
one later, in a directory above it, cannot be read either.
"""

import os
from collections.abc import Collection, Iterator
from pathlib import Path

_SECRETS = (
    *(".ssh", ".aws", ".azure", ".kube", ".docker", ".gnupg", ".netrc", ".pgpass", ".git-credentials", ".pypirc"),
    *(".config/gcloud", ".config/gh", ".huggingface", ".cache/huggingface/token", ".cache/huggingface/stored_tokens"),
)
"""Under the home directory: where programs keep keys."""


def usual_secrets() -> tuple[str, ...]:
    """Files and directories of the user's that hold keys."""
    home = os.path.expanduser("~")
    return tuple(path for path in (os.path.join(home, name) for name in _SECRETS) if os.path.lexists(path))


def list_readable(hidden: Collection[str]) -> Iterator[str]:
    """Everything that is not hidden, as few paths as that takes: nothing of them is above a hidden one, or under it."""
    closed = {Path(os.path.realpath(path)) for path in hidden}
    above = {parent for path in closed for parent in path.parents}
    for directory in sorted(above - {path for path in above if path in closed}):
        if any(parent in closed for parent in directory.parents):
            continue
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            path = directory / entry.name
            if path not in closed and path not in above and not entry.is_symlink():
                yield str(path)
