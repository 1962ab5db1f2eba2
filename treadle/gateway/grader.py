"""Grader program: gives the reward of an agent program, after that has ended, with the session's second key.

Owns what a grader is given: the task, a directory with what the agent has made, the address for rewards and notes in
`TREADLE_NOTES_URL`, and the key for it as the first line of its standard input. An environment can be read by every
program of the same user for as long as a process lives; what is read from a pipe is gone from there. Its home and its
working directory are its own and empty: nothing that the agent has written is run or imported by accident. Any status
but 0 is a failure of the reward.
Waits: for the program, until the session's deadline ends it.
"""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from treadle.errors import LoopFailure, RewardFailure
from treadle.gateway.agent_program import AgentProgram, fill, template_values
from treadle.gateway.server import NOTES, GatewaySession
from treadle.rollout.session import Session


class GraderProgram:
    """One grader, for all sessions of a loop."""

    def __init__(self, argv: Sequence[str], inherited: Mapping[str, str]) -> None:
        self._argv = [str(word) for word in argv]
        self._inherited = inherited

    async def run(self, session: Session, opened: GatewaySession, url: str, directory: Path) -> None:
        """Grade what an agent has left in its directory; what it posts is in `opened` then."""
        values = template_values(session.task, url, "", directory)
        home = await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="treadle-grader-")
        environment = {
            **self._inherited,
            "HOME": home.name,
            "TMPDIR": home.name,
            "PYTHONUNBUFFERED": "1",
            "TREADLE_NOTES_URL": f"{url}{NOTES}",
        }
        program = AgentProgram([fill(word, values) for word in self._argv], environment, Path(home.name))
        try:
            status = await program.run(stdin=f"{opened.notes_key}\n".encode())
        except LoopFailure as failure:
            raise RewardFailure(f"the grader: {failure}") from failure
        finally:
            await asyncio.to_thread(home.cleanup)
        if status != 0:
            raise RewardFailure(f"the grader: {program.explain(status)}")

    async def run_on_files(
        self, session: Session, opened: GatewaySession, url: str, files: Mapping[str, bytes]
    ) -> None:
        """Grade files that came out of a box, in a directory that holds these alone."""
        with await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="treadle-graded-") as directory:
            await asyncio.to_thread(_write_files, Path(directory), files)
            await self.run(session, opened, url, Path(directory))


def _write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
