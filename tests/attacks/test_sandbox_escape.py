"""Hostile reward functions: what code that a sandboxed function evaluates can reach, and what it cannot.

Each function below stands for a text that a policy wrote and a reward function executed. Those of `ESCAPES` return how
much they got out of it: 0.0 where the fence held.
"""

import asyncio
import contextlib
import ctypes
import gc
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import chaos
from treadle.config.reward import RewardConfig, RewardFunctionConfig
from treadle.process.channel import HEADER
from treadle.process.codec import RecordCodec
from treadle.process.rpc import RpcReply
from treadle.reward.context import RewardContext
from treadle.reward.result import Fault, ScoreFailure
from treadle.reward.sandbox import code, run_python
from treadle.reward.sandbox.process import WorkerProcess, worker_environment
from treadle.reward.sandbox.protocol import FunctionReply
from treadle.reward.scorer import Scorer
from treadle.sandbox.confine import drop_capabilities, list_readable, load_libc, usual_secrets
from treadle.types import Outcome, Score, StopReason, Task, Trajectory

HERE = __name__
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's fences are Linux's")


def hostile(extra: dict[str, Any], response: str) -> Any:
    return globals()[extra["how"]](extra) if extra.get("how") else float(len(response))


def _tries(*actions: Callable[[], Any]) -> float:
    """How many of these succeed."""
    done = 0
    for action in actions:
        with contextlib.suppress(Exception):
            if callable(close := getattr(action(), "close", None)):
                close()
            done += 1
    return float(done)


# What must not succeed, and what is then returned.


def write_a_file(extra: dict[str, Any]) -> float:
    return _tries(
        lambda: Path(extra["target"]).write_text("x"),
        lambda: os.open(extra["target"], os.O_CREAT | os.O_WRONLY),
        lambda: Path("/dev/shm/treadle_was_here").write_text("x"),
        lambda: open(__file__, "a"),
    )


def change_the_disk(extra: dict[str, Any]) -> float:
    there = extra["there"]
    return _tries(
        lambda: os.remove(there),
        lambda: os.rename(there, there + ".moved"),
        lambda: os.chmod(there, 0o777),
        lambda: os.truncate(there, 0),
        lambda: os.symlink(there, there + ".link"),
        lambda: os.link(there, there + ".hard"),
        lambda: os.mkdir(there + ".d"),
        lambda: os.utime(there, (0, 0)),
        lambda: os.setxattr(there, "user.x", b"1"),
        lambda: os.mkfifo(there + ".fifo"),
    )


def open_sockets(extra: dict[str, Any]) -> float:
    kinds = [(family, kind) for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX) for kind in (1, 2)]
    return _tries(
        *(lambda pair=pair: socket.socket(*pair) for pair in kinds),  # type: ignore[misc]
        lambda: socket.create_connection(("127.0.0.1", extra["port"]), 1),
        lambda: socket.create_server(("127.0.0.1", 0)),
        lambda: [end.close() for end in socket.socketpair(type=socket.SOCK_DGRAM)],  # to any local socket, by address
    )


def connect_from_a_shell(extra: dict[str, Any]) -> float:
    program = f"import socket; socket.create_connection(('127.0.0.1', {extra['port']}), 1)"
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0)


def fork_and_exec_beneath_subprocess(extra: dict[str, Any]) -> float:
    """The audit hooks of Python never saw this one."""
    import _posixsubprocess

    touch = [b"/usr/bin/touch", b"/bin/touch"]
    gate, error = os.pipe()
    arguments = ([b"touch", os.fsencode(extra["target"])], touch, True, (error,), None, None)
    _posixsubprocess.fork_exec(
        *arguments, -1, -1, -1, -1, -1, -1, gate, error, False, False, -1, None, None, None, -1, None, True
    )
    with contextlib.suppress(ChildProcessError):
        os.wait()
    return float(Path(extra["target"]).exists())


def lower_every_fence(extra: dict[str, Any]) -> float:
    """Whatever looks like a switch is thrown: objects in memory, modules, hooks."""
    for thing in gc.get_objects():
        for name in ("up", "built", "sandbox", "enabled"):
            with contextlib.suppress(Exception):
                if isinstance(getattr(thing, name, None), bool):
                    object.__setattr__(thing, name, False)
    return write_a_file(extra)


def read_secrets(extra: dict[str, Any]) -> float:
    found = [name for name in os.environ if "KEY" in name or "TOKEN" in name or "SECRET" in name]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += [process.name] * (b"sk-secret" in (process / "environ").read_bytes())
    for pid in (extra["driver"], extra["bystander"]):
        with contextlib.suppress(OSError):
            found += [pid] * bool(Path(f"/proc/{pid}/environ").read_bytes())
    return float(len(found))


def trace_other_processes(extra: dict[str, Any]) -> float:
    libc, attach, seize = load_libc(), 16, 0x4206
    pids = (os.getppid(), extra["driver"], extra["bystander"])
    return float(sum(libc.ptrace(request, pid, None, None) == 0 for request in (attach, seize) for pid in pids))


def read_memory_of_others(extra: dict[str, Any]) -> float:
    libc, got = load_libc(), 0.0
    for pid in (os.getppid(), extra["driver"], extra["bystander"]):
        buffer = ctypes.create_string_buffer(8)
        local = struct.pack("PN", ctypes.addressof(buffer), 8)
        got += libc.process_vm_readv(pid, local, 1, struct.pack("PN", id(extra), 8), 1, 0) > 0
        got += _tries(
            lambda pid=pid: os.open(f"/proc/{pid}/mem", os.O_RDONLY),
            lambda pid=pid: Path(f"/proc/{pid}/maps").read_text()[0],
            lambda pid=pid: os.readlink(f"/proc/{pid}/fd/0"),
        )  # type: ignore[misc]
    return got


def steal_descriptors(extra: dict[str, Any]) -> float:
    pidfd_getfd, got = 438, 0.0
    for pid in (os.getppid(), extra["driver"]):
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(pid)
            got += sum(load_libc().syscall(pidfd_getfd, handle, number, 0) >= 0 for number in range(64))
    return got


def signal_the_driver(extra: dict[str, Any]) -> float:
    return _tries(
        lambda: os.kill(extra["driver"], 0),
        lambda: os.kill(extra["driver"], signal.SIGCONT),
        lambda: signal.pidfd_send_signal(os.pidfd_open(extra["driver"]), signal.SIGCONT),
    )


def raise_limits(extra: dict[str, Any]) -> float:
    most = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_DATA)
    return _tries(
        *(lambda kind=kind: resource.setrlimit(kind, most) for kind in kinds),  # type: ignore[misc]
        *(lambda kind=kind: resource.prlimit(os.getppid(), kind, most) for kind in kinds),  # type: ignore[misc]
    )


def hide_memory_in_files(extra: dict[str, Any]) -> float:
    return _tries(
        lambda: os.memfd_create("x"),
        lambda: os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR),
        lambda: os.open("/tmp", os.O_TMPFILE | os.O_RDWR),
    ) + float(load_libc().shmget(0, 1 << 20, 0o1600) >= 0)


def use_shared_objects_by_id(extra: dict[str, Any]) -> float:
    """System V objects of other programs need no name, only a number that is easily guessed."""
    libc, message, stated = load_libc(), struct.pack("l", 1) + b"x", ctypes.create_string_buffer(256)
    libc.shmat.restype = ctypes.c_long
    memory, queue, semaphore, no_wait = *extra["objects"], 0o4000
    got = float(libc.shmat(memory, None, 0) != -1) + (libc.shmctl(memory, 2, stated) == 0)
    got += (libc.msgsnd(queue, message, 1, no_wait) == 0) + (libc.msgctl(queue, 2, stated) == 0)
    got += libc.msgrcv(queue, stated, 8, 0, no_wait) >= 0
    got += libc.semop(semaphore, struct.pack("HhH", 0, 1, 0), 1) == 0
    got += libc.semtimedop(semaphore, struct.pack("HhH", 0, 1, 0), 1, struct.pack("ll", 1, 0)) == 0
    return got + (libc.semctl(semaphore, 0, 12, 0) >= 0)


def unlink_a_queue_by_name(extra: dict[str, Any]) -> float:
    return float(load_libc().mq_unlink(extra["queue"].encode()) == 0)


def pin_to_a_core(extra: dict[str, Any]) -> float:
    core = {min(os.sched_getaffinity(0))}
    return _tries(*(lambda pid=extra[name]: os.sched_setaffinity(pid, core) for name in ("driver", "bystander")))


def make_namespaces(extra: dict[str, Any]) -> float:
    libc = load_libc()
    flags = (0x10000000, 0x40000000, 0x00020000, 0x20000000)
    made = sum(libc.unshare(flag) == 0 for flag in flags)
    return float(made + (libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0) + (libc.chroot(b"/tmp") == 0))


def use_io_uring(extra: dict[str, Any]) -> float:
    return float(load_libc().syscall(425, 8, ctypes.create_string_buffer(256)) >= 0)


def call_by_another_abi(extra: dict[str, Any]) -> float:
    """x32's number for socket: refused by ending the process."""
    return float(load_libc().syscall(0x40000000 | 41, 2, 1, 0) >= 0)


ESCAPES = [
    write_a_file,
    change_the_disk,
    open_sockets,
    connect_from_a_shell,
    fork_and_exec_beneath_subprocess,
    lower_every_fence,
    read_secrets,
    trace_other_processes,
    read_memory_of_others,
    steal_descriptors,
    signal_the_driver,
    raise_limits,
    hide_memory_in_files,
    use_shared_objects_by_id,
    unlink_a_queue_by_name,
    pin_to_a_core,
    make_namespaces,
    use_io_uring,
]

# What forges, lingers, or takes too much.


def forge_on_every_descriptor(extra: dict[str, Any]) -> float:
    body = b'{"score": 99, "parts": {}, "extra": {}}'
    frames = [body, *(forged_reply(number, body) for number in range(2))]
    for number in range(64):
        for frame in frames:
            with contextlib.suppress(OSError):
                os.write(number, framed(frame))
    return 1.0


def framed(body: bytes) -> bytes:
    return HEADER.pack(len(body)) + body


def forged_reply(number: int, body: bytes) -> bytes:
    """A reply as the parent reads it, to a request with that number."""
    return RecordCodec(replies=(FunctionReply,)).encode(RpcReply(number, FunctionReply(body)))


def forge_a_whole_reply(extra: dict[str, Any]) -> float:
    """The first request's reply as the parent reads it, but for its number; and none of its own."""
    frame = forged_reply(0, b'{"score": 99, "parts": {}, "extra": {}}')
    for number in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(number, framed(frame))
    time.sleep(60)
    return 1.0


def reply_twice(extra: dict[str, Any]) -> float:
    body = b'{"score": 1, "parts": {}, "extra": {}}'
    os.write(3, framed(body) * 2)
    return 1.0


def linger_in_a_thread(extra: dict[str, Any]) -> float:
    def later() -> None:
        time.sleep(0.2)
        while True:
            forge_on_every_descriptor(extra)

    threading.Thread(target=later, daemon=True).start()
    return 1.0


def linger_in_a_child(extra: dict[str, Any]) -> float:
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            time.sleep(0.2)
            while True:
                forge_on_every_descriptor(extra)
    return 1.0


def change_later_scores(extra: dict[str, Any]) -> float:
    globals()["hostile"] = lambda extra, response: 77.0
    sys.modules[__name__].hostile = globals()["hostile"]  # type: ignore[attr-defined]
    for function in gc.get_objects():
        with contextlib.suppress(Exception):
            if getattr(function, "__name__", "") in ("hostile", "encode", "read_score"):
                function.__code__ = (lambda *_, **__: b'{"score": 77, "parts": {}, "extra": {}}').__code__
    return 1.0


def fork_many(extra: dict[str, Any]) -> float:
    for _ in range(400):
        if os.fork() == 0:
            time.sleep(600)
    time.sleep(600)
    return 1.0


def undo_the_timer(extra: dict[str, Any]) -> float:
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    while True:
        pass


def fill_shared_memory(extra: dict[str, Any]) -> float:
    kept = []
    while True:
        kept.append(mmap.mmap(-1, 16 << 20))
        kept[-1][:] = b"x" * (16 << 20)


def call_sys_exit(extra: dict[str, Any]) -> None:
    sys.exit(0)


def kill_the_holder(extra: dict[str, Any]) -> float:
    os.kill(os.getppid(), signal.SIGKILL)
    return 1.0


def make_task(how: str | None = None, **extra: Any) -> Task:
    return Task("t", (), None, extra={"how": how, "driver": os.getpid(), **extra})


def make_config(*, sandbox: bool | None = True, **keys: Any) -> RewardConfig:
    functions = {"hostile": RewardFunctionConfig(path=f"{HERE}:hostile", sandbox=sandbox)}
    return RewardConfig(**{"functions": functions, "retries": 0, "timeout_s": 30.0, "memory_mb": 256, **keys})


async def attack(reward: RewardConfig, task: Task) -> tuple[float | ScoreFailure, list[float]]:
    """What came of the attack, and three honest scores after it: of answers of 1, 2 and 3 letters."""
    async with await Scorer.create(reward) as scorer:
        try:
            first: float | ScoreFailure = _value(await scorer.score(task, _say("x")))
        except ScoreFailure as failure:
            first = failure
        return first, [_value(await scorer.score(make_task(), _say("x" * size))) for size in (1, 2, 3)]


def _say(text: str) -> Trajectory:
    return Trajectory("t", 0, (), Outcome.ended(StopReason.STOP), messages=({"role": "assistant", "content": text},))


def _value(score: Score | None) -> float:
    assert score is not None
    return score.value


@pytest.fixture
def shared_objects() -> Iterator[dict[str, Any]]:
    """Memory, a queue and a semaphore that any program of the user's may use, by id; and a queue by its name."""
    libc, private, mode, remove, name = load_libc(), 0, 0o1666, 0, f"/treadle-{os.getpid()}"
    memory, queue = libc.shmget(private, 4096, mode), libc.msgget(private, mode)
    semaphore, named = libc.semget(private, 1, mode), libc.mq_open(name.encode(), os.O_CREAT | os.O_RDWR, 0o666, None)
    assert libc.msgsnd(queue, struct.pack("l", 1) + b"x", 1, 0) == 0 and min(memory, semaphore, named) >= 0
    try:
        yield {"objects": (memory, queue, semaphore), "queue": name}
    finally:
        libc.shmctl(memory, remove, None)
        libc.msgctl(queue, remove, None)
        libc.semctl(semaphore, 0, remove, None)
        libc.mq_unlink(name.encode())
        os.close(named)


def be_no_root() -> None:
    """Keep no capabilities beyond exec: the kernel protects a process that has more than who attacks it."""
    libc, set_securebits, no_root = load_libc(), 28, 1
    libc.prctl(set_securebits, no_root, 0, 0, 0)
    drop_capabilities(libc)


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_objects: dict[str, Any]) -> Any:
    """A file, a listening socket, shared objects and secrets within reach of whatever is not fenced off."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("HF_TOKEN", "hf-secret")
    (tmp_path / "there").write_text("there")
    sleeps = subprocess.Popen(["sleep", "600"], preexec_fn=be_no_root)
    with socket.create_server(("127.0.0.1", 0)) as server, sleeps as bystander:
        try:
            paths = {"target": str(tmp_path / "new"), "there": str(tmp_path / "there")}
            yield {**paths, "port": server.getsockname()[1], "bystander": bystander.pid, **shared_objects}
        finally:
            bystander.kill()
    assert sorted(os.listdir(tmp_path)) == ["there"] and (tmp_path / "there").read_text() == "there"
    assert not Path("/dev/shm/treadle_was_here").exists()


@pytest.mark.parametrize("escape", ESCAPES, ids=lambda escape: escape.__name__)
def test_the_fence_holds_against(escape: Callable[..., float], surroundings: dict[str, Any]) -> None:
    got, honest = asyncio.run(attack(make_config(), make_task(escape.__name__, **surroundings)))
    assert got == 0.0
    assert honest == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("escape", [write_a_file, open_sockets])
def test_the_attacks_succeed_where_there_is_no_fence(escape: Callable[..., float], tmp_path: Path) -> None:
    """Or the tests above would show nothing."""
    assert escape({"target": str(tmp_path / "new"), "port": 9}) > 0.0
    Path("/dev/shm/treadle_was_here").unlink(missing_ok=True)


def test_shared_objects_are_reached_where_there_is_no_fence(shared_objects: dict[str, Any]) -> None:
    """Or the same would hold for these."""
    assert use_shared_objects_by_id(shared_objects) == 8.0
    assert unlink_a_queue_by_name(shared_objects) == 1.0


def test_others_of_the_same_user_can_be_looked_into_where_there_is_no_fence(surroundings: dict[str, Any]) -> None:
    """Or the same would hold for attacks on other processes."""
    victim = surroundings["bystander"]
    assert b"sk-secret" in Path(f"/proc/{victim}/environ").read_bytes()
    assert load_libc().ptrace(0x4206, victim, None, None) == 0, "seized, which leaves it running"
    os.close(os.open(f"/proc/{victim}/mem", os.O_RDONLY))


def read_what_is_hidden(extra: dict[str, Any]) -> float:
    hidden = extra["hidden"]
    there = Path(hidden)
    around = (
        f"/proc/self/root{hidden}",
        f"/proc/{os.getpid()}/cwd/{os.path.relpath(hidden)}",
        f"{there.parent}/../one/x",
    )
    folder = os.open(there.parent, os.O_RDONLY)
    descriptor = os.open(hidden, os.O_PATH)
    got = _tries(
        *(lambda path=path: Path(path).read_text()[0] for path in (hidden, *around)),  # type: ignore[misc]
        lambda: os.close(os.open(there.name, os.O_RDONLY, dir_fd=folder)),
        lambda: os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)),
        lambda: subprocess.run(["cat", hidden], check=True, capture_output=True),
        lambda: mmap.mmap(os.open(hidden, os.O_RDONLY), 0, prot=mmap.PROT_READ),
    )
    assert Path(extra["beside"]).read_text() == "data", "all else can be read"
    assert Path(__file__).read_text() and os.listdir(there.parent)
    return got


@pytest.fixture
def run_directory(tmp_path: Path) -> dict[str, Any]:
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "x").write_text("journal")
    (tmp_path / "runs" / "data.txt").write_text("data")
    return {"hidden": str(run / "x"), "beside": str(tmp_path / "runs" / "data.txt"), "run": str(run)}


def test_code_in_a_sandbox_cannot_read_the_run_directory(run_directory: dict[str, Any]) -> None:
    async def main(hidden: tuple[str, ...]) -> float:
        async with await Scorer.create(make_config(), RewardContext(hidden=hidden)) as scorer:
            return _value(await scorer.score(make_task("read_what_is_hidden", **run_directory), _say("x")))

    assert asyncio.run(main((run_directory["run"],))) == 0.0
    assert asyncio.run(main(())) == 8.0, "or that would show nothing"


def test_nor_can_code_that_a_function_runs(run_directory: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "_HIDDEN", [])
    program = f"print(open({run_directory['hidden']!r}).read())"
    assert run_python(program).stdout == "journal\n"
    code.hide_from_code([run_directory["run"]])
    done = run_python(program)
    assert done.status == 1 and "PermissionError" in done.stderr and not done.stdout
    assert run_python(f"print(open({run_directory['beside']!r}).read())").stdout == "data\n"


def test_files_of_keys_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".cache" / "huggingface" / "hub").mkdir(parents=True)
    (tmp_path / ".cache" / "huggingface" / "token").write_text("hf-secret")
    hidden = usual_secrets()
    assert hidden == (str(tmp_path / ".ssh"), str(tmp_path / ".cache" / "huggingface" / "token"))
    readable = set(list_readable(hidden))
    assert str(tmp_path / ".cache" / "huggingface" / "hub") in readable and "/usr" in readable
    assert not any(path.startswith(hidden) or str(tmp_path).startswith(path) for path in readable)


def test_the_namespace_alone_keeps_the_driver_closed() -> None:
    program = """
import os, sys
from treadle.sandbox import confine
driver, missing = os.getppid(), confine.enter_empty_network()
if missing:
    sys.exit(missing)
for name in ("environ", "mem", "maps"):
    try:
        with open(f"/proc/{driver}/{name}", "rb") as file:
            print(name, bool(file.read(1)))
    except OSError:
        pass
if confine.load_libc().ptrace(0x4206, driver, None, None) == 0:
    print("seized")
"""
    done = chaos.run_python(program)
    if "no network namespace" in done.stderr:
        pytest.skip(done.stderr)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


NAMESPACE, LANDLOCK = ("no network namespace: Operation not permitted",), ("no Landlock against writing and signals",)


@pytest.mark.parametrize(("missing", "dumpable"), [((), 1), (LANDLOCK, 1), (NAMESPACE, 0)])
def test_the_driver_is_hidden_where_no_fence_keeps_a_sandboxed_function_from_looking_in(
    missing: tuple[str, ...], dumpable: int
) -> None:
    done = chaos.run_python(
        f"""
import asyncio, dataclasses
from treadle.reward.sandbox import process
from treadle.sandbox import confine
from treadle.reward.scorer import Scorer
from tests.attacks.test_sandbox_escape import make_config
read = process.read_report
process.read_report = lambda data: dataclasses.replace(read(data), missing={missing!r})

async def main():
    async with await Scorer.create(make_config(sandbox=None)):  # true would be refused
        print(confine.load_libc().prctl(3, 0, 0, 0, 0))  # PR_GET_DUMPABLE

asyncio.run(main())
"""
    )
    assert done.stdout == f"{dumpable}\n", done.stderr
    assert ("no core dump, no profiler" in done.stderr) is not bool(dumpable)


def test_another_abi_ends_the_process(surroundings: dict[str, Any]) -> None:
    got, honest = asyncio.run(attack(make_config(), make_task("call_by_another_abi", **surroundings)))
    assert isinstance(got, ScoreFailure) and got.fault is Fault.CRASH
    assert honest == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("forge_on_every_descriptor", None),
        ("reply_twice", Fault.CRASH),
        ("linger_in_a_thread", None),
        ("linger_in_a_child", None),
        ("change_later_scores", None),
        ("undo_the_timer", Fault.CPU_TIME),
        ("fill_shared_memory", Fault.MEMORY),
        ("call_sys_exit", Fault.CRASH),
        ("kill_the_holder", None),
    ],
)
def test_a_hostile_score_changes_no_other(how: str, fault: Fault | None) -> None:
    """The attack may spoil its own score; the honest ones after it are each their own answer's."""
    got, honest = asyncio.run(attack(make_config(cpu_time_s=1.0, timeout_s=300.0), make_task(how)))
    assert honest == [1.0, 2.0, 3.0]
    if fault is not None:
        assert isinstance(got, ScoreFailure) and got.fault is fault, got


def test_a_score_has_a_limit_of_processes() -> None:
    got, honest = asyncio.run(attack(make_config(cpu_time_s=60.0, memory_mb=16_384), make_task("fork_many")))
    assert isinstance(got, ScoreFailure) and "started more than 128 processes" in str(got), got
    assert honest == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("forge_on_every_descriptor", Fault.CRASH),
        ("forge_a_whole_reply", Fault.CRASH),
        ("undo_the_timer", Fault.CPU_TIME),
        ("fill_shared_memory", Fault.MEMORY),
    ],
)
def test_a_plain_function_has_limits_and_numbered_replies_too(how: str, fault: Fault) -> None:
    got, honest = asyncio.run(attack(make_config(sandbox=False, cpu_time_s=1.0), make_task(how)))
    assert isinstance(got, ScoreFailure) and got.fault is fault, got
    assert honest == [1.0, 2.0, 3.0]


def test_a_reply_after_the_last_ends_the_worker() -> None:
    """A thread of a plain function that replies between two requests still shifts nothing."""

    async def main() -> tuple[bool, list[float]]:
        async with await Scorer.create(make_config(sandbox=False)) as scorer:
            pool = scorer._pools[0]
            await scorer.score(make_task(), _say("x"))
            worker = pool._idle[0].process
            assert isinstance(worker, WorkerProcess)
            worker.process.channel.data_received(framed(forged_reply(1, b"{}")))
            usable = not worker.over
            return usable, [_value(await scorer.score(make_task(), _say("x" * size))) for size in (1, 2, 3)]

    assert asyncio.run(main()) == (False, [1.0, 2.0, 3.0])


def test_workers_are_given_no_keys_but_those_the_config_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_JUDGE"):
        monkeypatch.setenv(name, "secret")
    assert "secret" not in worker_environment().values()
    assert worker_environment(["MY_JUDGE"])["MY_JUDGE"] == "secret"

    async def main() -> float:
        function = RewardFunctionConfig(path=f"{HERE}:sees_variables", env=("MY_JUDGE",))
        async with await Scorer.create(RewardConfig(functions={"f": function})) as scorer:
            return _value(await scorer.score(make_task(), _say("x")))

    assert asyncio.run(main()) == 1.0


def sees_variables(response: str) -> float:
    return float([name for name, value in os.environ.items() if value == "secret"] == ["MY_JUDGE"])


def runs_code(response: str) -> float:
    result = run_python(response, stdin="6 7", timeout_s=5)
    return float(result.status == 0 and result.stdout.strip() == "42")


@pytest.mark.parametrize(
    ("program", "score"),
    [
        ("a, b = map(int, input().split()); print(a * b)", 1.0),
        ("print(41)", 0.0),
        ("import os; os.write(3, b'x' * 99); os._exit(0)", 0.0),
        ("import socket; socket.socket(); print(42)", 0.0),
        ("open('/dev/shm/treadle_was_here', 'w'); print(42)", 0.0),
        ("print(42)\nwhile True: print('x' * 10000)", 0.0),
        ("import os\nprint(42)\nif any('KEY' in name for name in os.environ): print(1)", 1.0),
        ("raise SystemExit(3)", 0.0),
        ("kept = bytearray(1 << 30); print(42)", 0.0),
    ],
)
@pytest.mark.parametrize("sandbox", [True, False])
def test_code_runs_where_it_can_only_print(program: str, score: float, sandbox: bool) -> None:
    async def main() -> float:
        function = RewardFunctionConfig(path=f"{HERE}:runs_code", sandbox=sandbox)
        async with await Scorer.create(RewardConfig(functions={"f": function}, timeout_s=60.0)) as scorer:
            return _value(await scorer.score(make_task(), _say(program)))

    assert asyncio.run(main()) == score
    assert not Path("/dev/shm/treadle_was_here").exists()


def test_code_that_never_ends_is_ended() -> None:
    assert run_python("import time\ntime.sleep(60)", timeout_s=2.0).timed_out
    assert run_python("print('x' * 5_000_000)").stdout == "x" * (1 << 20)
