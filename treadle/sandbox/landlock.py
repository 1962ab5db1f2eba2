"""Landlock provider: a directory of this machine, and fences of the kernel around each command; no privileges.

Works where namespaces are forbidden, as in most containers. It shares the machine's processes and users, so it keeps
less apart than bubblewrap, and says so. Needs Linux 6.2; from 6.12 on signals stay in the box.
"""

import asyncio
import os
import resource
import sys
import tempfile
from pathlib import Path

import treadle
from treadle.sandbox.box import InitBox, interpreter
from treadle.sandbox.bubblewrap import CONFIGURATION, SYSTEM
from treadle.sandbox.init.kernel import remove_folder
from treadle.sandbox.landlock_init import SCOPES_ABI, landlock_version
from treadle.sandbox.protocol import BoxSettings

_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from treadle.sandbox.landlock_init import main; main(sys.argv[1:])"
)


class LandlockBox(InitBox):
    """A directory that commands cannot leave: what they may read, write, call and signal is fenced."""

    provider = "landlock"
    not_protected = (
        "holes in the kernel, which the box shares",
        "that files outside exist, and how large they are: their contents and the names in a directory are hidden",
        "reading the programs and libraries under /usr, and of the interpreter",
        "a full disk between two looks (ten a second, one between commands): files are counted, not bounded",
        "CPU: other processes of the machine wait for a busy box",
    )

    def __init__(self, settings: BoxSettings) -> None:
        super().__init__(settings)
        self.home = ""
        if landlock_version() < SCOPES_ABI:
            self.missing += ("signals reach other processes of this user: the kernel is older than 6.12",)

    async def prepare(self) -> None:
        self.home = await asyncio.to_thread(tempfile.mkdtemp, prefix="treadle-box-")
        os.mkdir(f"{self.home}/.tmp")

    async def release(self) -> None:
        await super().release()
        if self.home:
            await asyncio.to_thread(remove_folder, self.home)

    def more_limits(self) -> dict[int | str, int]:
        limits: dict[int | str, int] = {"disk": self.settings.disk_mb << 20}
        if os.getuid() != 0 and self._cgroup is None:
            limits[resource.RLIMIT_NPROC] = 4096  # of this user, all programs together
        return limits

    def command(self) -> list[str]:
        root = str(Path(treadle.__file__).parent.parent)
        shown = (*SYSTEM, *CONFIGURATION, os.path.realpath(sys.base_prefix), *self.settings.read_only)
        readable = ":".join(path for path in shown if os.path.exists(path))
        return [interpreter(), "-I", "-S", "-c", _BOOT, root, readable, *self.init_arguments()]
