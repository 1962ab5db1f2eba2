"""Kernel: the processes below this one, their limits, memory and files, for the init of a box.

Owns what is asked of /proc and of system calls; refuses to know of requests. Imports the standard library alone.
"""

import ctypes
import errno
import os
import resource
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:  # at the cost of no import
    from typing import NoReturn

PIECE = 65536
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
LIBC = ctypes.CDLL(None)


def children(pid: int) -> "list[int]":
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as listing:
                found += [int(word) for word in listing.read().split()]
    return found


def tree(pid: int) -> "list[int]":
    """`pid` and everything below it. A chain of children may be longer than our stack."""
    members, known = [pid], {pid}
    for member in members:  # which grows meanwhile
        found = [child for child in children(member) if child not in known]
        members += found
        known.update(found)
    return members


def kill(pid: int) -> None:
    with suppress(OSError):
        os.kill(pid, 9)


def lower_limits(limits: "list[tuple[int, int]]") -> None:
    """Limits of the kernel for this process and all it starts, given as (number, value)."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as setting:
        setting.write("1000")
    for number, value in limits:
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


class FilterProgram(ctypes.Structure):
    """A seccomp program, as the kernel takes it."""

    _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_char_p)]


def install_filter(program: bytes) -> None:
    """Put a seccomp program around this process and all that it starts."""
    filter_program = ctypes.byref(FilterProgram(len(program) // 8, program))
    if LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or LIBC.prctl(PR_SET_SECCOMP, 2, filter_program, 0, 0):
        raise OSError("seccomp")


def become(argv: "list[bytes]", cwd: bytes, environment: "list[bytes]") -> "NoReturn":
    """Turn this process into a command."""
    os.chdir(cwd)
    names = dict(entry.split(b"=", 1) for entry in environment)
    os.execvpe(argv[0], argv, names)


def read_file(path: bytes, most: int) -> int:
    """A regular file on standard output; a longer one is refused."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    size = 0
    while size <= most:
        data = os.read(descriptor, PIECE)
        if not data:
            return 0
        size += len(data)
        while data:
            data = data[os.write(1, data) :]
    os.write(2, b"it is longer than %d bytes" % most)
    return 1


def write_file(path: bytes, mode: int, size: int) -> int:
    """Standard input as a file."""
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, mode)
    while size:
        data = os.read(0, min(size, PIECE))
        if not data:
            return 1
        size -= len(data)
        while data:
            data = data[os.write(descriptor, data) :]
    return 0


def remove_folder(folder: str) -> None:
    """Remove a folder in which nothing runs any more, however deep it is; what cannot be removed stays.

    Where something that still runs moves a folder meanwhile, the removal ends: its ".." may be outside.
    """
    with suppress(OSError):
        here = _open_folder(folder, None)
        levels, names, places = [_empty(here)], list[str](), [_place(here)]
        while levels[-1] or names:
            if not levels[-1]:
                levels.pop()
                places.pop()
                here = _open_folder("..", here)
                if _place(here) != places[-1]:
                    break
                with suppress(OSError):
                    os.rmdir(names.pop(), dir_fd=here)
                continue
            name = levels[-1].pop()
            with suppress(OSError):
                os.chmod(name, 0o700, dir_fd=here)
                here = _open_folder(name, here)
                levels.append(_empty(here))
                names.append(name)
                places.append(_place(here))
        os.close(here)
        os.rmdir(folder)


def _open_folder(name: str, here: "int | None") -> int:
    """A folder in the one that is open, which is closed."""
    there = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
    if here is not None:
        os.close(here)
    return there


def _place(folder: int) -> "tuple[int, int]":
    """Which folder it is, whatever its name."""
    found = os.fstat(folder)
    return found.st_dev, found.st_ino


def _empty(folder: int) -> "list[str]":
    """Remove the files of a folder; the names of the folders in it."""
    with os.scandir(folder) as listing:
        entries = list(listing)
    folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    for name in {entry.name for entry in entries} - {*folders}:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
    return folders


def find_excess(limits: "dict[str, int]", home: str) -> "tuple[str | None, str | None]":
    """What the tree of this process has too much of: processes or memory; and files."""
    members, full = tree(os.getpid())[1:], None
    if "disk" in limits:
        files = disk_of(home)
        if files is None:
            full = "folders too deep for their files to be counted"
        elif files > limits["disk"]:
            full = f"{files >> 20} MB of files, and {limits['disk'] >> 20} may be written"
    if len(members) > limits.get("processes", 1 << 30):
        return f"{len(members)} processes, and {limits['processes']} may run", full
    if "memory" in limits:
        used = sum(map(memory_of, members))
        if used > limits["memory"]:
            return f"{used >> 20} MB of memory, and {limits['memory'] >> 20} may be used", full
    return None, full


def memory_of(pid: int) -> int:
    """Bytes that a process has for itself, or shares with others of its box."""
    used = 0
    with suppress(OSError), open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith(("RssAnon:", "RssShmem:", "VmSwap:")):
                used += int(line.split()[1]) << 10
    return used


def disk_of(folder: str) -> "int | None":
    """Bytes of the files below a folder; None where folders lie deeper than a path can say."""
    used, left = 0, [folder]
    while left:
        try:
            listing = os.scandir(left.pop())
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return None
            continue  # it went meanwhile
        with listing as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    else:
                        used += entry.stat(follow_symlinks=False).st_blocks * 512
    return used
