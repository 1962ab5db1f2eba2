"""Escapes from a box, tried under each provider that runs here; none succeeds.

Each attack is a Python program that runs in a box and calls `escaped` where it got what it should not; or one of the
functions below, which look from outside. `python tests/attacks/test_sandbox_providers.py` tries all of them and writes
the table of docs/sandbox.md.
"""

import asyncio
import ctypes
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.boxes import LOCAL, image_of, why_not
from treadle.sandbox.box import InitBox
from treadle.sandbox.protocol import BoxSettings
from treadle.sandbox.providers import PROVIDERS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="boxes are Linux's")

HEAD = """
import ctypes, os, socket, struct, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def escaped(what=""):
    print("ESCAPED", what)
def call(number, *arguments):
    result = libc.syscall(number, *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result
"""

KINDS: dict[str, dict[str, str]] = {
    "the journal and other files": {
        "read the journal": "escaped(open({journal!r}).read())",
        "list the run directory": "escaped(os.listdir({run!r}))",
        "append to the journal": "open({journal!r}, 'a').write('x'); escaped()",
        "empty the journal": "os.truncate({journal!r}, 0); escaped()",
        "delete the journal": "os.unlink({journal!r}); escaped()",
        "rename the journal": "os.rename({journal!r}, {journal!r} + '.old'); escaped()",
        "make the journal readable": "os.chmod({journal!r}, 0o777); escaped()",
        "date the journal back": "os.utime({journal!r}, (0, 0)); escaped()",
        "a file beside the journal": "open({run!r} + '/planted', 'w'); escaped()",
        "a symbolic link to the journal": "os.symlink({journal!r}, 'link'); escaped(open('link').read())",
        "a hard link to the journal": "os.link({journal!r}, 'hard'); escaped(open('hard').read())",
        "a path with many ..": "escaped(open('../' * 20 + {journal!r}).read())",
        "read the password hashes": "escaped(open('/etc/shadow').read())",
        "read the home directory": "escaped() if len(os.listdir({user_home!r})) > 1 else 0",
        "plant a program in /usr": "open('/usr/bin/planted', 'w'); escaped()",
        "plant a file in /etc": "open('/etc/planted', 'w'); escaped()",
        "plant a file in a module of Python": "open(os.path.dirname(os.__file__) + '/planted.py', 'w'); escaped()",
    },
    "other sessions": {
        "read another session's file": "escaped(open({other!r} + '/secret').read()) if {other!r} != os.getcwd() else 0",
        "write to another session": "open({other!r} + '/planted', 'w'); escaped() if {other!r} != os.getcwd() else 0",
        "find another session's processes": "escaped() if b'other-session' in b''.join(open(f'/proc/{{p}}/cmdline',"
        " 'rb').read() for p in os.listdir('/proc') if p.isdigit() and int(p) != os.getpid()) else 0",
    },
    "keys and processes outside": {
        "an API key in the environment": "escaped() if 'secret-key' in str(os.environ) else 0",
        "the environment of a process outside": "'secret-key' in open('/proc/{victim}/environ').read() and escaped()",
        "the memory of the run": "escaped() if {parent} > 3 and open('/proc/{parent}/mem', 'rb') else 0",
        "the files of the run, by its root": "escaped(open('/proc/{parent}/root' + {journal!r}).read())",
        "the directory of the run": "escaped() if 'treadle' in os.listdir('/proc/{parent}/cwd') else 0",
        "the descriptors of the run": "escaped(os.listdir('/proc/{parent}/fd')) if {parent} > 3 else 0",
        "a signal to a process outside": "os.kill({victim}, 15); escaped()",
        "a signal to its group": "os.killpg({victim}, 15); escaped()",
        "a signal by pidfd": "fd = os.pidfd_open({victim}); __import__('signal').pidfd_send_signal(fd, 15); escaped()",
        "trace a process outside": "call(101, 16, {victim}, 0, 0); escaped()",
        "read its memory": "b = ctypes.create_string_buffer(8); v = struct.pack('PN', ctypes.addressof(b), 8);"
        " call(310, {victim}, v, 1, v, 1, 0); escaped()",
        "lower its limits": "call(302, {victim}, 7, struct.pack('QQ', 3, 3), None); escaped()",
        "lower its priority": "os.setpriority(os.PRIO_PROCESS, {victim}, 19); escaped()",
    },
    "the box's own init": {
        "end init": "os.kill(os.getppid(), 9); time.sleep(0.2); os.kill(os.getppid(), 0)",
        "trace init": "call(101, 16, os.getppid(), 0, 0); escaped()",
        "write init's memory": "open(f'/proc/{{os.getppid()}}/mem', 'r+b'); escaped()",
        "answer in init's place": """
            for name in os.listdir(f"/proc/{{os.getppid()}}/fd"):
                try:
                    os.open(f"/proc/{{os.getppid()}}/fd/{{name}}", os.O_WRONLY)
                    escaped(name)
                except OSError:
                    pass""",
        "a reply on standard output": "os.write(1, b'\\0\\0\\0\\x10\\0\\0\\0\\x04done')",
        "descriptors that were inherited": """
            for number in range(3, 1024):
                try:
                    os.fstat(number)
                    escaped(number)
                except OSError:
                    pass""",
    },
    "network": {
        "a service of this machine": "socket.create_connection(('127.0.0.1', {port}), 2); escaped()",
        "the same by IPv6": "socket.create_connection(('::1', {port}), 2); escaped()",
        "another machine": "socket.create_connection(('192.0.2.1', 80), 2); escaped()",
        "a datagram": "s = socket.socket(type=socket.SOCK_DGRAM); s.sendto(b'x', ('192.0.2.1', 53)); escaped()",
        "DNS": "escaped(socket.getaddrinfo('example.com', 80))",
        "a local socket": "s = socket.socket(socket.AF_UNIX); s.connect({unix!r}); escaped()",
        "an abstract local socket": "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + {abstract!r}); escaped()",
        "a local datagram socket, by a pair": "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM);"
        " a.sendto(b'x', {datagrams!r}); escaped()",
        "the same, with other flags": "a, b = socket.socketpair(1, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC |"
        " socket.SOCK_NONBLOCK); a.sendto(b'x', {datagrams!r}); escaped()",
        "an abstract datagram socket": "a, b = socket.socketpair(1, 2); a.sendto(b'x', '\\0' + {abstract!r} + 'd');"
        " escaped()",
        "the virtual machine's host": "socket.socket(40, socket.SOCK_STREAM); escaped()",
        "raw packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); escaped()",
        "the kernel's crypto sockets": "socket.socket(38, 5); escaped()",
        "shared memory of another program": "call(29, {segment}, 4096, 0); escaped()",
    },
    "shared objects of other programs, by number": {
        "attach memory by id": "call(30, {memory}, 0, 0); escaped()",
        "state of memory by id": "call(31, {memory}, 2, ctypes.create_string_buffer(256)); escaped()",
        "send to a queue by id": "call(69, {queue}, struct.pack('l', 1) + b'x', 1, 0o4000); escaped()",
        "receive from a queue by id": "call(70, {queue}, ctypes.create_string_buffer(64), 8, 0, 0o4000); escaped()",
        "state of a queue by id": "call(71, {queue}, 2, ctypes.create_string_buffer(256)); escaped()",
        "raise a semaphore by id": "call(65, {semaphore}, struct.pack('HhH', 0, 1, 0), 1); escaped()",
        "the same, with a timeout": "call(220, {semaphore}, struct.pack('HhH', 0, 1, 0), 1, None); escaped()",
        "read a semaphore by id": "call(66, {semaphore}, 0, 12, 0); escaped()",
        "unlink a queue by name": "call(241, {posix_queue!r}); escaped()",
    },
    "the kernel": {
        "a user namespace": "call(272, 0x10000000); escaped()",
        "a namespace by clone": "libc.clone; call(56, 0x10000011, 0, 0, 0, 0) or os._exit(0); escaped()",
        "the namespaces of the run": "fd = os.open('/proc/{parent}/ns/mnt', 0); call(308, fd, 0); escaped()",
        "mount a file system": "os.mkdir('m'); call(165, b'none', b'm', b'tmpfs', 0, None); escaped()",
        "change the root": "os.chroot('.'); escaped()",
        "become root": "os.setuid(0) if os.getuid() else os.setuid(12345); os.setgid(54321); escaped()",
        "a device": "os.mknod('disk', 0o60666, os.makedev(254, 0)); open('disk').read(1); escaped()",
        "the key ring": "call(248, b'user', b'name', b'x', 1, -3); escaped()",
        "BPF": "call(321, 0, None, 0); escaped()",
        "io_uring": "call(425, 1, ctypes.create_string_buffer(200)); escaped()",
        "userfaultfd": "call(323, 0); escaped()",
        "performance counters": "call(298, struct.pack('II112x', 1, 112), 0, -1, -1, 0); escaped()",
        "files by handle": "call(304, -100, ctypes.create_string_buffer(16), 0); escaped()",
        "a setting of the kernel": "f = open('/proc/sys/kernel/core_pattern', 'r+'); f.write(f.read()); escaped()",
        "the magic keys": "open('/proc/sysrq-trigger', 'w'); escaped()",
        "a limit of all users": "open('/proc/sys/user/max_user_namespaces', 'r+'); escaped()",
        "the memory of the kernel": "escaped() if open('/proc/kcore', 'rb').read(1) else 0",
        "its control group": "os.mkdir('/sys/fs/cgroup/pids/out'); escaped()",
        "the host's name": "socket.sethostname('other'); escaped()",
        "the clock": "time.clock_settime(time.CLOCK_REALTIME, 0); escaped()",
        "the terminal": "fd = os.open('/dev/tty', os.O_RDWR); import fcntl; fcntl.ioctl(fd, 0x5412, b'x'); escaped()",
        "higher limits": "import resource; resource.setrlimit(resource.RLIMIT_CPU, (-1, -1)); escaped()",
    },
}

SMALL = {"memory_mb": 128, "processes": 40, "disk_mb": 24, "cpu_time_s": 2, "timeout_s": 30.0}


async def fork_bomb(box: InitBox, seen: SimpleNamespace) -> bool:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: os.sched_yield()"
    running = asyncio.ensure_future(box.exec(["python3", "-c", bomb], timeout_s=3))
    most = 0
    while not running.done():
        most = max(most, len(below(box._process.pid)))
        await asyncio.sleep(0.02)
    await running
    left = await box.exec(["sh", "-c", "echo alive"])
    # Without a control group they are counted from time to time, and the box is emptied.
    bound = 60 if box._cgroup is not None else 20_000
    return most > bound or left.stdout != b"alive\n" or len(below(box._process.pid)) > 4


async def fill_the_disk(box: InitBox, seen: SimpleNamespace) -> bool:
    fill = "i=0; while [ $i -lt 500 ]; do head -c 8000000 /dev/zero > fill$i || exit 1; i=$((i+1)); done; echo full"
    result = await box.exec(["sh", "-c", fill])
    used = await box.exec(["du", "-sk", "."])
    size = int(used.stdout.split()[0]) if used.stdout else 0
    # Where files are counted from time to time, how much fits between two looks depends on the disk: the end counts.
    counted = any("files are counted" in line for line in box.not_protected)
    return b"full" in result.stdout or (size > 3 * 24 * 1024 and not counted)


async def fill_shared_memory(box: InitBox, seen: SimpleNamespace) -> bool:
    result = await box.exec(["sh", "-c", "head -c 100000000 /dev/zero > /dev/shm/fill && echo full"])
    return b"full" in result.stdout


async def one_large_file(box: InitBox, seen: SimpleNamespace) -> bool:
    result = await box.exec(["sh", "-c", "head -c 100000000 /dev/zero > fill && echo full"])
    return b"full" in result.stdout


async def use_much_memory(box: InitBox, seen: SimpleNamespace) -> bool:
    result = await box.exec(
        ["python3", "-c", "x = bytearray(400 << 20); x[::4096] = b'x' * len(x[::4096]); print('full')"]
    )
    return b"full" in result.stdout


async def use_memory_in_many_processes(box: InitBox, seen: SimpleNamespace) -> bool:
    code = (
        "import os, time\nfor _ in range(12): os.fork() or (bytearray(b'x' * (60 << 20)), time.sleep(5), os._exit(0))"
    )
    code += "\nprint(sum(os.wait()[1] == 0 for _ in range(12)))"
    result = await box.exec(["python3", "-c", code])
    return result.stdout.strip() == b"12"


async def use_much_cpu(box: InitBox, seen: SimpleNamespace) -> bool:
    result = await box.exec(["python3", "-c", "while True: pass"])
    return result.timed_out or result.code == 0


async def print_without_end(box: InitBox, seen: SimpleNamespace) -> bool:
    result = await box.exec(["sh", "-c", "yes | head -c 50000000"])
    return len(result.stdout) > 1 << 20


async def survive_the_deadline(box: InitBox, seen: SimpleNamespace) -> bool:
    daemon = "trap '' TERM HUP INT; (setsid sh -c 'trap \"\" TERM HUP; while :; do sleep 0.05; done' &); sleep 100"
    await box.exec(["sh", "-c", daemon], timeout_s=0.5)
    return len(below(box._process.pid)) > 2


async def survive_the_box(box: InitBox, seen: SimpleNamespace) -> bool:
    await box.exec(["sh", "-c", "(setsid sh -c 'trap \"\" TERM HUP; sleep 87654.321' &)"])
    await box.stop()
    found = await asyncio.create_subprocess_exec("pgrep", "-f", "sleep 87654.321")
    return await found.wait() == 0


async def link_for_the_reader(box: InitBox, seen: SimpleNamespace) -> bool:
    """The host reads and writes files by name: a link must not lead it out."""
    await box.exec(["ln", "-s", seen.journal, "result.txt"])
    try:
        data = await box.read_file("result.txt")
    except OSError:
        data = b""
    with suppress(OSError):
        await box.write_file("result.txt", b"changed")
    return b"journal" in data or harmed(seen)


async def read_the_channel(box: InitBox, seen: SimpleNamespace) -> bool:
    """A name that leads to init's own descriptors."""
    for name in ("/proc/self/fd/3", "/proc/1/fd/3", "/dev/fd/4", f"/proc/{box._process.pid}/fd/0"):
        try:
            await box.read_file(name)
        except OSError:
            continue
    return (await box.exec(["echo", "works"])).stdout != b"works\n"


OUTSIDE: dict[str, Callable[[InitBox, SimpleNamespace], Awaitable[bool]]] = {
    "a fork bomb": fork_bomb,
    "fill the disk": fill_the_disk,
    "one large file": one_large_file,
    "fill shared memory": fill_shared_memory,
    "much memory": use_much_memory,
    "memory in many processes": use_memory_in_many_processes,
    "much CPU": use_much_cpu,
    "print without end": print_without_end,
    "survive the deadline": survive_the_deadline,
    "survive the box": survive_the_box,
    "a link for the host's reader": link_for_the_reader,
    "a name of init's descriptors": read_the_channel,
}
LIMITS = "limits and survivors"
ATTACKS = [
    *((kind, name) for kind, attacks in KINDS.items() for name in attacks),
    *((LIMITS, name) for name in OUTSIDE),
]


def below(pid: int) -> list[int]:
    listing = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(word) for word in listing.read_text().split()] if listing.exists() else []
    return found + [member for child in found for member in below(child)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    yield from targets(tmp_path_factory.mktemp("run"))


def targets(run: Path) -> Iterator[SimpleNamespace]:
    """What attacks aim at: a journal, a key, a process, services, shared memory."""
    (run / "journal.sqlite").write_text("the journal")
    os.environ["SECRET_API_KEY"] = "secret-key"
    victim = subprocess.Popen(
        ["sleep", "1000"], start_new_session=True, env={"SECRET_API_KEY": "secret-key", **os.environ}
    )
    service, local, abstract = (
        socket.create_server(("127.0.0.1", 0)),
        socket.socket(socket.AF_UNIX),
        socket.socket(socket.AF_UNIX),
    )
    local.bind(str(run / "socket"))
    local.listen()
    abstract.bind(f"\0treadle-{os.getpid()}")
    abstract.listen()
    datagrams, abstract_datagrams = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
    datagrams.bind(str(run / "datagrams"))
    os.chmod(run / "datagrams", 0o666)
    abstract_datagrams.bind(f"\0treadle-{os.getpid()}d")
    kept = os.open(run / "journal.sqlite", os.O_RDONLY)
    os.set_inheritable(kept, True)
    libc = ctypes.CDLL(None)
    segment = 0x5EC2E7
    shared = libc.shmget(segment, 4096, 0o1666)
    queue, semaphore, posix_queue = libc.msgget(0, 0o1666), libc.semget(0, 1, 0o1666), f"treadle-{os.getpid()}"
    named = libc.mq_open(f"/{posix_queue}".encode(), os.O_CREAT | os.O_RDWR, 0o666, None)
    libc.msgsnd(queue, struct.pack("l", 1) + b"x", 1, 0)
    assert min(shared, queue, semaphore, named) >= 0
    seen = SimpleNamespace(
        run=str(run), journal=str(run / "journal.sqlite"), victim=victim.pid, port=service.getsockname()[1],
        unix=str(run / "socket"), abstract=f"treadle-{os.getpid()}", parent=os.getpid(), segment=segment,
        memory=shared, queue=queue, semaphore=semaphore, posix_queue=posix_queue.encode(),
        user_home=str(Path.home()), other="",
        datagrams=str(run / "datagrams"),
    )  # fmt: skip
    try:
        yield seen
    finally:
        victim.kill()
        victim.wait()
        libc.shmctl(shared, 0, None)
        libc.msgctl(queue, 0, None)
        libc.semctl(semaphore, 0, 0, None)
        libc.mq_unlink(f"/{posix_queue}".encode())
        os.close(named)
        os.close(kept)
        for opened in (service, local, abstract, datagrams, abstract_datagrams):
            opened.close()


def attempt(provider: str, kind: str, name: str, seen: SimpleNamespace) -> bool:
    """Whether an attack succeeds."""
    return asyncio.run(_attempt(provider, kind, name, seen))


async def _attempt(provider: str, kind: str, name: str, seen: SimpleNamespace) -> bool:
    make = PROVIDERS[provider]
    settings = BoxSettings(provider, image_of(provider), **SMALL)
    box, other = make(settings), make(settings)
    await box.start()
    try:
        if kind == LIMITS:
            return await OUTSIDE[name](box, seen)
        if kind == "other sessions":
            await other.start()
            await other.write_file("secret", b"of the other session")
            await other.spawn(["sh", "-c", "read line; : other-session"])
            seen.other = other.home
        code = textwrap.dedent(KINDS[kind][name]).strip().format(**vars(seen))
        program = (
            f"{HEAD}\ntry:\n{textwrap.indent(code, '    ')}\nexcept BaseException as error:\n    print(repr(error))\n"
        )
        result = await box.exec(["python3", "-c", program])
        works = await box.exec(["echo", "works"])
        return b"ESCAPED" in result.stdout or works.stdout != b"works\n" or harmed(seen)
    finally:
        await box.stop()
        await other.stop()


def harmed(seen: SimpleNamespace) -> bool:
    """Whether something outside has changed."""
    journal = Path(seen.journal)
    whole = journal.exists() and journal.read_text() == "the journal" and journal.stat().st_mtime > 1000
    try:
        os.kill(seen.victim, 0)
        running = "State:\tZ" not in Path(f"/proc/{seen.victim}/status").read_text()
    except OSError:
        running = False
    return not whole or not running or sorted(os.listdir(seen.run)) != ["datagrams", "journal.sqlite", "socket"]


@pytest.mark.parametrize("provider", LOCAL)
@pytest.mark.parametrize(("kind", "name"), ATTACKS, ids=[name.replace(" ", "-") for _, name in ATTACKS])
def test_no_escape_succeeds(provider: str, kind: str, name: str, target: SimpleNamespace) -> None:
    if why_not(provider) is not None:
        pytest.skip(f"{provider}: {why_not(provider)}")
    assert not attempt(provider, kind, name, target)


def test_an_attack_that_succeeds_is_seen(target: SimpleNamespace) -> None:
    """Without a box the same programs get what they want."""
    names = (
        "read the journal",
        "list the run directory",
        "the environment of a process outside",
        "a service of this machine",
        *KINDS["shared objects of other programs, by number"],
    )
    for kind, attacks in KINDS.items():
        for name in names:
            if name in attacks:
                program = f"{HEAD}\n{attacks[name].format(**vars(target))}"
                done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
                assert b"ESCAPED" in done.stdout, (kind, name, done.stderr)


def write_table(page: Path) -> None:
    """Try everything, and write what each provider stops into the page."""
    import tempfile

    providers = [provider for provider in LOCAL if why_not(provider) is None]
    lines = [f"| attacks | {' | '.join(providers)} |", "|---|" + "---|" * len(providers)]
    run = targets(Path(tempfile.mkdtemp()))
    target = next(run)
    for kind in (*KINDS, LIMITS):
        names = [name for where, name in ATTACKS if where == kind]
        cells = []
        for provider in providers:
            through = [name for name in names if attempt(provider, kind, name, target)]
            cells.append(
                f"{len(names) - len(through)} of {len(names)} stopped" + "".join(f"; not: {name}" for name in through)
            )
        lines.append(f"| {kind}: {', '.join(names)} | {' | '.join(cells)} |")
    text = page.read_text()
    table = "<!-- attacks -->\n" + "\n".join(lines) + "\n<!-- end of attacks -->"
    page.write_text(re.sub(r"<!-- attacks -->.*<!-- end of attacks -->", lambda _: table, text, flags=re.DOTALL))
    os.kill(target.victim, signal.SIGKILL)


def test_the_page_lists_every_attack() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sandbox.md").read_text()
    table = page.partition("<!-- attacks -->")[2].partition("<!-- end of attacks -->")[0]
    assert [name for _, name in ATTACKS if name not in table] == []
    assert "; not: " not in table


def test_the_security_page_says_what_the_table_says() -> None:
    """Which providers stop all attacks, and how many of them were tried under the others."""
    root = Path(__file__).parents[2]
    table = (root / "docs" / "sandbox.md").read_text().partition("<!-- attacks -->")[2].partition("<!--")[0]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")[1:]] for line in table.strip().splitlines()]
    stopped = {
        name: sum(int(row[at].split()[0]) for row in rows if row[at] != "not tried") for at, name in enumerate(head)
    }
    whole = [name for name, count in stopped.items() if count == len(ATTACKS)]
    rest = "".join(f", {count} of them under {name}" for name, count in stopped.items() if name not in whole)
    said = f"tries {len(ATTACKS)} escapes under {' and '.join(whole)}{rest}; none succeeds"
    assert said in " ".join((root / "SECURITY.md").read_text().split())


if __name__ == "__main__":
    write_table(Path(__file__).parents[2] / "docs" / "sandbox.md")
