"""Kernel fences of a sandboxed process: seccomp, Landlock, a network namespace without a network, no capabilities.

    what                          by                        without it
    network, any new socket       seccomp, namespace        —
    writing, making, removing     Landlock                  seccomp refuses to open for writing
    reading hidden paths          Landlock                  allowed, and said
    memory of other processes     seccomp, namespace        the driver is made non-dumpable
    shared memory, queues         seccomp                   —
    signals to other processes    Landlock (kernel 6.12)    allowed, and said
    more memory, more CPU         rlimits, set by `limits`  —

Owns the calls, by number, for x86_64 and aarch64. Each fence holds for the life of the process and of all it starts;
nothing that runs inside can take it away. Reading other files, importing, computing, starting processes stay possible.
Invariant: what could not be put up is returned in words; a fence that is not named there stands.
Landlock allows and never forbids: so what lies beside the hidden paths is allowed, from the root down. Names in a
directory stay visible, as imports need them; contents of files under a hidden path are not. A file that is made beside
one later, in a directory above it, cannot be read either.
"""

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
CLONE_NEW = 0x7E020080
"""Every flag of clone that makes a namespace."""
NO_NAMESPACE = "no network namespace"
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446

_X86 = """ptrace=101 process_vm_readv=310 process_vm_writev=311 process_madvise=440 pidfd_getfd=438 kcmp=312
socket=41 connect=42 bind=49 listen=50 accept=43 accept4=288
io_uring_setup=425 io_uring_enter=426 io_uring_register=427 bpf=321 userfaultfd=323 perf_event_open=298
mount=165 umount2=166 pivot_root=155 chroot=161 setns=308 unshare=272 open_tree=428 move_mount=429 fsopen=430
mount_setattr=442 add_key=248 request_key=249 keyctl=250 memfd_create=319 memfd_secret=447
shmget=29 shmat=30 shmctl=31 semget=64 semop=65 semctl=66 semtimedop=220 msgget=68 msgsnd=69 msgrcv=70 msgctl=71
mq_open=240 mq_unlink=241 setrlimit=160 personality=135 open_by_handle_at=304
chmod=90 fchmod=91 fchmodat=268 chown=92 fchown=93 lchown=94 fchownat=260 utimensat=280 utime=132 utimes=235
futimesat=261 setxattr=188 lsetxattr=189 fsetxattr=190 removexattr=197 lremovexattr=198 fremovexattr=199 fchmodat2=452
creat=85 mkdir=83 mkdirat=258 rmdir=84 unlink=87 unlinkat=263 rename=82 renameat=264 renameat2=316 link=86 linkat=265
symlink=88 symlinkat=266 mknod=133 mknodat=259 truncate=76
setpriority=141 ioprio_set=251 sched_setparam=142 sched_setscheduler=144 sched_setattr=314 syslog=103"""
_ARM = """ptrace=117 process_vm_readv=270 process_vm_writev=271 process_madvise=440 pidfd_getfd=438 kcmp=272
socket=198 connect=203 bind=200 listen=201 accept=202 accept4=242
io_uring_setup=425 io_uring_enter=426 io_uring_register=427 bpf=280 userfaultfd=282 perf_event_open=241
mount=40 umount2=39 pivot_root=41 chroot=51 setns=268 unshare=97 open_tree=428 move_mount=429 fsopen=430
mount_setattr=442 add_key=217 request_key=218 keyctl=219 memfd_create=279 memfd_secret=447
shmget=194 shmat=196 shmctl=195 semget=190 semop=193 semctl=191 semtimedop=192 msgget=186 msgsnd=189 msgrcv=188
msgctl=187 mq_open=180 mq_unlink=181 setrlimit=164 personality=92 open_by_handle_at=265
fchmod=52 fchmodat=53 fchown=55 fchownat=54 utimensat=88 setxattr=5 lsetxattr=6 fsetxattr=7 removexattr=14
lremovexattr=15 fremovexattr=16 fchmodat2=452 mkdirat=34 unlinkat=35 renameat=38 renameat2=276 linkat=37 symlinkat=36
mknodat=33 truncate=45
setpriority=140 ioprio_set=30 sched_setparam=118 sched_setscheduler=119 sched_setattr=274 syslog=116"""

_KERNEL = """ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd kcmp io_uring_setup io_uring_enter
io_uring_register bpf userfaultfd perf_event_open mount umount2 pivot_root chroot setns unshare open_tree move_mount
fsopen mount_setattr add_key request_key keyctl memfd_secret personality open_by_handle_at syslog"""
"""Calls into other processes and into parts of the kernel that ordinary programs do without."""
_SHARED = """socket connect bind listen accept accept4 shmget shmat shmctl semget semop semctl semtimedop msgget msgsnd
msgrcv msgctl mq_open mq_unlink chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utimensat utime utimes
futimesat setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr setpriority ioprio_set sched_setparam
sched_setscheduler sched_setattr"""
"""Calls that reach what is shared with the machine where there are no namespaces, and that Landlock does not govern."""
_FAMILIES = (1, 2, 10, 16)
"""Sockets that have a namespace: local, internet, routing. The others (a virtual machine's host, crypto) have none."""


_Line = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class _Machine:
    """What seccomp calls an architecture, and the numbers of its system calls."""

    audit: int
    calls: Mapping[str, int]
    opens: tuple[tuple[int, int], ...]
    """Calls that open a file by flags, with the position of the flags."""
    openat2: int
    clone: int
    clone3: int
    prlimit64: int
    sched_setaffinity: int
    socketpair: int


def _numbers(table: str) -> Mapping[str, int]:
    return {name: int(number) for name, _, number in (entry.partition("=") for entry in table.split())}


_MACHINES = {
    "x86_64": _Machine(0xC000003E, _numbers(_X86), ((2, 1), (257, 2)), 437, 56, 435, 302, 203, 53),
    "aarch64": _Machine(0xC00000B7, _numbers(_ARM), ((56, 2),), 437, 220, 435, 261, 122, 199),
}

_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
_SOCKET_TYPE, _STREAM = 0xF, 1
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000 | 1, 0x00050000 | 38
_X32 = 0x40000000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def build_filter(writing: bool) -> bytes | None:
    """The seccomp program; `writing` leaves opening for writing to Landlock. None where there is none."""
    machine = _this_machine()
    if machine is None:
        return None
    lines = [*_refuse_calls(machine, machine.calls), *_refuse_more(machine), *_stay_apart(machine)]
    lines += ((_EQUAL, 0, 1, machine.openat2), (_RETURN, 0, 0, _ENOSYS))  # its flags are behind a pointer, too
    if not writing:
        for number, position in machine.opens:
            lines += _refuse_bits(number, position, _WRITING)
    return _assemble(machine, lines)


def build_box_filter(namespaces: bool) -> bytes | None:
    """The seccomp program of a box, whose commands may write files; `namespaces`: it has network and IPC of its own."""
    machine = _this_machine()
    if machine is None:
        return None
    refused = _KERNEL.split() if namespaces else [*_KERNEL.split(), *_SHARED.split()]
    lines = [*_refuse_calls(machine, refused), *_refuse_more(machine)]
    if namespaces:
        lines += _allow_only(machine.calls["socket"], _FAMILIES)
    else:
        lines += _stay_apart(machine)
    return _assemble(machine, lines)


def _this_machine() -> "_Machine | None":
    return _MACHINES.get(platform.machine()) if sys.platform == "linux" else None


def _assemble(machine: _Machine, lines: Iterable[_Line]) -> bytes:
    """Lines of (code, jump if true, jump if false, value). The number of the call is at 0, arguments are from 16 on."""
    begin = ((_LOAD, 0, 0, 4), (_EQUAL, 1, 0, machine.audit), (_RETURN, 0, 0, _KILL))
    number = ((_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL))
    return b"".join(struct.pack("=HBBI", *line) for line in (*begin, *number, *lines, (_RETURN, 0, 0, _ALLOW)))


def _refuse_calls(machine: _Machine, names: Iterable[str]) -> Iterator[_Line]:
    for name in names:
        if name in machine.calls:
            yield from ((_EQUAL, 0, 1, machine.calls[name]), (_RETURN, 0, 0, _EPERM))


def _refuse_more(machine: _Machine) -> Iterator[_Line]:
    """Namespaces, and limits of other processes; one's own can only be lowered."""
    # Its flags are behind a pointer; libraries go back to the older call.
    yield from ((_EQUAL, 0, 1, machine.clone3), (_RETURN, 0, 0, _ENOSYS))
    yield from _refuse_bits(machine.clone, 0, CLONE_NEW)
    yield from _refuse_bits(machine.prlimit64, 0, 0xFFFFFFFF)


def _stay_apart(machine: _Machine) -> Iterator[_Line]:
    """Refuse to choose the cores of other processes, and pairs of datagram sockets: one of them could send to any local
    socket of this machine by its address."""
    yield from _refuse_bits(machine.sched_setaffinity, 0, 0xFFFFFFFF)
    yield from ((_EQUAL, 0, 5, machine.socketpair), (_LOAD, 0, 0, 24), (_AND, 0, 0, _SOCKET_TYPE))
    yield from ((_EQUAL, 1, 0, _STREAM), (_RETURN, 0, 0, _EPERM), (_LOAD, 0, 0, 0))


def _allow_only(number: int, values: Collection[int]) -> Iterator[_Line]:
    """Refuse this call where its first argument is none of these."""
    yield from ((_EQUAL, 0, len(values) + 3, number), (_LOAD, 0, 0, 16))
    for at, value in enumerate(values):
        yield (_EQUAL, len(values) - at, 0, value)
    yield from ((_RETURN, 0, 0, _EPERM), (_LOAD, 0, 0, 0))


def _refuse_bits(number: int, position: int, bits: int) -> Iterator[_Line]:
    """Refuse this call where its argument has any of these bits; the call's number is loaded before and after."""
    yield from ((_EQUAL, 0, 4, number), (_LOAD, 0, 0, 16 + 8 * position), (_ANY_BIT, 0, 1, bits))
    yield from ((_RETURN, 0, 0, _EPERM), (_LOAD, 0, 0, 0))


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))


def load_libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def enter_empty_network() -> str | None:
    """Move this process, which must have one thread, to a network namespace that has no network; or why not."""
    if sys.platform != "linux":
        return f"{NO_NAMESPACE}: {sys.platform} has none"
    user, group = os.getuid(), os.getgid()
    if load_libc().unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        return f"{NO_NAMESPACE}: {os.strerror(ctypes.get_errno())}"
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        try:
            with open(f"/proc/self/{name}", "w") as setting:
                setting.write(text)
        except OSError:
            break  # it then has no name for itself, and all the same no network
    return None


def hide() -> None:
    """Let no other process of the same user read the memory, the environment or the descriptors of this one."""
    if sys.platform == "linux":
        load_libc().prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def hide_where_needed(missing: Collection[str]) -> bool:
    """Hide this process, which started a sandboxed one, where that has no user namespace of its own.

    The namespace is enough, and a process that is not hidden can be profiled and leaves core dumps. Landlock is not: it
    refuses to attach, but not to read /proc/PID/environ.
    """
    needed = any(item.startswith(NO_NAMESPACE) for item in missing)
    if needed:
        hide()
    return needed


def apply_restrictions(hidden: Collection[str] = ()) -> tuple[str, ...]:
    """Put every fence of this module around this process, but for the network namespace; what is missing, in words.

    `hidden`: paths whose contents it cannot read from now on.
    """
    if sys.platform != "linux":
        return (f"no seccomp and no Landlock: {sys.platform} has neither",)
    libc = load_libc()
    missing = []
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        missing.append(f"new privileges are possible: {os.strerror(ctypes.get_errno())}")
    missing += (landlocked := _landlock(libc, hidden))
    drop_capabilities(libc)
    program = build_filter(writing=not any("writing" in item for item in landlocked))
    if program is None:
        missing.append(f"no seccomp filter is written for {platform.machine()}")
    elif libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(_FilterProgram(len(program) // 8, program))) != 0:
        missing.append(f"no seccomp: {os.strerror(ctypes.get_errno())}")
    return tuple(missing)


def _landlock(libc: ctypes.CDLL, hidden: Collection[str]) -> list[str]:
    """No writing but to /dev/null, no reading of hidden paths, no TCP, and no signal to and no look into processes
    outside; what is missing."""
    version = libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if version < 1:
        return ["no Landlock against writing and signals"]
    write, read, truncate = 1 << 1, (1 << 2 if hidden else 0), (1 << 14 if version >= 3 else 0)
    handled = write | read | truncate | sum(1 << bit for bit in range(4, 13)) | (1 << 13 if version >= 2 else 0)
    fields = [handled, *([0b11] if version >= 4 else []), *([0b11] if version >= 6 else [])]
    rules = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = libc.syscall(LANDLOCK_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint(0))
    if ruleset < 0:
        return [f"no Landlock against writing and signals: {os.strerror(ctypes.get_errno())}"]
    null = os.open(os.devnull, os.O_PATH | os.O_CLOEXEC)
    try:
        _add_rule(libc, ruleset, write | read | truncate, null)
        for path in list_readable(hidden):
            _allow_reading(libc, ruleset, read, path)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, ctypes.c_uint(0)) != 0:
            return [f"no Landlock against writing and signals: {os.strerror(ctypes.get_errno())}"]
    finally:
        os.close(null)
        os.close(ruleset)
    return [] if version >= 6 else ["no fence against signals to other processes: the kernel is older than 6.12"]


def _add_rule(libc: ctypes.CDLL, ruleset: int, rights: int, place: int) -> None:
    libc.syscall(LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, place), ctypes.c_uint(0))


def _allow_reading(libc: ctypes.CDLL, ruleset: int, read: int, path: str) -> None:
    with suppress(OSError):  # it went meanwhile, or is closed to this user anyway
        place = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            _add_rule(libc, ruleset, read, place)
        finally:
            os.close(place)


def drop_capabilities(libc: ctypes.CDLL) -> None:
    """Root without capabilities is a user like any other. A process that has none keeps none."""
    header, none = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    libc.capset(header, none)


def install_filter(libc: ctypes.CDLL) -> None:
    """Put the seccomp filter of a box without namespaces around this process; OSError where that cannot be done."""
    program = build_box_filter(namespaces=False)
    if program is None:
        raise OSError(f"no seccomp filter is written for {platform.machine()}")
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(_FilterProgram(len(program) // 8, program))) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def die_with_starter() -> None:
    """Be killed when the thread that started this process ends."""
    if sys.platform == "linux":
        load_libc().prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)


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
