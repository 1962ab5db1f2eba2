"""Container provider: podman or docker, by its command line, with `init` as the container's only process.

Owns the arguments of `run` and the end of the container. The image is the user's and must have python3; it is not
pulled: a box never waits for a registry.
"""

import asyncio
import itertools
import os
import shutil
from typing import ClassVar

from treadle.errors import SandboxFailure
from treadle.sandbox.box import HOME, INIT, InitBox

INIT_PLACE = "/run/treadle-init.py"
ENGINE_VARIABLES = ("PATH", "HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "DOCKER_HOST", "CONTAINERS_CONF")
REMOVE_S = 30.0
_NUMBERS = itertools.count(1)


class ContainerBox(InitBox):
    """A container without a network, capabilities or a writable image."""

    program: ClassVar[str]
    engine_options: ClassVar[tuple[str, ...]] = ()
    not_protected = (
        "holes in the kernel, which the container shares",
        "what the image itself holds, secrets among it",
        "what the container engine allows its user: membership of docker's group is root",
    )

    name = ""

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
        words += ["--tmpfs", f"{HOME}:rw,exec,nosuid,nodev,mode=1777,size={settings.disk_mb}m", "--workdir", HOME]
        words += ["--volume", f"{INIT}:{INIT_PLACE}:ro", "--entrypoint", "python3"]
        for path in settings.read_only:
            words += ["--volume", f"{path}:{path}:ro"]
        return [*words, settings.image, "-I", "-S", INIT_PLACE, *self.init_arguments()]

    async def start(self) -> None:
        await super().start()
        await self.exec(["mkdir", "-p", ".tmp"])

    async def stop(self) -> None:
        running = self._process is not None
        await super().stop()
        if running and self.name:
            # The client is gone; the engine's own process may still hold the container.
            remover = await asyncio.create_subprocess_exec(
                self.program, "rm", "--force", self.name,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            async with asyncio.timeout(REMOVE_S):
                await remover.wait()

    def uses_groups(self) -> bool:
        return False


class PodmanBox(ContainerBox):
    """A container of podman, rootless where its user is."""

    provider = program = "podman"
    engine_options = ("--read-only-tmpfs=false",)
    """Else /tmp, /run and /var/tmp could be written, without a limit."""


class DockerBox(ContainerBox):
    """A container of docker's daemon."""

    provider = program = "docker"
