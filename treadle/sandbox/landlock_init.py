"""Landlock's process beside the box: `init`, whose commands each put up Landlock and seccomp before they begin.

    /usr, the interpreter, a few files of /etc   read and run
    the box's directory                          everything
    /dev/null, zero, full                        read and write;  random, urandom: read
    all else, /proc too                          nothing

Runs outside of its own fences, which a command cannot lift: signals, traces and descriptors do not reach it. It ends
when its input closes, and so with its starter, however that ends; a death signal would leave the commands behind.
Imports nothing of treadle but `confine` and `init`.
Invariant: when it has ended no command is left, nor the box's directory.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Iterable

from treadle.sandbox.confine import (
    LANDLOCK_ADD_RULE,
    LANDLOCK_CREATE_RULESET,
    LANDLOCK_RESTRICT_SELF,
    PR_SET_NO_NEW_PRIVS,
    drop_capabilities,
    install_filter,
    load_libc,
)
from treadle.sandbox.init.kernel import remove_folder
from treadle.sandbox.init.server import main as serve_init

PR_SET_CHILD_SUBREAPER = 36
EXECUTE, WRITE, READ, READ_DIR, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
MIN_ABI = 3
"""Without TRUNCATE (kernel 6.2) a command could empty files that it may only read."""
SCOPES_ABI = 6
"""From kernel 6.12 on, signals stay in the box."""


def landlock_version() -> int:
    """The version of Landlock that the kernel has; 0 for none."""
    if sys.platform != "linux":
        return 0
    return max(0, int(load_libc().syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))))


def make_ruleset(home: str, readable: Iterable[str]) -> int:
    """A ruleset of a box, as a descriptor."""
    version = landlock_version()
    files = (1 << (16 if version >= 5 else 15)) - 1
    fields = [files, *([0b11] if version >= 4 else []), *([0b11] if version >= SCOPES_ABI else [])]
    rules = struct.pack(f"={len(fields)}Q", *fields)
    libc = load_libc()
    ruleset = int(libc.syscall(LANDLOCK_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint(0)))
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "Landlock")
    allowed = [(home, files), *((path, EXECUTE | READ | READ_DIR) for path in readable)]
    allowed += [(f"/dev/{name}", READ | WRITE | TRUNCATE) for name in ("null", "zero", "full")]
    allowed += [(f"/dev/{name}", READ) for name in ("random", "urandom")]
    for path, rights in allowed:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if not os.path.isdir(path):
            rights &= EXECUTE | READ | WRITE | TRUNCATE
        if libc.syscall(LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, place), ctypes.c_uint(0)) != 0:
            raise OSError(ctypes.get_errno(), f"Landlock: {path}")
        os.close(place)
    return ruleset


def main(arguments: list[str]) -> None:
    """Arguments: the directories that can be read, joined by colons; then those of `init`."""
    readable, home, *rest = arguments
    libc = load_libc()
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ruleset = os.dup2(make_ruleset(home, readable.split(":")), 1000)

    def confine() -> None:
        drop_capabilities(libc)
        if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(
            LANDLOCK_RESTRICT_SELF, ruleset, ctypes.c_uint(0)
        ):
            raise OSError(ctypes.get_errno(), "Landlock")
        os.close(ruleset)
        install_filter(libc)

    try:
        serve_init([home, *rest], confine, own_namespace=False)
    finally:
        remove_folder(home)
