"""Bubblewrap provider: a box of namespaces, made without privileges.

    files        an empty root; /usr, the interpreter and a few files of /etc, read-only; /workspace, of limited size
    processes    a namespace of their own, with `init` as process 1; all of it ends with the box
    network      a namespace with a loopback alone; ports of 127.0.0.1 may lead out, by a bridge or the egress proxy
    kernel       no capabilities, no further namespaces, a seccomp filter

Owns the command line of bwrap. Needs Linux, the program `bwrap`, and user namespaces for this user.
"""

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence

from treadle.errors import SandboxFailure
from treadle.sandbox.box import HOME, INIT, INIT_PLACE, INIT_ROOT, RUN_INIT, InitBox, interpreter
from treadle.sandbox.bridge import FORWARDER
from treadle.sandbox.confine import build_box_filter
from treadle.sandbox.egress import EgressProxy
from treadle.sandbox.protocol import BoxSettings, ExecResult

log = logging.getLogger(__name__)

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
CONFIGURATION = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/alternatives",
    "/etc/nsswitch.conf",
    "/etc/localtime",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/mime.types",
    "/etc/magic",
)
"""What programs need of /etc: no passwords, no keys, no names of this machine."""
FROZEN = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi")
BLANK = ("kcore", "keys", "timer_list", "kallsyms", "slabinfo", "kpagecount", "kpageflags", "kpagecgroup")
"""Parts of /proc that are the machine's: settings of the kernel are read-only, and what tells of it is empty."""
USER = 1000
TEMPORARY_BYTES = 16 << 20
PROXY_PORT = 3128
PROXY_VARIABLES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
FORWARDER_S = 10.0
"""For a forwarder that is stopped or starved to answer; then another takes its place."""


class BubblewrapBox(InitBox):
    """A box of namespaces. Hidden: all files, processes and networks of this machine but the system's programs."""

    provider = "bubblewrap"
    not_protected = (
        "holes in the kernel, which the box shares",
        "reading the programs and libraries under /usr, and of the interpreter",
        "CPU: other processes of the machine wait for a busy box",
    )

    reaches_out = True

    def __init__(self, settings: BoxSettings) -> None:
        super().__init__(settings)
        self._filter: tuple[int, ...] = ()
        self._bridges = list(settings.bridges)
        self._forwarders: dict[int, str] = {}
        """The process in the box that listens, by its port."""
        self._keeping = asyncio.Lock()
        self._proxy: EgressProxy | None = None
        self._proxy_port = 0

    @property
    def egress_refused(self) -> dict[str, int]:
        """How often which host and port was asked for in vain."""
        return dict(self._proxy.refused) if self._proxy is not None else {}

    async def prepare(self) -> None:
        if not self.settings.egress:
            return
        self._proxy = EgressProxy(self.settings.egress)
        try:
            await self._proxy.start()
        except OSError as error:
            raise SandboxFailure(f"the egress proxy did not start: {error}") from error
        taken = {port for port, _ in self._bridges}
        self._proxy_port = next(port for port in range(PROXY_PORT, PROXY_PORT + 1000) if port not in taken)
        self._bridges.append((self._proxy_port, self._proxy.path))

    async def complete(self) -> None:
        if problem := await self._keep_bridges():
            raise SandboxFailure(problem)

    async def release(self) -> None:
        await super().release()
        if self._proxy is not None:
            await self._proxy.close()
            if self._proxy.refused:
                counts = ", ".join(f"{target} ×{count}" for target, count in self._proxy.refused.most_common(10))
                log.info("a box asked in vain for %s", counts)

    def environment(self) -> dict[str, str]:
        variables = super().environment()
        if self._proxy_port:
            variables |= dict.fromkeys(PROXY_VARIABLES, f"http://127.0.0.1:{self._proxy_port}")
            variables |= dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost")
        return variables

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        id: str | None = None,
    ) -> ExecResult:
        await self._keep_bridges()
        return await super().exec(argv, cwd=cwd, env=env, stdin=stdin, timeout_s=timeout_s, id=id)

    async def launch(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        id: str | None = None,
    ) -> str:
        await self._keep_bridges()
        return await super().launch(argv, cwd=cwd, env=env, timeout_s=timeout_s, id=id)

    async def ask(self, process: str, data: bytes, timeout_s: float | None = None) -> ExecResult:
        await self._keep_bridges()
        return await super().ask(process, data, timeout_s)

    async def _keep_bridges(self) -> str | None:
        """Start forwarders that do not answer, before a command needs them: what ends all processes of a box ends them.

        Returns why one cannot be had. A command that took its port, or all room, has its own connections refused.
        """
        if not self._bridges:
            return None
        problem = None
        async with self._keeping:
            for at, (port, _) in enumerate(self._bridges):
                said = await self._ask_forwarder(port)
                if said is not None and said.line:
                    continue
                try:
                    words = ["python3", "-I", "-S", "-c", FORWARDER, str(port), f"/run/bridge-{at}"]
                    self._forwarders[port] = await self.spawn(words)
                except OSError as error:
                    problem = f"the bridge to port {port} did not start: {error}"
                    continue
                said = await self._ask_forwarder(port)
                if said is None or not said.line:
                    problem = f"the bridge to port {port} did not start: {said.text if said is not None else ''}"
        return problem

    async def _ask_forwarder(self, port: int) -> ExecResult | None:
        process = self._forwarders.get(port)
        return None if process is None else await super().ask(process, b"\n", FORWARDER_S)

    def descriptors(self) -> tuple[int, ...]:
        program = build_box_filter(namespaces=True)
        if program is None:
            self.missing += ("no seccomp filter is written for this machine",)
            return ()
        reader, writer = os.pipe()
        os.write(writer, program)
        os.close(writer)
        self._filter = (reader,)
        return self._filter

    def command(self) -> list[str]:
        settings = self.settings
        words = [bwrap(), "--unshare-user", "--unshare-all", "--disable-userns", "--new-session", "--die-with-parent"]
        words += ["--as-pid-1", "--uid", str(USER), "--gid", str(USER), "--cap-drop", "ALL", "--hostname", "box"]
        words += ["--clearenv", "--setenv", "PATH", "/usr/bin:/bin"]
        words += self._files()
        words += _show_proc()
        words += ["--dev", "/dev", "--size", str(16 << 20), "--tmpfs", "/dev/shm"]
        words += ["--size", str(settings.disk_mb << 20), "--tmpfs", HOME, "--dir", f"{HOME}/.tmp"]
        words += ["--ro-bind", str(INIT), INIT_PLACE]
        if not self._shows_temporary():
            words += ["--symlink", f"{HOME}/.tmp", "/tmp"]
        for at, (_, socket) in enumerate(self._bridges):
            words += ["--bind", socket, f"/run/bridge-{at}"]
        words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", HOME]
        words += [word for descriptor in self._filter for word in ("--seccomp", str(descriptor))]
        return [*words, interpreter(), "-I", "-S", "-c", RUN_INIT, INIT_ROOT, *self.init_arguments()]

    def _files(self) -> list[str]:
        """Directories that can be read, at the place they have here."""
        words = [*_show_system()]
        if self._shows_temporary():
            words += ["--size", str(TEMPORARY_BYTES), "--tmpfs", "/tmp"]
        for path in (os.path.realpath(sys.base_prefix), *map(os.path.realpath, self.settings.read_only)):
            if not path.startswith("/usr/"):
                words += ["--ro-bind-try", path, path]
        return words

    def _shows_temporary(self) -> bool:
        """Whether something below /tmp is shown; then /tmp is a directory of its own, and no link into the box's."""
        return any(os.path.realpath(path).startswith("/tmp/") for path in self.settings.read_only)


def _show_system() -> Iterator[str]:
    """Programs, libraries, and the configuration that they need, at the place they have here."""
    for path in SYSTEM:
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            yield from ("--ro-bind", path, path)
    for path in CONFIGURATION:
        yield from ("--ro-bind-try", path, path)


def _show_proc() -> Iterator[str]:
    """The processes of the box; the settings of the kernel are root's to write, also without capabilities."""
    yield from ("--proc", "/proc")
    for name in FROZEN:
        yield from ("--ro-bind-try", f"/proc/{name}", f"/proc/{name}")
    for name in BLANK:
        if os.path.exists(f"/proc/{name}"):
            yield from ("--ro-bind", "/dev/null", f"/proc/{name}")


def bwrap() -> str:
    """The program, or its name where there is none: starting it then says so."""
    return shutil.which("bwrap") or "bwrap"
