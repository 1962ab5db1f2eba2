"""Container provider: podman or docker, by its command line, with `init` as the container's only process.

Owns the arguments of `run` and the end of the container. The image is the user's and must have python3; it is not
pulled: a box never waits for a registry.
"""

import asyncio
import itertools
import os
import platform
import shutil
from typing import ClassVar

from treadle.errors import SandboxFailure
from treadle.sandbox.box import HOME, INIT, INIT_PLACE, INIT_ROOT, RUN_INIT, InitBox
from treadle.sandbox.confine import build_box_filter

ENGINE_VARIABLES = ("PATH", "HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "DOCKER_HOST", "CONTAINERS_CONF")
REMOVE_S = 30.0
_NUMBERS = itertools.count(1)


class ContainerBox(InitBox):
    """A container without a network, capabilities or a writable image."""

    program: ClassVar[str]
    engine_options: ClassVar[tuple[str, ...]] = ()
    home_options: ClassVar[str] = "mode=1777"
    """Of the file system in memory that is the box's directory: its user may write there."""
    remove_options: ClassVar[tuple[str, ...]] = ()
    not_protected = (
        "holes in the kernel, which the container shares",
        "what the image itself holds, secrets among it",
        "what the container engine allows its user: membership of docker's group is root",
    )

    name = ""
    """Of the container, from the start of its client on."""
    _is_made = False
    """Whether its `init` has answered."""

    def environment(self) -> dict[str, str]:
        system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        path = ":".join((*self.settings.path, system))
        return {"PATH": path, "HOME": HOME, "TMPDIR": f"{HOME}/.tmp", "LANG": "C.UTF-8"}

    def starter_environment(self) -> dict[str, str]:
        return {name: os.environ[name] for name in ENGINE_VARIABLES if name in os.environ}

    def command(self) -> list[str]:
        settings = self.settings
        if settings.image is None:
            raise SandboxFailure(f"{self.provider} needs an image (sandbox.image)")
        program = shutil.which(self.program)
        if program is None:
            raise SandboxFailure(f"{self.program} is not installed: no program of that name in PATH")
        self.name = f"treadle-box-{os.getpid()}-{next(_NUMBERS)}"
        words = [program, "run", "--interactive", "--rm", "--name", self.name]
        words += ["--pull", "never", "--network", "none", "--read-only", "--cap-drop", "ALL", "--user", "1000:1000"]
        words += ["--security-opt", "no-new-privileges", "--hostname", "box", "--ulimit", "nofile=1024:1024"]
        memory = f"{settings.memory_mb + settings.disk_mb}m"
        words += ["--pids-limit", str(settings.processes + 4), "--memory", memory, "--memory-swap", memory]
        words += self.engine_options
        shared = max(1, settings.disk_mb // 8)  # /dev/shm holds files as well
        words += ["--shm-size", f"{shared}m", "--workdir", HOME]
        words += ["--tmpfs", f"{HOME}:rw,exec,nosuid,nodev,{self.home_options},size={settings.disk_mb - shared}m"]
        words += ["--volume", f"{INIT}:{INIT_PLACE}:ro", "--entrypoint", "python3"]
        for path in settings.read_only:
            words += ["--volume", f"{path}:{path}:ro"]
        return [*words, settings.image, "-I", "-S", "-c", RUN_INIT, INIT_ROOT, *self.init_arguments()]

    def init_arguments(self) -> list[str]:
        """The engine's own seccomp profile lets user namespaces and the host of a virtual machine through."""
        program = build_box_filter(namespaces=True)
        if program is None:
            raise SandboxFailure(f"no seccomp filter is written for {platform.machine()}")
        return [*super().init_arguments(), f"seccomp={program.hex()}"]

    async def complete(self) -> None:
        self._is_made = True
        made = await self.exec(["mkdir", "-p", ".tmp"])
        if made.code != 0:
            raise SandboxFailure(f"its directory {HOME} cannot be written in image {self.settings.image}: {made.text}")

    async def release(self) -> None:
        name, self.name = self.name, ""
        if name:
            await self._remove(name)
        await super().release()
        if name and not self._is_made:
            await self._remove(name)  # its client may have made it after the first time

    async def _remove(self, name: str) -> None:
        """Remove the container at once: its client would wait for processes that ignore it."""
        remover = await asyncio.create_subprocess_exec(
            self.program, "rm", "--force", *self.remove_options, name,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with asyncio.timeout(REMOVE_S):
                await remover.wait()
        except TimeoutError:
            remover.kill()
            await remover.wait()

    def uses_groups(self) -> bool:
        return False


class PodmanBox(ContainerBox):
    """A container of podman, rootless where its user is."""

    provider = program = "podman"
    engine_options = ("--read-only-tmpfs=false",)
    """Else /tmp, /run and /var/tmp could be written, without a limit."""
    home_options = "mode=01777,notmpcopyup,U"
    """Without what an image has at that place, which belongs to another user."""
    remove_options = ("--time", "0")


class DockerBox(ContainerBox):
    """A container of docker's daemon."""

    provider = program = "docker"
