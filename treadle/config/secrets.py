"""Secrets in a config: values that no run directory, journal or tracker is given.

Owns which values those are: the environment of MCP servers, entries of free-form maps that are called a key, token,
secret or password, and credentials in addresses. Keys of endpoints are named by their environment variable, which is
no secret.
"""

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

HIDDEN = "(hidden)"
_SECRET = re.compile(
    r"(?i)(^|[-_.])(api[-_]?key|access[-_]?key|auth|token|secret|password|passwd|credentials?|authorization|cookie)$"
)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
_ENVIRONMENT = "env"


def hide_secret(key: str, value: Any, *, digest: bool = False) -> Any:
    """The value of a dotted key with every secret hidden; with `digest`, so that a changed one can still be told."""
    return _hide(value, key.rpartition(".")[2] == _ENVIRONMENT, digest)


def hide_in_words(words: Sequence[str]) -> list[str]:
    """A command line with the values of `key=value` words hidden that are secret."""
    return [_hide_word(word) for word in words]


def _hide_word(word: str) -> str:
    key, equals, value = word.partition("=")
    parts = key.split(".")
    if equals and (_ENVIRONMENT in parts or _SECRET.search(parts[-1])):
        return f"{key}={HIDDEN}"
    return f"{key}{equals}{_CREDENTIALS.sub(HIDDEN + '@', value)}"


def _hide(value: Any, secret: bool, digest: bool) -> Any:
    if isinstance(value, Mapping):
        return {name: _hide(item, secret or bool(_SECRET.search(str(name))), digest) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_hide(item, secret, digest) for item in value)
    if not secret:
        return _CREDENTIALS.sub(f"{HIDDEN}@", value) if isinstance(value, str) else value
    return f"{HIDDEN[:-1]} {blake2b(str(value).encode(), digest_size=4).hexdigest()})" if digest else HIDDEN
