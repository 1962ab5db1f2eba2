"""Agent program in a box: the same program as without one, with nothing of the run in its reach but the gateway.

Journal, ground truth, keys, other sessions and the network are outside by construction: the box shows none of them, and
of the network the hosts of `rollout.sandbox.egress` alone. The gateway answers at its own port of 127.0.0.1, by a
bridge, with the session's own key.
Owns the start and the end of box and bridge, and the files that are kept of it. A box that breaks is a LoopFailure.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from treadle.config import RolloutConfig
from treadle.errors import LoopFailure, SandboxFailure
from treadle.gateway.agent_program import (
    MAX_BLAMED_CHARS,
    MAX_OUTPUT_CHARS,
    default_environment,
    fill,
    template_values,
)
from treadle.rollout.session import Session
from treadle.sandbox.bridge import UnixBridge
from treadle.sandbox.egress import count_refused
from treadle.sandbox.protocol import BoxSettings, ExecResult, Sandbox
from treadle.sandbox.providers import open_box

MAX_ARTIFACT_BYTES = 1 << 20


class BoxedAgent:
    """One program in one box, for one session."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        files: Mapping[str, str],
        inherited: Mapping[str, str],
        artifacts: Sequence[str],
    ) -> None:
        self._argv, self._env, self._files, self._artifacts = argv, env, files, artifacts
        self._inherited = {name: value for name, value in inherited.items() if name != "PATH"}
        self.stdout = ""
        self.stderr = ""
        self.files: Mapping[str, bytes] = {}
        """The artifacts, when it has ended."""

    async def run(self, session: Session, key: str, url: str, rollout: RolloutConfig) -> ExecResult:
        """Run it to its end, or to the session's; its artifacts go to the session's `files`."""
        gateway = urlsplit(url)
        assert gateway.hostname is not None and gateway.port is not None, "the gateway's address has a port"
        bridge, box = UnixBridge(gateway.hostname, gateway.port), None
        try:
            await bridge.start()
            settings = replace(BoxSettings.of(rollout.sandbox), bridges=((gateway.port, bridge.path),))
            box = await open_box(settings)
            result = await self._run_in(box, session, key, f"http://127.0.0.1:{gateway.port}", rollout)
            if refused := count_refused(box):
                session.extra["egress_refused"] = refused
            if self._artifacts:
                self.files = await self._collect(box, session)
                session.extra["files"] = {name: found.decode(errors="replace") for name, found in self.files.items()}
        except SandboxFailure as failure:
            raise LoopFailure(f"the box of {self._argv[0]}: {failure}") from failure
        finally:
            await asyncio.shield(_end(box, bridge))
        self.stdout = result.stdout.decode(errors="replace")[-MAX_OUTPUT_CHARS:]
        self.stderr = result.stderr.decode(errors="replace")[-MAX_OUTPUT_CHARS:]
        return result

    async def _run_in(
        self, box: Sandbox, session: Session, key: str, address: str, rollout: RolloutConfig
    ) -> ExecResult:
        home = Path(box.home)
        values = template_values(session.task, address, key, home)
        for name, text in self._files.items():
            await box.write_file(name, fill(text, values).encode())
        environment = {
            **self._inherited,
            **default_environment(address, key, home),
            **{name: fill(value, values) for name, value in self._env.items()},
        }
        argv = [fill(word, values) for word in self._argv]
        argv[0] = _box_python(rollout.sandbox.read_only) if argv[0] == "python" else argv[0]
        return await box.exec(argv, env=environment, timeout_s=rollout.limits.session_timeout_s)

    async def _collect(self, box: Sandbox, session: Session) -> dict[str, bytes]:
        """Files that are to be graded, out of a box that ends now; why others are missing is kept with the session."""
        found: dict[str, bytes] = {}
        missing: dict[str, str] = {}
        for name in self._artifacts:
            try:
                found[name] = await box.read_file(name, MAX_ARTIFACT_BYTES)
            except OSError as error:
                missing[name] = str(error)
        if missing:
            session.extra["files_missing"] = missing
        return found

    def explain(self, status: int) -> str:
        """How it ended, with the end of what it wrote."""
        written = {"stderr": self.stderr.strip(), "stdout": self.stdout.strip()}
        said = [f"{name}: {text[-MAX_BLAMED_CHARS:]}" for name, text in written.items() if text]
        return f"{self._argv[0]} ended with status {status} in its box; {'; '.join(said) or 'it wrote nothing'}"


def _box_python(shown: Sequence[str]) -> str:
    """The Python of a box: this one with its packages where its directory is shown to boxes, else without them."""
    return sys.executable if any(Path(sys.prefix).is_relative_to(path) for path in shown) else "python3"


async def _end(box: Sandbox | None, bridge: UnixBridge) -> None:
    if box is not None:
        await box.stop()
    await bridge.close()
